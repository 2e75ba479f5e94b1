#include "placement.h"

struct Extent {
  unsigned count[3];  // threadgroups in the grid
  unsigned at[3];     // which one this is
  unsigned size[3];   // its threads
};

static Extent extent_of(const msl_launch& launch, unsigned number) {
  Extent e;
  for (int k = 0; k < 3; k++) e.count[k] = (launch.grid[k] + launch.threadgroup[k] - 1) / launch.threadgroup[k];
  e.at[0] = number % e.count[0];
  e.at[1] = number / e.count[0] % e.count[1];
  e.at[2] = number / e.count[0] / e.count[1];
  for (int k = 0; k < 3; k++) {
    const unsigned left = launch.grid[k] - e.at[k] * launch.threadgroup[k];
    e.size[k] = left < launch.threadgroup[k] ? left : launch.threadgroup[k];
  }
  return e;
}

static msl_thread position_of(const msl_launch& launch, const Extent& e, unsigned index) {
  msl_thread p{};
  const unsigned inside[3] = {index % e.size[0], index / e.size[0] % e.size[1], index / e.size[0] / e.size[1]};
  for (int k = 0; k < 3; k++) {
    p.position_in_threadgroup[k] = inside[k];
    p.threadgroup_position[k] = e.at[k];
    p.position_in_grid[k] = e.at[k] * launch.threadgroup[k] + inside[k];
    p.threads_per_grid[k] = launch.grid[k];
    p.threads_per_threadgroup[k] = e.size[k];
    p.dispatch_threads_per_threadgroup[k] = launch.threadgroup[k];
    p.threadgroups_per_grid[k] = e.count[k];
  }
  const unsigned threads = e.size[0] * e.size[1] * e.size[2];
  const unsigned dispatched = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  p.index_in_threadgroup = index;
  p.lane = index % WIDTH;
  p.simdgroup = index / WIDTH;
  p.simdgroups = (threads + WIDTH - 1) / WIDTH;
  p.dispatch_simdgroups = (dispatched + WIDTH - 1) / WIDTH;
  p.quadgroups = (threads + 3) / 4;
  p.dispatch_quadgroups = (dispatched + 3) / 4;
  return p;
}

Threadgroup place_threadgroup(const msl_launch& launch, unsigned number) {
  const Extent e = extent_of(launch, number);
  const int n = (int)(e.size[0] * e.size[1] * e.size[2]);
  for (int i = 0; i < n; i++) {
    Thread& t = threads[i];
    t = Thread{};
    t.position = position_of(launch, e, (unsigned)i);
    t.index = (unsigned)i;
    t.lane = t.position.lane;
    t.simdgroup = t.position.simdgroup;
  }
  return Threadgroup{number, n, n, 0, (n + WIDTH - 1) / WIDTH, 0, {}};
}
