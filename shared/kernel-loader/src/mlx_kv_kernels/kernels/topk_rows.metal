// One threadgroup finds the k highest scores of one head by radix select, and writes their rows in ascending order.
// Three passes over the scores (11, 11 and 10 bits of an order-preserving key) find the k-th highest key and how many rows
// with exactly that key are taken, lowest row first. Then each simdgroup counts, and after one barrier writes, the rows of
// its own share. Every count is an integer, so the result does not depend on the order of threads.

// Ascending in the score; -0 equals +0, and NaN has the lowest key of all, below -infinity.
METAL_FUNC uint order_key(uint bits) {
    const uint key = bits ^ (uint(int(bits) >> 31) | 0x80000000u);   // negative: all bits flipped, else the sign
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? 0 : key + uint(key == 0x7fffffffu);                 // of all scores only -0 becomes 0x7fffffff
}
METAL_FUNC void order_keys(uint4 bits, thread uint* keys) {
    keys[0] = order_key(bits.x);
    keys[1] = order_key(bits.y);
    keys[2] = order_key(bits.z);
    keys[3] = order_key(bits.w);
}

// The scores of four neighbouring rows. Rows from `length` on are NaN; being last, they lose even to a NaN before them.
METAL_FUNC uint4 load_scores(const device float* scores, uint row, uint length, bool aligned) {
    if (aligned && row + 4 <= length) return *reinterpret_cast<const device uint4*>(scores + row);
    uint4 bits = {0x7fffffffu, 0x7fffffffu, 0x7fffffffu, 0x7fffffffu};
    if (row < length) bits.x = as_type<uint>(scores[row]);
    if (row + 1 < length) bits.y = as_type<uint>(scores[row + 1]);
    if (row + 2 < length) bits.z = as_type<uint>(scores[row + 2]);
    if (row + 3 < length) bits.w = as_type<uint>(scores[row + 3]);
    return bits;
}
// --- body ---
    constexpr uint SIMDGROUPS = THREADS / 32;
    constexpr uint AHEAD = 4;                        // loads a thread has on their way
    constexpr uint BINS = 2048;
    constexpr uint OWN = BINS / THREADS;             // bins a thread scans
    threadgroup atomic_uint histogram[BINS];
    threadgroup uint partial[SIMDGROUPS];
    threadgroup uint partial_equal[SIMDGROUPS];
    threadgroup uint chosen[2];                      // the bin that holds the k-th key, and the rows still wanted from it

    const uint thread_index = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
    const uint head = threadgroup_position_in_grid.x;
    const uint kv_heads = scores_shape[1], rows = scores_shape[2];
    const uint k = params[0], length = params[1 + head / kv_heads];
    const device float* own_scores = scores + ulong(head) * rows;
    const bool aligned = reinterpret_cast<ulong>(own_scores) % 16 == 0;
    uint4 bits[AHEAD];
    uint keys[4];

    uint kth = 0, known = 0, wanted = k;             // bits of the k-th key, which are known, rows wanted among equal bits
    for (uint pass = 0; pass < 3; pass++) {
        const uint shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        const uint digits = pass == 2 ? 1023 : 2047;
        for (uint bin = thread_index; bin < BINS; bin += THREADS) {
            atomic_store_explicit(&histogram[bin], 0u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint base = 0; base < rows; base += 4 * THREADS * AHEAD) {
            for (uint n = 0; n < AHEAD; n++) {
                bits[n] = load_scores(own_scores, base + 4 * (n * THREADS + thread_index), length, aligned);
            }
            for (uint n = 0; n < AHEAD; n++) {
                if (base + 4 * n * THREADS >= rows) continue;
                order_keys(bits[n], keys);
                const uint first = (simd_broadcast_first(keys[0]) >> shift) & digits;
                uint other = 0;                      // bits in which a key differs from one that counts in bin `first`
                for (uint i = 0; i < 4; i++) {
                    other |= ((keys[i] ^ kth) & known) | (((keys[i] >> shift) & digits) ^ first);
                }
                // equal scores are common (padding, masks): one addition then stands for the simdgroup's 128
                if (simd_all(other == 0)) {
                    if (lane == 0) atomic_fetch_add_explicit(&histogram[first], 128u, memory_order_relaxed);
                    continue;
                }
                for (uint i = 0; i < 4; i++) {
                    if (((keys[i] ^ kth) & known) == 0) {
                        const uint digit = (keys[i] >> shift) & digits;
                        atomic_fetch_add_explicit(&histogram[digit], 1u, memory_order_relaxed);
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // From the highest bin down: the bin in which the running count reaches what is wanted.
        uint bin = BINS - 1 - OWN * thread_index, own_count = 0;
        for (uint i = 0; i < OWN; i++) own_count += atomic_load_explicit(&histogram[bin - i], memory_order_relaxed);
        uint above = simd_prefix_exclusive_sum(own_count);
        if (lane == 31) partial[simdgroup] = above + own_count;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < simdgroup; i++) above += partial[i];
        if (above < wanted && wanted <= above + own_count) {
            uint count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
            while (above + count < wanted) {
                above += count;
                bin--;
                count = atomic_load_explicit(&histogram[bin], memory_order_relaxed);
            }
            chosen[0] = bin;
            chosen[1] = wanted - above;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        kth |= chosen[0] << shift;
        known |= digits << shift;
        wanted = chosen[1];
    }

    // Rows above the k-th key, and equal to it, in this simdgroup's share: counted first, then written behind those before.
    const uint share = (rows + 128 * SIMDGROUPS - 1) / (128 * SIMDGROUPS) * 128;
    const uint begin = simdgroup * share, end = metal::min(begin + share, rows);
    uint above = 0, equal = 0;
    for (uint base = begin; base < end; base += 128 * AHEAD) {
        for (uint n = 0; n < AHEAD; n++) {
            bits[n] = load_scores(own_scores, base + 128 * n + 4 * lane, length, aligned);
        }
        for (uint n = 0; n < AHEAD; n++) {
            if (base + 128 * n >= end) continue;
            order_keys(bits[n], keys);
            for (uint i = 0; i < 4; i++) {
                above += uint(keys[i] > kth);
                equal += uint(keys[i] == kth);
            }
        }
    }
    above = simd_sum(above);
    equal = simd_sum(equal);
    if (lane == 0) {
        partial[simdgroup] = above;
        partial_equal[simdgroup] = equal;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    above = 0;
    equal = 0;
    for (uint i = 0; i < simdgroup; i++) {
        above += partial[i];
        equal += partial_equal[i];
    }
    device uint* own_indices = indices + ulong(head) * k;
    for (uint base = begin; base < end; base += 128 * AHEAD) {
        for (uint n = 0; n < AHEAD; n++) {
            bits[n] = load_scores(own_scores, base + 128 * n + 4 * lane, length, aligned);
        }
        for (uint n = 0; n < AHEAD; n++) {
            if (base + 128 * n >= end) continue;
            const uint row = base + 128 * n + 4 * lane;
            uint here = 0;                           // above in the low half, equal in the high half: at most 128 each
            order_keys(bits[n], keys);
            for (uint i = 0; i < 4; i++) here += keys[i] > kth ? 1u : keys[i] == kth ? 0x10000u : 0u;
            const uint before = simd_prefix_exclusive_sum(here);
            uint lane_above = above + (before & 0xffffu), lane_equal = equal + (before >> 16);
            for (uint i = 0; i < 4; i++) {
                if (keys[i] > kth || (keys[i] == kth && lane_equal < wanted)) {
                    own_indices[lane_above + metal::min(lane_equal, wanted)] = row + i;
                }
                lane_above += uint(keys[i] > kth);
                lane_equal += uint(keys[i] == kth);
            }
            const uint total = simd_shuffle(before + here, 31);
            above += total & 0xffffu;
            equal += total >> 16;
        }
    }
