// Attention that each row of a KV head gets from the window, the queries of the newest tokens, in two launches: without VOTES
// a threadgroup leaves the softmax statistics of every query over its share of the rows; with VOTES it merges those of all
// shares and adds up each row's probabilities over the queries. Scores exist only in registers, 16 rows by 8 queries at a time.
// Equal rows are computed alike wherever they stand, so their votes are equal to the bit.

template <typename T> struct pair_of;
template <> struct pair_of<float> { using type = float2; };
template <> struct pair_of<half> { using type = half2; };
template <> struct pair_of<bfloat> { using type = bfloat2; };

// The lane that holds an element of an 8x8 matrix, a pair of neighbouring columns to a lane, and the reverse.
METAL_FUNC uint lane_of(uint row, uint column) {
    return ((column >> 1) & 1) | (row & 3) << 1 | (column & 4) << 1 | (row & 4) << 2;
}
METAL_FUNC uint matrix_row(uint lane) { return ((lane >> 1) & 3) | ((lane >> 2) & 4); }
METAL_FUNC uint matrix_column(uint lane) { return (lane & 1) << 1 | ((lane >> 1) & 4); }

// [c0; c1] += [a00 a01; a10 a11] [b0; b1]. In half precision the hardware has it; in float it is done by shuffles, since CUDA's
// matrices would round.
template <typename T>
METAL_FUNC void multiply_accumulate(
    thread simdgroup_float8x8& c0, thread simdgroup_float8x8& c1, simdgroup_matrix<T, 8, 8> a00,
    simdgroup_matrix<T, 8, 8> a01, simdgroup_matrix<T, 8, 8> a10, simdgroup_matrix<T, 8, 8> a11,
    simdgroup_matrix<T, 8, 8> b0, simdgroup_matrix<T, 8, 8> b1, uint lane) {
    multiply_accumulate_16x8x16_as_read(c0, c1, a00, a01, a10, a11, b0, b1);
}
METAL_FUNC void multiply_accumulate_8x8(
    thread simdgroup_float8x8& c, simdgroup_float8x8 a, simdgroup_float8x8 b, uint lane) {
    for (uint k = 0; k < 8; k++) {
        const float own = k % 2 == 0 ? a.thread_elements().x : a.thread_elements().y;
        const float left = simd_shuffle(own, ushort(lane_of(matrix_row(lane), k)));
        const ushort from = ushort(lane_of(k, matrix_column(lane)));
        c.thread_elements().x += left * simd_shuffle(float(b.thread_elements().x), from);
        c.thread_elements().y += left * simd_shuffle(float(b.thread_elements().y), from);
    }
}
METAL_FUNC void multiply_accumulate(
    thread simdgroup_float8x8& c0, thread simdgroup_float8x8& c1, simdgroup_float8x8 a00, simdgroup_float8x8 a01,
    simdgroup_float8x8 a10, simdgroup_float8x8 a11, simdgroup_float8x8 b0, simdgroup_float8x8 b1, uint lane) {
    multiply_accumulate_8x8(c0, a00, b0, lane);
    multiply_accumulate_8x8(c0, a01, b1, lane);
    multiply_accumulate_8x8(c1, a10, b0, lane);
    multiply_accumulate_8x8(c1, a11, b1, lane);
}

template <typename T> METAL_FUNC simdgroup_matrix<T, 8, 8> matrix_of(typename pair_of<T>::type elements) {
    simdgroup_matrix<T, 8, 8> m;
    m.thread_elements().x = elements.x;
    m.thread_elements().y = elements.y;
    return m;
}
METAL_FUNC void matrices_of(uint first, uint second, thread simdgroup_matrix<half, 8, 8>* to) {
    to[0] = matrix_of<half>(as_type<half2>(first));
    to[1] = matrix_of<half>(as_type<half2>(second));
}
METAL_FUNC void matrices_of(uint first, uint second, thread simdgroup_matrix<bfloat, 8, 8>* to) {
    to[0] = matrix_of<bfloat>(as_type<bfloat2>(first));
    to[1] = matrix_of<bfloat>(as_type<bfloat2>(second));
}
METAL_FUNC void matrices_of(uint first, uint second, thread simdgroup_matrix<float, 8, 8>* to) {
    to[0] = matrix_of<float>(float2{as_type<float>(first), as_type<float>(second)});
}
// A row's quarter that this lane feeds to the products: the order of the channels does not matter to a dot product, so each
// lane reads neighbours, as many bytes at a time as divide a quarter.
template <typename T, int PAIRS>
METAL_FUNC void load_quarter(const device T* from, long stride, thread simdgroup_matrix<T, 8, 8>* to) {
    using Pair = typename pair_of<T>::type;
    constexpr int HALF = 8 / sizeof(Pair), BYTES = PAIRS % (2 * HALF) == 0 ? 16 : 8;
    if (stride == 1 && reinterpret_cast<ulong>(from) % BYTES == 0) {
        #pragma unroll
        for (int i = 0; i < PAIRS; i += BYTES / 8 * HALF) {
            if constexpr (BYTES == 16) {
                const uint4 words = *reinterpret_cast<const device uint4*>(from + 2 * i);
                matrices_of(words.x, words.y, to + i);
                matrices_of(words.z, words.w, to + i + HALF);
            } else {
                const uint2 words = *reinterpret_cast<const device uint2*>(from + 2 * i);
                matrices_of(words.x, words.y, to + i);
            }
        }
    } else {
        #pragma unroll
        for (int i = 0; i < PAIRS; i++) to[i] = matrix_of<T>(Pair{from[2 * i * stride], from[(2 * i + 1) * stride]});
    }
}

