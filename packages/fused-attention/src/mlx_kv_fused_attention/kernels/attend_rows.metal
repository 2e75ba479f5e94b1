// Split-KV decode attention, row by row in float: any layout, any dtype. The rows of a sequence are shared out evenly over the
// simdgroups of all splits.
// --- body ---
    constexpr int LANES = lanes_of_row(least_lanes<decltype(keys)>(0), GROUP, KEY_DIM, VALUE_DIM);
    using OwnChannels = Channels<VALUE_DIM, LANES>;
    constexpr int PARTS = SIMDGROUPS * 32 / LANES, OF_PART = LANES * OwnChannels::COUNT;
    threadgroup float query[GROUP * 32 * channels_of_lane(KEY_DIM)];
    threadgroup float maxima[GROUP * SIMDGROUPS], sums[GROUP * SIMDGROUPS];
    threadgroup float weighed[2 * PARTS * OF_PART];  // of two heads in turn: while one's are read the next one's are written

    const int thread_index = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
    const int simdgroup = simdgroup_index_in_threadgroup;
    const int split = threadgroup_position_in_grid.x, splits = threadgroups_per_grid.x;
    const int first_head = (sequence * int(threadgroups_per_grid.y) + kv_head) * GROUP;
    const float scale = as_type<float>(uint(SCALE));  // of the scores, log2(e) included
    load_queries<GROUP, KEY_DIM, SIMDGROUPS>(queries + first_head * KEY_DIM, keys, query, scale, lane, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    RowState<GROUP, OwnChannels::COUNT> state;
    attend_rows<KEY_DIM, VALUE_DIM, LANES>(
        state, keys, values, query, logits_of<LOGITS>(all_logits + long(first_head) * logit_rows, logit_rows, noise),
        row_count, split * SIMDGROUPS + simdgroup, splits * SIMDGROUPS, tiles_begin, tiles_end, lane);

    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        if (lane == 0) {
            maxima[h * SIMDGROUPS + simdgroup] = state.maximum[h];
            sums[h * SIMDGROUPS + simdgroup] = state.sum[h];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const auto own_weighed = weighed + (simdgroup * (32 / LANES) + lane / LANES) * OF_PART;
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        const float3 weight = weigh<SIMDGROUPS>(maxima + h * SIMDGROUPS, sums + h * SIMDGROUPS, state.maximum[h]);
        const int buffer = h % 2 * PARTS * OF_PART;
        #pragma unroll
        for (int c = 0; c < OwnChannels::COUNT; c++) {
            const int channel = OwnChannels::first(c / OwnChannels::RUN, lane % LANES) + c % OwnChannels::RUN;
            own_weighed[buffer + channel] = state.value[h][c] * weight.x;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const long place_of_head = long(first_head + h) * splits + split;
        store_head<32 * SIMDGROUPS, PARTS, VALUE_DIM, OF_PART>(
            weighed + buffer, partial + place_of_head * (VALUE_DIM + 1), weight.y, weight.z, thread_index);
    }
