// Split-KV decode attention over packed rows in half types: the first `row_splits` splits share out the rows outside the tiles (exact
// first rows, the newest in full precision, the rest of a group), the others the tiles. Every simdgroup has a softmax state of its
// own, and they are merged once, at the end.
// --- body ---
    using Shape = Tiling<GROUP, KEY_DIM, VALUE_DIM, KEY_BITS, VALUE_BITS, VALUE_GROUP>;
    using Values = decltype(values);
    constexpr int KC = channels_of_lane(KEY_DIM), VC = channels_of_lane(VALUE_DIM);
    threadgroup float query[GROUP * 32 * KC];
    threadgroup uint2 query_pairs[KEY_DIM / 16 * 32];
    threadgroup uint4 folds[SIMDGROUPS * 4 * Shape::FOLD_STRIDE];
    threadgroup float units[GROUP];
    threadgroup float maxima[GROUP * SIMDGROUPS], sums[GROUP * SIMDGROUPS];
    constexpr int OF_HEAD = SIMDGROUPS * 32 * VC;    // numbers below
    constexpr int OTHERS = GROUP * (32 * KC + 1 + 2 * SIMDGROUPS) + KEY_DIM * 4 + SIMDGROUPS * 16 * Shape::FOLD_STRIDE;  // above
    constexpr int HEADS = smaller(GROUP, at_least_one((8192 - OTHERS) / OF_HEAD));  // of Metal's 32 KB
    threadgroup float weighed[HEADS * OF_HEAD];

    const int thread_index = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
    const int simdgroup = simdgroup_index_in_threadgroup;
    const int split = threadgroup_position_in_grid.x, splits = threadgroups_per_grid.x;
    const int first_head = (sequence * int(threadgroups_per_grid.y) + kv_head) * GROUP;
    const float scale = as_type<float>(uint(SCALE));  // of the scores, log2(e) included
    load_queries<GROUP, KEY_DIM, SIMDGROUPS>(
        queries + first_head * KEY_DIM, keys, query, split < row_splits ? scale : 1.0f, lane, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const auto own_logits = logits_of<LOGITS>(all_logits + long(first_head) * logit_rows, logit_rows, noise);
    const FragmentPlace<Shape> place_of_lane(lane);
    RowState<GROUP, VC> rows;
    TileState<Shape> tiles;
    if (split < row_splits) {
        attend_rows<KEY_DIM, VALUE_DIM, 32>(
            rows, keys, values, query, own_logits, row_count, split * SIMDGROUPS + simdgroup, row_splits * SIMDGROUPS,
            tiles_begin, tiles_end, lane);
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            if (lane == 0) {
                maxima[h * SIMDGROUPS + simdgroup] = rows.maximum[h];
                sums[h * SIMDGROUPS + simdgroup] = rows.sum[h];
            }
        }
    } else {
        for (int h = simdgroup; h < GROUP; h += SIMDGROUPS) {
            float largest = 0;
            for (int c = lane; c < KEY_DIM; c += 32) largest = metal::max(largest, metal::fabs(query[h * 32 * KC + c]));
            largest = simd_max(largest);
            if (lane == 0) units[h] = power_of_two(largest);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        spread_query<Shape>(query, 32 * KC, GROUP, units, query_pairs, lane, simdgroup, SIMDGROUPS);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const long groups = (tiles_end - tiles_begin) / TILE_ROWS, parts = (splits - row_splits) * SIMDGROUPS;
        const int part = (split - row_splits) * SIMDGROUPS + simdgroup, before = tiles_begin / TILE_ROWS;
        attend_tiles<Shape, TILE_ROWS, ROWS, VALUE_BITS, VALUES_AHEAD>(
            tiles, keys, values, query_pairs, folds + simdgroup * 4 * Shape::FOLD_STRIDE,
            units[metal::min(place_of_lane.column0, GROUP - 1)] * scale,
            units[metal::min(place_of_lane.column1, GROUP - 1)] * scale, own_logits, GROUP, before + int(groups * part / parts),
            before + int(groups * (part + 1) / parts), lane);
        if (place_of_lane.row == 0 && place_of_lane.copy0 == 0 && place_of_lane.column0 < GROUP) {
            maxima[place_of_lane.column0 * SIMDGROUPS + simdgroup] = tiles.maximum0;
            sums[place_of_lane.column0 * SIMDGROUPS + simdgroup] = tiles.sum0;
        }
        if (place_of_lane.row == 0 && place_of_lane.copy1 == 0 && place_of_lane.column1 < GROUP) {
            maxima[place_of_lane.column1 * SIMDGROUPS + simdgroup] = tiles.maximum1;
            sums[place_of_lane.column1 * SIMDGROUPS + simdgroup] = tiles.sum1;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int first = 0; first < GROUP; first += HEADS) {
        const int last = smaller(first + HEADS, GROUP);
        #pragma unroll 1
        for (int h = first; h < last; h++) {         // not unrolled: code that runs once is read from memory as rows are
            const float3 weight = weigh<SIMDGROUPS>(
                maxima + h * SIMDGROUPS, sums + h * SIMDGROUPS, maxima[h * SIMDGROUPS + simdgroup]);
            const auto own_weighed = weighed + (h - first) * OF_HEAD + simdgroup * 32 * VC;
            if (split < row_splits) {
                #pragma unroll
                for (int own = 0; own < GROUP; own++) {  // registers have no addresses
                    #pragma unroll
                    for (int c = 0; c < VC; c++) {
                        if (own == h) own_weighed[lane * VC + c] = rows.value[own][c] * weight.x;
                    }
                }
            } else {
                store_channels<Values>(tiles, own_weighed, h, weight.y, lane);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll 1
        for (int h = first; h < last; h++) {
            const float3 weight = weigh<SIMDGROUPS>(maxima + h * SIMDGROUPS, sums + h * SIMDGROUPS, 0);
            store_head<32 * SIMDGROUPS, SIMDGROUPS, VALUE_DIM, 32 * VC>(
                weighed + (h - first) * OF_HEAD, partial + (long(first_head + h) * splits + split) * (VALUE_DIM + 1), weight.y,
                weight.z, thread_index);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
