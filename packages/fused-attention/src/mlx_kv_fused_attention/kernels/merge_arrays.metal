// What the threads of merge_splits share: each simdgroup's part of the output, and of the sum of weights.
// --- body ---
    threadgroup float values[SIMDGROUPS * DIM];
    threadgroup float sums[SIMDGROUPS];
