// Quantises keys per channel and packs their codes, in one pass: a group is GROUP consecutive rows of one channel.
// A thread owns 8 rows of 8 channels, which stay in its registers; GROUP / 8 lanes of a simdgroup share the groups of these
// channels and find their extremes by shuffles. The 8 codes of a row are BITS whole bytes. The rules for numbers that leave
// the range of a dtype are reference.py's.

template <typename T> METAL_FUNC void unpack(uint word, thread float* to) {
    to[0] = float(as_type<T>(ushort(word)));
    to[1] = float(as_type<T>(ushort(word >> 16)));
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
// Eight channels of a row, 16 bytes at a time where they lie so.
template <typename T> METAL_FUNC void load(const device T* from, long stride, thread float* to) {
    if (stride == 1 && reinterpret_cast<ulong>(from) % 16 == 0) {
        load_aligned<T>(from, to);
    } else {
        for (uint i = 0; i < 8; i++) to[i] = float(from[i * stride]);
    }
}

template <typename T> METAL_FUNC uint pack(T low, T high) {
    return uint(as_type<ushort>(low)) | uint(as_type<ushort>(high)) << 16;
}
template <typename T> METAL_FUNC void store(const thread T* from, device T* to) {
    *reinterpret_cast<device uint4*>(to) =
        uint4{pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7])};
}
template <> METAL_FUNC void store<float>(const thread float* from, device float* to) {
    for (uint i = 0; i < 8; i += 4) {
        *reinterpret_cast<device float4*>(to + i) = float4{from[i], from[i + 1], from[i + 2], from[i + 3]};
    }
}

// distance / scale, rounded as IEEE asks. For the few bits of a half's or bfloat's mantissa the residual of the approximate
// quotient is exact and far smaller than what lies between a quotient and the border of a rounding interval.
template <typename T> METAL_FUNC float quotient(float distance, float scale, float inverse) {
    const float q = distance * inverse;
    return metal::fma(metal::fma(-q, scale, distance), inverse, q);
}
template <> METAL_FUNC float quotient<float>(float distance, float scale, float) { return distance / scale; }

template <int BITS> METAL_FUNC void store_codes(uint low, uint high, device uchar* to) {
    if (BITS == 2) {
        *reinterpret_cast<device ushort*>(to) = ushort(low);
    } else if (BITS == 3) {
        for (uint i = 0; i < 3; i++) to[i] = uchar(low >> (8 * i));
    } else {
        reinterpret_cast<device uint*>(to)[0] = low;
        if (BITS == 8) reinterpret_cast<device uint*>(to)[1] = high;
    }
}
// --- body ---
    constexpr uint LANES = GROUP / 8;                // that share a group
    constexpr uint ITEMS = 32 / LANES;               // groups of 8 channels in a simdgroup
    constexpr uint LARGEST_CODE = (1 << BITS) - 1;
    constexpr float RANGE_LIMIT = 1.7014118346046923e38f;       // 2^127
    constexpr float SMALLEST_SCALE = 8.271806125530277e-25f;    // 2^-80
    constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;  // 2^-126

    const uint heads = x_shape[1], rows = x_shape[2], chunks = uint(x_shape[3]) / 8;
    const uint groups = rows / GROUP;                // of one head
    const uint lane = thread_index_in_simdgroup, slot = lane / ITEMS;
    const uint item = thread_position_in_grid.x / 32 * ITEMS + lane % ITEMS;
    const uint group = item / chunks, chunk = item % chunks;
    const uint head = group / groups, first_row = group % groups * GROUP;
    const bool inside = item < x_shape[0] * heads * groups * chunks;

    float tile[8][8];
#pragma unroll
    for (uint r = 0; r < 8; r++) {
#pragma unroll
        for (uint c = 0; c < 8; c++) tile[r][c] = 0;
        if (inside) {
            load<T>(x + long(head / heads) * x_strides[0] + long(head % heads) * x_strides[1] +
                        long(first_row + r * LANES + slot) * x_strides[2] + long(8 * chunk) * x_strides[3],
                    x_strides[3], tile[r]);
        }
    }

    T scales[8], minima[8];
    uint packed[8][2] = {};
#pragma unroll
    for (uint c = 0; c < 8; c++) {
        float low = INFINITY, high = -INFINITY;
        bool finite = true;
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            low = metal::min(low, tile[r][c]);
            high = metal::max(high, tile[r][c]);
            finite = finite && metal::isfinite(tile[r][c]);
        }
        high = finite ? high : INFINITY;             // min and max pass a NaN over
        for (uint mask = ITEMS; mask < 32; mask *= 2) {
            low = metal::min(low, simd_shuffle_xor(low, ushort(mask)));
            high = metal::max(high, simd_shuffle_xor(high, ushort(mask)));
        }
        const float range = high - low;
        finite = range < RANGE_LIMIT;
        const T step = T(range / float(LARGEST_CODE));
        scales[c] = finite && float(step) >= SMALLEST_SCALE ? step : T(1.0f);
        minima[c] = T(!finite ? NAN : metal::fabs(low) < SMALLEST_NORMAL ? 0.0f : low);

        const float divisor = float(scales[c]), inverse = 1.0f / divisor, origin = float(minima[c]);
        const uint bits_kept = finite ? LARGEST_CODE : 0;
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            const float q = metal::min(quotient<T>(tile[r][c] - origin, divisor, inverse), float(LARGEST_CODE));
            const uint code = as_type<uint>(q + 8388608.0f) & bits_kept;  // at 2^23 floats are integers: rounds to even
            packed[r][BITS * c / 32] |= code << (BITS * c % 32);
        }
    }

    if (inside) {
        device uchar* bytes = reinterpret_cast<device uchar*>(codes);
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            const ulong row = ulong(head) * rows + first_row + r * LANES + slot;
            store_codes<BITS>(packed[r][0], packed[r][1], bytes + (row * chunks + chunk) * BITS);
        }
        if (slot == 0) {
            store<T>(scales, scale + (ulong(group) * chunks + chunk) * 8);
            store<T>(minima, minimum + (ulong(group) * chunks + chunk) * 8);
        }
    }
