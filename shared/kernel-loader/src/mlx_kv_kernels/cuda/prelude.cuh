// What a kernel body finds on Metal, for CUDA: this text stands before the helpers of a `.metal` file in mx.fast.cuda_kernel.
// Only what kernels of this project may use; the README lists it. The lanes of a warp are the lanes of a simdgroup.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- qualifiers (CUDA's own __device__ is a macro over the word `device`, so the attribute is spelled otherwise)
#undef __device__
#define device
#define constant
#define thread
#define threadgroup __shared__
#define METAL_FUNC __attribute__((__device__)) __forceinline__

// ---- types (half and half2 come from cuda_fp16.h, float2 to uint4 from CUDA itself)
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using bfloat = __nv_bfloat16;
using float16_t = __half;
using bfloat16_t = __nv_bfloat16;
using bfloat2 = __nv_bfloat162;
struct alignas(8) half4 { half x, y, z, w; };
struct alignas(8) bfloat4 { bfloat x, y, z, w; };
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

template <typename T, typename U> METAL_FUNC T as_type(U from) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  T to;
  memcpy(&to, &from, sizeof(T));
  return to;
}
METAL_FUNC half2 pack_half2(float a, float b) { return __floats2half2_rn(a, b); }
METAL_FUNC uint lower_halves(uint a, uint b) { return __byte_perm(a, b, 0x5410); }
METAL_FUNC uint upper_halves(uint a, uint b) { return __byte_perm(a, b, 0x7632); }
METAL_FUNC uint upper_bytes(uint halves) { return __byte_perm(halves, 0, 0x4341); }
// The compiler may not put off what x is worked out from, which frees those registers here.
METAL_FUNC void settle(uint& x) { asm volatile("" : "+r"(x)); }
METAL_FUNC void settle(float& x) { asm volatile("" : "+f"(x)); }

// ---- arithmetic that is never fused (portable.metal holds the Metal text)
METAL_FUNC float precise_mul(float a, float b) { return __fmul_rn(a, b); }
METAL_FUNC float precise_add(float a, float b) { return __fadd_rn(a, b); }
METAL_FUNC float precise_sub(float a, float b) { return __fsub_rn(a, b); }

// ---- vectors: arithmetic by component, also with a scalar on the right
#define MLX_KV_VECTOR_OP(V2, V4, T, OP)                                                                                 \
  METAL_FUNC V2 operator OP(V2 a, V2 b) { return {T(a.x OP b.x), T(a.y OP b.y)}; }                                      \
  METAL_FUNC V2 operator OP(V2 a, T b) { return {T(a.x OP b), T(a.y OP b)}; }                                           \
  METAL_FUNC V4 operator OP(V4 a, V4 b) { return {T(a.x OP b.x), T(a.y OP b.y), T(a.z OP b.z), T(a.w OP b.w)}; }        \
  METAL_FUNC V4 operator OP(V4 a, T b) { return {T(a.x OP b), T(a.y OP b), T(a.z OP b), T(a.w OP b)}; }
#define MLX_KV_ARITHMETIC(V2, V4, T)                                                                                    \
  MLX_KV_VECTOR_OP(V2, V4, T, +) MLX_KV_VECTOR_OP(V2, V4, T, -) MLX_KV_VECTOR_OP(V2, V4, T, *)
#define MLX_KV_BITWISE(V2, V4, T)                                                                                       \
  MLX_KV_VECTOR_OP(V2, V4, T, &) MLX_KV_VECTOR_OP(V2, V4, T, |) MLX_KV_VECTOR_OP(V2, V4, T, ^)                          \
  MLX_KV_VECTOR_OP(V2, V4, T, <<) MLX_KV_VECTOR_OP(V2, V4, T, >>)
MLX_KV_ARITHMETIC(float2, float4, float)
MLX_KV_VECTOR_OP(float2, float4, float, /)
MLX_KV_ARITHMETIC(int2, int4, int)
MLX_KV_ARITHMETIC(uint2, uint4, uint)
MLX_KV_BITWISE(int2, int4, int)
MLX_KV_BITWISE(uint2, uint4, uint)

