// The newest row joins the overdue ones, at the place that its token's distance from the first of them tells: a threadgroup for each
// KV head.
// --- body ---
    const uint width = overdue_rows_shape[3], size = overdue_rows_shape[2] * width, key_dim = newest_key_shape[3];
    const uint own_head = threadgroup_position_in_grid.x, place = uint(tokens[0] - overdue_from[0]) * width;
    for (uint i = thread_position_in_threadgroup.x; i < size; i += 32 * SIMDGROUPS) {
        const uint channel = i - place;              // wraps around before the place
        T x = overdue_rows[own_head * size + i];
        if (channel < key_dim) x = newest_key[own_head * key_dim + channel];
        else if (channel < width) x = newest_value[own_head * (width - key_dim) + channel - key_dim];
        out_overdue[own_head * size + i] = x;
    }
