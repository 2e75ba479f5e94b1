// Unpacks and dequantises keys, in one pass: a group is GROUP consecutive rows of one channel.
// A thread owns 8 rows of 8 channels, BITS bytes of codes a row; GROUP / 8 lanes of a simdgroup share the scales and minima of
// these channels, which the first of them reads. Codes, scales and minima are read where they lie, with their strides.

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
// 8 channels, 16 bytes at a time where they lie so.
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

METAL_FUNC const device uchar* byte_of(const device uint* words, long stride, uint byte) {
    return reinterpret_cast<const device uchar*>(words + long(byte / 4) * stride) + byte % 4;
}
// The 8 codes of a chunk, in the low BITS bytes.
template <int BITS> METAL_FUNC uint2 load_codes(const device uint* row, long stride, uint chunk) {
    const uint byte = BITS * chunk;
    if (BITS == 2) return uint2{*reinterpret_cast<const device ushort*>(byte_of(row, stride, byte)), 0};
    if (BITS == 3) {
        uint codes = 0;
        for (uint i = 0; i < 3; i++) codes |= uint(*byte_of(row, stride, byte + i)) << (8 * i);
        return uint2{codes, 0};
    }
    return uint2{row[long(byte / 4) * stride], BITS == 8 ? row[long(byte / 4 + 1) * stride] : 0};
}
// code * scale + minimum of the chunk's code c: a float whose last bits are the code, less that float without them.
template <int BITS> METAL_FUNC float value(uint2 codes, uint c, float scale, float minimum) {
    const uint code = ((BITS * c < 32 ? codes.x : codes.y) >> (BITS * c % 32)) & ((1u << BITS) - 1);
    return precise_add(precise_mul(as_type<float>(code | 0x4b000000u) - 8388608.0f, scale), minimum);
}
// --- body ---
    constexpr uint LANES = GROUP / 8;  // that share a group
    constexpr uint ITEMS = 32 / LANES;  // groups of 8 channels in a simdgroup

    const uint heads = scale_shape[1], groups = scale_shape[2], chunks = uint(scale_shape[3]) / 8;
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint simdgroup = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint slot = lane / ITEMS, item = simdgroup * ITEMS + lane % ITEMS;
    const uint group = item / chunks, chunk = item % chunks;
    const uint first_row = group * GROUP + slot;  // the thread's rows are LANES apart
    const bool inside = group < groups;

    uint2 packed[8] = {};
    float scales[8] = {}, minima[8] = {};
    if (inside) {
        const device uint* row = codes + sequence * codes_strides[0] + head * codes_strides[1] + first_row * codes_strides[2];
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            packed[r] = load_codes<BITS>(row + r * LANES * codes_strides[2], codes_strides[3], chunk);
        }
        if (slot == 0) {
            load<T>(scale + sequence * scale_strides[0] + head * scale_strides[1] + group * scale_strides[2] +
                        8 * chunk * scale_strides[3],
                    scale_strides[3], scales);
            load<T>(minimum + sequence * minimum_strides[0] + head * minimum_strides[1] + group * minimum_strides[2] +
                        8 * chunk * minimum_strides[3],
                    minimum_strides[3], minima);
        }
    }
#pragma unroll
    for (uint c = 0; c < 8; c++) {
        scales[c] = simd_shuffle(scales[c], ushort(lane % ITEMS));
        minima[c] = simd_shuffle(minima[c], ushort(lane % ITEMS));
    }

    if (inside) {
        device T* to = x + (((ulong(sequence) * heads + head) * groups * GROUP + first_row) * chunks + chunk) * 8;
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            T values[8];
#pragma unroll
            for (uint c = 0; c < 8; c++) values[c] = T(value<BITS>(packed[r], c, scales[c], minima[c]));
            store<T>(values, to + r * LANES * chunks * 8);
        }
    }
