// What stands before a layout's text: which rows the threadgroup reads, and loads of registers. The grid's y is the KV head, its z
// the sequence of the batch. A sequence's numbers: rows, the first and last tiled row, rows of the
// logits, splits over single rows, then the layout's own (`place`).

template <int N> METAL_FUNC void load_words(const device uint* from, thread uint (&to)[N]) {
    if constexpr (N % 4 == 0) {
        for (int i = 0; i < N; i += 4) {
            const uint4 x = *reinterpret_cast<const device uint4*>(from + i);
            to[i] = x.x;
            to[i + 1] = x.y;
            to[i + 2] = x.z;
            to[i + 3] = x.w;
        }
    } else if constexpr (N % 2 == 0) {
        for (int i = 0; i < N; i += 2) {
            const uint2 x = *reinterpret_cast<const device uint2*>(from + i);
            to[i] = x.x;
            to[i + 1] = x.y;
        }
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
}
// Every STEP-th of numbers of two bytes, N in all, two in a word.
template <int N, int STEP, typename T> METAL_FUNC void load_pairs(const device T* from, thread uint (&to)[(N + 1) / 2]) {
    if constexpr (N % 2 == 0 && STEP == 1) {
        load_words(reinterpret_cast<const device uint*>(from), to);
    } else {
        const device ushort* numbers = reinterpret_cast<const device ushort*>(from);
        for (int i = 0; i < N; i += 2) to[i / 2] = uint(numbers[i * STEP]) | (i + 1 < N ? uint(numbers[(i + 1) * STEP]) << 16 : 0u);
    }
}
// --- body ---
    const int kv_head = threadgroup_position_in_grid.y, sequence = threadgroup_position_in_grid.z;
    const device int* place = places + sequence * PLACES;
    const int row_count = place[0], tiles_begin = place[1], tiles_end = place[2];
    const int logit_rows = place[3], row_splits = place[4];
    place += 5;
