// Attention over single rows, in float, and the end of both kernels: lanes share out a row's channels, simdgroups the rows.

constexpr constant float LOWEST = -1e30f;            // below every score, and finite: differences of maxima are never NaN
constexpr constant float LN2 = 0.6931471805599453f;

METAL_FUNC constexpr int channels_of_lane(int dim) { return (dim + 31) / 32; }

// Online softmax of GROUP query heads: the maximum of the scores (base 2), the sum of 2^(score - maximum), and that sum of values.
template <int GROUP, int CHANNELS> struct RowState {
    float maximum[GROUP], sum[GROUP], value[GROUP][CHANNELS];
};

// Whether a layout holds its rows in another basis than the model's, into which `turn` brings a query.
template <typename Rows> METAL_FUNC constexpr auto is_turned(int) -> decltype(bool(Rows::TURNED)) { return Rows::TURNED; }
template <typename Rows> METAL_FUNC constexpr bool is_turned(long) { return false; }

// A KV head's queries in float, times `factor`, and zero beyond the last channel.
template <int GROUP, int DIM, int SIMDGROUPS, typename T, typename Keys, typename Query>
METAL_FUNC void load_queries(const device T* queries, Keys keys, Query query, float factor, int lane, int simdgroup) {
    constexpr int KC = channels_of_lane(DIM);
    for (int first = 0; first < GROUP; first += SIMDGROUPS) {
        const int h = first + simdgroup;
        if (h >= GROUP) break;                       // the same in all lanes
        if constexpr (is_turned<Keys>(0)) {
            float x[KC];
            keys.turn(queries + h * DIM, lane * KC, x);
            for (int j = 0; j < KC; j++) query[(h * 32 + lane) * KC + j] = x[j] * factor;
        } else {
            for (int j = 0; j < KC; j++) {
                const int c = j * 32 + lane;
                query[h * 32 * KC + c] = c < DIM ? float(queries[h * DIM + c]) * factor : 0.0f;
            }
        }
    }
}

// Whether a layout's rows have to be looked for before they are loaded.
template <typename Rows> METAL_FUNC constexpr auto is_moved(int) -> decltype(bool(Rows::MOVED)) { return Rows::MOVED; }
template <typename Rows> METAL_FUNC constexpr bool is_moved(long) { return false; }

// The lanes that share a row: all 32, or as few as a layout allows, which take fewer steps to a sum, of several rows at once. Each holds
// more channels then: of a group's heads in registers, of a head in threadgroup memory.
template <typename Rows> METAL_FUNC constexpr auto least_lanes(int) -> decltype(int(Rows::LEAST_LANES)) { return Rows::LEAST_LANES; }
template <typename Rows> METAL_FUNC constexpr int least_lanes(long) { return 32; }
METAL_FUNC constexpr int lanes_of_row(int least, int group, int key_dim, int value_dim) {
    int lanes = key_dim % 32 == 0 && value_dim % 32 == 0 ? least : 32;
    while (lanes < 32 && (group > 4 ? group : 4) * value_dim > 64 * lanes) lanes *= 2;
    return lanes;
}

// The channels of a row's lane number `own`: runs of 8 where they come out even, which lie together with those of the other lanes, else
// one run.
template <int DIM, int LANES> struct Channels {
    static constexpr constant int COUNT = LANES == 32 ? channels_of_lane(DIM) : DIM / LANES;
    static constexpr constant int RUN = LANES < 32 && COUNT % 8 == 0 ? 8 : COUNT, RUNS = COUNT / RUN;
    static METAL_FUNC int first(int run, int own) { return (run * LANES + own) * RUN; }
};

template <int LANES> METAL_FUNC float sum_of_row(float x) {
    if constexpr (LANES == 32) return simd_sum(x);
    #pragma unroll
    for (ushort mask = 1; mask < LANES; mask *= 2) x += simd_shuffle_xor(x, mask);
    return x;
}

