// Puts pairs of numbers into one array. The body repeats for each pair.

// --- body ---
    if (thread_position_in_grid.x < 2) numbers[2 * @ + thread_position_in_grid.x] = pair@[thread_position_in_grid.x];
