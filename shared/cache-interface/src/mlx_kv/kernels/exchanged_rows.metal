// Reads dense rows of which the newest have not been written to the places they take, but stand in `overdue_rows`, a key and its value
// side by side; the very newest has arrays of its own. `taken` has the place of each of the overdue rows, and behind those of all how
// many they are. place: as in dense_rows.metal.

template <typename T, int DIM, int STRIDE> struct ExchangedRows {
    static constexpr constant int LEAST_LANES = 8;    // that may share a row
    static constexpr constant bool MOVED = true;
    const device T* rows;
    const device T* overdue;
    const device T* newest;
    int count, taken;                                // rows in the arrays; the place taken by this lane's row, none if it is negative
    uint number;                                     // of this lane's row, from 1 on
    uint found;                                      // of four rows: byte i is the number of the row that has taken the place
                                                     // of the one whose last two bits are i, 0 if none has
    template <int N> struct Row {
        RunOfNumbers<T, N> numbers;
    };
    // Finds what stands in the places of row, a multiple of 4, and of the three behind it, all lanes together, before they are loaded.
    METAL_FUNC uint look(int row) const {
        const uint distance = uint(taken - row);
        return simd_or(distance < 4 ? number << (8 * distance) : 0u);
    }
    template <int N> METAL_FUNC void load(int row, int first, thread Row<N>& r) const {
        const uint own = found >> (8 * (row & 3)) & 0xff;
        const device T* from = row < count ? rows + long(row) * DIM : newest;
        if (own > 0) from = overdue + (own - 1) * STRIDE;
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
    const device uint* own_taken = taken + kv_head;
    const uint number = thread_index_in_simdgroup + 1, kv_heads = threadgroups_per_grid.y;
    const int place_of_lane = number <= own_taken[32 * kv_heads] ? int(own_taken[(number - 1) * kv_heads]) : -4;
    const ExchangedRows<T, KEY_DIM, STRIDE> keys = {
        key_rows + (long(kv_head) * place[1] + place[0]) * KEY_DIM, overdue, newest_key + kv_head * KEY_DIM,
        place[4], place_of_lane, number, 0};
    const ExchangedRows<T, VALUE_DIM, STRIDE> values = {
        value_rows + (long(kv_head) * place[3] + place[2]) * VALUE_DIM, overdue + KEY_DIM, newest_value + kv_head * VALUE_DIM,
        place[4], place_of_lane, number, 0};
