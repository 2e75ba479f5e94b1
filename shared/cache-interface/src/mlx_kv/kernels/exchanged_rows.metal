// Reads dense rows of which the newest have not been written to the places that are theirs: rows of position overdue_from[0] and later
// ones are found in `overdue_rows`, a key and its value side by side, and the very newest in arrays of its own. place: as in
// dense_rows.metal; the sequence's positions begin with the array.

template <typename T, int DIM, int STRIDE> struct ExchangedRows {
    const device T* rows;
    const device T* overdue;
    const device T* newest;
    const device int* positions;
    int overdue_from, count;
    template <int N> struct Row {
        RunOfNumbers<T, N> numbers;
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        const device T* from = newest;
        if (row < count) {
            const int since = positions[row] - overdue_from;
            from = since < 0 ? rows + long(row) * DIM : overdue + since * STRIDE;
        }
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
    const device int* own_positions = positions + long(kv_head) * positions_shape[2];
    const ExchangedRows<T, KEY_DIM, STRIDE> keys = {
        key_rows + (long(kv_head) * place[1] + place[0]) * KEY_DIM, overdue, newest_key + kv_head * KEY_DIM,
        own_positions, overdue_from[0], place[4]};
    const ExchangedRows<T, VALUE_DIM, STRIDE> values = {
        value_rows + (long(kv_head) * place[3] + place[2]) * VALUE_DIM, overdue + KEY_DIM, newest_value + kv_head * VALUE_DIM,
        own_positions, overdue_from[0], place[4]};
