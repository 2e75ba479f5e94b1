#pragma once
// Vector types are clang's. Constructors such as float4(a, b.xy, c) do not exist on those: macros of the same name
// build them.

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, int N>
struct packed_vec {
  T elements[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; i++) elements[i] = v[i];
  }
  operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v[i] = elements[i];
    return v;
  }
  T operator[](int i) const { return elements[i]; }
  T& operator[](int i) { return elements[i]; }
};
}  // namespace metal

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4))); \
  namespace metal {                                   \
  using packed_##T##2 = packed_vec<T, 2>;             \
  using packed_##T##3 = packed_vec<T, 3>;             \
  using packed_##T##4 = packed_vec<T, 4>;             \
  }
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

namespace msl {

template <class X>
struct shape {
  static constexpr int size = 1;
  static constexpr bool is_vector = false;
};
template <class X, int N>
struct shape<metal::vec<X, N>> {
  static constexpr int size = N;
  static constexpr bool is_vector = true;
};

template <class T, class V, class X>
METAL_FUNC void append(V& result, int& filled, X x) {
  if constexpr (shape<X>::is_vector) {
    for (int i = 0; i < shape<X>::size; i++) result[filled++] = (T)x[i];
  } else {
    result[filled++] = (T)x;
  }
}

template <class T, int N>
METAL_FUNC metal::vec<T, N> make() {
  return metal::vec<T, N>{};
}
template <class T, int N, class X>
METAL_FUNC metal::vec<T, N> make(X x) {
  metal::vec<T, N> result = {};
  if constexpr (shape<X>::is_vector) {
    static_assert(shape<X>::size == N, "a vector of another size");
    for (int i = 0; i < N; i++) result[i] = (T)x[i];
  } else {
    for (int i = 0; i < N; i++) result[i] = (T)x;
  }
  return result;
}
template <class T, int N, class X, class Y, class... More>
METAL_FUNC metal::vec<T, N> make(X x, Y y, More... more) {
  static_assert(shape<X>::size + shape<Y>::size + (shape<More>::size + ... + 0) == N, "wrong number of components");
  metal::vec<T, N> result = {};
  int filled = 0;
  append<T>(result, filled, x);
  append<T>(result, filled, y);
  (append<T>(result, filled, more), ...);
  return result;
}

}  // namespace msl

#define bool2(...) ::msl::make<bool, 2>(__VA_ARGS__)
#define bool3(...) ::msl::make<bool, 3>(__VA_ARGS__)
#define bool4(...) ::msl::make<bool, 4>(__VA_ARGS__)
#define char2(...) ::msl::make<char, 2>(__VA_ARGS__)
#define char3(...) ::msl::make<char, 3>(__VA_ARGS__)
#define char4(...) ::msl::make<char, 4>(__VA_ARGS__)
#define uchar2(...) ::msl::make<uchar, 2>(__VA_ARGS__)
#define uchar3(...) ::msl::make<uchar, 3>(__VA_ARGS__)
#define uchar4(...) ::msl::make<uchar, 4>(__VA_ARGS__)
#define short2(...) ::msl::make<short, 2>(__VA_ARGS__)
#define short3(...) ::msl::make<short, 3>(__VA_ARGS__)
#define short4(...) ::msl::make<short, 4>(__VA_ARGS__)
#define ushort2(...) ::msl::make<ushort, 2>(__VA_ARGS__)
#define ushort3(...) ::msl::make<ushort, 3>(__VA_ARGS__)
#define ushort4(...) ::msl::make<ushort, 4>(__VA_ARGS__)
#define int2(...) ::msl::make<int, 2>(__VA_ARGS__)
#define int3(...) ::msl::make<int, 3>(__VA_ARGS__)
#define int4(...) ::msl::make<int, 4>(__VA_ARGS__)
#define uint2(...) ::msl::make<uint, 2>(__VA_ARGS__)
#define uint3(...) ::msl::make<uint, 3>(__VA_ARGS__)
#define uint4(...) ::msl::make<uint, 4>(__VA_ARGS__)
#define long2(...) ::msl::make<long, 2>(__VA_ARGS__)
#define long3(...) ::msl::make<long, 3>(__VA_ARGS__)
#define long4(...) ::msl::make<long, 4>(__VA_ARGS__)
#define ulong2(...) ::msl::make<ulong, 2>(__VA_ARGS__)
#define ulong3(...) ::msl::make<ulong, 3>(__VA_ARGS__)
#define ulong4(...) ::msl::make<ulong, 4>(__VA_ARGS__)
#define half2(...) ::msl::make<half, 2>(__VA_ARGS__)
#define half3(...) ::msl::make<half, 3>(__VA_ARGS__)
#define half4(...) ::msl::make<half, 4>(__VA_ARGS__)
#define bfloat2(...) ::msl::make<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) ::msl::make<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) ::msl::make<bfloat, 4>(__VA_ARGS__)
#define float2(...) ::msl::make<float, 2>(__VA_ARGS__)
#define float3(...) ::msl::make<float, 3>(__VA_ARGS__)
#define float4(...) ::msl::make<float, 4>(__VA_ARGS__)
