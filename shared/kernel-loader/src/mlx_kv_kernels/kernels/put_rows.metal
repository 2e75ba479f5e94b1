// Copies small buffers [kv_heads, rows, width] of which each gets one row: rows move down by `shift`, over the first ones, and the
// new row comes to stand at `place`. A copy, because MLX lets no kernel write to its inputs. The body repeats for each buffer;
// gather_rows.metal's helpers stand before this text.

// The threads of a head, one chunk of BYTES each in turn; WIDTH elements are a row.
template <int WIDTH, int BYTES, typename T>
METAL_FUNC void put_row(
    const device T* buffer, const device T* row, device T* out, const device int* numbers, uint head, uint index, uint threads) {
    using Chunk = typename chunk_of<BYTES>::type;
    constexpr int ELEMENTS = BYTES / sizeof(T), CHUNKS = WIDTH / ELEMENTS;
    const int rows = numbers[0], shift = numbers[1], place = numbers[2];
    const device T* new_row = row + ulong(head) * WIDTH;
    for (int i = int(index); i < rows * CHUNKS; i += int(threads)) {
        const int own = i / CHUNKS, first = i % CHUNKS * ELEMENTS;
        const ulong begin = ulong(head) * rows;
        device T* to = out + (begin + own) * WIDTH + first;
        if (own == place) {  // one by one: the row may be a view that begins anywhere
            for (int j = 0; j < ELEMENTS; j++) to[j] = new_row[first + j];
        } else {
            const device T* from = buffer + (begin + metal::min(own + shift, rows - 1)) * WIDTH + first;
            *reinterpret_cast<device Chunk*>(to) = *reinterpret_cast<const device Chunk*>(from);
        }
    }
}
// --- body ---
    put_row<WIDTH@, BYTES@>(
        buffer@, row@, out@, numbers + 3 * @, thread_position_in_grid.y, thread_position_in_grid.x, threads_per_grid.x);
