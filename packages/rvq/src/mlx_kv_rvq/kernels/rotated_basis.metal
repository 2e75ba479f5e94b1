// Brings an output out of the basis in which RVQ holds values: the transposed transform, then the signs.

template <int DIM, int ODD> struct RotatedBasis {
    static constexpr constant bool TURNED = true;
    const device uint* flips;
    const device uint* hadamard;

    // Channels first..first+N-1 of a row; every lane of a simdgroup asks for the N that follow those of the lane before.
    template <typename Row, int N> METAL_FUNC void leave(Row row, int first, thread float (&x)[N]) const {
        if constexpr (ODD == 1) {
            for (int j = 0; j < N; j++) x[j] = row[first + j];
            add_and_subtract(first, x);
        } else {
            if (first >= DIM) return;
            for (int j = 0; j < N; j++) x[j] = 0;
            for (int i = 0; i < DIM; i++) {
                for (int j = 0; j < N; j++) {
                    x[j] += row[i] * minus_one_if(minus_at<DIM / ODD>(hadamard, i, metal::min(first + j, DIM - 1)));
                }
            }
        }
        for (int j = 0; j < N; j++) {
            const int c = metal::min(first + j, DIM - 1);
            x[j] *= metal::rsqrt(float(DIM)) * minus_one_if(flips[c / 32] >> (c % 32) & 1);
        }
    }
};
// --- body ---
    const RotatedBasis<DIM, VALUE_ODD> basis{value_flips, value_hadamard};
