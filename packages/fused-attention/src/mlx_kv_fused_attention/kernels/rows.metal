// Attention over single rows, in float, and the end of both kernels: a lane holds a run of channels, a simdgroup a run of rows.

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
    for (int h = simdgroup; h < GROUP; h += SIMDGROUPS) {
        if constexpr (is_turned<Keys>(0)) {
            float x[KC];
            keys.turn(queries + h * DIM, lane * KC, x);
            for (int j = 0; j < KC; j++) query[(h * 32 + lane) * KC + j] = x[j] * factor;
        } else {
            for (int c = lane; c < 32 * KC; c += 32) query[h * 32 * KC + c] = c < DIM ? float(queries[h * DIM + c]) * factor : 0.0f;
        }
    }
}

// Whether a layout's rows have to be looked for before they are loaded.
template <typename Rows> METAL_FUNC constexpr auto is_moved(int) -> decltype(bool(Rows::MOVED)) { return Rows::MOVED; }
template <typename Rows> METAL_FUNC constexpr bool is_moved(long) { return false; }

// The share of `part` in the rows outside the tiles, in whole steps, so that no row is loaded twice.
template <int GROUP, int KEY_DIM, int VALUE_DIM, typename Keys, typename Values, typename Queries, typename Logits>
METAL_FUNC void attend_rows(
    thread RowState<GROUP, channels_of_lane(VALUE_DIM)>& state, Keys keys, Values values, Queries queries, Logits logits,
    int row_count, int part, int parts, int tiles_begin, int tiles_end, int lane) {
    constexpr int STEP = 4;                          // rows whose loads are in flight together
    const int count = row_count - (tiles_end - tiles_begin);
    const long steps = (count + STEP - 1) / STEP;
    const int first = int(steps * part / parts) * STEP, last = metal::min(int(steps * (part + 1) / parts) * STEP, count);
    constexpr int KC = channels_of_lane(KEY_DIM), VC = channels_of_lane(VALUE_DIM);
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        state.maximum[h] = LOWEST;
        state.sum[h] = 0;
        #pragma unroll
        for (int c = 0; c < VC; c++) state.value[h][c] = 0;
    }
    for (int step = first; step < last; step += STEP) {
        typename Keys::template Row<KC> loaded_keys[STEP];
        typename Values::template Row<VC> loaded_values[STEP];
        float key[STEP][KC], value[STEP][VC];
        int row[STEP], row_of_lane = 0;
        if constexpr (is_moved<Keys>(0)) {
            keys.begin = values.begin = step;
            keys.found = values.found = keys.look(step);
        }
        #pragma unroll
        for (int i = 0; i < STEP; i++) {
            const int outside = metal::min(step + i, last - 1);
            row[i] = outside < tiles_begin ? outside : outside + tiles_end - tiles_begin;
            row_of_lane = lane == i ? row[i] : row_of_lane;
            keys.load(row[i], lane * KC, loaded_keys[i]);
            values.load(row[i], lane * VC, loaded_values[i]);
        }
        // Else CUDA's compiler would put off the values' loads until they are wanted.
        if constexpr (is_moved<Keys>(0)) simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int i = 0; i < STEP; i++) {
            keys.read(loaded_keys[i], lane * KC, key[i]);
            values.read(loaded_values[i], lane * VC, value[i]);
        }
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float score[STEP], score_of_lane = 0, highest = state.maximum[h];
            #pragma unroll
            for (int i = 0; i < STEP; i++) {
                float product = 0;
                #pragma unroll
                for (int c = 0; c < KC; c++) product += queries[(h * 32 + lane) * KC + c] * key[i][c];
                product = simd_sum(product);
                score_of_lane = lane == i ? product : score_of_lane;
                score[i] = step + i < last ? product : -INFINITY;
                highest = metal::max(highest, score[i]);
            }
            // A lane for each row: a branch after every sum would cost more on CUDA than all the rest.
            logits.write_if(lane < STEP && step + lane < last, h, row_of_lane, score_of_lane);
            const float rescale = metal::exp2(state.maximum[h] - highest);
            state.maximum[h] = highest;
            state.sum[h] *= rescale;
            #pragma unroll
            for (int c = 0; c < VC; c++) state.value[h][c] *= rescale;
            #pragma unroll
            for (int i = 0; i < STEP; i++) {
                const float p = metal::exp2(score[i] - highest);
                state.sum[h] += p;
                #pragma unroll
                for (int c = 0; c < VC; c++) state.value[h][c] += p * value[i][c];
            }
        }
    }
}

// The scores (base 2, scaled) of a KV head's query heads, written as natural logits if they are wanted.
template <bool WANTED, typename Pointer> struct LogitsOf {
    Pointer logits;                                  // of the first query head
    int rows;
    METAL_FUNC void write(int head, int row, float score) const {
        if constexpr (WANTED) logits[long(head) * rows + row] = score * LN2;
    }
    METAL_FUNC void write_if(bool condition, int head, int row, float score) const {
        if constexpr (WANTED) {
            if (condition) write(head, row, score);
        }
    }
};
template <bool WANTED, typename Pointer> METAL_FUNC LogitsOf<WANTED, Pointer> logits_of(Pointer logits, int rows) {
    return LogitsOf<WANTED, Pointer>{logits, rows};
}

// The weight of one simdgroup's state among those of the threadgroup, and (maximum, sum) of all.
template <int SIMDGROUPS, typename Maxima, typename Sums>
METAL_FUNC float3 weigh(Maxima maxima, Sums sums, float own_maximum) {
    float maximum = maxima[0], sum = 0;
    for (int i = 1; i < SIMDGROUPS; i++) maximum = metal::max(maximum, maxima[i]);
    for (int i = 0; i < SIMDGROUPS; i++) sum += metal::exp2(maxima[i] - maximum) * sums[i];
    return float3{metal::exp2(own_maximum - maximum), maximum, sum};
}

// One query head: the simdgroups' values, already weighed, become the split's output and, behind it, its lse (base 2).
template <int SIMDGROUPS, int DIM, int STRIDE, typename Values, typename Output>
METAL_FUNC void store_head(Values values, Output output, float maximum, float sum, int thread_index) {
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;  // a split without rows is (-inf, 0)
    for (int c = thread_index; c < DIM; c += 32 * SIMDGROUPS) {
        float value = 0;
        for (int i = 0; i < SIMDGROUPS; i++) value += values[i * STRIDE + c];
        output[c] = value * inverse;
    }
    if (thread_index == 0) output[DIM] = sum > 0 ? maximum + metal::log2(sum) : -INFINITY;
}
