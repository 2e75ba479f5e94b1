// Unpacks rows, sums their centroids, and rotates them back, in one pass. Four neighbouring lanes have a row of DIM = ODD * 2^k
// channels in their registers, and take turns: RUN channels each, until all are dealt out, so that they store side by side. Inputs
// are read where they lie, with their strides. `params`: the number of rows.

template <typename T> METAL_FUNC void unpack(uint word, thread float* to) {
    to[0] = float(as_type<T>(ushort(word)));
    to[1] = float(as_type<T>(ushort(word >> 16)));
}
template <> METAL_FUNC void unpack<bfloat>(uint word, thread float* to) {  // a bfloat is a float's upper half
    to[0] = as_type<float>(word << 16);
    to[1] = as_type<float>(word & 0xffff0000u);
}
template <> METAL_FUNC void unpack<float>(uint word, thread float* to) { to[0] = as_type<float>(word); }
template <typename T> METAL_FUNC uint pack(const thread float* x) {
    return uint(as_type<ushort>(T(x[0]))) | uint(as_type<ushort>(T(x[1]))) << 16;
}
template <> METAL_FUNC uint pack<float>(const thread float* x) { return as_type<uint>(x[0]); }

// N channels that lie together, eight bytes at a time.
template <typename T, int N> METAL_FUNC void load(const device T* from, long stride, thread float* x) {
    constexpr int IN_WORD = 4 / sizeof(T);
    if (stride == 1 && reinterpret_cast<ulong>(from) % 8 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2 * IN_WORD) {
            const uint2 words = *reinterpret_cast<const device uint2*>(from + i);
            unpack<T>(words.x, x + i);
            unpack<T>(words.y, x + i + IN_WORD);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = float(from[i * stride]);
    }
}
template <typename T, int N> METAL_FUNC void store(const thread float* x, device T* to) {
    constexpr int IN_WORD = 4 / sizeof(T), WORDS = N / IN_WORD;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4 * IN_WORD) {
            *reinterpret_cast<device uint4*>(to + i) = uint4{
                pack<T>(x + i), pack<T>(x + i + IN_WORD), pack<T>(x + i + 2 * IN_WORD), pack<T>(x + i + 3 * IN_WORD)};
        }
    } else {
        *reinterpret_cast<device uint2*>(to) = uint2{pack<T>(x), pack<T>(x + IN_WORD)};
    }
}
template <int FROM, int TO, int COUNT> METAL_FUNC void butterflies(thread float (&y)[COUNT]) {
#pragma unroll
    for (int half_size = FROM; half_size < TO; half_size *= 2) {
#pragma unroll
        for (int pair = 0; pair < COUNT / 2; pair++) {
            const int low = pair / half_size * 2 * half_size + pair % half_size, high = low + half_size;
            const float a = y[low], b = y[high];
            y[low] = a + b;
            y[high] = a - b;
        }
    }
}
// Not a condition, of which a compiler could make a branch with shuffles on both sides. A product with it is exact: fma rounds as a
// sum does.
METAL_FUNC float minus_one_if(uint bit) { return as_type<float>(0x3f800000u | bit << 31); }
// The transform beyond a lane's run: two butterflies across the four lanes and the rest again within, or ODD x ODD signs, of which a
// lane has every fourth row; bit b of a row's word says that column b is -1.
template <int ODD, int RUN, int COUNT>
METAL_FUNC void across_lanes(thread float (&y)[COUNT], const device uint* negative, uint lane) {
    if constexpr (ODD == 1) {
#pragma unroll
        for (uint mask = 1; mask < 4; mask *= 2) {
            const float sign = minus_one_if(lane / mask % 2);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float other = simd_shuffle_xor(y[i], ushort(mask));
                y[i] = metal::fma(sign, y[i], other);
            }
        }
        butterflies<RUN, COUNT>(y);
    } else {
        constexpr int ROWS = ODD / 4;
        uint signs[ROWS];
        float total[COUNT];
#pragma unroll
        for (int r = 0; r < ROWS; r++) signs[r] = negative[4 * r + lane % 4];
#pragma unroll
        for (int b = 0; b < ODD; b++) {
#pragma unroll
            for (int a = 0; a < RUN; a++) {
                const float x = simd_shuffle(y[b / 4 * RUN + a], ushort(lane / 4 * 4 + b % 4));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float sign = minus_one_if(signs[r] >> b & 1);
                    total[r * RUN + a] = b == 0 ? sign * x : metal::fma(sign, x, total[r * RUN + a]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = total[i];
    }
}
// Codes first..first+N-1 of a row, in the lower bits; `stride` is that of its words.
template <int BITS, int N> METAL_FUNC uint read_codes(const device uint* words, long stride, uint first) {
    const uint word = first * BITS / 32, shift = first * BITS % 32;
    uint codes = words[word * stride] >> shift;
    if (32 % (N * BITS) != 0 && shift + N * BITS > 32) codes |= words[(word + 1) * stride] << (32 - shift);
    return codes;
}
// --- body ---
    constexpr int COUNT = DIM / 4, LEVELS = 1 << BITS, ROW_WORDS = (DIM * BITS + 31) / 32, THREADS = 128;
    constexpr int RUN = ODD == 1 ? 8 : DIM / ODD, UNIT = RUN < 8 ? RUN : 8;  // UNIT codes fill a word at most
    constexpr int TOGETHER = BITS <= 2 ? 2 : 1, ENTRIES = 1 << TOGETHER * BITS;  // codes looked up at once
    threadgroup float2 levels[STAGES * ENTRIES];

    const uint heads = codes_shape[1], rows = uint(params[0]);
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint lane = thread_index_in_simdgroup, thread_index = thread_position_in_threadgroup.x, part = lane % 4;
    const uint row = threadgroup_position_in_grid.x * (THREADS / 4) + thread_index / 4;
    const bool inside = row < rows;
    if (thread_index < STAGES * ENTRIES) {
        const device float* of_stage = codebook + thread_index / ENTRIES * LEVELS;
        levels[thread_index] = float2{of_stage[thread_index % LEVELS], of_stage[thread_index % ENTRIES / LEVELS]};
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float y[COUNT] = {};
    if (inside) {
        const device uint* words = codes + sequence * codes_strides[0] + head * codes_strides[1] + row * codes_strides[2];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
#pragma unroll
            for (int i = 0; i < COUNT; i += UNIT) {
                const uint own = read_codes<BITS, UNIT>(
                    words + stage * ROW_WORDS * codes_strides[3], codes_strides[3], i / RUN * 4 * RUN + part * RUN + i % RUN);
#pragma unroll
                for (int j = 0; j < UNIT; j += TOGETHER) {
                    const float2 found = levels[stage * ENTRIES + (own >> (j * BITS)) % ENTRIES];
                    y[i + j] += found.x;
                    if (TOGETHER == 2) y[i + j + 1] += found.y;
                }
            }
        }
        const float size = float(norm[sequence * norm_strides[0] + head * norm_strides[1] + row * norm_strides[2]]);
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] *= size;
        if constexpr (CENTER) {
            const device T* means = mean + sequence * mean_strides[0] + head * mean_strides[1] + row / 128 * mean_strides[2];
#pragma unroll
            for (int i = 0; i < COUNT; i += RUN) {
                float of_block[RUN];
                load<T, RUN>(means + (4 * i + part * RUN) * mean_strides[3], mean_strides[3], of_block);
#pragma unroll
                for (int j = 0; j < RUN; j++) y[i + j] += of_block[j];
            }
        }
    }
    butterflies<1, RUN>(y);
    across_lanes<ODD, RUN>(y, hadamard, lane);
    if (inside) {
        const float scale = as_type<float>(uint(SCALE));  // DIM^-0.5
        device T* to = x + ((ulong(sequence) * heads + head) * rows + row) * DIM;
#pragma unroll
        for (int i = 0; i < COUNT; i += RUN) {
            const uint first = 4 * i + part * RUN, signs = flips[first / 32] >> first % 32;
            float run[RUN];
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                const float value = y[i + j] * scale;
                run[j] = signs >> j & 1 ? -value : value;
            }
            store<T, RUN>(run, to + first);
        }
    }
