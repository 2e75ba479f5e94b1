#pragma once
// SIMD-group functions: every lane hands its value to the runtime, waits for the others, and reads what it needs.

namespace msl {

// Reads the runtime's memory, not the kernel's: not to be checked.
#define MSL_UNCHECKED inline __attribute__((no_sanitize("thread", "undefined")))

template <class T>
MSL_UNCHECKED T value_of(const msl_exchange* e, unsigned lane) {
  T value;
  __builtin_memcpy(&value, e->value[lane], sizeof value);
  return value;
}

MSL_UNCHECKED unsigned lane_of(const msl_exchange* e) { return e->lane; }
MSL_UNCHECKED unsigned mask_of(const msl_exchange* e) { return e->mask; }

// A lane that does not take part gives an undefined value on Metal: all bits set here, and a finding.
template <class T>
MSL_UNCHECKED T read_lane(const msl_exchange* e, unsigned lane) {
  if (lane < 32 && (e->mask >> lane & 1)) return value_of<T>(e, lane);
  msl_inactive_lane(lane);
  T undefined;
  __builtin_memset(&undefined, 0xff, sizeof undefined);
  return undefined;
}

// A butterfly over the lanes that take part; the first lane to come computes it for all.
template <class T, class F>
MSL_UNCHECKED T reduce(msl_exchange* e, F combine) {
  T result;
  if (!e->reduced) {
    T values[32];
    unsigned mask = e->mask;
    for (unsigned i = 0; i < 32; i++) values[i] = value_of<T>(e, i);
    for (unsigned half_width = 16; half_width; half_width /= 2) {
      for (unsigned i = 0; i < half_width; i++) {
        const bool low = mask >> i & 1, high = mask >> (i + half_width) & 1;
        if (low && high) values[i] = combine(values[i], values[i + half_width]);
        else if (high) values[i] = values[i + half_width];
        mask |= (unsigned)high << i;
      }
    }
    __builtin_memcpy(e->result, &values[0], sizeof(T));
    e->reduced = true;
  }
  __builtin_memcpy(&result, e->result, sizeof result);
  return result;
}

// Combines the lanes before this one, and this one too if `inclusive`.
template <class T, class F>
MSL_UNCHECKED T scan(const msl_exchange* e, T identity, bool inclusive, F combine) {
  T result = identity;
  for (unsigned i = 0; i < e->lane + inclusive; i++) {
    if (e->mask >> i & 1) result = combine(result, value_of<T>(e, i));
  }
  return result;
}

MSL_UNCHECKED unsigned ballot(const msl_exchange* e) {
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; i++) votes |= (unsigned)(e->mask >> i & 1 && e->value[i][0]) << i;
  return votes;
}

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(name, expression)                                      \
  template <class T>                                                         \
  METAL_FUNC T name(T value, MSL_HERE) {                                     \
    return msl::reduce<T>(msl_simd(&value, sizeof value, #name, file, line), \
                          [](T a, T b) -> T { return expression; });         \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_and, (a & b))
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION

#define MSL_SCAN(name, identity, inclusive, expression)                                            \
  template <class T>                                                                               \
  METAL_FUNC T name(T value, MSL_HERE) {                                                           \
    return msl::scan<T>(msl_simd(&value, sizeof value, #name, file, line), T(identity), inclusive, \
                        [](T a, T b) -> T { return expression; });                                 \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 0, true, a + b)
MSL_SCAN(simd_prefix_exclusive_sum, 0, false, a + b)
MSL_SCAN(simd_prefix_inclusive_product, 1, true, a* b)
MSL_SCAN(simd_prefix_exclusive_product, 1, false, a* b)
#undef MSL_SCAN

// `source` is the lane to read, from `lane` (this one) and `n` (the argument).
#define MSL_SHUFFLE(name, source)                                              \
  template <class T>                                                           \
  METAL_FUNC T name(T value, ushort n, MSL_HERE) {                             \
    const msl_exchange* e = msl_simd(&value, sizeof value, #name, file, line); \
    const unsigned lane = msl::lane_of(e);                                     \
    return msl::read_lane<T>(e, source);                                       \
  }
MSL_SHUFFLE(simd_shuffle, ((void)lane, n))
MSL_SHUFFLE(simd_broadcast, ((void)lane, n))
MSL_SHUFFLE(simd_shuffle_xor, lane ^ n)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + n) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane - n) & 31)
// At the end of the simdgroup these two keep the lane's own value.
MSL_SHUFFLE(simd_shuffle_down, lane + n < 32 ? lane + n : lane)
MSL_SHUFFLE(simd_shuffle_up, lane >= n ? lane - n : lane)

template <class T>
METAL_FUNC T simd_broadcast_first(T value, MSL_HERE) {
  const msl_exchange* e = msl_simd(&value, sizeof value, "simd_broadcast_first", file, line);
  return msl::read_lane<T>(e, (unsigned)__builtin_ctz(msl::mask_of(e)));
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T value, T filling, ushort n, MSL_HERE) {
  struct Pair {
    T value, filling;
  } pair{value, filling};
  const msl_exchange* e = msl_simd(&pair, sizeof pair, "simd_shuffle_and_fill_up", file, line);
  const unsigned lane = msl::lane_of(e);
  return lane >= n ? msl::read_lane<Pair>(e, lane - n).value : msl::read_lane<Pair>(e, 32 + lane - n).filling;
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_down(T value, T filling, ushort n, MSL_HERE) {
  struct Pair {
    T value, filling;
  } pair{value, filling};
  const msl_exchange* e = msl_simd(&pair, sizeof pair, "simd_shuffle_and_fill_down", file, line);
  const unsigned lane = msl::lane_of(e);
  return lane + n < 32 ? msl::read_lane<Pair>(e, lane + n).value : msl::read_lane<Pair>(e, lane + n - 32).filling;
}

struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  explicit constexpr operator vote_t() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool vote, MSL_HERE) {
  return simd_vote(msl::ballot(msl_simd(&vote, 1, "simd_ballot", file, line)));
}
METAL_FUNC simd_vote simd_active_threads_mask(MSL_HERE) {
  const bool vote = true;
  return simd_vote(msl::mask_of(msl_simd(&vote, 1, "simd_active_threads_mask", file, line)));
}
METAL_FUNC bool simd_any(bool vote, MSL_HERE) { return msl::ballot(msl_simd(&vote, 1, "simd_any", file, line)) != 0; }
METAL_FUNC bool simd_all(bool vote, MSL_HERE) {
  const msl_exchange* e = msl_simd(&vote, 1, "simd_all", file, line);
  return msl::ballot(e) == msl::mask_of(e);
}
METAL_FUNC bool simd_is_first(MSL_HERE) {
  const bool vote = true;
  const msl_exchange* e = msl_simd(&vote, 1, "simd_is_first", file, line);
  return (unsigned)__builtin_ctz(msl::mask_of(e)) == msl::lane_of(e);
}

}  // namespace metal
