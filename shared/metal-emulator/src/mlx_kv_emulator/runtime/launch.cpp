// Runs a whole grid, one threadgroup after the other. State is global: launch.py holds a lock around this call.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "fiber.h"
#include "findings.h"
#include "memory.h"
#include "scheduler.h"

void use_sites(const msl_site* table);

static sigjmp_buf abandoned;
static volatile bool running;
static pthread_t runner;

void abandon_launch() { siglongjmp(abandoned, 1); }

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int SIGNAL_COUNT = sizeof SIGNALS / sizeof *SIGNALS;
static struct sigaction previous[SIGNAL_COUNT];

static const char* name_of(int signal, const void* address) {
  if (signal == SIGFPE) return "integer division by zero";
  if (signal == SIGILL || signal == SIGTRAP) return "trap";
  return fiber::on_stack(address) ? "stack overflow" : "invalid address or alignment";
}

static void on_signal(int signal, siginfo_t* info, void*) {
  if (!running || !pthread_equal(runner, pthread_self())) {  // not the kernel's: let the previous handler have it
    for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
    raise(signal);
    return;
  }
  findings::report(CRASH, name_of(signal, info->si_addr), msl_site{});
  abandon_launch();
}

// A kernel's stack may be full, so signals are taken on another.
struct SignalGuard {
  static constexpr size_t SIZE = 65536;
  stack_t before{};

  SignalGuard() {
    static char stack[SIZE];
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = SIZE;
    sigaltstack(&own, &before);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    runner = pthread_self();
    running = true;
    for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &action, &previous[i]);
  }

  ~SignalGuard() {
    running = false;
    current = nullptr;
    for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
    sigaltstack(&before, nullptr);
  }
};

static void run_grid(msl_launch* launch) {
  unsigned long groups = 1;
  for (int k = 0; k < 3; k++) groups *= (launch->grid[k] + launch->threadgroup[k] - 1) / launch->threadgroup[k];
  const size_t shared = (size_t)(launch->threadgroup_end - launch->threadgroup_begin);
  for (unsigned long i = 0; i < groups && !findings::full(); i++) {
    if (shared) memset(launch->threadgroup_begin, 0xff, shared);  // NaN: what nobody wrote shows in the result
    if (launch->checked) memory::begin_threadgroup();
    run_threadgroup(launch, (unsigned)(launch->reverse ? groups - 1 - i : i));
  }
}

// 0, or -1 when there is no memory for the launch.
extern "C" int msl_run(msl_launch* launch) {
  if (!fiber::create_stacks()) return -1;
  findings::begin(launch);
  use_sites(launch->sites);
  const bool ready = !launch->checked || memory::begin(launch);
  if (ready) {
    SignalGuard guard;
    if (sigsetjmp(abandoned, 1) == 0) run_grid(launch);
    else launch->abandoned = 1;
  }
  if (launch->checked) memory::end();
  return ready ? 0 : -1;
}
