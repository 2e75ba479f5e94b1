// Unpacks rows, sums their centroids, and rotates them back, in one pass: a row of DIM channels lies in four neighbouring lanes, a
// run of channels in the registers of each. Inputs are read where they lie, with their strides. `params`: the number of rows.

template <int COUNT, int POWER> METAL_FUNC void butterflies(thread float (&y)[COUNT]) {
    constexpr int WITHIN = POWER < COUNT ? POWER : COUNT;
#pragma unroll
    for (int half_size = 1; half_size < WITHIN; half_size *= 2) {
#pragma unroll
        for (int pair = 0; pair < COUNT / 2; pair++) {
            const int low = pair / half_size * 2 * half_size + pair % half_size, high = low + half_size;
            const float a = y[low], b = y[high];
            y[low] = a + b;
            y[high] = a - b;
        }
    }
}
// As encode.metal's, with the rows of the transposed matrix.
template <int ODD, int COUNT> METAL_FUNC void across_lanes(thread float (&y)[COUNT], const device uint* negative, uint lane) {
    const uint part = lane % 4;
    if constexpr (ODD == 1) {
#pragma unroll
        for (uint mask = 1; mask < 4; mask *= 2) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float other = simd_shuffle_xor(y[i], ushort(mask));
                y[i] = part & mask ? other - y[i] : y[i] + other;
            }
        }
    } else {
        constexpr int ROWS = ODD / 4, POWER = COUNT / ROWS;
        uint signs[ROWS];
        float total[COUNT];
#pragma unroll
        for (int r = 0; r < ROWS; r++) signs[r] = negative[part * ROWS + r];
#pragma unroll
        for (int b = 0; b < ODD; b++) {
#pragma unroll
            for (int a = 0; a < POWER; a++) {
                const float x = simd_shuffle(y[b % ROWS * POWER + a], ushort(lane / 4 * 4 + b / ROWS));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float term = signs[r] >> b & 1 ? -x : x;
                    total[r * POWER + a] = b == 0 ? term : total[r * POWER + a] + term;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = total[i];
    }
}
// Codes first..first+COUNT-1 of a row; `stride` is that of its words.
template <int BITS, int COUNT>
METAL_FUNC void read_codes(const device uint* words, long stride, int first, thread uint (&codes)[COUNT]) {
    constexpr uint MASK = (1u << BITS) - 1;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int bit = (first + i) * BITS, shift = bit % 32;
        codes[i] = words[bit / 32 * stride] >> shift;
        if (shift + BITS > 32) codes[i] |= words[(bit / 32 + 1) * stride] << (32 - shift);
        codes[i] &= MASK;
    }
}
// --- body ---
    constexpr int COUNT = DIM / 4, LEVELS = 1 << BITS, ROW_WORDS = (DIM * BITS + 31) / 32, THREADS = 128;
    threadgroup float levels[STAGES * LEVELS];

    const uint heads = codes_shape[1], rows = uint(params[0]);
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint lane = thread_index_in_simdgroup, thread_index = thread_position_in_threadgroup.x, part = lane % 4;
    const uint row = threadgroup_position_in_grid.x * (THREADS / 4) + thread_index / 4;
    const bool inside = row < rows;
    for (uint i = thread_index; i < STAGES * LEVELS; i += THREADS) levels[i] = codebook[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float y[COUNT] = {};
    if (inside) {
        const device uint* words = codes + sequence * codes_strides[0] + head * codes_strides[1] + row * codes_strides[2];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            uint own[COUNT];
            read_codes<BITS>(words + stage * ROW_WORDS * codes_strides[3], codes_strides[3], part * COUNT, own);
#pragma unroll
            for (int i = 0; i < COUNT; i++) y[i] += levels[stage * LEVELS + own[i]];
        }
        const float size = float(norm[sequence * norm_strides[0] + head * norm_strides[1] + row * norm_strides[2]]);
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] *= size;
        if constexpr (CENTER) {
            const long block = sequence * mean_strides[0] + head * mean_strides[1] + row / 128 * mean_strides[2];
#pragma unroll
            for (int i = 0; i < COUNT; i++) y[i] += float(mean[block + (part * COUNT + i) * mean_strides[3]]);
        }
    }
    butterflies<COUNT, DIM / ODD>(y);
    across_lanes<ODD>(y, hadamard, lane);
    if (inside) {
        const float scale = as_type<float>(uint(SCALE));  // DIM^-0.5
        device T* to = x + ((ulong(sequence) * heads + head) * rows + row) * DIM + part * COUNT;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint channel = part * COUNT + i;
            const float value = y[i] * scale;
            to[i] = T(flips[channel / 32] >> channel % 32 & 1 ? -value : value);
        }
    }