// ---- mathematics: always written metal::, since CUDA has functions of the same names outside
namespace metal {
#define MLX_KV_UNARY(NAME, FUNCTION)                                                                                    \
  METAL_FUNC float NAME(float x) { return FUNCTION(x); }                                                                \
  METAL_FUNC half NAME(half x) { return half(FUNCTION(float(x))); }                                                     \
  METAL_FUNC bfloat NAME(bfloat x) { return bfloat(FUNCTION(float(x))); }
#define MLX_KV_MATHEMATICS                                                                                              \
  MLX_KV_UNARY(exp, ::expf) MLX_KV_UNARY(exp2, ::exp2f) MLX_KV_UNARY(log, ::logf) MLX_KV_UNARY(log2, ::log2f)           \
  MLX_KV_UNARY(sqrt, ::sqrtf) MLX_KV_UNARY(rsqrt, ::rsqrtf) MLX_KV_UNARY(sin, ::sinf) MLX_KV_UNARY(cos, ::cosf)         \
  MLX_KV_UNARY(tanh, ::tanhf)
MLX_KV_MATHEMATICS
MLX_KV_UNARY(floor, ::floorf) MLX_KV_UNARY(ceil, ::ceilf) MLX_KV_UNARY(trunc, ::truncf) MLX_KV_UNARY(rint, ::rintf)
MLX_KV_UNARY(round, ::roundf) MLX_KV_UNARY(abs, ::fabsf) MLX_KV_UNARY(fabs, ::fabsf)
METAL_FUNC float pow(float x, float y) { return ::powf(x, y); }
METAL_FUNC float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
METAL_FUNC float copysign(float x, float y) { return ::copysignf(x, y); }
METAL_FUNC float ldexp(float x, int n) { return ::ldexpf(x, n); }
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
METAL_FUNC long abs(long x) { return x < 0 ? -x : x; }

// As on Metal, of a number and a NaN the number is both the larger and the smaller.
METAL_FUNC float max(float a, float b) { return ::fmaxf(a, b); }
METAL_FUNC float min(float a, float b) { return ::fminf(a, b); }
METAL_FUNC half max(half a, half b) { return half(::fmaxf(float(a), float(b))); }
METAL_FUNC half min(half a, half b) { return half(::fminf(float(a), float(b))); }
METAL_FUNC bfloat max(bfloat a, bfloat b) { return bfloat(::fmaxf(float(a), float(b))); }
METAL_FUNC bfloat min(bfloat a, bfloat b) { return bfloat(::fminf(float(a), float(b))); }
#define MLX_KV_MIN_MAX(T)                                                                                               \
  METAL_FUNC T max(T a, T b) { return a > b ? a : b; }                                                                  \
  METAL_FUNC T min(T a, T b) { return a < b ? a : b; }
MLX_KV_MIN_MAX(short) MLX_KV_MIN_MAX(ushort) MLX_KV_MIN_MAX(int) MLX_KV_MIN_MAX(uint) MLX_KV_MIN_MAX(long)
MLX_KV_MIN_MAX(ulong)
template <typename T> METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T> METAL_FUNC T select(T no, T yes, bool which) { return which ? yes : no; }
template <typename T> METAL_FUNC bool isnan(T x) { return float(x) != float(x); }
template <typename T> METAL_FUNC bool isinf(T x) { return ::fabsf(float(x)) == INFINITY; }
template <typename T> METAL_FUNC bool isfinite(T x) { return ::fabsf(float(x)) < INFINITY; }
METAL_FUNC uint popcount(uint x) { return __popc(x); }
METAL_FUNC uint clz(uint x) { return __clz(x); }
METAL_FUNC uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }

