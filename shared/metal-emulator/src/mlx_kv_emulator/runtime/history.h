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

// The last write, and of the reads since then the last one and the last by another lane of its simdgroup, by another
// simdgroup, and by another threadgroup. If any read since the last write races with a new write, one of these does.
struct History {
  Access write, read, read_by_lane, read_by_simdgroup, read_by_threadgroup;

  const Access* race_with_read(const Access& now) const { return unordered(write, now) ? &write : nullptr; }

  const Access* race_with_write(const Access& now) const {
    const Access* candidates[] = {&write, &read, &read_by_lane, &read_by_simdgroup, &read_by_threadgroup};
    for (const Access* a : candidates) {
      if (unordered(*a, now)) return a;
    }
    return nullptr;
  }

  void add_read(const Access& now) {
    if (!read.none() && read.threadgroup_plus_1 != now.threadgroup_plus_1) {
      read_by_threadgroup = read;
      read_by_lane = read_by_simdgroup = Access{};
    } else if (!read.none() && read.simdgroup() != now.simdgroup()) {
      read_by_simdgroup = read;
      read_by_lane = Access{};
    } else if (!read.none() && read.thread != now.thread) {
      read_by_lane = read;
    }
    read = now;
  }

  void add_write(const Access& now) {
    *this = History{};
    write = now;
  }
};
