#pragma once
// One stack for every thread of a threadgroup, and the switch between them.
#include <stddef.h>

namespace fiber {

constexpr int COUNT = 1024;
constexpr size_t STACK = 256 * 1024;

// Maps the stacks, once per process; false when memory is refused.
bool create_stacks();

// The saved stack pointer of a fiber that begins at `entry` when it is first switched to.
void* prepare(int index, void (*entry)());

bool on_stack(const void* address);

}  // namespace fiber

// Saves the running fiber's registers and stack pointer in *save and resumes the fiber whose stack pointer is `to`.
extern "C" void msl_switch(void** save, void* to);
