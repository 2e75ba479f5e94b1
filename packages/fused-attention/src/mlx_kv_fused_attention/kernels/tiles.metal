// Attention over packed tiles; fragments.metal says which lane holds what.

// What a simdgroup holds of its rows: the tile in hand, loaded ahead, and the query folded with the scales of the tile's group.
// With VALUES_AHEAD values are loaded a tile ahead, else beside the products of their own tile's keys: that hides less of the memory's
// latency, but needs registers for one tile's values instead of two.
template <
    typename Shape, int TILE_ROWS, int ROWS, int VALUE_BITS, bool VALUES_AHEAD, typename Keys, typename Values, typename Pairs,
    typename Folds>
struct TileWalk {
    using Half8x8 = simdgroup_half8x8;
    static constexpr constant int R = ROWS / 8;      // fragments of a tile, in fours
    static constexpr constant int W = Shape::KEY_WORDS, RUN = Shape::KEY_RUN;
    static constexpr constant int KEY_PLANES = planes_of<Keys>(0), VALUE_PLANES = planes_of<Values>(0);
    static constexpr constant float HEADROOM = 4096.0f;  // folded queries are below 2^14: small ones keep their bits, sums are in float
    // The lanes share out a group's scales and minima: a share is two codes of the lower and two of the upper half of a word.
    static constexpr constant int SHARES = Shape::KEY_FRAGMENTS * 2, OWN_SHARES = (SHARES + 31) / 32;
    using Fold = typename Keys::template Fold<2>;
    const FragmentPlace<Shape> place;
    const int lane;
    int row;                                         // of the tile in hand
    int next_group;                                  // the one whose scales are loaded next
    const int last_group;
    const Pairs query;
    const Folds folds;                               // in threadgroup memory: what the lanes of this simdgroup share
    const Keys group_keys;                           // of row 0: a pointer that moves along would take registers
    // Where this lane reads next: places in a tile are then constants, which cost no arithmetic.
    Keys tile_keys;
    const device uint* own_keys;
    ValuePlace<Shape, Values> tile_values;
    uint key_words[R][W];
    ValueWords<Shape, VALUE_BITS> value_words[R][2];
    TileScales<Shape, Values> scales[R];
    ValueOperands<Shape, Values> operands[R];
    Fold lower[OWN_SHARES], upper[OWN_SHARES];       // of the group after the next, or the next one's
    Half8x8 folded[Shape::KEY_FRAGMENTS];
    const float unit0, unit1;                        // of the query
    float unit;                                      // of the next group's scales and minima
    float bias0, bias1, factor0, factor1, origin0, origin1, query_sum0, query_sum1;

    METAL_FUNC TileWalk(
        Keys keys, Values values, Pairs query, Folds folds, float unit0, float unit1, int first_group, int groups, int lane)
        : place(lane), lane(lane), row(first_group * TILE_ROWS), next_group(first_group), last_group(first_group + groups - 1),
          query(query), folds(folds), group_keys(keys), tile_keys(keys.from(row + place.token())), own_keys(tile_keys.words(0) + place.quad * W),
          tile_values(values, row, place), unit0(unit0), unit1(unit1) {
        load_fold();
        load_keys();
        if constexpr (VALUES_AHEAD) load_values();
        if constexpr (KEY_PLANES == 2) sum_query();
        share_fold();
        load_fold();
        simdgroup_barrier(mem_flags::mem_threadgroup);
        fold_query();
    }
    METAL_FUNC void load_fold() {
        const Keys of_group = group_keys.from(next_group * TILE_ROWS);
        #pragma unroll
        for (int i = 0; i < OWN_SHARES; i++) {
            const int share = metal::min(lane + 32 * i, SHARES - 1);
            const int channel = share / (RUN / 2) * 2 * RUN + share % (RUN / 2) * 2;
            of_group.fold(channel, lower[i]);
            of_group.fold(channel + RUN, upper[i]);
        }
        next_group = metal::min(next_group + 1, last_group);  // the last one again, so that loading need not depend on it
    }
    METAL_FUNC void load_keys() {
        #pragma unroll
        for (int j = 0; j < R; j++) load_words(own_keys + 8 * j * Keys::WORDS, key_words[j]);
    }

