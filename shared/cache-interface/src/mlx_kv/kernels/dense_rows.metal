// Reads rows held in the model's own dtype. place: first row of the sequence's keys, all rows of the array, and the same for
// its values, then how many rows these are: the one behind them is the newest, in an array of its own.

template <typename T, int DIM> struct DenseRows {
    static constexpr constant int LEAST_LANES = 8;    // that may share a row
    const device T* rows;
    const device T* newest;
    int count;
    template <int N> struct Row {
        RunOfNumbers<T, N> numbers;
    };
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        r.numbers.load((row < count ? rows + long(row) * DIM : newest) + first, DIM - first);
    }
    // Channels first..first+N-1, zero from DIM on.
    template <int N> METAL_FUNC void read(thread const Row<N>& r, int first, thread float (&x)[N]) const {
        for (int j = 0; j < N; j++) x[j] = first + j < DIM ? r.numbers.get(j) : 0.0f;
    }
};
// --- body ---
    const long own_head = sequence * long(threadgroups_per_grid.y) + kv_head;
    const DenseRows<T, KEY_DIM> keys = {
        key_rows + (long(kv_head) * place[1] + place[0]) * KEY_DIM, newest_key + own_head * KEY_DIM, place[4]};
    const DenseRows<T, VALUE_DIM> values = {
        value_rows + (long(kv_head) * place[3] + place[2]) * VALUE_DIM, newest_value + own_head * VALUE_DIM, place[4]};
