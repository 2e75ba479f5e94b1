// Copies the rows that `indices` names, BYTES at a time: a thread copies one chunk of one row. The rows are read where they
// lie (a view of a larger buffer is not copied first), so a chunk that is strided or not aligned goes element by element.

template <int BYTES> struct chunk_of;
template <> struct chunk_of<1> { using type = uchar; };
template <> struct chunk_of<2> { using type = ushort; };
template <> struct chunk_of<4> { using type = uint; };
template <> struct chunk_of<8> { using type = uint2; };
template <> struct chunk_of<16> { using type = uint4; };
// --- body ---
    using Chunk = typename chunk_of<BYTES>::type;
    constexpr uint ELEMENTS = BYTES / sizeof(T);
    constexpr uint CHUNKS = WIDTH / ELEMENTS;        // chunks of a row
    const uint kv_heads = rows_shape[1], k = indices_shape[2];
    const uint head = thread_position_in_grid.y, chunk = thread_position_in_grid.x;
    const uint kept = chunk / CHUNKS, first = chunk % CHUNKS * ELEMENTS;
    if (kept < k) {
        const long row = long(indices[ulong(head) * k + kept]);
        const device T* from = rows + long(head / kv_heads) * rows_strides[0] + long(head % kv_heads) * rows_strides[1] +
                               row * rows_strides[2] + long(first) * rows_strides[3];
        device T* to = gathered + (ulong(head) * k + kept) * WIDTH + first;
        if (rows_strides[3] == 1 && reinterpret_cast<ulong>(from) % BYTES == 0) {
            *reinterpret_cast<device Chunk*>(to) = *reinterpret_cast<const device Chunk*>(from);
        } else {
            for (uint i = 0; i < ELEMENTS; i++) to[i] = from[long(i) * rows_strides[3]];
        }
    }