// The share of `part` in the rows outside the tiles, in whole steps, so that no row is loaded twice.
template <int KEY_DIM, int VALUE_DIM, int LANES, int GROUP, int COUNT, typename Keys, typename Values, typename Queries, typename Logits>
METAL_FUNC void attend_rows(
    thread RowState<GROUP, COUNT>& state, Keys keys, Values values, Queries queries, Logits logits,
    int row_count, int part, int parts, int tiles_begin, int tiles_end, int lane) {
    constexpr int ROWS = 32 / LANES;                 // side by side
    constexpr int TIMES = ROWS == 1 ? 4 : 8 / ROWS;  // how often, in a step whose loads are in flight together
    constexpr int STEP = ROWS * TIMES;
    constexpr int HEADS = GROUP > 8 ? 4 : GROUP;     // whose products are computed together, while registers last
    using KeyChannels = Channels<KEY_DIM, LANES>;
    using ValueChannels = Channels<VALUE_DIM, LANES>;
    constexpr int KC = KeyChannels::RUN, VC = ValueChannels::RUN;
    constexpr int QUERY = 32 * channels_of_lane(KEY_DIM);
    const int own_row = lane / LANES, own = lane % LANES;
    const int count = row_count - (tiles_end - tiles_begin);
    const long steps = (count + STEP - 1) / STEP;
    const int first = int(steps * part / parts) * STEP, last = metal::min(int(steps * (part + 1) / parts) * STEP, count);
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        state.maximum[h] = LOWEST;
        state.sum[h] = 0;
        #pragma unroll
        for (int c = 0; c < COUNT; c++) state.value[h][c] = 0;
    }
    for (int step = first; step < last; step += STEP) {
        typename Keys::template Row<KC> loaded_keys[TIMES][KeyChannels::RUNS];
        typename Values::template Row<VC> loaded_values[TIMES][ValueChannels::RUNS];
        uint found[STEP / 4];
        if constexpr (is_moved<Keys>(0)) {
            #pragma unroll
            for (int i = 0; i < STEP / 4; i++) found[i] = keys.look(step + 4 * i);
        }
        int row_of_lane = 0;
        #pragma unroll
        for (int i = 0; i < TIMES; i++) {
            if constexpr (is_moved<Keys>(0)) keys.found = values.found = found[i * ROWS / 4];
            const int outside = metal::min(step + i * ROWS + own_row, last - 1);
            const int row = outside < tiles_begin ? outside : outside + tiles_end - tiles_begin;
            row_of_lane = own % TIMES == i ? row : row_of_lane;
            #pragma unroll
            for (int r = 0; r < KeyChannels::RUNS; r++) keys.load(row, KeyChannels::first(r, own), loaded_keys[i][r]);
            #pragma unroll
            for (int r = 0; r < ValueChannels::RUNS; r++) values.load(row, ValueChannels::first(r, own), loaded_values[i][r]);
        }
        // Else CUDA's compiler would put off the values' loads until they are wanted.
        if constexpr (LANES < 32 || is_moved<Keys>(0)) simdgroup_barrier(mem_flags::mem_threadgroup);
        float score_of_lane = 0;
        constexpr int WRITTEN = LANES / TIMES;       // heads whose scores the lanes of a row write together
        const int own_head = own / TIMES;
        const bool own_counts = step + own % TIMES * ROWS + own_row < last;
        #pragma unroll
        for (int first_head = 0; first_head < GROUP; first_head += HEADS) {
            float score[TIMES][HEADS];
            #pragma unroll
            for (int i = 0; i < TIMES * HEADS; i++) score[i / HEADS][i % HEADS] = 0;
            #pragma unroll
            for (int r = 0; r < KeyChannels::RUNS; r++) {
                float key[TIMES][KC];
                #pragma unroll
                for (int i = 0; i < TIMES; i++) keys.read(loaded_keys[i][r], KeyChannels::first(r, own), key[i]);
                #pragma unroll
                for (int h = 0; h < HEADS && first_head + h < GROUP; h++) {
                    #pragma unroll
                    for (int c = 0; c < KC; c++) {
                        const float query = queries[(first_head + h) * QUERY + KeyChannels::first(r, own) + c];
                        #pragma unroll
                        for (int i = 0; i < TIMES; i++) score[i][h] += query * key[i][c];
                    }
                }
            }
            #pragma unroll
            for (int h = 0; h < HEADS && first_head + h < GROUP; h++) {
                const int head = first_head + h, place = head % WRITTEN;
                float highest = state.maximum[head];
                #pragma unroll
                for (int i = 0; i < TIMES; i++) {
                    const float product = sum_of_row<LANES>(score[i][h]);
                    score_of_lane = own == place * TIMES + i ? product : score_of_lane;
                    score[i][h] = step + i * ROWS + own_row < last ? product : -INFINITY;
                    highest = metal::max(highest, score[i][h]);
                }
                // A lane for each: a branch after every sum would cost more on CUDA than all the rest.
                if (place == WRITTEN - 1 || head == GROUP - 1) {
                    logits.write_if(own_counts && own_head <= place, head - place + own_head, row_of_lane, score_of_lane);
                }
                const float rescale = metal::exp2(state.maximum[head] - highest);
                state.maximum[head] = highest;
                state.sum[head] *= rescale;
                #pragma unroll
                for (int c = 0; c < COUNT; c++) state.value[head][c] *= rescale;
                #pragma unroll
                for (int i = 0; i < TIMES; i++) {
                    score[i][h] = metal::exp2(score[i][h] - highest);
                    state.sum[head] += score[i][h];
                }
            }
            #pragma unroll
            for (int i = 0; i < TIMES; i++) {
                #pragma unroll
                for (int r = 0; r < ValueChannels::RUNS; r++) {
                    float value[VC];
                    values.read(loaded_values[i][r], ValueChannels::first(r, own), value);
                    #pragma unroll
                    for (int h = 0; h < HEADS && first_head + h < GROUP; h++) {
                        #pragma unroll
                        for (int c = 0; c < VC; c++) state.value[first_head + h][r * VC + c] += score[i][h] * value[c];
                    }
                }
            }
        }
    }
    // The rows side by side have had sums of their own.
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float highest = state.maximum[h];
        #pragma unroll
        for (ushort mask = LANES; mask < 32; mask *= 2) highest = metal::max(highest, simd_shuffle_xor(highest, mask));
        const float rescale = metal::exp2(state.maximum[h] - highest);
        state.maximum[h] = highest;
        state.sum[h] *= rescale;
        #pragma unroll
        for (ushort mask = LANES; mask < 32; mask *= 2) state.sum[h] += simd_shuffle_xor(state.sum[h], mask);
        #pragma unroll
        for (int c = 0; c < COUNT; c++) state.value[h][c] *= rescale;
    }
}

