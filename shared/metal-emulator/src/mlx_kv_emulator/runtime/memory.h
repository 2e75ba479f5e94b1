#pragma once
// The memory of a checked launch: what each address belongs to and what was done to every byte.
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

enum Action { READ = 1, WRITE = 2, ATOMIC = 4 };

namespace memory {

bool begin(msl_launch* launch);  // false when memory is refused
void begin_threadgroup();
void end();  // counts the bytes that were touched and those that were never written

// Called before the running thread accesses `size` bytes; `action` is a mask of Action.
void access(char* address, size_t size, int action, uint32_t site);

}  // namespace memory
