// The randomised Hadamard rotation of a row of DIM = ODD * POWER channels, of which the lanes of a simdgroup have N each, side by side
// (rotation.py): signs, which `flips` has as bits, and the transform.

// Not a condition, of which a compiler could make a branch with shuffles on both sides.
METAL_FUNC float minus_one_if(uint bit) { return as_type<float>(0x3f800000u | bit << 31); }

// The transform of 32 * N channels, a power of two.
template <int N> METAL_FUNC void add_and_subtract(int first, thread float (&x)[N]) {
    for (int half_size = 1; half_size < N; half_size *= 2) {
        for (int pair = 0; pair < N / 2; pair++) {
            const int low = pair / half_size * 2 * half_size + pair % half_size, high = low + half_size;
            const float a = x[low], b = x[high];
            x[low] = a + b;
            x[high] = a - b;
        }
    }
    for (int mask = 1; mask < 32; mask *= 2) {
        const float sign = minus_one_if(uint(first) / (N * mask) % 2);
        for (int j = 0; j < N; j++) x[j] = metal::fma(sign, x[j], simd_shuffle_xor(x[j], ushort(mask)));
    }
}

// Whether the transform has -1 in row i and column c; bit b of hadamard[a] says so of the odd part's row a and column b.
template <int POWER> METAL_FUNC uint minus_at(const device uint* hadamard, int i, int c) {
    const uint parity = 0x6996u >> (i % POWER & c % POWER);  // of the bits of a number below 16
    return (hadamard[i / POWER] >> (c / POWER) ^ parity) & 1;
}
