// Merges the splits of one query head: o = sum 2^(lse_i - M) o_i / sum 2^(lse_i - M), M the largest lse. Simdgroups stride over the
// splits, lanes over the channels. An attention sink is one more split whose value is zero. `basis`, which stands before this body,
// brings the output out of the basis in which a layout holds its values.
// --- body ---
    constexpr bool TURNED = decltype(basis)::TURNED;
    constexpr int CHANNELS = (DIM + 31) / 32;
    const int thread_index = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
    const int simdgroup = simdgroup_index_in_threadgroup;
    const int head = threadgroup_position_in_grid.x, splits = partial_shape[1];
    const device float* own = partial + long(head) * splits * (DIM + 1);

    const float sink = SINKS ? float(sinks[head % SINK_COUNT]) * 1.4426950408889634f : -INFINITY;
    float maximum = sink;
    for (int i = lane; i < splits; i += 32) maximum = metal::max(maximum, own[i * (DIM + 1) + DIM]);
    maximum = simd_max(maximum);
    if (maximum == -INFINITY) maximum = 0;           // no rows at all: every weight is 2^-inf = 0

    float value[CHANNELS], sum = simdgroup == 0 ? metal::exp2(sink - maximum) : 0.0f;
    for (int c = 0; c < CHANNELS; c++) value[c] = 0;
    #pragma unroll 4
    for (int i = simdgroup; i < splits; i += SIMDGROUPS) {
        const device float* split = own + i * (DIM + 1);
        const float weight = metal::exp2(split[DIM] - maximum);
        sum += weight;
        #pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            if (c * 32 + lane < DIM) value[c] += weight * split[c * 32 + lane];
        }
    }
    for (int c = 0; c < CHANNELS; c++) {
        if (c * 32 + lane < DIM) values[simdgroup * DIM + c * 32 + lane] = value[c];
    }
    if (lane == 0) sums[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0;
    for (int i = 0; i < SIMDGROUPS; i++) sum += sums[i];
    for (int first = 0; first < DIM; first += 32 * SIMDGROUPS) {  // a number of times that the compiler knows
        const int c = first + thread_index;
        if (c >= DIM) break;
        float merged = 0;
        for (int i = 0; i < SIMDGROUPS; i++) merged += values[i * DIM + c];
        const float own_output = sum > 0 ? merged / sum : 0.0f;
        if (TURNED) values[c] = own_output;          // nobody else reads this channel's sums
        else output[long(head) * DIM + c] = T(own_output);
    }
    if (TURNED) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup == 0) {
            float x[CHANNELS];
            basis.leave(values, lane * CHANNELS, x);
            for (int j = 0; j < CHANNELS; j++) {
                if (lane * CHANNELS + j < DIM) output[long(head) * DIM + lane * CHANNELS + j] = T(x[j]);
            }
        }
    }
