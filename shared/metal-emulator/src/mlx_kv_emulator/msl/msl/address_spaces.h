#pragma once
// MSL's keywords. In strict mode address spaces are types, as on Metal; in the other modes they mean nothing.

#ifdef MSL_STRICT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
// `extern`: a class with a constructor, such as an atomic, cannot be defined in an address space, only declared.
#define MSL_THREADGROUP_VARIABLE extern __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
// One section holds all of a kernel's threadgroup memory. `used` keeps the optimiser from reasoning about a variable
// that other threads write.
#ifdef __APPLE__
#define MSL_THREADGROUP_VARIABLE static __attribute__((section("__DATA,msl_tg"), used))
#else
#define MSL_THREADGROUP_VARIABLE static __attribute__((section("msl_tg"), used))
#endif
#endif

#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_ALIGN(bytes) alignas(bytes)
#define METAL_CONST static constant constexpr const
#define __METAL__ 1
#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 310
#endif