namespace precise { MLX_KV_MATHEMATICS }
namespace fast {
METAL_FUNC float exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
METAL_FUNC float exp(float x) { return ::__expf(x); }
METAL_FUNC float log2(float x) { return ::__log2f(x); }
METAL_FUNC float log(float x) { return ::__logf(x); }
}  // namespace fast

// ---- barriers
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
METAL_FUNC mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

// ---- lanes: a kernel with 8x8 matrices renumbers them, so that Metal's 8x8 layout is the one of CUDA's mma
#ifdef MLX_KV_MATRIX_LANES   // Metal's lane bits 0 to 4 are CUDA's lane bits 0, 2, 3, 1, 4
METAL_FUNC uint cuda_lane(uint lane) { return (lane & 17u) | ((lane & 6u) << 1) | ((lane & 8u) >> 2); }
METAL_FUNC uint metal_lane(uint lane) { return (lane & 17u) | ((lane & 12u) >> 1) | ((lane & 2u) << 2); }
#else
METAL_FUNC uint cuda_lane(uint lane) { return lane; }
METAL_FUNC uint metal_lane(uint lane) { return lane; }
#endif
METAL_FUNC uint this_lane() { uint lane; asm("mov.u32 %0, %%laneid;" : "=r"(lane)); return metal_lane(lane); }

// ---- simdgroup functions: all 32 lanes take part
#define MLX_KV_ALL_LANES 0xffffffffu
template <typename T> METAL_FUNC T simd_shuffle(T v, ushort lane) { return __shfl_sync(MLX_KV_ALL_LANES, v, cuda_lane(lane)); }
template <typename T> METAL_FUNC T simd_shuffle_xor(T v, ushort mask) {
  return __shfl_xor_sync(MLX_KV_ALL_LANES, v, cuda_lane(mask));
}
template <typename T> METAL_FUNC T simd_shuffle_up(T v, ushort delta) {
  const uint lane = this_lane();
  return simd_shuffle(v, lane < delta ? lane : lane - delta);
}
template <typename T> METAL_FUNC T simd_shuffle_down(T v, ushort delta) {
  const uint lane = this_lane();
  return simd_shuffle(v, lane + delta > 31 ? lane : lane + delta);
}
template <typename T> METAL_FUNC T simd_broadcast(T v, ushort lane) { return simd_shuffle(v, lane); }
template <typename T> METAL_FUNC T simd_broadcast_first(T v) { return simd_shuffle(v, ushort(0)); }
#define MLX_KV_REDUCE(NAME, EXPRESSION)                                                                                 \
  template <typename T> METAL_FUNC T NAME(T a) {                                                                        \
    for (ushort mask = 16; mask; mask >>= 1) {                                                                          \
      const T b = simd_shuffle_xor(a, mask);                                                                            \
      a = EXPRESSION;                                                                                                   \
    }                                                                                                                   \
    return a;                                                                                                           \
  }
MLX_KV_REDUCE(simd_sum, a + b) MLX_KV_REDUCE(simd_product, a * b) MLX_KV_REDUCE(simd_max, max(a, b))
MLX_KV_REDUCE(simd_min, min(a, b)) MLX_KV_REDUCE(simd_and, a & b) MLX_KV_REDUCE(simd_or, a | b)
MLX_KV_REDUCE(simd_xor, a ^ b)
template <typename T> METAL_FUNC T simd_prefix_inclusive_sum(T v) {
  for (ushort delta = 1; delta < 32; delta *= 2) {
    const T before = simd_shuffle_up(v, delta);
    if (this_lane() >= delta) v = v + before;
  }
  return v;
}
template <typename T> METAL_FUNC T simd_prefix_exclusive_sum(T v) {
  const T sum = simd_shuffle_up(simd_prefix_inclusive_sum(v), ushort(1));
  return this_lane() ? sum : T(0);
}
#if __CUDA_ARCH__ >= 800
METAL_FUNC uint simd_max(uint a) { return __reduce_max_sync(MLX_KV_ALL_LANES, a); }  // one instruction
METAL_FUNC uint simd_or(uint a) { return __reduce_or_sync(MLX_KV_ALL_LANES, a); }
#endif
METAL_FUNC bool simd_any(bool p) { return __any_sync(MLX_KV_ALL_LANES, p); }
METAL_FUNC bool simd_all(bool p) { return __all_sync(MLX_KV_ALL_LANES, p); }
template <typename T> METAL_FUNC T quad_shuffle_xor(T v, ushort mask) { return simd_shuffle_xor(v, mask); }
template <typename T> METAL_FUNC T quad_sum(T v) { v = v + simd_shuffle_xor(v, 1); return v + simd_shuffle_xor(v, 2); }
template <typename T> METAL_FUNC T quad_max(T v) {
  v = max(v, simd_shuffle_xor(v, 1));
  return max(v, simd_shuffle_xor(v, 2));
}
template <typename T> METAL_FUNC T quad_min(T v) {
  v = min(v, simd_shuffle_xor(v, 1));
  return min(v, simd_shuffle_xor(v, 2));
}

