#include "scheduler.h"

#include <string.h>

#include "divergence.h"
#include "fiber.h"
#include "findings.h"
#include "placement.h"

Thread threads[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / WIDTH];
Threadgroup group;
Thread* current;

static msl_launch* launch;
static void* caller_stack;

static int first_lane(unsigned mask) { return __builtin_ctz(mask); }

static int choose(unsigned mask) { return launch->reverse ? 31 - __builtin_clz(mask) : first_lane(mask); }

static Thread& thread_at(int simdgroup, int lane) { return threads[simdgroup * WIDTH + lane]; }

template <class F>
static void each_lane(unsigned mask, F f) {
  for (; mask; mask &= mask - 1) f(first_lane(mask));
}

static void update_ready(int simdgroup) {
  if (simdgroups[simdgroup].ready) group.ready |= 1u << simdgroup;
  else group.ready &= ~(1u << simdgroup);
}

static void resume(Thread* next) {
  Thread* previous = current;
  if (next == previous) return;
  current = next;
  msl_switch(&previous->stack_pointer, next->stack_pointer);
}

bool same_operation(const Thread& a, const Thread& b) {
  return a.operation == b.operation && a.site.line == b.site.line && a.site.file == b.site.file;
}

// ---- SIMD operations

static void release_simd(int simdgroup, unsigned lanes) {
  Simdgroup& s = simdgroups[simdgroup];
  s.exchange[s.turn].mask = lanes;
  s.exchange[s.turn].reduced = false;
  s.turn ^= 1;
  s.at_simd &= ~lanes;
  s.ready |= lanes;
  each_lane(lanes, [&](int lane) { thread_at(simdgroup, lane).state = State::ready; });
  update_ready(simdgroup);
  const Thread& t = thread_at(simdgroup, first_lane(lanes));
  if (t.flags) s.epochs.advance(t.flags);
}

static unsigned lanes_at_same_operation(int simdgroup, const Thread& as) {
  unsigned lanes = 0;
  each_lane(simdgroups[simdgroup].at_simd, [&](int lane) {
    if (same_operation(thread_at(simdgroup, lane), as)) lanes |= 1u << lane;
  });
  return lanes;
}

static bool release_simd_if_complete(int simdgroup) {
  Simdgroup& s = simdgroups[simdgroup];
  if (!s.live || s.at_simd != s.live) return false;
  if (lanes_at_same_operation(simdgroup, thread_at(simdgroup, first_lane(s.live))) != s.live) return false;
  release_simd(simdgroup, s.live);
  return true;
}

// No lane can run. In structured code the lanes at the lowest line are the ones that a GPU would run now.
static void release_diverged_simd(int simdgroup) {
  Simdgroup& s = simdgroups[simdgroup];
  const Thread* lowest = nullptr;
  each_lane(s.at_simd, [&](int lane) {
    const Thread& t = thread_at(simdgroup, lane);
    if (!lowest || t.site.line < lowest->site.line) lowest = &t;
  });
  const unsigned active = lanes_at_same_operation(simdgroup, *lowest), rest = s.live & ~active;
  divergence::report_simd(*lowest, thread_at(simdgroup, first_lane(rest)), active, rest);
  release_simd(simdgroup, active);
}

// ---- barriers

static void release_barrier() {
  divergence::check_barrier();
  launch->barriers++;
  bool advanced = false;
  for (int i = 0; i < group.simdgroups; i++) {
    Simdgroup& s = simdgroups[i];
    each_lane(s.at_barrier, [&](int lane) {
      Thread& t = thread_at(i, lane);
      if (!advanced) group.epochs.advance(t.flags);
      advanced = true;
      t.state = State::ready;
    });
    s.ready |= s.at_barrier;
    s.at_barrier = 0;
    update_ready(i);
  }
  group.waiting = 0;
}

// ---- choosing who runs

static void resolve_divergence() {
  for (int i = 0; i < group.simdgroups; i++) {
    if (simdgroups[i].at_simd) return release_diverged_simd(i);
  }
  release_barrier();
}

