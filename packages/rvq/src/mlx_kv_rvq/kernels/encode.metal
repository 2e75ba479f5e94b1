// Rotates rows, removes their block's mean if CENTER, and quantises and packs them, in one pass.
// A row of DIM channels lies in four neighbouring lanes, a run of channels in the registers of each. A simdgroup has eight rows;
// with CENTER a threadgroup has a block of 128, whose mean goes through threadgroup memory. Sums are added in reference.py's order.
// `params`: the number of rows, then of each sequence the rows that its first block's mean leaves out.

// Butterflies over the power of two of DIM = ODD * 2^k, as far as they lie in a lane; channel b * 2^k + a has place a in them.
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
// What is left of the transform lies across the four lanes: two more butterflies or, with an odd part, ODD x ODD signs, of which a
// lane has ODD / 4 rows, bit b of a row's word saying that column b is -1.
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
// Halves onto each other as long as there are two, then one by one.
template <int COUNT> METAL_FUNC float fold(thread float (&x)[COUNT]) {
    int n = COUNT;
#pragma unroll
    while (n % 2 == 0) {
        n /= 2;
#pragma unroll
        for (int i = 0; i < n; i++) x[i] = x[i] + x[i + n];
    }
    float total = x[0];
    for (int i = 1; i < n; i++) total = total + x[i];
    return total;
}
METAL_FUNC float over_lanes(float x) {  // of the four
    x = x + simd_shuffle_xor(x, 2);
    return x + simd_shuffle_xor(x, 1);
}
METAL_FUNC float over_rows(float x) {  // of the eight of a simdgroup
    x = x + simd_shuffle_xor(x, 16);
    x = x + simd_shuffle_xor(x, 8);
    return x + simd_shuffle_xor(x, 4);
}
// 32 bits of a lane's bits from `first` on, zeros outside of them.
template <int WORDS> METAL_FUNC uint bits_from(const thread uint (&words)[WORDS], int first) {
    uint found = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int shift = 32 * w - first;
        if (shift > -32 && shift < 32) found |= shift >= 0 ? words[w] << shift : words[w] >> -shift;
    }
    return found;
}
METAL_FUNC float largest_of(float) { return 3.4028234663852886e38f; }
METAL_FUNC float largest_of(half) { return 65504.0f; }
METAL_FUNC float largest_of(bfloat) { return 3.3895313892515355e38f; }
// --- body ---
    constexpr int COUNT = DIM / 4, LEVELS = 1 << BITS, OWN_BITS = COUNT * BITS, OWN_WORDS = (OWN_BITS + 31) / 32;
    constexpr int ROW_WORDS = (DIM * BITS + 31) / 32, SIMDGROUPS = CENTER ? 16 : 4;
    constexpr float SMALLEST_SQUARE = 7.888609052210118e-31f;  // 2^-100
    constexpr float LARGEST_SQUARE = 1.2676506002282294e30f;   // 2^100
    threadgroup float levels[STAGES * LEVELS], borders[STAGES * LEVELS];
    threadgroup float sums[CENTER ? SIMDGROUPS * DIM : 1];

    const uint heads = x_shape[1], rows = uint(params[0]);
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint lane = thread_index_in_simdgroup, thread_index = thread_position_in_threadgroup.x, part = lane % 4;
    const uint row = threadgroup_position_in_grid.x * 8 * SIMDGROUPS + thread_index / 4;
    const bool inside = row < rows;
    for (uint i = thread_index; i < STAGES * LEVELS; i += 32 * SIMDGROUPS) {
        levels[i] = codebook[i];
        borders[i] = codebook[STAGES * LEVELS + i];
    }

    float y[COUNT];
    const device T* from = x + sequence * x_strides[0] + head * x_strides[1] + row * x_strides[2] + part * COUNT * x_strides[3];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const uint channel = part * COUNT + i;
        const float value = inside ? float(from[i * x_strides[3]]) : 0.0f;
        y[i] = flips[channel / 32] >> channel % 32 & 1 ? -value : value;
    }
    butterflies<COUNT, DIM / ODD>(y);
    across_lanes<ODD>(y, hadamard, lane);
    const float scale = as_type<float>(uint(SCALE));  // DIM^-0.5
#pragma unroll
    for (int i = 0; i < COUNT; i++) y[i] = precise_mul(y[i], scale);

    if constexpr (CENTER) {
        const uint block = threadgroup_position_in_grid.x, skip = block == 0 ? uint(params[1 + sequence]) : 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float total = over_rows(thread_index / 4 < skip ? 0.0f : y[i]);
            if (lane < 4) sums[thread_index / 32 * DIM + part * COUNT + i] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index < DIM) {
            float of_simdgroups[SIMDGROUPS];
#pragma unroll
            for (int s = 0; s < SIMDGROUPS; s++) of_simdgroups[s] = sums[s * DIM + thread_index];
            const float average = precise_mul(fold(of_simdgroups), 1.0f / float(128 - int(skip)));
            const float limit = largest_of(T(0));
            const T rounded = T(average != average ? average : metal::clamp(average, -limit, limit));
            mean[((ulong(sequence) * heads + head) * (rows / 128) + block) * DIM + thread_index] = rounded;
            sums[thread_index] = float(rounded);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = y[i] - sums[part * COUNT + i];
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // for the codebook
    }

    float squares[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) squares[i] = precise_mul(y[i], y[i]);
    const float square = over_lanes(fold(squares));
    const bool usual = square >= SMALLEST_SQUARE && square < LARGEST_SQUARE;
    float size = metal::sqrt(usual ? square : 1.0f);
    const float inverse = 1.0f / size;

    const ulong place = (ulong(sequence) * heads + head) * rows + row;
    float unit[COUNT], decoded[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        y[i] = usual ? precise_mul(y[i], inverse) : 0.0f;
        unit[i] = y[i];
        decoded[i] = 0;
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        uint own[OWN_WORDS] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            uint code = 0;
#pragma unroll
            for (uint step = LEVELS / 2; step > 0; step /= 2) code += y[i] > borders[stage * LEVELS + code + step - 1] ? step : 0;
            const float centroid = levels[stage * LEVELS + code];
            y[i] = y[i] - centroid;
            decoded[i] = decoded[i] + centroid;
            const int bit = i * BITS;
            own[bit / 32] |= code << (bit % 32);
            if (bit % 32 + BITS > 32) own[bit / 32 + 1] |= code >> (32 - bit % 32);
        }
        device uint* to = codes + (place * STAGES + stage) * ROW_WORDS;
        if constexpr (OWN_BITS % 32 == 0) {
            if (inside) {
#pragma unroll
                for (int w = 0; w < OWN_WORDS; w++) to[part * OWN_WORDS + w] = own[w];
            }
        } else {  // words that lanes share
            for (int w = 0; w < ROW_WORDS; w++) {
                uint word = bits_from(own, 32 * w - int(part) * OWN_BITS);
                word |= simd_shuffle_xor(word, 1);
                word |= simd_shuffle_xor(word, 2);
                if (inside && int(part) == w % 4) to[w] = word;
            }
        }
    }
    if constexpr (UNBIASED) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) unit[i] = precise_mul(unit[i], decoded[i]);
        size = precise_mul(size, 1.0f / over_lanes(fold(unit)));
    }
    if (inside && part == 0) norm[place] = bfloat(usual ? size : square < SMALLEST_SQUARE ? 0.0f : NAN);