// ---- atomics: relaxed, in threadgroup or device memory
enum memory_order { memory_order_relaxed };
template <typename T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
template <typename T> METAL_FUNC T atomic_load_explicit(const atomic<T>* a, memory_order) {
  return *const_cast<const volatile T*>(&a->value);
}
template <typename T> METAL_FUNC void atomic_store_explicit(atomic<T>* a, T v, memory_order) {
  *const_cast<volatile T*>(&a->value) = v;
}
#define MLX_KV_ATOMIC(NAME, FUNCTION)                                                                                   \
  template <typename T> METAL_FUNC T NAME(atomic<T>* a, T v, memory_order) { return FUNCTION(&a->value, v); }
MLX_KV_ATOMIC(atomic_exchange_explicit, atomicExch) MLX_KV_ATOMIC(atomic_fetch_add_explicit, atomicAdd)
MLX_KV_ATOMIC(atomic_fetch_sub_explicit, atomicSub) MLX_KV_ATOMIC(atomic_fetch_min_explicit, atomicMin)
MLX_KV_ATOMIC(atomic_fetch_max_explicit, atomicMax) MLX_KV_ATOMIC(atomic_fetch_and_explicit, atomicAnd)
MLX_KV_ATOMIC(atomic_fetch_or_explicit, atomicOr) MLX_KV_ATOMIC(atomic_fetch_xor_explicit, atomicXor)
}  // namespace metal

// Names that CUDA does not have may stand without metal::, as in Metal's own style.
using metal::clamp; using metal::select; using metal::popcount; using metal::clz; using metal::ctz;
using metal::mem_flags; using metal::threadgroup_barrier; using metal::simdgroup_barrier;
using metal::simd_shuffle; using metal::simd_shuffle_xor; using metal::simd_shuffle_up; using metal::simd_shuffle_down;
using metal::simd_broadcast; using metal::simd_broadcast_first; using metal::simd_sum; using metal::simd_product;
using metal::simd_max; using metal::simd_min; using metal::simd_and; using metal::simd_or; using metal::simd_xor;
using metal::simd_prefix_inclusive_sum; using metal::simd_prefix_exclusive_sum; using metal::simd_any; using metal::simd_all;
using metal::quad_shuffle_xor; using metal::quad_sum; using metal::quad_max; using metal::quad_min;
using metal::atomic; using metal::atomic_int; using metal::atomic_uint; using metal::atomic_float;
using metal::memory_order; using metal::memory_order_relaxed;
using metal::atomic_load_explicit; using metal::atomic_store_explicit; using metal::atomic_exchange_explicit;
using metal::atomic_fetch_add_explicit; using metal::atomic_fetch_sub_explicit; using metal::atomic_fetch_min_explicit;
using metal::atomic_fetch_max_explicit; using metal::atomic_fetch_and_explicit; using metal::atomic_fetch_or_explicit;
using metal::atomic_fetch_xor_explicit;