// The scores (base 2, scaled) of a KV head's query heads, written as natural logits, with their noise, if they are wanted.
template <bool WANTED, typename Pointer, typename Noise> struct LogitsOf {
    Pointer logits;                                  // of the first query head
    int rows;
    Noise noise;
    METAL_FUNC void write(int head, int row, float score) const {
        if constexpr (WANTED) logits[long(head) * rows + row] = noise.added(score * LN2, head, row);
    }
    METAL_FUNC void write_if(bool condition, int head, int row, float score) const {
        if constexpr (WANTED) {
            if (condition) write(head, row, score);
        }
    }
};
template <bool WANTED, typename Pointer, typename Noise>
METAL_FUNC LogitsOf<WANTED, Pointer, Noise> logits_of(Pointer logits, int rows, Noise noise) {
    return LogitsOf<WANTED, Pointer, Noise>{logits, rows, noise};
}

// The weight of one simdgroup's state among those of the threadgroup, and (maximum, sum) of all.
template <int SIMDGROUPS, typename Maxima, typename Sums>
METAL_FUNC float3 weigh(Maxima maxima, Sums sums, float own_maximum) {
    float maximum = maxima[0], sum = 0;
    for (int i = 1; i < SIMDGROUPS; i++) maximum = metal::max(maximum, maxima[i]);
    for (int i = 0; i < SIMDGROUPS; i++) sum += metal::exp2(maxima[i] - maximum) * sums[i];
    return float3{metal::exp2(own_maximum - maximum), maximum, sum};
}

// One query head: the values of PARTS of the rows, already weighed, become the split's output and, behind it, its lse (base 2).
template <int THREADS, int PARTS, int DIM, int STRIDE, typename Values, typename Output>
METAL_FUNC void store_head(Values values, Output output, float maximum, float sum, int thread_index) {
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;  // a split without rows is (-inf, 0)
    for (int first = 0; first < DIM; first += THREADS) {  // a number of times that is known: code is read from memory, too
        const int c = first + thread_index;
        if (c >= DIM) break;
        float value = 0;
        for (int i = 0; i < PARTS; i++) value += values[i * STRIDE + c];
        output[c] = value * inverse;
    }
    if (thread_index == 0) output[DIM] = sum > 0 ? maximum + metal::log2(sum) : -INFINITY;
}
