#include "scheduler.h"

#include <string.h>

#include "fiber.h"
#include "findings.h"

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

static bool same_operation(const Thread& a, const Thread& b) {
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

static const char* waiting_at(const Thread& t) { return t.operation ? t.operation : "nothing"; }

// No lane can run. In structured code the lanes at the lowest line are the ones that a GPU would run now.
static void release_diverged_simd(int simdgroup) {
  Simdgroup& s = simdgroups[simdgroup];
  const Thread* lowest = nullptr;
  each_lane(s.at_simd, [&](int lane) {
    const Thread& t = thread_at(simdgroup, lane);
    if (!lowest || t.site.line < lowest->site.line) lowest = &t;
  });
  const unsigned active = lanes_at_same_operation(simdgroup, *lowest), rest = s.live & ~active;
  if (msl_finding* f = findings::report(DIVERGENCE, lowest->operation, lowest->site)) {
    f->party[0].thread = lowest->index;
    f->lanes[0] = active;
    f->lanes[1] = rest;
    const Thread& o = thread_at(simdgroup, first_lane(rest));
    findings::other(f, group.number, o.index, waiting_at(o), o.site);
  }
  release_simd(simdgroup, active);
}

// ---- barriers

static void check_barrier() {
  const Thread* first = nullptr;
  for (int i = 0; i < group.threads; i++) {
    const Thread& t = threads[i];
    if (t.state != State::at_barrier) continue;
    if (!first) {
      first = &t;
    } else if (!same_operation(*first, t)) {
      if (msl_finding* f = findings::report(DIVERGENCE, first->operation, first->site)) {
        f->party[0].thread = first->index;
        findings::other(f, group.number, t.index, t.operation, t.site);
      }
      return;
    }
  }
  if (group.live == group.threads) return;
  if (msl_finding* f = findings::report(DIVERGENCE, first->operation, first->site)) {
    f->party[0].thread = first->index;
    f->count = (unsigned)group.live;
  }
}

static void release_barrier() {
  check_barrier();
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

static msl_exchange* simd(const void* value, unsigned size, const char* operation, const char* file, unsigned line, unsigned flags) {
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

extern "C" msl_exchange* msl_simd(const void* value, unsigned size, const char* operation, const char* file, unsigned line) {
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
  if (msl_finding* f = findings::report(INACTIVE_LANE, current->operation, current->site)) f->lanes[1] = lane < WIDTH ? 1u << lane : 0;
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

static void place_thread(Thread& t, unsigned index, const unsigned at[3], const unsigned size[3], const unsigned count[3]) {
  t = Thread{};
  t.index = index;
  t.lane = index % WIDTH;
  t.simdgroup = index / WIDTH;
  const unsigned in_group[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  msl_thread& p = t.position;
  for (int k = 0; k < 3; k++) {
    p.position_in_threadgroup[k] = in_group[k];
    p.threadgroup_position[k] = at[k];
    p.position_in_grid[k] = at[k] * launch->threadgroup[k] + in_group[k];
    p.threads_per_grid[k] = launch->grid[k];
    p.threads_per_threadgroup[k] = size[k];
    p.dispatch_threads_per_threadgroup[k] = launch->threadgroup[k];
    p.threadgroups_per_grid[k] = count[k];
  }
  const unsigned dispatched = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  p.index_in_threadgroup = index;
  p.lane = t.lane;
  p.simdgroup = t.simdgroup;
  p.simdgroups = (unsigned)group.simdgroups;
  p.dispatch_simdgroups = (dispatched + WIDTH - 1) / WIDTH;
  p.quadgroups = ((unsigned)group.threads + 3) / 4;
  p.dispatch_quadgroups = (dispatched + 3) / 4;
  t.stack_pointer = fiber::prepare((int)index, run_thread);
}

void run_threadgroup(msl_launch* l, unsigned number) {
  launch = l;
  unsigned count[3], size[3];
  for (int k = 0; k < 3; k++) count[k] = (l->grid[k] + l->threadgroup[k] - 1) / l->threadgroup[k];
  const unsigned at[3] = {number % count[0], number / count[0] % count[1], number / count[0] / count[1]};
  for (int k = 0; k < 3; k++) {  // the last threadgroup of a dimension may be smaller
    const unsigned left = l->grid[k] - at[k] * l->threadgroup[k];
    size[k] = left < l->threadgroup[k] ? left : l->threadgroup[k];
  }
  const int n = (int)(size[0] * size[1] * size[2]);
  group = Threadgroup{number, n, n, 0, (n + WIDTH - 1) / WIDTH, 0, {}};
  for (int s = 0; s < group.simdgroups; s++) {
    const int lanes = n - s * WIDTH < WIDTH ? n - s * WIDTH : WIDTH;
    Simdgroup& g = simdgroups[s];
    g.live = g.ready = lanes == WIDTH ? ~0u : (1u << lanes) - 1;
    g.at_simd = g.at_barrier = 0;
    g.epochs = Epochs{};
    g.turn = 0;
    update_ready(s);
  }
  for (int i = 0; i < n; i++) place_thread(threads[i], (unsigned)i, at, size, count);
  const int s = choose(group.ready);
  current = &thread_at(s, choose(simdgroups[s].ready));
  msl_switch(&caller_stack, current->stack_pointer);
}
