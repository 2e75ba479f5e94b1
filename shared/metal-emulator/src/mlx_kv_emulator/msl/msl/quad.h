#pragma once
// Quadgroup functions: four lanes of a simdgroup.

namespace metal {

#define MSL_QUAD_SHUFFLE(name, source)                                         \
  template <class T>                                                           \
  METAL_FUNC T name(T value, ushort n, MSL_HERE) {                             \
    const msl_exchange* e = msl_simd(&value, sizeof value, #name, file, line); \
    const unsigned lane = msl::lane_of(e), quad = lane & ~3u;                  \
    return msl::read_lane<T>(e, source);                                       \
  }
MSL_QUAD_SHUFFLE(quad_shuffle, quad + (n & 3))
MSL_QUAD_SHUFFLE(quad_broadcast, quad + (n & 3))
MSL_QUAD_SHUFFLE(quad_shuffle_xor, ((void)quad, lane ^ (n & 3)))
MSL_QUAD_SHUFFLE(quad_shuffle_down, lane - quad + n < 4 ? lane + n : lane)
MSL_QUAD_SHUFFLE(quad_shuffle_up, lane - quad >= n ? lane - n : lane)
#undef MSL_QUAD_SHUFFLE

#define MSL_QUAD_REDUCTION(name, combine)                                           \
  template <class T>                                                                \
  METAL_FUNC T name(T value, MSL_HERE) {                                            \
    const msl_exchange* e = msl_simd(&value, sizeof value, #name, file, line);      \
    const unsigned quad = msl::lane_of(e) & ~3u;                                    \
    const T a = msl::read_lane<T>(e, quad), b = msl::read_lane<T>(e, quad + 1);     \
    const T c = msl::read_lane<T>(e, quad + 2), d = msl::read_lane<T>(e, quad + 3); \
    return combine(combine(a, b), combine(c, d));                                   \
  }
#define MSL_ADD(a, b) ((a) + (b))
MSL_QUAD_REDUCTION(quad_sum, MSL_ADD)
MSL_QUAD_REDUCTION(quad_max, max)
MSL_QUAD_REDUCTION(quad_min, min)
#undef MSL_ADD
#undef MSL_QUAD_REDUCTION

}  // namespace metal
