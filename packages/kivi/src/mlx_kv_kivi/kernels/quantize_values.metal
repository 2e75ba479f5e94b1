// Quantises values per token and packs their codes, in one pass: a group is GROUP consecutive channels of one row.
// A thread owns 4 chunks of 8 channels, 32 chunks apart, so that the loads of a simdgroup lie side by side; GROUP / 8
// neighbouring lanes share a group and find its extremes by shuffles. The 8 codes of a chunk are BITS whole bytes. The rules
// for numbers that leave the range of a dtype are reference.py's.

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
    constexpr uint LARGEST_CODE = (1 << BITS) - 1;
    constexpr float RANGE_LIMIT = 1.7014118346046923e38f;       // 2^127
    constexpr float SMALLEST_SCALE = 8.271806125530277e-25f;    // 2^-80
    constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f;  // 2^-126

    const uint heads = x_shape[1], rows = x_shape[2], chunks = uint(x_shape[3]) / 8;
    const uint total = x_shape[0] * heads * rows * chunks;
    const uint lane = thread_index_in_simdgroup;
    const uint first = thread_position_in_grid.x / 32 * 128 + lane;

    float tile[4][8];
#pragma unroll
    for (uint r = 0; r < 4; r++) {
        const uint item = first + 32 * r, chunk = item % chunks, row = item / chunks, head = row / rows;
#pragma unroll
        for (uint c = 0; c < 8; c++) tile[r][c] = 0;
        if (item < total) {
            load<T>(x + long(head / heads) * x_strides[0] + long(head % heads) * x_strides[1] +
                        long(row % rows) * x_strides[2] + long(8 * chunk) * x_strides[3],
                    x_strides[3], tile[r]);
        }
    }

#pragma unroll
    for (uint r = 0; r < 4; r++) {
        float low = INFINITY, high = -INFINITY;
        bool finite = true;
#pragma unroll
        for (uint c = 0; c < 8; c++) {
            low = metal::min(low, tile[r][c]);
            high = metal::max(high, tile[r][c]);
            finite = finite && metal::isfinite(tile[r][c]);
        }
        high = finite ? high : INFINITY;             // min and max pass a NaN over
        for (uint mask = 1; mask < LANES; mask *= 2) {
            low = metal::min(low, simd_shuffle_xor(low, ushort(mask)));
            high = metal::max(high, simd_shuffle_xor(high, ushort(mask)));
        }
        const float range = high - low;
        finite = range < RANGE_LIMIT;
        const T step = T(range / float(LARGEST_CODE));
        const T own_scale = finite && float(step) >= SMALLEST_SCALE ? step : T(1.0f);
        const T own_minimum = T(!finite ? NAN : metal::fabs(low) < SMALLEST_NORMAL ? 0.0f : low);

        const float divisor = float(own_scale), inverse = 1.0f / divisor, origin = float(own_minimum);
        const uint bits_kept = finite ? LARGEST_CODE : 0;
        uint packed[2] = {};
#pragma unroll
        for (uint c = 0; c < 8; c++) {
            const float q = metal::min(quotient<T>(tile[r][c] - origin, divisor, inverse), float(LARGEST_CODE));
            const uint code = as_type<uint>(q + 8388608.0f) & bits_kept;  // at 2^23 floats are integers: rounds to even
            packed[BITS * c / 32] |= code << (BITS * c % 32);
        }

        const uint item = first + 32 * r;
        if (item < total) {
            store_codes<BITS>(packed[0], packed[1], reinterpret_cast<device uchar*>(codes) + ulong(item) * BITS);
            if (lane % LANES == 0) {
                scale[item / LANES] = own_scale;
                minimum[item / LANES] = own_minimum;
            }
        }
    }
