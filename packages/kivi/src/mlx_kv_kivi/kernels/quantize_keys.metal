// Quantises keys per channel and packs their codes, in one pass: a group is GROUP consecutive rows of one channel.
// A thread owns 8 rows of 8 channels, which stay in its registers; GROUP / 8 lanes of a simdgroup share the groups of these
// channels and find their extremes by shuffles. The 8 codes of a row are BITS whole bytes.

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
// 8 channels of 8 rows, each 16 bytes at a time where its elements lie together.
template <typename T> METAL_FUNC void load(const device T* from, long step, long stride, thread float (*to)[8]) {
    if (stride == 1 && reinterpret_cast<ulong>(from) % 16 == 0 && step * sizeof(T) % 16 == 0) {
#pragma unroll
        for (uint i = 0; i < 8; i++) load_aligned<T>(from + i * step, to[i]);
    } else {
#pragma unroll
        for (uint i = 0; i < 8; i++) {
#pragma unroll
            for (uint c = 0; c < 8; c++) to[i][c] = float(from[i * step + c * stride]);
        }
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

// The codes of 8 channels, BITS bytes.
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
    constexpr uint LANES = GROUP / 8;  // that share a group
    constexpr uint ITEMS = 32 / LANES;  // groups of 8 channels in a simdgroup
    // What stands above a code is taken off beforehand from the sum of 8 codes in their places (4 codes a word, if they have 8 bits).
    constexpr uint ABOVE =
        GroupScale<T, BITS>::ABOVE * (BITS == 2 ? 0x5555u : BITS == 3 ? 0x249249u : BITS == 4 ? 0x11111111u : 0x01010101u);

    const uint heads = x_shape[1], rows = x_shape[2], chunks = uint(x_shape[3]) / 8, groups = rows / GROUP;
    const uint sequence = threadgroup_position_in_grid.z, head = threadgroup_position_in_grid.y;
    const uint simdgroup = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint slot = lane / ITEMS, item = simdgroup * ITEMS + lane % ITEMS;
    const uint group = item / chunks, chunk = item % chunks;
    const uint first_row = group * GROUP + slot;  // the thread's rows are LANES apart
    const bool inside = group < groups;

    float tile[8][8] = {};
    if (inside) {
        load<T>(x + sequence * x_strides[0] + head * x_strides[1] + first_row * x_strides[2] + 8 * chunk * x_strides[3],
                LANES * x_strides[2], x_strides[3], tile);
    }

    T scales[8], minima[8];
    uint packed[8][2];
#pragma unroll
    for (uint r = 0; r < 8; r++) packed[r][0] = packed[r][1] = 0u - ABOVE;
#pragma unroll
    for (uint c = 0; c < 8; c++) {
        Extremes extremes;
#pragma unroll
        for (uint r = 0; r < 8; r++) extremes.add(tile[r][c]);
        extremes.end();
        for (uint mask = ITEMS; mask < 32; mask *= 2) extremes.join(ushort(mask));
        GroupScale<T, BITS> own;
        own.set(extremes);
        scales[c] = own.scale;
        minima[c] = own.minimum;
#pragma unroll
        for (uint r = 0; r < 8; r++) {
            packed[r][BITS * c / 32] += own.code_above(tile[r][c]) << (BITS * c % 32);
        }
    }

    if (inside) {
        const ulong row = (ulong(sequence) * heads + head) * rows + first_row;
        device uchar* bytes = reinterpret_cast<device uchar*>(codes) + (row * chunks + chunk) * BITS;
#pragma unroll
        for (uint r = 0; r < 8; r++) store_codes<BITS>(packed[r][0], packed[r][1], bytes + r * LANES * chunks * BITS);
        if (slot == 0) {
            const ulong place = (((ulong(sequence) * heads + head) * groups + group) * chunks + chunk) * 8;
            store<T>(scales, scale + place);
            store<T>(minima, minimum + place);
        }
    }
