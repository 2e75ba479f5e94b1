// Attention over packed tiles; fragments.metal says which lane holds what.

// What a simdgroup holds of its rows: the tile in hand, loaded ahead, and the query folded with the scales of the tile's group.
template <typename Shape, int TILE_ROWS, int ROWS, int VALUE_BITS, typename Keys, typename Values> struct TileWalk {
    using Fold = typename Keys::template Fold<Shape::KEY_RUN>;
    using Half8x8 = simdgroup_half8x8;
    static constexpr constant int R = ROWS / 8;      // fragments of a tile, in fours
    static constexpr constant int W = Shape::KEY_WORDS, RUN = Shape::KEY_RUN;
    static constexpr constant int KEY_PLANES = planes_of<Keys>(0), VALUE_PLANES = planes_of<Values>(0);
    static constexpr constant float HEADROOM = 4096.0f;  // folded queries are below 2^14: small ones keep their bits, sums are in float
    const FragmentPlace<Shape> place;
    int row;                                         // of the tile in hand
    // Where this lane reads next: places in a tile are then constants, which cost no arithmetic.
    Keys group_keys, tile_keys;
    const device uint* own_keys;
    ValuePlace<Shape, Values> tile_values;
    uint key_words[R][W];
    ValueWords<Shape, VALUE_BITS> value_words[R][2];
    TileScales<Shape, Values> scales[R];
    ValueOperands<Shape, Values> operands[R];
    Fold fold[W];
    Half8x8 folded[Shape::KEY_FRAGMENTS];
    float bias0, bias1, factor0, factor1, origin0, origin1;

    METAL_FUNC TileWalk(Keys keys, Values values, int first_row, int lane)
        : place(lane), row(first_row), group_keys(keys.from(first_row)), tile_keys(keys.from(first_row + place.token())),
          own_keys(tile_keys.words(0) + place.quad * W), tile_values(values, first_row, place) {
        load_fold();
        load_keys();
        load_values();
    }
    METAL_FUNC void load_fold() {
        #pragma unroll
        for (int w = 0; w < W; w++) group_keys.fold(place.channel(w), fold[w]);
    }
    METAL_FUNC void load_keys() {
        #pragma unroll
        for (int j = 0; j < R; j++) load_words(own_keys + 8 * j * Keys::WORDS, key_words[j]);
    }

    METAL_FUNC void load_values() {
        #pragma unroll
        for (int j = 0; j < R; j++) tile_values.load(8 * j, value_words[j], scales[j]);
    }

    // Key scales go into the query, brought near one by a power of two; key minima into a bias.
    template <typename Pairs> METAL_FUNC void fold_query(Pairs query, float unit0, float unit1, int lane) {
        float largest = 0;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            #pragma unroll
            for (int i = 0; i < RUN / 2; i++) {
                const float2 s = fold[w].scale(i);
                largest = metal::max(largest, metal::max(metal::fabs(s.x), metal::fabs(s.y)));
            }
        }
        const float unit = power_of_two(row_max(largest)), inverse = inverse_of_power(unit) * HEADROOM;
        bias0 = bias1 = origin0 = origin1 = 0;
        #pragma unroll
        for (int i = 0; i < Shape::KEY_FRAGMENTS; i += 2) {
            const int code = i % RUN;
            const float4 q = query[i / 2 * 32 + lane];
            const float2 s = fold[i / RUN].scale(code / 2), m = fold[i / RUN].minimum(code / 2);
            const float s0 = s.x * (inverse * Keys::weight(code)), s1 = s.y * (inverse * Keys::weight(code + 1));
            folded[i] = matrix_of<Half8x8>(pack_half2(q.x * s0, q.y * s0));
            folded[i + 1] = matrix_of<Half8x8>(pack_half2(q.z * s1, q.w * s1));
            bias0 += q.x * m.x + q.z * m.y;
            bias1 += q.y * m.x + q.w * m.y;
            origin0 += q.x + q.z;
            origin1 += q.y + q.w;
        }
        bias0 = row_sum(bias0) * unit0;
        bias1 = row_sum(bias1) * unit1;
        factor0 = unit0 * unit * (Keys::UNIT / HEADROOM);
        factor1 = unit1 * unit * (Keys::UNIT / HEADROOM);
        if constexpr (KEY_PLANES == 2) {
            origin0 = row_sum(origin0) * (group_keys.origin() * inverse / Keys::UNIT);
            origin1 = row_sum(origin1) * (group_keys.origin() * inverse / Keys::UNIT);
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
                multiply_accumulate_16x8x16(
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
    // at once: the first number wanted, at the start of a tile, must not wait for loads that have just been issued. So values become
    // operands first of all, and their registers and the fold's are free for almost a whole tile.
    template <bool MORE, typename Logits>
    METAL_FUNC void attend(thread TileState<Shape>& state, Logits logits, int heads, bool last_of_group) {
        #pragma unroll
        for (int j = 0; j < R; j++) operands[j].read(value_words[j], scales[j]);
        if constexpr (MORE) {
            tile_values.advance(ROWS);
            load_values();
            if (TILE_ROWS == ROWS || last_of_group) {
                group_keys = group_keys.from(TILE_ROWS);
                load_fold();
            }
        }
        simdgroup_float8x8 score[R];
        #pragma unroll
        for (int j = 0; j < R; j++) {
            score[j].thread_elements().x = 0;
            score[j].thread_elements().y = 0;
        }
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
        }

        float highest0 = -INFINITY, highest1 = -INFINITY, largest_scale0 = 0, largest_scale1 = 0;
        #pragma unroll
        for (int j = 0; j < R; j++) {
            const float s0 = score[j].thread_elements().x, s1 = score[j].thread_elements().y;
            const int token = row + 8 * j + place.token();
            logits.write_if(place.copy0 == 0 && place.column0 < heads, place.column0, token, s0 * factor0 + bias0);
            logits.write_if(place.copy1 == 0 && place.column1 < heads, place.column1, token, s1 * factor1 + bias1);
            highest0 = metal::max(highest0, s0);
            highest1 = metal::max(highest1, s1);
            largest_scale0 = metal::max(largest_scale0, operands[j].largest0());
            if constexpr (Shape::COPIES_DIFFER) largest_scale1 = metal::max(largest_scale1, operands[j].largest1());
        }
        highest0 = highest0 * factor0 + bias0 + metal::fast::log2(largest_scale0);
        highest1 = highest1 * factor1 + bias1 + metal::fast::log2(Shape::COPIES_DIFFER ? largest_scale1 : largest_scale0);
        // The maximum moves only once it has fallen 8 behind, a factor of 256.
        if (simd_any(highest0 > state.maximum0 + 8.0f || highest1 > state.maximum1 + 8.0f)) {
            state.raise(metal::max(state.maximum0, row_max(highest0)), metal::max(state.maximum1, row_max(highest1)));
        }
        const float offset0 = bias0 - state.maximum0, offset1 = bias1 - state.maximum1;
        #pragma unroll
        for (int j = 0; j < R; j += 2) {
            Half8x8 probability[VALUE_PLANES][Shape::SETS][2];
            #pragma unroll
            for (int u = 0; u < 2; u++) {
                const float p0 = metal::fast::exp2(score[j + u].thread_elements().x * factor0 + offset0);
                const float p1 = metal::fast::exp2(score[j + u].thread_elements().y * factor1 + offset1);
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
template <typename Shape, int TILE_ROWS, int ROWS, int VALUE_BITS, typename Keys, typename Values, typename Pairs, typename Logits>
METAL_FUNC void attend_tiles(
    thread TileState<Shape>& state, Keys keys, Values values, Pairs query, float unit0, float unit1, Logits logits, int heads,
    int first, int last, int lane) {
    constexpr int TILES = TILE_ROWS / ROWS;          // of a group
    state.clear();
    if (first >= last) return;
    TileWalk<Shape, TILE_ROWS, ROWS, VALUE_BITS, Keys, Values> walk(keys, values, first * TILE_ROWS, lane);
    const int tiles = (last - first) * TILES;
    #pragma unroll 1
    for (int tile = 0; tile + 1 < tiles; tile++) {
        if (tile % TILES == 0) walk.fold_query(query, unit0, unit1, lane);
        walk.template attend<true>(state, logits, heads, (tile + 1) % TILES == 0);
    }
    if (TILES == 1) walk.fold_query(query, unit0, unit1, lane);
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
                if (first) weighed[channel] = (state.value[n][i].thread_elements().x * unit + state.minimum0[set]) * weight0;
                if (second) weighed[channel] = (state.value[n][i].thread_elements().y * unit + state.minimum1[set]) * weight1;
            }
        }
    }
}