    METAL_FUNC void load_values() {
        #pragma unroll
        for (int j = 0; j < R; j++) tile_values.load(8 * j, value_words[j], scales[j]);
        tile_values.advance(ROWS);
    }
    METAL_FUNC void read_values() {
        #pragma unroll
        for (int j = 0; j < R; j++) operands[j].read(value_words[j], scales[j]);
    }

    static METAL_FUNC Half8x8 halves(uint word) { return matrix_of<Half8x8>(as_type<half2>(word)); }
    static METAL_FUNC float largest_of(float2 x) { return metal::max(metal::fabs(x.x), metal::fabs(x.y)); }

    // Gives the other lanes the scales and minima that were loaded, as halves near one, the power of two apart. Every number is made
    // once so, where each lane would otherwise make those of all its rows and columns.
    METAL_FUNC void share_fold() {
        float largest = 0;
        #pragma unroll
        for (int i = 0; i < OWN_SHARES; i++) {
            largest = metal::max(largest, metal::max(largest_of(lower[i].scale(0)), largest_of(upper[i].scale(0))));
            largest = metal::max(largest, metal::max(largest_of(lower[i].minimum(0)), largest_of(upper[i].minimum(0))));
        }
        // The bits of positive numbers are in the numbers' order, and CUDA has one instruction for the largest integer.
        unit = power_of_two(as_type<float>(simd_max(as_type<uint>(largest))));
        const float inverse = inverse_of_power(unit) * HEADROOM;
        const int code = lane % (RUN / 2) * 2;       // of all its shares
        const float weight0 = inverse * Keys::weight(code), weight1 = inverse * Keys::weight(code + 1);
        #pragma unroll
        for (int i = 0; i < OWN_SHARES; i++) {
            const int share = lane + 32 * i;
            const float2 s = lower[i].scale(0), t = upper[i].scale(0), m = lower[i].minimum(0), n = upper[i].minimum(0);
            uint4 both;                              // minima and scales of a code, and of the next
            both.x = as_type<uint>(pack_half2(m.x * inverse, n.x * inverse));
            both.y = as_type<uint>(pack_half2(s.x * weight0, t.x * weight0));
            both.z = as_type<uint>(pack_half2(m.y * inverse, n.y * inverse));
            both.w = as_type<uint>(pack_half2(s.y * weight1, t.y * weight1));
            if (SHARES % 32 == 0 || share < SHARES) folds[share + share / (Shape::FOLD_STRIDE - 1)] = both;
        }
    }
    // The sum of the query's channels, for keys whose code 0 is not the number 0.
    METAL_FUNC void sum_query() {
        const Half8x8 ones = matrix_of<Half8x8>(pack_half2(1.0f, 1.0f));
        simdgroup_float8x8 sum[2];
        set_to_zero(sum);
        #pragma unroll
        for (int i = 0; i < Shape::KEY_FRAGMENTS; i += 2) {
            const uint2 q = query[i / 2 * 32 + lane];
            multiply_accumulate_16x8x16_as_read(sum[0], sum[1], ones, ones, ones, ones, halves(q.x), halves(q.y));
        }
        query_sum0 = sum[0].thread_elements().x;
        query_sum1 = sum[0].thread_elements().y;
    }
    // Key scales go into the query; key minima into a bias: the query's product with a matrix all of whose upper rows are the minima.
    METAL_FUNC void fold_query() {
        simdgroup_float8x8 bias[2];
        set_to_zero(bias);
        #pragma unroll
        for (int i = 0; i < Shape::KEY_FRAGMENTS; i += 2) {
            const uint2 q = query[i / 2 * 32 + lane];
            const uint4 own = folds[place.quad * Shape::FOLD_STRIDE + i / 2];
            uint s0 = own.y, s1 = own.w;
            if constexpr (!reads_right_by_columns<half>()) {  // then both numbers are of the channel of this lane's row
                const uint4 of_row = folds[place.row / 2 * Shape::FOLD_STRIDE + i / 2];
                s0 = place.row % 2 ? upper_halves(of_row.y, of_row.y) : lower_halves(of_row.y, of_row.y);
                s1 = place.row % 2 ? upper_halves(of_row.w, of_row.w) : lower_halves(of_row.w, of_row.w);
            }
            folded[i] = matrix_of<Half8x8>(as_type<half2>(q.x) * as_type<half2>(s0));
            folded[i + 1] = matrix_of<Half8x8>(as_type<half2>(q.y) * as_type<half2>(s1));
            // Nobody reads the lower rows: the scales stand there because CUDA's operands are registers side by side, as loaded.
            multiply_accumulate_16x8x16_as_read(
                bias[0], bias[1], halves(own.x), halves(own.z), halves(own.y), halves(own.w), halves(q.x), halves(q.y));
        }
        // Where the last code of 16 bits is read, others are read with it, times its number: that is taken from their own.
        #pragma unroll
        for (int i = RUN; i <= Shape::KEY_FRAGMENTS; i += RUN) {
            #pragma unroll
            for (int other = 2; other <= lump_of<Keys>(0); other++) {
                folded[i - other] = matrix_of<Half8x8>(folded[i - other].thread_elements() - folded[i - 1].thread_elements());
            }
        }
        bias0 = bias[0].thread_elements().x * (unit0 * unit * (1.0f / HEADROOM));
        bias1 = bias[0].thread_elements().y * (unit1 * unit * (1.0f / HEADROOM));
        factor0 = unit0 * unit * (Keys::UNIT / HEADROOM);
        factor1 = unit1 * unit * (Keys::UNIT / HEADROOM);
        if constexpr (KEY_PLANES == 2) {
            const float origin = group_keys.origin() * (inverse_of_power(unit) * (HEADROOM / Keys::UNIT));
            origin0 = query_sum0 * origin;
            origin1 = query_sum1 * origin;
        }
    }

