// For kernels with 8x8 matrices: one wider product, which CUDA has as a single instruction (cuda/matrices.cuh).
#include <metal_simdgroup_matrix>

// [c0; c1] += [a00 a01; a10 a11] [b0; b1]
template <typename T>
METAL_FUNC void multiply_accumulate_16x8x16(
    thread simdgroup_float8x8& c0, thread simdgroup_float8x8& c1, simdgroup_matrix<T, 8, 8> a00,
    simdgroup_matrix<T, 8, 8> a01, simdgroup_matrix<T, 8, 8> a10, simdgroup_matrix<T, 8, 8> a11,
    simdgroup_matrix<T, 8, 8> b0, simdgroup_matrix<T, 8, 8> b1) {
    simdgroup_multiply_accumulate(c0, a00, b0, c0);
    simdgroup_multiply_accumulate(c0, a01, b1, c0);
    simdgroup_multiply_accumulate(c1, a10, b0, c1);
    simdgroup_multiply_accumulate(c1, a11, b1, c1);
}

// The same with a right operand read as the hardware wants it: where reads_right_by_columns() says so, a lane that has row r and
// columns c, c + 1 of a matrix has b[c][r], b[c + 1][r] instead. That saves CUDA an instruction for each of b0 and b1.
template <typename T> METAL_FUNC constexpr bool reads_right_by_columns() { return false; }
template <typename T>
METAL_FUNC void multiply_accumulate_16x8x16_as_read(
    thread simdgroup_float8x8& c0, thread simdgroup_float8x8& c1, simdgroup_matrix<T, 8, 8> a00,
    simdgroup_matrix<T, 8, 8> a01, simdgroup_matrix<T, 8, 8> a10, simdgroup_matrix<T, 8, 8> a11,
    simdgroup_matrix<T, 8, 8> b0, simdgroup_matrix<T, 8, 8> b1) {
    multiply_accumulate_16x8x16(c0, c1, a00, a01, a10, a11, b0, b1);
}
