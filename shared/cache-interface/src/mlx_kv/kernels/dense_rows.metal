// Reads rows held in the model's own dtype. place: first row of the sequence's keys, all rows of the array, and the same for
// its values.

template <typename T, int DIM> struct DenseRows {
    const device T* rows;
    // Channels first..first+N-1 of a row, zero from DIM on.
    template <int N> METAL_FUNC void read(int row, int first, thread float (&x)[N]) const {
        const device T* from = rows + long(row) * DIM;
        for (int j = 0; j < N; j++) x[j] = first + j < DIM ? float(from[first + j]) : 0.0f;
    }
};
// --- body ---
    const DenseRows<T, KEY_DIM> keys = {key_rows + (long(kv_head) * place[1] + place[0]) * KEY_DIM};
    const DenseRows<T, VALUE_DIM> values = {value_rows + (long(kv_head) * place[3] + place[2]) * VALUE_DIM};
