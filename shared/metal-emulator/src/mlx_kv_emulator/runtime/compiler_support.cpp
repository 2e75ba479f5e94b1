// Pieces of compiler-rt that an older system library lacks.
#include <stdint.h>
#include <string.h>

// float to bfloat16, rounding to nearest even.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t rounded = nan ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  __bf16 result;
  memcpy(&result, &rounded, 2);
  return result;
}
