// Called by instrumented kernels. instrument.py renames the compiler's own sanitizer callbacks to these and adds the
// site.
#include <string.h>

#include "findings.h"
#include "memory.h"
#include "scheduler.h"

namespace {

struct SourceLocation {  // begins the static data of every undefined-behaviour check
  const char* file;
  unsigned line, column;
};

const msl_site* sites;

// Optimisation may merge checks and lose the line; the static data still has it.
msl_site place_of(const SourceLocation* location, unsigned site) {
  if (site || !location) return sites[site];
  return msl_site{location->file, location->line, location->column, 0};
}

void undefined(Kind kind, const char* what, const SourceLocation* location, unsigned site) {
  findings::report(kind, what, place_of(location, site));
}

[[noreturn]] void fatal(Kind kind, const char* what, const SourceLocation* location, unsigned site) {
  undefined(kind, what, location, site);
  abandon_launch();
}

}  // namespace

void use_sites(const msl_site* table) { sites = table; }

extern "C" {

void msl_check_read(char* address, unsigned long size, unsigned site) { memory::access(address, size, READ, site); }
void msl_check_write(char* address, unsigned long size, unsigned site) { memory::access(address, size, WRITE, site); }
void msl_check_read_write(char* address, unsigned long size, unsigned site) {
  memory::access(address, size, READ | WRITE, site);
}

void* msl_check_memcpy(char* to, char* from, unsigned long size, unsigned site) {
  memory::access(from, size, READ, site);
  memory::access(to, size, WRITE, site);
  return memmove(to, from, size);
}
void* msl_check_memmove(char* to, char* from, unsigned long size, unsigned site) {
  return msl_check_memcpy(to, from, size, site);
}
void* msl_check_memset(char* to, int value, unsigned long size, unsigned site) {
  memory::access(to, size, WRITE, site);
  return memset(to, value, size);
}

void msl_check_atomic(char* address, unsigned size, int action, unsigned site) {
  memory::access(address, size, action | ATOMIC, site);
}

void msl_check_init() {}

// Metal leaves these undefined and goes on.
void msl_ub_shift_out_of_bounds(SourceLocation* at, void*, void*, unsigned site) {
  undefined(SHIFT, "shift", at, site);
}
void msl_ub_float_cast_overflow(SourceLocation* at, void*, unsigned site) {
  undefined(CONVERSION, "conversion", at, site);
}
void msl_ub_load_invalid_value(SourceLocation* at, void*, unsigned site) {
  undefined(CONVERSION, "load of a bool", at, site);
}

// After these this processor would fault, or memory that is not the kernel's would change.
void msl_ub_divrem_overflow(SourceLocation* at, void*, void*, unsigned site) {
  fatal(DIVISION, "integer division", at, site);
}
void msl_ub_out_of_bounds(SourceLocation* at, void*, unsigned site) { fatal(BOUNDS, "index of an array", at, site); }
void msl_ub_trap(unsigned site) { fatal(BOUNDS, "index of an object", nullptr, site); }
void msl_ub_type_mismatch_v1(SourceLocation* at, void*, unsigned site) { fatal(MISALIGNED, "access", at, site); }
void msl_ub_builtin_unreachable(SourceLocation* at, unsigned site) { fatal(CRASH, "unreachable code", at, site); }
void msl_ub_missing_return(SourceLocation* at, unsigned site) { fatal(CRASH, "function without return", at, site); }

}  // extern "C"
