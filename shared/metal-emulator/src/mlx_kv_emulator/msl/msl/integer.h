#pragma once

namespace metal {

#define MSL_INTEGER(T)                                           \
  METAL_FUNC constexpr T max(T a, T b) { return a < b ? b : a; } \
  METAL_FUNC constexpr T min(T a, T b) { return b < a ? b : a; } \
  METAL_FUNC constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
MSL_INTEGER(char)
MSL_INTEGER(signed char)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
#undef MSL_INTEGER

#define MSL_ABS(T) \
  METAL_FUNC constexpr T abs(T x) { return x < 0 ? -x : x; }
MSL_ABS(char)
MSL_ABS(short)
MSL_ABS(int)
MSL_ABS(long)
#undef MSL_ABS

template <class T>
METAL_FUNC T popcount(T x) {
  static_assert(is_integral_v<T>, "popcount takes an integer");
  constexpr ulong mask = sizeof(T) == 8 ? ~0ul : (1ul << (sizeof(T) * 8 & 63)) - 1;
  return (T)__builtin_popcountl((ulong)x & mask);
}

METAL_FUNC uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
METAL_FUNC uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
METAL_FUNC int clz(int x) { return (int)clz((uint)x); }
METAL_FUNC int ctz(int x) { return (int)ctz((uint)x); }
METAL_FUNC ulong clz(ulong x) { return x ? (ulong)__builtin_clzl(x) : 64ul; }
METAL_FUNC ulong ctz(ulong x) { return x ? (ulong)__builtin_ctzl(x) : 64ul; }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
METAL_FUNC int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }

METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) {
  if (bits == 0) return 0;
  return bits >= 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1);
}
METAL_FUNC uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  const uint mask = (bits >= 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}
template <class T>
METAL_FUNC T rotate(T x, T n) {
  constexpr T width = sizeof(T) * 8;
  n &= width - 1;
  return n ? (T)((x << n) | (x >> (width - n))) : x;
}

}  // namespace metal
