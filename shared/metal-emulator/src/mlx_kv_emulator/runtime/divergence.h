#pragma once
// Threads that should meet and do not: SIMD operations and barriers in branches that some threads do not take.
#include "scheduler.h"

namespace divergence {

// `active` lanes go through an operation that `first` is at, while the `rest` of the simdgroup wait where `other` is.
void report_simd(const Thread& first, const Thread& other, unsigned active, unsigned rest);

// All live threads wait at barriers: is it one barrier, and are all threads of the threadgroup there?
void check_barrier();

}  // namespace divergence
