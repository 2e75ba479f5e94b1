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
    // What stands above a code is taken off beforehand from the sum of 8 codes in their places (4 codes a word, if they have 8 bits).
    constexpr uint ABOVE =
        GroupScale<T, BITS>::ABOVE * (BITS == 2 ? 0x5555u : BITS == 3 ? 0x249249u : BITS == 4 ? 0x11111111u : 0x01010101u);

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

    Extremes extremes;
#pragma unroll
    for (uint i = 0; i < 32; i++) extremes.add(tile[i / 8][i % 8]);
    extremes.end();
    for (uint mask = 1; mask < LANES; mask *= 2) extremes.join(ushort(mask));
    GroupScale<T, BITS> own;
    own.set(extremes);
    uint packed[4][2];
#pragma unroll
    for (uint r = 0; r < 4; r++) {
        packed[r][0] = packed[r][1] = 0u - ABOVE;
#pragma unroll
        for (uint c = 0; c < 8; c++) {
            packed[r][BITS * c / 32] += own.code_above(tile[r][c]) << (BITS * c % 32);
        }
    }

    if (inside) {
        const ulong place = ((ulong(sequence) * heads + head) * rows + row) * parts + part;
        store_codes<BITS>(packed, codes + place * BITS);
        if (part % LANES == 0) {
            scale[place / LANES] = own.scale;
            minimum[place / LANES] = own.minimum;
        }
    }