    // Adds the products of the query and a plane of the codes.
    template <int PLANE> METAL_FUNC void add_plane(thread simdgroup_float8x8 (&score)[R]) const {
        #pragma unroll
        for (int i = 0; i < Shape::KEY_FRAGMENTS; i += 2) {
            const int code = i % RUN;
            #pragma unroll
            for (int j = 0; j < R; j += 2) {
                const uint upper = key_words[j][i / RUN], lower = key_words[j + 1][i / RUN];
                multiply_accumulate_16x8x16_as_read(
                    score[j], score[j + 1], fragment_of<PLANE, Half8x8>(tile_keys, upper, code),
                    fragment_of<PLANE, Half8x8>(tile_keys, upper, code + 1), fragment_of<PLANE, Half8x8>(tile_keys, lower, code),
                    fragment_of<PLANE, Half8x8>(tile_keys, lower, code + 1), folded[i], folded[i + 1]);
            }
        }
    }
    // Adds the products of a plane of the values' codes, of fragments j and j + 1, and the probabilities.
    template <int PLANE>
    METAL_FUNC void add_values(thread TileState<Shape>& state, int j, const thread Half8x8 (&probability)[Shape::SETS][2]) const {
        #pragma unroll
        for (int b = 0; b < Shape::BLOCKS; b++) {
            #pragma unroll
            for (int f = 0; f < Shape::CHUNK; f += 2) {
                const int i = f / Shape::VALUE_RUN, code = f % Shape::VALUE_RUN;
                const uint x0 = operands[j].units[b][i], x1 = operands[j + 1].units[b][i];
                #pragma unroll
                for (int n = 0; n < Shape::REPEATS; n++) {
                    multiply_accumulate_16x8x16(
                        state.value[n][b * Shape::CHUNK + f], state.value[n][b * Shape::CHUNK + f + 1],
                        fragment_of<PLANE, Half8x8>(tile_values.scales0, x0, code),
                        fragment_of<PLANE, Half8x8>(tile_values.scales0, x1, code),
                        fragment_of<PLANE, Half8x8>(tile_values.scales0, x0, code + 1),
                        fragment_of<PLANE, Half8x8>(tile_values.scales0, x1, code + 1), probability[Shape::set_of(b, n)][0],
                        probability[Shape::set_of(b, n)][1]);
                }
            }
        }
    }

