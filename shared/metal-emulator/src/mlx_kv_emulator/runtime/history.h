#pragma once
// What happened to a few bytes of shared memory: enough to tell whether the next access races with an earlier one.
#include <stdint.h>

#include "scheduler.h"

// One access; all zeros: none. Epochs order it against accesses by other threads of the same threadgroup.
struct Access {
  uint32_t threadgroup_plus_1, barrier, simdgroup_barrier;
  uint32_t thread : 10, atomic : 1, site : 21;

  bool none() const { return threadgroup_plus_1 == 0; }
  unsigned threadgroup() const { return threadgroup_plus_1 - 1; }
  unsigned simdgroup() const { return thread / WIDTH; }
};

// Two accesses by different threads with no barrier between them, of which Metal promises no order.
inline bool unordered(const Access& earlier, const Access& now) {
  if (earlier.none() || (earlier.atomic && now.atomic)) return false;
  if (earlier.threadgroup_plus_1 != now.threadgroup_plus_1) return true;
  if (earlier.thread == now.thread || earlier.barrier != now.barrier) return false;
  if (earlier.simdgroup() != now.simdgroup()) return true;
  return earlier.simdgroup_barrier == now.simdgroup_barrier;
}

// Accesses that do not race among themselves: the last one, and the last by another lane of its simdgroup, by another
// simdgroup, and by another threadgroup. If any of all races with a new access, one of these does.
struct Peers {
  Access last, by_lane, by_simdgroup, by_threadgroup;

  const Access* race_with(const Access& now) const {
    const Access* kept[] = {&last, &by_lane, &by_simdgroup, &by_threadgroup};
    for (const Access* a : kept) {
      if (unordered(*a, now)) return a;
    }
    return nullptr;
  }

  void add(const Access& now) {
    if (!last.none() && last.threadgroup_plus_1 != now.threadgroup_plus_1) {
      by_threadgroup = last;
      by_lane = by_simdgroup = Access{};
    } else if (!last.none() && last.simdgroup() != now.simdgroup()) {
      by_simdgroup = last;
      by_lane = Access{};
    } else if (!last.none() && last.thread != now.thread) {
      by_lane = last;
    }
    last = now;
  }
};

// The last plain write, and what came since: reads, and atomic writes.
struct History {
  Access write;
  Peers reads, atomic_writes;

  const Access* race_with_read(const Access& now) const {
    if (unordered(write, now)) return &write;
    return atomic_writes.race_with(now);
  }

  const Access* race_with_write(const Access& now) const {
    if (unordered(write, now)) return &write;
    const Access* read = reads.race_with(now);
    return read ? read : atomic_writes.race_with(now);
  }

  void add_read(const Access& now) { reads.add(now); }

  void add_write(const Access& now) {
    if (now.atomic) return atomic_writes.add(now);
    *this = History{};
    write = now;
  }

  bool is_read(const Access* access) const { return access >= &reads.last && access <= &reads.by_threadgroup; }
};
