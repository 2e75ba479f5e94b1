#pragma once
// Scalar types and the constants that MSL predefines.

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

constexpr half operator""h(long double x) { return (half)(float)x; }
constexpr half operator""h(unsigned long long x) { return (half)(float)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955078125e-07f
#define MAXFLOAT FLT_MAX
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)0.0009765625f)
#define M_PI_F 3.14159274101257f
#define M_E_F 2.71828174591064f
#define M_LN2_F 0.693147180559945f
#define M_LOG2E_F 1.44269502162933f
#define M_SQRT2_F 1.41421354f
#define M_SQRT1_2_F 0.707106769f
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define ULONG_MAX 18446744073709551615ul

namespace metal {
using ::bfloat;
using ::half;
using ::size_t;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
}  // namespace metal
