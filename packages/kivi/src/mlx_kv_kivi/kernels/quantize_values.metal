// Quantises values per token and packs their codes, in one pass: a group is GROUP consecutive channels of one row.
// A thread owns 32 channels of one row, which stay in its registers; GROUP / 32 neighbouring lanes share a group and find its
// extremes by shuffles. The 32 codes are BITS whole words. The rules for numbers that leave the range of a dtype are
// reference.py's.

template <typename T> METAL_FUNC void unpack(uint word, thread float* to) {
    to[0] = float(as_type<T>(ushort(word)));
    to[1] = float(as_type<T>(ushort(word >> 16)));
}
template <> METAL_FUNC void unpack<bfloat>(uint word, thread float* to) {  // a bfloat is a float's upper half
    to[0] = as_type<float>(word << 16);
    to[1] = as_type<float>(word & 0xffff0000u);
}
template <typename T> METAL_FUNC void load_aligned(const device T* from, thread float* to) {
    const uint4 words = *reinterpret_cast<const device uint4*>(from);
    unpack<T>(words.x, to);
    unpack<T>(words.y, to + 2);
    unpack<T>(words.z, to + 4);
    unpack<T>(words.w, to + 6);
}
template <> METAL_FUNC void load_aligned<float>(const device float* from, thread float* to) {
    for (uint i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const device float4*>(from + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
    }
}
// 4 times 8 channels, each 16 bytes at a time where its elements lie together.
template <typename T> METAL_FUNC void load(const device T* from, long step, long stride, thread float (*to)[8]) {
    if (stride == 1 && reinterpret_cast<ulong>(from) % 16 == 0) {
#pragma unroll
        for (uint i = 0; i < 4; i++) load_aligned<T>(from + i * step, to[i]);
    } else {
#pragma unroll
        for (uint i = 0; i < 4; i++) {
#pragma unroll
            for (uint c = 0; c < 8; c++) to[i][c] = float(from[i * step + c * stride]);
        }
    }
}
// The code before rounding: distance / scale as IEEE rounds it, by the inverse of the scale in two parts. The scales of half and
// bfloat have so few bits that no quotient comes as near to a border of rounding as this errs; those of float have too many.
template <typename T> METAL_FUNC float quotient(float distance, float, float inverse, float rest, float largest) {
    const float q = metal::fma(distance, inverse, distance * rest);
    return largest > 15 ? metal::min(q, largest) : q;  // a bfloat may be 1/256 too small: that is half a code of 8 bits only
}
template <> METAL_FUNC float quotient<half>(float distance, float, float inverse, float rest, float largest) {
    return metal::min(metal::fma(distance, inverse, distance * rest), largest);  // subnormal scales may be far too small
}
template <> METAL_FUNC float quotient<float>(float distance, float scale, float, float, float) { return distance / scale; }

// The codes of 32 channels, BITS words, from those of 4 times 8 channels.
template <int BITS> METAL_FUNC void store_codes(const thread uint (*of)[2], device uint* to) {
    if (BITS == 2) {
        *reinterpret_cast<device uint2*>(to) = uint2{of[0][0] | of[1][0] << 16, of[2][0] | of[3][0] << 16};
    } else if (BITS == 3) {
        to[0] = of[0][0] | of[1][0] << 24;
        to[1] = of[1][0] >> 8 | of[2][0] << 16;
        to[2] = of[2][0] >> 16 | of[3][0] << 8;
    } else if (BITS == 4) {
        *reinterpret_cast<device uint4*>(to) = uint4{of[0][0], of[1][0], of[2][0], of[3][0]};
    } else {
        *reinterpret_cast<device uint4*>(to) = uint4{of[0][0], of[0][1], of[1][0], of[1][1]};
        *reinterpret_cast<device uint4*>(to + 4) = uint4{of[2][0], of[2][1], of[3][0], of[3][1]};
    }
}
// --- body ---
    constexpr uint LANES = GROUP / 32;  // that share a group
    constexpr uint LARGEST_CODE = (1 << BITS) - 1;
    constexpr float LARGEST_INVERSE = 1.0f / float(LARGEST_CODE);
    constexpr float RANGE_LIMIT = 1.2676506002282294e30f;       // 2^100
    constexpr float SMALLEST_SCALE = 8.271806125530277e-25f;    // 2^-80
    constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;  // 2^-126
    // From 2^23 on floats are integers: adding it rounds half to even and puts the code into the last bits. What stands above
    // them is taken off beforehand from the sum of 8 codes in their places (4 codes a word, if they have 8 bits).
    constexpr float TWO_23 = 8388608.0f;
    constexpr uint ABOVE = 0x4b000000u * (BITS == 2 ? 0x5555u : BITS == 3 ? 0x249249u : BITS == 4 ? 0x11111111u : 0x01010101u);

    const uint heads = x_shape[1], rows = x_shape[2], parts = uint(x_shape[3]) / 32;  // of a row
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint simdgroup = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint item = simdgroup * 32 + lane, row = item / parts, part = item % parts;
    const bool inside = row < rows;

    float tile[4][8] = {};
    if (inside) {
        load<T>(x + sequence * x_strides[0] + head * x_strides[1] + row * x_strides[2] + 32 * part * x_strides[3],
                8 * x_strides[3], x_strides[3], tile);
    }

    float low = INFINITY, high = -INFINITY, poison = 0;
#pragma unroll
    for (uint i = 0; i < 32; i++) {
        low = metal::min(low, tile[i / 8][i % 8]);
        high = metal::max(high, tile[i / 8][i % 8]);
        poison = metal::fma(tile[i / 8][i % 8], 0.0f, poison);  // NaN from a NaN or an infinity on
    }
    high = poison == 0 ? high : INFINITY;  // min and max pass a NaN over
    for (uint mask = 1; mask < LANES; mask *= 2) {
        low = metal::min(low, simd_shuffle_xor(low, ushort(mask)));
        high = metal::max(high, simd_shuffle_xor(high, ushort(mask)));
    }
    const float largest_rest = metal::fma(-LARGEST_INVERSE, float(LARGEST_CODE), 1.0f) * LARGEST_INVERSE;
    const float range = high - low;
    const bool finite = range < RANGE_LIMIT;
    const T step = T(metal::fma(range, LARGEST_INVERSE, range * largest_rest));
    const T own_scale = finite && float(step) >= SMALLEST_SCALE ? step : T(1.0f);
    const T own_minimum = T(!finite ? NAN : metal::fabs(low) < SMALLEST_NORMAL ? 0.0f : low);
    if (!finite) {
#pragma unroll
        for (uint i = 0; i < 32; i++) tile[i / 8][i % 8] = 0;
    }
    const float divisor = float(own_scale), origin = finite ? float(own_minimum) : 0.0f;
    const float inverse = 1.0f / divisor, rest = metal::fma(-inverse, divisor, 1.0f) * inverse;
    uint packed[4][2];
#pragma unroll
    for (uint r = 0; r < 4; r++) {
        packed[r][0] = packed[r][1] = 0u - ABOVE;
#pragma unroll
        for (uint c = 0; c < 8; c++) {
            const float code = quotient<T>(tile[r][c] - origin, divisor, inverse, rest, float(LARGEST_CODE));
            packed[r][BITS * c / 32] += as_type<uint>(code + TWO_23) << (BITS * c % 32);
        }
    }

    if (inside) {
        const ulong place = ((ulong(sequence) * heads + head) * rows + row) * parts + part;
        store_codes<BITS>(packed, codes + place * BITS);
        if (part % LANES == 0) {
            scale[place / LANES] = own_scale;
            minimum[place / LANES] = own_minimum;
        }
    }
