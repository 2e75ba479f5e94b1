// Rotates rows, removes their block's mean if CENTER, and quantises and packs them, in one pass.
// A row of DIM channels lies in four neighbouring lanes, a run of channels in the registers of each. A simdgroup has eight rows;
// with CENTER a threadgroup has a block of 128, whose mean goes through threadgroup memory. Levels are symmetric: a code is found by
// magnitude, among the upper half of them, and sign. Sums are added in reference.py's order.
// `params`: the number of rows, then of each sequence the rows that its first block's mean leaves out.

template <typename T> METAL_FUNC void unpack(uint word, thread float* to) {
    to[0] = float(as_type<T>(ushort(word)));
    to[1] = float(as_type<T>(ushort(word >> 16)));
}
template <> METAL_FUNC void unpack<bfloat>(uint word, thread float* to) {  // a bfloat is a float's upper half
    to[0] = as_type<float>(word << 16);
    to[1] = as_type<float>(word & 0xffff0000u);
}
template <> METAL_FUNC void unpack<float>(uint word, thread float* to) { to[0] = as_type<float>(word); }
template <typename T> METAL_FUNC uint bits_of(T x) { return as_type<ushort>(x); }
template <> METAL_FUNC uint bits_of<float>(float x) { return as_type<uint>(x); }
template <int BYTES, int WORDS> METAL_FUNC void load_words(const device uint* from, thread uint (&words)[WORDS]) {
#pragma unroll
    for (int w = 0; w < WORDS; w += BYTES / 4) {
        if constexpr (BYTES == 16) {
            const uint4 four = *reinterpret_cast<const device uint4*>(from + w);
            words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
        } else {
            const uint2 two = *reinterpret_cast<const device uint2*>(from + w);
            words[w] = two.x, words[w + 1] = two.y;
        }
    }
}
// The channels of a lane, with the signs of some changed: by an exclusive or of words as they lie in memory, as many bytes at once
// as divide a lane's channels where they lie together.
template <typename T, int COUNT>
METAL_FUNC void load(const device T* from, long stride, const device uint* signs, thread float (&x)[COUNT]) {
    constexpr int BYTES = COUNT * sizeof(T) % 16 == 0 ? 16 : 8, IN_WORD = 4 / sizeof(T), WORDS = COUNT / IN_WORD;
    uint words[WORDS];
    if (stride == 1 && reinterpret_cast<ulong>(from) % BYTES == 0) {
        load_words<BYTES>(reinterpret_cast<const device uint*>(from), words);
    } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            words[w] = bits_of(from[w * IN_WORD * stride]);
            if (IN_WORD == 2) words[w] |= bits_of(from[(w * IN_WORD + 1) * stride]) << 16;
        }
    }
    uint changed[WORDS];
    load_words<BYTES>(signs, changed);
