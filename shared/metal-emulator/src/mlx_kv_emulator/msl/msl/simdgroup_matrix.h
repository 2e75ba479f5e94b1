#pragma once
// 8x8 matrices spread over a simdgroup: a lane holds two neighbouring elements of one row, in the layout that MLX's own
// kernels rely on (steel/gemm/mma.h in its sources).

namespace msl {

struct Element {
  unsigned row, column;
};

// The first of the two elements that a lane holds.
MSL_UNCHECKED Element element_of(unsigned lane) {
  const unsigned quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}

template <class A, class B>
struct Operands {
  metal::vec<A, 2> a;
  metal::vec<B, 2> b;
};

// Elements (row, column) and (row, column + 1) of A B, in float.
template <class A, class B>
MSL_UNCHECKED metal::vec<float, 2> product(const msl_exchange* e, Element at, metal::vec<float, 2> sum) {
  float left[8], right[8][2];
  for (unsigned lane = 0; lane < 32; lane++) {
    const Element held = element_of(lane);
    const Operands<A, B> o = value_of<Operands<A, B>>(e, lane);
    for (unsigned k = 0; k < 2; k++) {
      if (held.row == at.row) left[held.column + k] = (float)o.a[k];
      if (held.column == at.column) right[held.row][k] = (float)o.b[k];
    }
  }
  for (unsigned j = 0; j < 8; j++) {
    for (unsigned k = 0; k < 2; k++) sum[k] += left[j] * right[j][k];
  }
  return sum;
}

}  // namespace msl

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;

  METAL_FUNC simdgroup_matrix() {}
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    const msl::Element at = msl::element_of(msl_lane());
    elements[0] = at.row == at.column ? diagonal : T(0);
    elements[1] = at.row == at.column + 1 ? diagonal : T(0);
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Rows = 8, int Columns = 8>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

template <class T, class P>
METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, P* source, ulong elements_per_row = 8,
                               vec<ulong, 2> origin = {0, 0}, bool transpose = false, MSL_HERE) {
  const char nothing = 0;
  msl_simd(&nothing, 1, "simdgroup_load", file, line);
  const msl::Element at = msl::element_of(msl_lane());
  for (unsigned k = 0; k < 2; k++) {
    const ulong row = transpose ? at.column + k : at.row, column = transpose ? at.row : at.column + k;
    m.elements[k] = source[(row + origin[1]) * elements_per_row + column + origin[0]];
  }
}

template <class T, class P>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P* target, ulong elements_per_row = 8,
                                vec<ulong, 2> origin = {0, 0}, bool transpose = false, MSL_HERE) {
  const char nothing = 0;
  msl_simd(&nothing, 1, "simdgroup_store", file, line);
  const msl::Element at = msl::element_of(msl_lane());
  for (unsigned k = 0; k < 2; k++) {
    const ulong row = transpose ? at.column + k : at.row, column = transpose ? at.row : at.column + k;
    target[(row + origin[1]) * elements_per_row + column + origin[0]] = m.elements[k];
  }
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_HERE) {
  const msl::Operands<A, B> operands{a.elements, b.elements};
  const msl_exchange* e = msl_simd(&operands, sizeof operands, "simdgroup_multiply_accumulate", file, line);
  const vec<float, 2> sum = msl::product<A, B>(e, msl::element_of(msl_lane()), msl::make<float, 2>(c.elements));
  d.elements = msl::make<D, 2>(sum);
}

template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, MSL_HERE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D>(D(0)), file, line);
}

}  // namespace metal
