#pragma once
// Runs the threads of one threadgroup as fibers. SIMD operations rendezvous per simdgroup, barriers per threadgroup.
#include "abi.h"

constexpr int MAX_THREADS = 1024, WIDTH = 32;

// Orders memory of one kind: how many barriers with that flag have been passed.
struct Epochs {
  unsigned device, threadgroup;
  void advance(unsigned flags) {
    device += flags & 1;            // mem_flags::mem_device
    threadgroup += flags >> 1 & 1;  // mem_flags::mem_threadgroup
  }
};

enum class State { ready, at_simd, at_barrier, finished };

struct Thread {
  void* stack_pointer;
  State state;
  unsigned index, lane, simdgroup;
  const char* operation;  // what it waits at
  msl_site site;
  unsigned flags;
  msl_thread position;
};

struct Simdgroup {
  unsigned live, ready, at_simd, at_barrier;  // masks of lanes
  Epochs epochs;
  msl_exchange exchange[2];  // lanes may still read one operation while others enter the next
  int turn;
};

struct Threadgroup {
  unsigned number;
  int threads, live, waiting;  // waiting: at the barrier
  int simdgroups;
  unsigned ready;  // mask of simdgroups that have a ready lane
  Epochs epochs;
};

extern Thread threads[MAX_THREADS];
extern Simdgroup simdgroups[MAX_THREADS / WIDTH];
extern Threadgroup group;
extern Thread* current;  // null outside a kernel

// Whether two waiting threads wait at one place in the source.
bool same_operation(const Thread& a, const Thread& b);

// Runs threadgroup `number` to its end; `launch` says what to run.
void run_threadgroup(msl_launch* launch, unsigned number);