#pragma unroll
    for (int w = 0; w < WORDS; w++) unpack<T>(words[w] ^ changed[w], x + w * IN_WORD);
}
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
// Not a condition, of which a compiler could make a branch with shuffles on both sides. A product with it is exact: fma rounds as a
// sum does.
METAL_FUNC float minus_one_if(uint bit) { return as_type<float>(0x3f800000u | bit << 31); }
// What is left of the transform lies across the four lanes: two more butterflies or, with an odd part, ODD x ODD signs, of which a
// lane has ODD / 4 rows, bit b of a row's word saying that column b is -1.
template <int ODD, int COUNT> METAL_FUNC void across_lanes(thread float (&y)[COUNT], const device uint* negative, uint lane) {
    const uint part = lane % 4;
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
                    const float sign = minus_one_if(signs[r] >> b & 1);
                    total[r * POWER + a] = b == 0 ? sign * x : metal::fma(sign, x, total[r * POWER + a]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = total[i];
    }
}
// Halves onto each other as long as there are two, then one by one.
template <int N, int COUNT> METAL_FUNC float fold(thread float (&x)[COUNT]) {
    if constexpr (N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) x[i] = x[i] + x[i + N / 2];
        return fold<N / 2>(x);
    } else {
        float total = x[0];
#pragma unroll
        for (int i = 1; i < N; i++) total = total + x[i];
        return total;
    }
}
METAL_FUNC float over_lanes(float x) {  // of the four
    x = x + simd_shuffle_xor(x, 2);
    return x + simd_shuffle_xor(x, 1);
}
// Sums over the eight rows of a simdgroup: of two lanes each hands half of its channels over and adds up the other half, as long as
// there are two halves. A lane is left with COUNT / 8 sums, if that is whole, else with COUNT / 4, as its neighbour four lanes on is.
template <int N, int MASK, int COUNT> METAL_FUNC void over_rows(thread float (&x)[COUNT], uint lane) {
    if constexpr (MASK < 4) {
        return;
    } else if constexpr (N % 2 == 0) {
        const uint upper = 0u - (lane / MASK & 1u);      // bits, not a condition: see minus_one_if
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const uint kept = as_type<uint>(x[i]), given = as_type<uint>(x[i + N / 2]), swapped = (kept ^ given) & upper;
            x[i] = as_type<float>(kept ^ swapped) + simd_shuffle_xor(as_type<float>(given ^ swapped), ushort(MASK));
        }
        over_rows<N / 2, MASK / 2>(x, lane);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = x[i] + simd_shuffle_xor(x[i], ushort(MASK));
        over_rows<N, MASK / 2>(x, lane);
    }
}
// The level of a magnitude in a row of `size`; levels and borders are for size 1. How many of the ascending borders are below it,
// times `unit`, changes bits of `code`. Few levels stay in registers, and halves are chosen.
template <int LEVELS, typename Numbers>
METAL_FUNC float quantise(float x, float size, Numbers levels, Numbers borders, uint unit, thread uint& code) {
    if constexpr (LEVELS <= 4) {
        float level[LEVELS], border[LEVELS];
#pragma unroll
        for (int i = 0; i < LEVELS; i++) level[i] = levels[i], border[i] = precise_mul(borders[i], size);
#pragma unroll
        for (int half_size = LEVELS / 2; half_size > 0; half_size /= 2) {
            const bool above = x > border[half_size - 1];
            if (above) code ^= half_size * unit;
#pragma unroll
            for (int i = 0; i < half_size; i++) {
                level[i] = above ? level[half_size + i] : level[i];
                border[i] = above ? border[half_size + i] : border[i];
            }
        }
        return level[0];
    } else {
        uint index = 0;
#pragma unroll
        for (uint step = LEVELS / 2; step > 0; step /= 2) index += x > precise_mul(borders[index + step - 1], size) ? step : 0;
        code ^= index * unit;
        return levels[index];
    }
}
// Inverts the codes of negative numbers.
template <int BITS, int COUNT, int WORDS>
METAL_FUNC void invert_negative(const thread float (&x)[COUNT], thread uint (&codes)[WORDS]) {
    constexpr uint ALL = (1u << BITS) - 1;
    if constexpr (32 % BITS == 0) {                  // signs are shifted in, with more of the numbers' bits, which fall away
        uint negative[WORDS] = {};
#pragma unroll
        for (int i = COUNT - 1; i >= 0; i--) {
            negative[i * BITS / 32] = negative[i * BITS / 32] << BITS | as_type<uint>(x[i]) >> (32 - BITS);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) codes[w] ^= (negative[w] >> (BITS - 1) & 0xffffffffu / ALL) * ALL;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int bit = i * BITS, shift = bit % 32;
            const uint negative = uint(as_type<int>(x[i]) >> 31);
            codes[bit / 32] ^= negative & ALL << shift;
            if (shift + BITS > 32) codes[bit / 32 + 1] ^= negative & ALL >> (32 - shift);
        }
    }
}
template <int N> METAL_FUNC void store_words(const thread uint (&words)[N], device uint* to) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int w = 0; w < N; w += 4) {
            *reinterpret_cast<device uint4*>(to + w) = uint4{words[w], words[w + 1], words[w + 2], words[w + 3]};
        }
    } else if constexpr (N % 2 == 0) {
#pragma unroll
        for (int w = 0; w < N; w += 2) *reinterpret_cast<device uint2*>(to + w) = uint2{words[w], words[w + 1]};
    } else {
#pragma unroll
        for (int w = 0; w < N; w++) to[w] = words[w];
    }
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
    constexpr int COUNT = DIM / 4, LEVELS = 1 << BITS, HALF = LEVELS / 2, OWN_BITS = COUNT * BITS, OWN_WORDS = (OWN_BITS + 31) / 32;
    constexpr int ROW_WORDS = (DIM * BITS + 31) / 32, SIMDGROUPS = CENTER ? 16 : 4;
    constexpr float SMALLEST_SQUARE = 7.888609052210118e-31f * DIM;  // 2^-100, of rows DIM^0.5 times as long
    constexpr float LARGEST_SQUARE = 1.2676506002282294e30f * DIM;   // 2^100
    constexpr int PADDED = COUNT + 4;                                // four lanes of a row then read 16 bytes from different banks
    threadgroup float levels[STAGES * LEVELS], borders[STAGES * LEVELS];
    threadgroup float sums[CENTER ? SIMDGROUPS * 4 * PADDED : 1];

    const uint heads = x_shape[1], rows = uint(params[0]);
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint lane = thread_index_in_simdgroup, thread_index = thread_position_in_threadgroup.x, part = lane % 4;
    const uint row = threadgroup_position_in_grid.x * 8 * SIMDGROUPS + thread_index / 4;
    const bool inside = CENTER || row < rows;  // blocks are whole
    if (thread_index < STAGES * LEVELS) {
        levels[thread_index] = codebook[thread_index];
        borders[thread_index] = codebook[STAGES * LEVELS + thread_index];
    }

    float y[COUNT] = {};
    const device T* from = x + sequence * x_strides[0] + head * x_strides[1] + row * x_strides[2] + part * COUNT * x_strides[3];
    if (inside) load<T>(from, x_strides[3], signs + part * COUNT * sizeof(T) / 4, y);
    butterflies<COUNT, DIM / ODD>(y);
    across_lanes<ODD>(y, hadamard, lane);
    const float scale = as_type<float>(uint(SCALE));  // DIM^-0.5, by which norms and means are multiplied, not every number

    if constexpr (CENTER) {
        const uint block = threadgroup_position_in_grid.x, skip = block == 0 ? uint(params[1 + sequence]) : 0;
        float counted[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) counted[i] = y[i];
        over_rows<COUNT, 16>(counted, lane);
        if (skip > 0) {                              // again, without some rows
#pragma unroll
            for (int i = 0; i < COUNT; i++) counted[i] = thread_index / 4 < skip ? 0.0f : y[i];
            over_rows<COUNT, 16>(counted, lane);
        }
        constexpr int HOLDERS = COUNT % 8 == 0 ? 1 : 2, OWN = HOLDERS * COUNT / 8;  // lanes that hold the same, and how much
        const uint own_sums = (thread_index / 32 * 4 + part) * PADDED + lane / (4 * HOLDERS) * OWN;
        if (lane / 4 % HOLDERS == 0) {
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[own_sums + i] = counted[i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index < DIM) {
            const int own = int(thread_index) + 4 * (int(thread_index) / COUNT);
            float of_simdgroups[SIMDGROUPS];
#pragma unroll
            for (int s = 0; s < SIMDGROUPS; s++) of_simdgroups[s] = sums[s * 4 * PADDED + own];
            float average = precise_mul(fold<SIMDGROUPS>(of_simdgroups), 1.0f / float(128 - int(skip)));
            average = precise_mul(average, scale);
            const float limit = largest_of(T(0));
            const T rounded = T(average != average ? average : metal::clamp(average, -limit, limit));
            mean[((ulong(sequence) * heads + head) * (rows / 128) + block) * DIM + thread_index] = rounded;
            sums[own] = precise_mul(float(rounded), metal::sqrt(float(DIM)));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = y[i] - sums[part * PADDED + i];
    } else {
        // Nobody reads the means, of which there are eight: every output is written.
        if (row == 0 && part == 0 && head == 0 && sequence == 0) {
            for (int i = 0; i < 8; i++) mean[i] = T(0.0f);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  // for the codebook
    }

    float squares[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) squares[i] = precise_mul(y[i], y[i]);
    const float square = over_lanes(fold<COUNT>(squares));
    const bool usual = square >= SMALLEST_SQUARE && square < LARGEST_SQUARE;
    const float size = metal::sqrt(usual ? square : 1.0f);
    float length = precise_mul(size, scale);

    const ulong place = (ulong(sequence) * heads + head) * rows + row;
    if (simd_any(!usual)) {                          // hardly ever
#pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = usual ? y[i] : 0.0f;
    }
    float products[COUNT], decoded[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) products[i] = y[i];
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        uint own[OWN_WORDS] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int bit = i * BITS, top = bit + BITS - 1;
            own[top / 32] |= 1u << top % 32;         // of a positive number
        }
        invert_negative<BITS>(y, own);
        const int upper = stage * LEVELS + HALF;     // half of the levels
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int bit = i * BITS, shift = bit % 32;
            const bool whole = shift + BITS <= 32;   // in one word, where the code is made in its place
            uint parted = 0;
            thread uint& code = whole ? own[bit / 32] : parted;
            float level = quantise<HALF>(metal::abs(y[i]), size, levels + upper, borders + upper, whole ? 1u << shift : 1u, code);
            if (!whole) own[bit / 32] ^= code << shift, own[bit / 32 + 1] ^= code >> (32 - shift);
            if (UNBIASED && STAGES == 1) {
                products[i] = precise_mul(metal::abs(y[i]), level);
            } else {
                level = as_type<float>(as_type<uint>(level) | (as_type<uint>(y[i]) & 0x80000000u));
                y[i] = y[i] - precise_mul(level, size);
                decoded[i] = stage == 0 ? level : decoded[i] + level;
                if (UNBIASED && stage + 1 == STAGES) products[i] = precise_mul(products[i], decoded[i]);  // here: registers
            }
        }
        device uint* to = codes + (place * STAGES + stage) * ROW_WORDS;
        if constexpr (OWN_BITS % 32 == 0) {
            if (inside) store_words(own, to + part * OWN_WORDS);
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
        length = precise_mul(precise_mul(square, scale), 1.0f / over_lanes(fold<COUNT>(products)));
    }
    if (inside && part == 0) norm[place] = bfloat(usual ? length : square < SMALLEST_SQUARE ? 0.0f : NAN);
