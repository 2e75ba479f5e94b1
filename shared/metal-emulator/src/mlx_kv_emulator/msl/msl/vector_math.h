#pragma once
// The functions of math.h and integer.h, component by component.

namespace metal {

#define MSL_VECTOR_UNARY(name, expression)            \
  template <class T, int N>                           \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {            \
    vec<T, N> r;                                      \
    for (int i = 0; i < N; i++) r[i] = name((T)v[i]); \
    return r;                                         \
  }
#define MSL_VECTOR_BINARY(name, expression)                    \
  template <class T, int N>                                    \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {        \
    vec<T, N> r;                                               \
    for (int i = 0; i < N; i++) r[i] = name((T)a[i], (T)b[i]); \
    return r;                                                  \
  }
#define MSL_VECTOR_TERNARY(name)                                        \
  template <class T, int N>                                             \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) {    \
    vec<T, N> r;                                                        \
    for (int i = 0; i < N; i++) r[i] = name((T)a[i], (T)b[i], (T)c[i]); \
    return r;                                                           \
  }
MSL_FUNCTIONS(MSL_VECTOR_UNARY, MSL_VECTOR_BINARY)
MSL_VECTOR_TERNARY(clamp)
MSL_VECTOR_TERNARY(fma)
MSL_VECTOR_TERNARY(mix)

template <class T, int N, class M>
METAL_FUNC vec<T, N> select(vec<T, N> if_false, vec<T, N> if_true, vec<M, N> condition) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = condition[i] ? if_true[i] : if_false[i];
  return r;
}
template <class M, int N>
METAL_FUNC bool any(vec<M, N> condition) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= (bool)condition[i];
  return r;
}
template <class M, int N>
METAL_FUNC bool all(vec<M, N> condition) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= (bool)condition[i];
  return r;
}

template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
METAL_FUNC T length_squared(vec<T, N> v) {
  return dot(v, v);
}
template <class T, int N>
METAL_FUNC T length(vec<T, N> v) {
  return sqrt(dot(v, v));
}
template <class T, int N>
METAL_FUNC T distance(vec<T, N> a, vec<T, N> b) {
  return length(a - b);
}
template <class T, int N>
METAL_FUNC vec<T, N> normalize(vec<T, N> v) {
  return v * rsqrt(dot(v, v));
}

}  // namespace metal