// Softmax statistics in base 2: the largest score, and the sum of all relative to it.
struct Statistics {
    float largest, sum;
};
METAL_FUNC float safe(float largest) { return largest == -INFINITY ? 0.0f : largest; }   // -inf - -inf would be NaN
METAL_FUNC Statistics merge(Statistics a, Statistics b) {
    const float largest = metal::max(a.largest, b.largest), base = safe(largest);
    return Statistics{largest, a.sum * metal::exp2(a.largest - base) + b.sum * metal::exp2(b.largest - base)};
}
METAL_FUNC Statistics add(Statistics s, float x, float y) {
    const float largest = metal::max(s.largest, metal::max(x, y)), base = safe(largest);
    return Statistics{largest, s.sum * metal::fast::exp2(s.largest - base) + metal::fast::exp2(x - base) + metal::fast::exp2(y - base)};
}
METAL_FUNC Statistics shuffled(Statistics s, ushort mask) {
    return Statistics{simd_shuffle_xor(s.largest, mask), simd_shuffle_xor(s.sum, mask)};
}
// --- body ---
    constexpr uint SIMDGROUPS = THREADS / 32;
    constexpr uint PAIRS = DIM / 8, BLOCKS = QUERIES / 8, QUARTER = DIM / 4;
    using Pair = typename pair_of<T>::type;
    threadgroup Pair tile[QUERIES * DIM / 2];        // queries, in the order in which the lanes read them
    threadgroup int visible[QUERIES];                // rows that a query sees
    threadgroup float lse[QUERIES];
    threadgroup uint own_bias[QUERIES];              // where the biases of a query's head begin
    threadgroup float largest[SIMDGROUPS * QUERIES];
    threadgroup float sums[SIMDGROUPS * QUERIES];

    const uint thread_index = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
    const uint split = threadgroup_position_in_grid.x, splits = threadgroups_per_grid.x;
    const uint head = threadgroup_position_in_grid.y, kv_heads = keys_shape[1], sequence = head / kv_heads;
    const uint rows = keys_shape[2], window = queries_shape[2], group = queries_shape[1] / kv_heads;
    const uint total = group * window;               // queries of this KV head
    const uint begin = split * params[0], end = metal::min(begin + uint(params[0]), rows);
    const float factor = scale[0] * 1.44269504088896f;

    const uint row_in_matrix = matrix_row(lane), column = matrix_column(lane);
    const long stride = keys_strides[3];
    const device T* own_keys = keys + long(sequence) * keys_strides[0] + long(head % kv_heads) * keys_strides[1] +
                               long(column / 2 * QUARTER) * stride;
    const device T* own_queries = queries + ulong(head) * total * DIM;

    for (uint base = 0; base < total; base += QUERIES) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index; i < QUERIES * DIM / 2; i += THREADS) {
            // Element (k, n) of a right operand is channel k of query n; a lane has two of its neighbours.
            constexpr bool DOWN = reads_right_by_columns<T>();
            const uint k = DOWN ? matrix_column(i % 32) : matrix_row(i % 32);
            const uint n = DOWN ? matrix_row(i % 32) : matrix_column(i % 32);
            const uint query = base + i / 32 / PAIRS * 8 + n, channel = k / 2 * QUARTER + i / 32 % PAIRS * 2 + k % 2;
            const device T* from = own_queries + ulong(query) * DIM + channel;
            const bool second = query + (DOWN ? 0 : 1) < total;
            tile[i] = Pair{query < total ? from[0] : T(0), second ? from[DOWN ? 1 : DIM] : T(0)};
        }
        for (uint query = thread_index; query < QUERIES; query += THREADS) {
            const bool real = base + query < total;
            visible[query] = real ? int(rows - window + (base + query) % window + 1) : 0;
            own_bias[query] = (head * group + (base + query) / window) * rows;
            if (VOTES) {
                Statistics all = {-INFINITY, 0};
                if (real) {
                    for (uint s = 0; s < splits; s++) {
                        const ulong at = ((ulong(head) * splits + s) * total + base + query) * 2;
                        all = merge(all, Statistics{statistics[at], statistics[at + 1]});
                    }
                    const uint query_head = head % kv_heads * group + (base + query) / window;
                    all = merge(all, Statistics{sinks[query_head] * 1.44269504088896f, 1});
                }
                lse[query] = all.largest + metal::log2(all.sum);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        Statistics seen[BLOCKS][2];
        #pragma unroll
        for (uint n = 0; n < BLOCKS; n++) seen[n][0] = seen[n][1] = Statistics{-INFINITY, 0};
        for (uint first = begin + 16 * simdgroup; first < end; first += 16 * SIMDGROUPS) {
            const uint row0 = first + row_in_matrix, row1 = row0 + 8;
            simdgroup_matrix<T, 8, 8> upper[PAIRS], lower[PAIRS];
            load_quarter<T, PAIRS>(own_keys + long(metal::min(row0, rows - 1)) * keys_strides[2], stride, upper);
            load_quarter<T, PAIRS>(own_keys + long(metal::min(row1, rows - 1)) * keys_strides[2], stride, lower);
            float vote0 = 0, vote1 = 0;
            #pragma unroll
            for (uint n = 0; n < BLOCKS; n++) {
                simdgroup_float8x8 c0 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), c1 = c0;
                #pragma unroll
                for (uint i = 0; i < PAIRS; i += 2) {
                    const uint at = (n * PAIRS + i) * 32 + lane;
                    multiply_accumulate(c0, c1, upper[i], upper[i + 1], lower[i], lower[i + 1],
                                        matrix_of<T>(tile[at]), matrix_of<T>(tile[at + 32]), lane);
                }
                float score0[2] = {c0.thread_elements().x * factor, c0.thread_elements().y * factor};
                float score1[2] = {c1.thread_elements().x * factor, c1.thread_elements().y * factor};
                for (uint c = 0; c < 2; c++) {
                    const uint query = 8 * n + column + c;
                    const bool sees0 = int(row0) < visible[query], sees1 = int(row1) < visible[query];
                    if (BIAS && sees0) score0[c] += bias[own_bias[query] + row0] * 1.44269504088896f;
                    if (BIAS && sees1) score1[c] += bias[own_bias[query] + row1] * 1.44269504088896f;
                    if (VOTES) {
                        vote0 += sees0 ? metal::fast::exp2(score0[c] - lse[query]) : 0.0f;
                        vote1 += sees1 ? metal::fast::exp2(score1[c] - lse[query]) : 0.0f;
                    } else {
                        seen[n][c] = add(seen[n][c], sees0 ? score0[c] : -INFINITY, sees1 ? score1[c] : -INFINITY);
                    }
                }
            }
            if (VOTES) {                             // over the lanes that hold the same row
                vote0 += simd_shuffle_xor(vote0, 1);
                vote0 += simd_shuffle_xor(vote0, 8);
                vote1 += simd_shuffle_xor(vote1, 1);
                vote1 += simd_shuffle_xor(vote1, 8);
                device float* votes = out + ulong(head) * rows;
                const float share = 1.0f / float(group);
                if (column == 0 && row0 < end) votes[row0] = (base == 0 ? 0.0f : votes[row0]) + vote0 * share;
                if (column == 0 && row1 < end) votes[row1] = (base == 0 ? 0.0f : votes[row1]) + vote1 * share;
            }
        }
        if (VOTES) continue;
        #pragma unroll
        for (uint n = 0; n < BLOCKS; n++) {          // over the lanes that hold the same query, shuffles before any branch
            for (uint c = 0; c < 2; c++) {
                seen[n][c] = merge(seen[n][c], shuffled(seen[n][c], 2));
                seen[n][c] = merge(seen[n][c], shuffled(seen[n][c], 4));
                seen[n][c] = merge(seen[n][c], shuffled(seen[n][c], 16));
            }
        }
        if (row_in_matrix == 0) {
            #pragma unroll
            for (uint n = 0; n < BLOCKS; n++) {
                for (uint c = 0; c < 2; c++) {
                    largest[simdgroup * QUERIES + 8 * n + column + c] = seen[n][c].largest;
                    sums[simdgroup * QUERIES + 8 * n + column + c] = seen[n][c].sum;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint query = thread_index; query < QUERIES && base + query < total; query += THREADS) {
            Statistics all = {-INFINITY, 0};
            for (uint s = 0; s < SIMDGROUPS; s++) {
                all = merge(all, Statistics{largest[s * QUERIES + query], sums[s * QUERIES + query]});
            }
            const ulong at = ((ulong(head) * splits + split) * total + base + query) * 2;
            out[at] = all.largest;
            out[at + 1] = all.sum;
        }
    }
