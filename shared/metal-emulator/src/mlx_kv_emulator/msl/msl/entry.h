#pragma once
// Conversions for the generated call of a kernel: arguments come as addresses, attributes as numbers.

namespace msl {

struct Pointer {
  void* address;
  template <class T>
  operator T*() const {
    return (T*)address;
  }
};

struct Reference {
  void* address;
  template <class T>
  operator T&() const {
    return *(T*)address;
  }
};

struct Attribute {
  unsigned value[3];
  operator uint() const { return value[0]; }
  operator ushort() const { return (ushort)value[0]; }
  operator metal::vec<uint, 2>() const { return {value[0], value[1]}; }
  operator metal::vec<uint, 3>() const { return {value[0], value[1], value[2]}; }
  operator metal::vec<ushort, 2>() const { return {(ushort)value[0], (ushort)value[1]}; }
  operator metal::vec<ushort, 3>() const { return {(ushort)value[0], (ushort)value[1], (ushort)value[2]}; }
};

}  // namespace msl

#define is_function_constant_defined(name) (name##_defined)

// Where the linker put threadgroup memory and the library itself.
#ifdef __APPLE__
extern "C" char msl_section_begin[] __asm("section$start$__DATA$msl_tg");
extern "C" char msl_section_end[] __asm("section$end$__DATA$msl_tg");
extern "C" char msl_image_begin[] __asm("segment$start$__TEXT");
extern "C" char msl_image_end[] __asm("segment$end$__DATA");
#else
extern "C" __attribute__((weak, visibility("hidden"))) char msl_section_begin[] __asm("__start_msl_tg");
extern "C" __attribute__((weak, visibility("hidden"))) char msl_section_end[] __asm("__stop_msl_tg");
extern "C" __attribute__((visibility("hidden"))) char msl_image_begin[] __asm("__ehdr_start");
extern "C" __attribute__((visibility("hidden"))) char msl_image_end[] __asm("_end");
#endif

#define MSL_EXPORT extern "C" __attribute__((visibility("default")))
