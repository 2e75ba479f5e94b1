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