    // Attends to the tile in hand. If there are MORE, registers are filled for the next one as soon as they are free; that is known
    // at compile time, because a register that may keep its old number is not free. CUDA's compiler waits for all loads in flight
    // at once: the first number wanted, at the start of a tile, must not wait for loads that have just been issued. So values that
    // were loaded ahead become operands first of all, and their registers are free for almost a whole tile.
    template <bool MORE, typename Logits>
    METAL_FUNC void attend(thread TileState<Shape>& state, Logits logits, int heads, bool last_of_group) {
        if constexpr (VALUES_AHEAD) read_values();
        if constexpr (MORE || !VALUES_AHEAD) load_values();
        if constexpr (MORE) {
            if (TILE_ROWS == ROWS || last_of_group) {
                simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have folded the query of the group in hand
                share_fold();
                load_fold();
            }
        }
        simdgroup_float8x8 score[R];
        set_to_zero(score);
        add_plane<0>(score);
        if constexpr (KEY_PLANES == 2) {
            const float ratio = tile_keys.ratio();
            #pragma unroll
            for (int j = 0; j < R; j++) {
                score[j].thread_elements().x = score[j].thread_elements().x * ratio + origin0;
                score[j].thread_elements().y = score[j].thread_elements().y * ratio + origin1;
            }
            add_plane<1>(score);
        }
        if constexpr (Keys::ROW_FACTORS) {
            #pragma unroll
            for (int j = 0; j < R; j++) {
                const float factor = tile_keys.factor(8 * j);
                score[j].thread_elements().x *= factor;
                score[j].thread_elements().y *= factor;
            }
        }
        if constexpr (MORE) {
            tile_keys = tile_keys.from(ROWS);
            own_keys += ROWS * Keys::WORDS;
            load_keys();
            // What lanes share is there now. Besides, CUDA's compiler would put off all loads until shortly before they are wanted.
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }

        if constexpr (!VALUES_AHEAD) read_values();
        // Those of the tile in hand: the next tile's query is folded beside this one's products, which leave time for it.
        const float own_bias0 = bias0, own_bias1 = bias1, own_factor0 = factor0, own_factor1 = factor1;
        float highest0 = -INFINITY, highest1 = -INFINITY, largest_scale0 = 0, largest_scale1 = 0;
        #pragma unroll
        for (int j = 0; j < R; j++) {
            const float s0 = score[j].thread_elements().x, s1 = score[j].thread_elements().y;
            const int token = row + 8 * j + place.token();
            logits.write_if(place.copy0 == 0 && place.column0 < heads, place.column0, token, s0 * own_factor0 + own_bias0);
            logits.write_if(place.copy1 == 0 && place.column1 < heads, place.column1, token, s1 * own_factor1 + own_bias1);
            highest0 = metal::max(highest0, s0);
            highest1 = metal::max(highest1, s1);
            largest_scale0 = metal::max(largest_scale0, operands[j].largest0());
            if constexpr (Shape::COPIES_DIFFER) largest_scale1 = metal::max(largest_scale1, operands[j].largest1());
        }
        highest0 = highest0 * own_factor0 + own_bias0 + metal::fast::log2(largest_scale0);
        highest1 = highest1 * own_factor1 + own_bias1 + metal::fast::log2(Shape::COPIES_DIFFER ? largest_scale1 : largest_scale0);
        // The maximum moves only once it has fallen 8 behind, a factor of 256.
        if (simd_any(highest0 > state.maximum0 + 8.0f || highest1 > state.maximum1 + 8.0f)) {
            state.raise(metal::max(state.maximum0, row_max(highest0)), metal::max(state.maximum1, row_max(highest1)));
        }
        const float offset0 = own_bias0 - state.maximum0, offset1 = own_bias1 - state.maximum1;
        if (MORE && (TILE_ROWS == ROWS || last_of_group)) fold_query();
        #pragma unroll
        for (int j = 0; j < R; j += 2) {
            Half8x8 probability[VALUE_PLANES][Shape::SETS][2];
            #pragma unroll
            for (int u = 0; u < 2; u++) {
                const float p0 = metal::fast::exp2(score[j + u].thread_elements().x * own_factor0 + offset0);
                const float p1 = metal::fast::exp2(score[j + u].thread_elements().y * own_factor1 + offset1);
                state.sum0 += p0;
                state.sum1 += p1;
                #pragma unroll
                for (int set = 0; set < Shape::SETS; set++) {
                    const float weighed0 = p0 * operands[j + u].scale0(set), weighed1 = p1 * operands[j + u].scale1(set);
                    probability[VALUE_PLANES - 1][set][u] = matrix_of<Half8x8>(pack_half2(weighed0, weighed1));
                    if constexpr (VALUE_PLANES == 2) {
                        const float ratio = tile_values.scales0.ratio();
                        probability[0][set][u] = matrix_of<Half8x8>(pack_half2(weighed0 * ratio, weighed1 * ratio));
                    }
                    state.minimum0[set] += p0 * operands[j + u].minimum0(set);
                    state.minimum1[set] += p1 * operands[j + u].minimum1(set);
                }
            }
            add_values<0>(state, j, probability[0]);
            if constexpr (VALUE_PLANES == 2) add_values<1>(state, j, probability[1]);
        }
        row += ROWS;
    }
};

