// Puts pairs of numbers into one array; the last may be a single one. The body repeats for each pair.

// --- body ---
    if (thread_position_in_grid.x < 2 && thread_position_in_grid.x + 2 * @ < COUNT)
        numbers[thread_position_in_grid.x + 2 * @] = pair@[thread_position_in_grid.x];
