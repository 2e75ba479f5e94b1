// Unpacks and dequantises values, in one pass: a group is GROUP consecutive channels of one row.
// A thread owns 8 channels of 4 rows, BITS bytes of codes a row; of the GROUP / 8 neighbouring lanes that share a group the
// first reads its scale and minimum. Codes, scales and minima are read where they lie, with their strides.

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

    const uint heads = scale_shape[1], rows = scale_shape[2], chunks = uint(scale_shape[3]) * LANES;
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint simdgroup = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint item = simdgroup * 32 + lane, chunk = item % chunks, first_row = item / chunks * 4;
    const long codes_begin = sequence * codes_strides[0] + head * codes_strides[1];
    const long scale_begin = sequence * scale_strides[0] + head * scale_strides[1] + chunk / LANES * scale_strides[3];
    const long minimum_begin =
        sequence * minimum_strides[0] + head * minimum_strides[1] + chunk / LANES * minimum_strides[3];

    uint2 packed[4] = {};
    float scales[4] = {}, minima[4] = {};
#pragma unroll
    for (uint r = 0; r < 4; r++) {
        const uint row = first_row + r;
        if (row < rows) {
            packed[r] = load_codes<BITS>(codes + codes_begin + row * codes_strides[2], codes_strides[3], chunk);
            if (lane % LANES == 0) {
                scales[r] = float(scale[scale_begin + row * scale_strides[2]]);
                minima[r] = float(minimum[minimum_begin + row * minimum_strides[2]]);
            }
        }
    }
    device T* to = x + (((ulong(sequence) * heads + head) * rows + first_row) * chunks + chunk) * 8;
#pragma unroll
    for (uint r = 0; r < 4; r++) {
        const float own_scale = simd_shuffle(scales[r], ushort(lane / LANES * LANES));
        const float own_minimum = simd_shuffle(minima[r], ushort(lane / LANES * LANES));
        if (first_row + r < rows) {
            T values[8];
#pragma unroll
            for (uint c = 0; c < 8; c++) values[c] = T(value<BITS>(packed[r], c, own_scale, own_minimum));
            store<T>(values, to + r * chunks * 8);
        }
    }