// The running thread waits or has finished: run another, its own simdgroup first.
static void run_next() {
  while (group.live) {
    const int own = (int)current->simdgroup;
    if (simdgroups[own].ready) return resume(&thread_at(own, choose(simdgroups[own].ready)));
    if (group.ready) {
      const int s = choose(group.ready);
      return resume(&thread_at(s, choose(simdgroups[s].ready)));
    }
    resolve_divergence();
  }
  Thread* last = current;
  current = nullptr;
  msl_switch(&last->stack_pointer, caller_stack);
}

static void wait_at(State state, const char* operation, const char* file, unsigned line, unsigned flags) {
  Thread* t = current;
  t->state = state;
  t->operation = operation;
  t->site = msl_site{file, line, 0, 0};
  t->flags = flags;
  simdgroups[t->simdgroup].ready &= ~(1u << t->lane);
  update_ready((int)t->simdgroup);
}

static msl_exchange* simd(const void* value, unsigned size, const char* operation, const char* file, unsigned line,
                          unsigned flags) {
  Thread* t = current;
  Simdgroup& s = simdgroups[t->simdgroup];
  msl_exchange* e = &s.exchange[s.turn];
  memcpy(e->value[t->lane], value, size);
  wait_at(State::at_simd, operation, file, line, flags);
  s.at_simd |= 1u << t->lane;
  release_simd_if_complete((int)t->simdgroup);
  run_next();
  e->lane = t->lane;
  return e;
}

// ---- called by kernels

extern "C" msl_exchange* msl_simd(const void* value, unsigned size, const char* operation, const char* file,
                                  unsigned line) {
  msl_exchange* e = simd(value, size, operation, file, line, 0);
  if ((unsigned)first_lane(e->mask) == e->lane) launch->simd_operations++;
  return e;
}

extern "C" void msl_simdgroup_barrier(unsigned flags, const char* file, unsigned line) {
  const char nothing = 0;
  msl_exchange* e = simd(&nothing, 1, "simdgroup_barrier", file, line, flags);
  if ((unsigned)first_lane(e->mask) == e->lane) launch->simdgroup_barriers++;
}

extern "C" void msl_threadgroup_barrier(unsigned flags, const char* file, unsigned line) {
  wait_at(State::at_barrier, "threadgroup_barrier", file, line, flags);
  simdgroups[current->simdgroup].at_barrier |= 1u << current->lane;
  if (++group.waiting == group.live) release_barrier();
  run_next();
}

extern "C" unsigned msl_lane() { return current->lane; }

// Metal leaves the value undefined when a lane reads one that does not take part.
extern "C" void msl_inactive_lane(unsigned lane) {
  if (msl_finding* f = findings::report(INACTIVE_LANE, current->operation, current->site))
    f->lanes[1] = lane < WIDTH ? 1u << lane : 0;
}

// ---- one threadgroup

static void run_thread() {
  launch->entry(launch->arguments, &current->position);
  Simdgroup& s = simdgroups[current->simdgroup];
  current->state = State::finished;
  current->operation = "returned";
  s.live &= ~(1u << current->lane);
  s.ready &= ~(1u << current->lane);
  update_ready((int)current->simdgroup);
  group.live--;
  release_simd_if_complete((int)current->simdgroup);
  if (group.live && group.waiting == group.live) release_barrier();
  run_next();
  __builtin_unreachable();
}

void run_threadgroup(msl_launch* l, unsigned number) {
  launch = l;
  group = place_threadgroup(*l, number);
  const int n = group.threads;
  for (int s = 0; s < group.simdgroups; s++) {
    const int lanes = n - s * WIDTH < WIDTH ? n - s * WIDTH : WIDTH;
    Simdgroup& g = simdgroups[s];
    g.live = g.ready = lanes == WIDTH ? ~0u : (1u << lanes) - 1;
    g.at_simd = g.at_barrier = 0;
    g.epochs = Epochs{};
    g.turn = 0;
    update_ready(s);
  }
  for (int i = 0; i < n; i++) threads[i].stack_pointer = fiber::prepare(i, run_thread);
  const int s = choose(group.ready);
  current = &thread_at(s, choose(simdgroups[s].ready));
  msl_switch(&caller_stack, current->stack_pointer);
}
