// simdgroup matrices of 8x8 on CUDA's mma, for kernels that name them. The renumbered lanes of prelude.cuh make a Metal
// fragment (two neighbouring columns of a row in each lane) the accumulator of mma; a right operand that is not given by columns
// is transposed in registers.
namespace metal {
template <typename T> struct matrix_pair;
template <> struct matrix_pair<float> { using type = float2; };
template <> struct matrix_pair<half> { using type = half2; };
template <> struct matrix_pair<bfloat> { using type = bfloat2; };

template <typename T, int ROWS, int COLUMNS> struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "only 8x8 matrices exist");
  typename matrix_pair<T>::type elements;
  METAL_FUNC typename matrix_pair<T>::type& thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T> METAL_FUNC uint matrix_bits(simdgroup_matrix<T, 8, 8> m) { return as_type<uint>(m.elements); }
template <typename T> METAL_FUNC simdgroup_matrix<T, 8, 8> transposed(simdgroup_matrix<T, 8, 8> m) {
  uint y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(matrix_bits(m)));
  simdgroup_matrix<T, 8, 8> t;
  t.elements = as_type<typename matrix_pair<T>::type>(y);
  return t;
}
template <typename T> METAL_FUNC constexpr bool reads_right_by_columns() { return sizeof(T) == 2; }
template <typename T, int ROWS, int COLUMNS> METAL_FUNC simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, ROWS, COLUMNS> m;
  m.elements.x = x;
  m.elements.y = x;
  return m;
}

// d = a b + c: the upper 8 rows of a 16x8x8 product, whose lower rows are zero.
#define MLX_KV_MATRIX_PRODUCT(T, NAME)                                                                                  \
  METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_matrix<T, 8, 8> a,                     \
                                                simdgroup_matrix<T, 8, 8> b, simdgroup_float8x8 c) {                    \
    float zero0 = 0, zero1 = 0;                                                                                         \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%2,%3};"       \
        : "=f"(d.elements.x), "=f"(d.elements.y), "+f"(zero0), "+f"(zero1)                                              \
        : "r"(matrix_bits(a)), "r"(0), "r"(matrix_bits(transposed(b))), "f"(c.elements.x), "f"(c.elements.y));                  \
  }                                                                                                                     \
  /* [c0; c1] += [a00 a01; a10 a11] [b0; b1], four 8x8x8 products in one instruction; b0 and b1 as the hardware wants them */    \
  METAL_FUNC void multiply_accumulate_16x8x16_as_read(                                                                  \
      simdgroup_float8x8& c0, simdgroup_float8x8& c1, simdgroup_matrix<T, 8, 8> a00, simdgroup_matrix<T, 8, 8> a01,     \
      simdgroup_matrix<T, 8, 8> a10, simdgroup_matrix<T, 8, 8> a11, simdgroup_matrix<T, 8, 8> b0,                       \
      simdgroup_matrix<T, 8, 8> b1) {                                                                                   \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "           \
        "{%0,%1,%2,%3};"                                                                                                \
        : "+f"(c0.elements.x), "+f"(c0.elements.y), "+f"(c1.elements.x), "+f"(c1.elements.y)                            \
        : "r"(matrix_bits(a00)), "r"(matrix_bits(a10)), "r"(matrix_bits(a01)), "r"(matrix_bits(a11)),                   \
          "r"(matrix_bits(b0)), "r"(matrix_bits(b1)));                                                                  \
  }                                                                                                                     \
  METAL_FUNC void multiply_accumulate_16x8x16(                                                                          \
      simdgroup_float8x8& c0, simdgroup_float8x8& c1, simdgroup_matrix<T, 8, 8> a00, simdgroup_matrix<T, 8, 8> a01,     \
      simdgroup_matrix<T, 8, 8> a10, simdgroup_matrix<T, 8, 8> a11, simdgroup_matrix<T, 8, 8> b0,                       \
      simdgroup_matrix<T, 8, 8> b1) {                                                                                   \
    multiply_accumulate_16x8x16_as_read(c0, c1, a00, a01, a10, a11, transposed(b0), transposed(b1));                    \
  }
MLX_KV_MATRIX_PRODUCT(half, "f16")
MLX_KV_MATRIX_PRODUCT(bfloat, "bf16")
}  // namespace metal
using metal::simdgroup_matrix; using metal::simdgroup_float8x8; using metal::simdgroup_half8x8;
using metal::simdgroup_bfloat8x8; using metal::make_filled_simdgroup_matrix; using metal::simdgroup_multiply_accumulate;
using metal::multiply_accumulate_16x8x16;
using metal::multiply_accumulate_16x8x16_as_read; using metal::reads_right_by_columns;
