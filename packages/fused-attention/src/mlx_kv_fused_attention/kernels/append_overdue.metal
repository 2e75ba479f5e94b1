// The newest row joins the overdue ones as the last of them; its place is found beside it (`dropped`).
// --- body ---
    const uint width = overdue_rows_shape[3], size = overdue_rows_shape[2] * width, key_dim = newest_key_shape[3];
    const uint kv_heads = scores_shape[1], begin = threadgroup_position_in_grid.x * 32 * SIMDGROUPS;
    for (uint i = begin + thread_position_in_threadgroup.x; i < kv_heads * size; i += threads_per_grid.x) {
        const uint own_head = i / size, row = i % size / width, channel = i % width;
        T x = overdue_rows[i];
        if (row == overdue) {
            x = channel < key_dim ? newest_key[own_head * key_dim + channel] : newest_value[own_head * (width - key_dim) + channel - key_dim];
        }
        out_overdue[i] = x;
    }
    for (uint i = begin + thread_position_in_threadgroup.x; i < taken_shape[0] * kv_heads; i += threads_per_grid.x) {
        const uint row = i / kv_heads;
        if (row != overdue) out_taken[i] = taken[i] + (row + 1 == uint(taken_shape[0]) ? 1 : 0);
    }
