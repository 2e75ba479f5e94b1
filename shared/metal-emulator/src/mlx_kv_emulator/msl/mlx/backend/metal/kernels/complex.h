#pragma once
// MLX's complex number without its address-space qualified members, which clang's C++ refuses.
#include <metal_stdlib>

using namespace metal;

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
  template <typename U, typename = enable_if_t<is_convertible_v<U, float>>>
  constexpr complex_t(U re) : real((T)re), imag(0) {}
  constexpr operator float() const { return (float)real; }
};
typedef complex_t<float> complex64_t;

template <typename T>
static constexpr bool is_complex_v = false;
template <typename T>
static constexpr bool is_complex_v<complex_t<T>> = true;

#define MLX_COMPLEX(result, op, ...)                             \
  template <typename T>                                          \
  constexpr result operator op(complex_t<T> a, complex_t<T> b) { \
    return __VA_ARGS__;                                          \
  }
MLX_COMPLEX(bool, ==, a.real == b.real && a.imag == b.imag)
MLX_COMPLEX(bool, !=, !(a == b))
MLX_COMPLEX(bool, <, a.real < b.real || (a.real == b.real && a.imag < b.imag))
MLX_COMPLEX(bool, >, b < a)
MLX_COMPLEX(bool, <=, !(b < a))
MLX_COMPLEX(bool, >=, !(a < b))
MLX_COMPLEX(complex_t<T>, +, {a.real + b.real, a.imag + b.imag})
MLX_COMPLEX(complex_t<T>, -, {a.real - b.real, a.imag - b.imag})
MLX_COMPLEX(complex_t<T>, *, {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real})
#undef MLX_COMPLEX

template <typename T>
constexpr complex_t<T> operator-(complex_t<T> a) {
  return {-a.real, -a.imag};
}
template <typename T>
constexpr complex_t<T> operator/(complex_t<T> a, complex_t<T> b) {
  const T d = b.real * b.real + b.imag * b.imag;
  return {(a.real * b.real + a.imag * b.imag) / d, (a.imag * b.real - a.real * b.imag) / d};
}