// Groups first..last-1 of TILE_ROWS rows each, in tiles of ROWS.
template <
    typename Shape, int TILE_ROWS, int ROWS, int VALUE_BITS, bool VALUES_AHEAD, typename Keys, typename Values, typename Pairs,
    typename Folds, typename Logits>
METAL_FUNC void attend_tiles(
    thread TileState<Shape>& state, Keys keys, Values values, Pairs query, Folds folds, float unit0, float unit1, Logits logits,
    int heads, int first, int last, int lane) {
    constexpr int TILES = TILE_ROWS / ROWS;          // of a group
    state.clear();
    if (first >= last) return;
    TileWalk<Shape, TILE_ROWS, ROWS, VALUE_BITS, VALUES_AHEAD, Keys, Values, Pairs, Folds> walk(
        keys, values, query, folds, unit0, unit1, first, last - first, lane);
    const int tiles = (last - first) * TILES;
    #pragma unroll 1
    for (int tile = 0; tile + 1 < tiles; tile++) {
        walk.template attend<true>(state, logits, heads, (tile + 1) % TILES == 0);
    }
    walk.template attend<false>(state, logits, heads, true);
    state.sum0 = row_sum(state.sum0);
    state.sum1 = row_sum(state.sum1);
    #pragma unroll
    for (int set = 0; set < Shape::SETS; set++) {
        state.minimum0[set] = row_sum(state.minimum0[set]);
        state.minimum1[set] = row_sum(state.minimum1[set]);
    }
}

// One head's channels of the values, weighed against the threadgroup's maximum, where this lane holds them. Copies of a column may have
// maxima of their own, since they see other scales.
template <typename Values, typename Shape, typename Weighed>
METAL_FUNC void store_channels(thread TileState<Shape>& state, Weighed weighed, int head, float maximum, int lane) {
    const FragmentPlace<Shape> place(lane);
    const float weight0 = metal::exp2(state.maximum0 - maximum), weight1 = metal::exp2(state.maximum1 - maximum);
    const int own_group = place.row * Shape::BLOCK_GROUPS / 8;
    #pragma unroll
    for (int n = 0; n < Shape::REPEATS; n++) {
        const bool first = place.column0 == head && place.copy0 < Shape::SPAN && n * Shape::SPAN + place.copy0 == own_group;
        const bool second = place.column1 == head && place.copy1 < Shape::SPAN && n * Shape::SPAN + place.copy1 == own_group;
        #pragma unroll
        for (int b = 0; b < Shape::BLOCKS; b++) {
            const int set = Shape::set_of(b, n);
            #pragma unroll
            for (int f = 0; f < Shape::CHUNK; f++) {
                const float unit = Values::UNIT * Values::weight(f % Shape::VALUE_RUN);
                const int i = b * Shape::CHUNK + f, channel = b * Shape::BLOCK + place.row * Shape::CHUNK + f;
                float x = state.value[n][i].thread_elements().x, y = state.value[n][i].thread_elements().y;
                if (f % Shape::VALUE_RUN == Shape::VALUE_RUN - 1) {  // others may have been read with it
                    #pragma unroll
                    for (int other = 1; other < lump_of<Values>(0); other++) {
                        x -= state.value[n][i - other].thread_elements().x;
                        y -= state.value[n][i - other].thread_elements().y;
                    }
                }
                if (first) weighed[channel] = (x * unit + state.minimum0[set]) * weight0;
                if (second) weighed[channel] = (y * unit + state.minimum1[set]) * weight1;
            }
        }
    }
}
