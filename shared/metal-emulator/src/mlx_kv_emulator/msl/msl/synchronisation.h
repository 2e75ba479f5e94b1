#pragma once
// Barriers, and what the runtime offers to the functions in simd.h.

extern "C" {
__attribute__((convergent, noduplicate)) void msl_threadgroup_barrier(unsigned flags, const char* file, unsigned line);
__attribute__((convergent)) void msl_simdgroup_barrier(unsigned flags, const char* file, unsigned line);
__attribute__((convergent)) msl_exchange* msl_simd(const void* value, unsigned size, const char* operation,
                                                   const char* file, unsigned line);
unsigned msl_lane();
void msl_inactive_lane(unsigned lane);
}

// The last parameters of everything that waits for other threads: the caller's place.
#define MSL_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }

METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_HERE) { msl_threadgroup_barrier((unsigned)flags, file, line); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, MSL_HERE) { msl_simdgroup_barrier((unsigned)flags, file, line); }

}  // namespace metal
