// Pools the votes of the rows before the window over their neighbours, and gives the rows that are always kept +infinity: the
// first `sinks` ones and the window. One thread a row; the reference adds in the same order, so the bits are the same.
// --- body ---
    constexpr int HALF = KERNEL / 2;
    const int row = int(thread_position_in_grid.x), head = int(thread_position_in_grid.y);
    const int rows = votes_shape[2], sinks = params[0], end = rows - params[1];
    if (row < rows) {
        const ulong own = ulong(head) * rows;
        float pooled = MEAN ? 0.0f : -INFINITY;
        for (int at = row - HALF; at <= row + HALF; at++) {
            const bool absent = at < 0 || at >= end;  // the window's rows count as absent
            if (MEAN) pooled = precise_add(pooled, absent ? 0.0f : votes[own + at]);
            else if (!absent) pooled = votes[own + at] > pooled || metal::isnan(votes[own + at]) ? votes[own + at] : pooled;
        }
        if (MEAN) pooled = precise_mul(pooled, 1.0f / float(KERNEL));
        out[own + row] = row < sinks || row >= end ? INFINITY : pooled;
    }
