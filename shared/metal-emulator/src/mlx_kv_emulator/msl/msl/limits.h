#pragma once

namespace metal {

template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, least, greatest, bits) \
  template <>                                        \
  struct numeric_limits<T> {                         \
    static constexpr bool is_integer = true;         \
    static constexpr int digits = bits;              \
    static constexpr T min() { return least; }       \
    static constexpr T lowest() { return least; }    \
    static constexpr T max() { return greatest; }    \
  };
MSL_INTEGER_LIMITS(bool, false, true, 1)
MSL_INTEGER_LIMITS(char, -128, 127, 7)
MSL_INTEGER_LIMITS(signed char, -128, 127, 7)
MSL_INTEGER_LIMITS(uchar, 0, 255, 8)
MSL_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX, 15)
MSL_INTEGER_LIMITS(ushort, 0, USHRT_MAX, 16)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX, 31)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX, 32)
MSL_INTEGER_LIMITS(long, -LONG_MAX - 1, LONG_MAX, 63)
MSL_INTEGER_LIMITS(ulong, 0, ULONG_MAX, 64)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, smallest_normal, greatest, bits, step)   \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr bool is_integer = false;                        \
    static constexpr int digits = bits;                              \
    static constexpr T min() { return (T)smallest_normal; }          \
    static constexpr T lowest() { return T(-greatest); }             \
    static constexpr T max() { return (T)greatest; }                 \
    static constexpr T epsilon() { return (T)step; }                 \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MSL_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 24, 1.1920928955078125e-07f)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 11, 0.0009765625f)
MSL_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.38953139e38f, 8, 0.0078125f)
#undef MSL_FLOAT_LIMITS

}  // namespace metal
