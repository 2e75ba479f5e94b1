// Reads dense rows of which the newest have not been written to the places they take: overdue_count[0] of them are found in
// `overdue_rows`, a key and its value side by side, their places in `taken`, and the very newest in arrays of its own. A lane knows the
// place of one of them. place: as in dense_rows.metal.

template <typename T, int DIM, int STRIDE> struct ExchangedRows {
    const device T* rows;
    const device T* overdue;
    const device T* newest;
    int count, taken;                                // taken by this lane's row, -1 if it has none
    uint number;                                     // of this lane's row, from 1 on
    template <int N> struct Row {
        RunOfNumbers<T, N> numbers;
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        const uint found = simd_max(row == taken ? number : 0u);
        const device T* from = row < count ? rows + long(row) * DIM : newest;
        if (found > 0) from = overdue + (found - 1) * STRIDE;
        r.numbers.load(from + first, DIM - first);
    }
    // Channels first..first+N-1, zero from DIM on.
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        for (int j = 0; j < N; j++) x[j] = first + j < DIM ? r.numbers.get(j) : 0.0f;
    }
};
// --- body ---
    constexpr int STRIDE = KEY_DIM + VALUE_DIM;
    const device T* overdue = overdue_rows + long(kv_head) * overdue_rows_shape[2] * STRIDE;
    const uint number = thread_index_in_simdgroup + 1;
    const int own_taken =
        number <= uint(overdue_count[0]) ? int(taken[(number - 1) * threadgroups_per_grid.y + kv_head]) : -1;
    const ExchangedRows<T, KEY_DIM, STRIDE> keys = {
        key_rows + (long(kv_head) * place[1] + place[0]) * KEY_DIM, overdue, newest_key + kv_head * KEY_DIM, place[4],
        own_taken, number};
    const ExchangedRows<T, VALUE_DIM, STRIDE> values = {
        value_rows + (long(kv_head) * place[3] + place[2]) * VALUE_DIM, overdue + KEY_DIM, newest_value + kv_head * VALUE_DIM,
        place[4], own_taken, number};
