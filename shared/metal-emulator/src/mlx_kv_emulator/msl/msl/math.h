#pragma once
// Scalar mathematics. half and bfloat are computed in float and rounded once.

namespace metal {

template <class To, class From>
METAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of equal size");
  return __builtin_bit_cast(To, value);
}

#define MSL_UNARY(name, expression)                     \
  METAL_FUNC float name(float x) { return expression; } \
  METAL_FUNC half name(half value) {                    \
    float x = value;                                    \
    return (half)(expression);                          \
  }                                                     \
  METAL_FUNC bfloat name(bfloat value) {                \
    float x = value;                                    \
    return (bfloat)(expression);                        \
  }

#define MSL_BINARY(name, expression)                             \
  METAL_FUNC float name(float x, float y) { return expression; } \
  METAL_FUNC half name(half first, half second) {                \
    float x = first, y = second;                                 \
    return (half)(expression);                                   \
  }                                                              \
  METAL_FUNC bfloat name(bfloat first, bfloat second) {          \
    float x = first, y = second;                                 \
    return (bfloat)(expression);                                 \
  }

#define MSL_FUNCTIONS(UNARY, BINARY)                            \
  UNARY(exp, __builtin_expf(x))                                 \
  UNARY(exp2, __builtin_exp2f(x))                               \
  UNARY(exp10, __builtin_powf(10.0f, x))                        \
  UNARY(log, __builtin_logf(x))                                 \
  UNARY(log2, __builtin_log2f(x))                               \
  UNARY(log10, __builtin_log10f(x))                             \
  UNARY(sqrt, __builtin_sqrtf(x))                               \
  UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                       \
  UNARY(sin, __builtin_sinf(x))                                 \
  UNARY(cos, __builtin_cosf(x))                                 \
  UNARY(tan, __builtin_tanf(x))                                 \
  UNARY(asin, __builtin_asinf(x))                               \
  UNARY(acos, __builtin_acosf(x))                               \
  UNARY(atan, __builtin_atanf(x))                               \
  UNARY(sinh, __builtin_sinhf(x))                               \
  UNARY(cosh, __builtin_coshf(x))                               \
  UNARY(tanh, __builtin_tanhf(x))                               \
  UNARY(asinh, __builtin_asinhf(x))                             \
  UNARY(acosh, __builtin_acoshf(x))                             \
  UNARY(atanh, __builtin_atanhf(x))                             \
  UNARY(ceil, __builtin_ceilf(x))                               \
  UNARY(floor, __builtin_floorf(x))                             \
  UNARY(rint, __builtin_roundevenf(x))                          \
  UNARY(round, __builtin_roundf(x))                             \
  UNARY(trunc, __builtin_truncf(x))                             \
  UNARY(fabs, __builtin_fabsf(x))                               \
  UNARY(abs, __builtin_fabsf(x))                                \
  UNARY(fract, x - __builtin_floorf(x))                         \
  UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f) \
  UNARY(saturate, x > 0 ? (x < 1 ? x : 1.0f) : 0.0f)            \
  BINARY(pow, __builtin_powf(x, y))                             \
  BINARY(powr, __builtin_powf(x, y))                            \
  BINARY(fmod, __builtin_fmodf(x, y))                           \
  BINARY(atan2, __builtin_atan2f(x, y))                         \
  BINARY(copysign, __builtin_copysignf(x, y))                   \
  BINARY(fmax, __builtin_fmaxf(x, y))                           \
  BINARY(fmin, __builtin_fminf(x, y))                           \
  BINARY(max, __builtin_fmaxf(x, y))                            \
  BINARY(min, __builtin_fminf(x, y))                            \
  BINARY(step, y < x ? 0.0f : 1.0f)                             \
  BINARY(nextafter, __builtin_nextafterf(x, y))
MSL_FUNCTIONS(MSL_UNARY, MSL_BINARY)

#define MSL_FLOATING(T)                                                                       \
  METAL_FUNC T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }                 \
  METAL_FUNC T fma(T a, T b, T c) { return (T)__builtin_fmaf((float)a, (float)b, (float)c); } \
  METAL_FUNC T mix(T a, T b, T t) { return a + (b - a) * t; }                                 \
  METAL_FUNC T ldexp(T x, int exponent) { return (T)__builtin_ldexpf((float)x, exponent); }   \
  METAL_FUNC bool isnan(T x) { return __builtin_isnan((float)x); }                            \
  METAL_FUNC bool isinf(T x) { return __builtin_isinf((float)x); }                            \
  METAL_FUNC bool isfinite(T x) { return __builtin_isfinite((float)x); }                      \
  METAL_FUNC bool signbit(T x) { return __builtin_signbit((float)x); }
MSL_FLOATING(float)
MSL_FLOATING(half)
MSL_FLOATING(bfloat)
#undef MSL_FLOATING

template <class T>
METAL_FUNC T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}

// Everything is computed as Metal's precise variant; only the names differ.
namespace fast {
using namespace metal;
}
namespace precise {
using namespace metal;
}

}  // namespace metal
