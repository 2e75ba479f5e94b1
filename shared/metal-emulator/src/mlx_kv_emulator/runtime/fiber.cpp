#include "fiber.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__APPLE__)
#define SYMBOL "_msl_switch"
#define BEGIN ".text\n.p2align 4\n.globl " SYMBOL "\n.private_extern " SYMBOL "\n" SYMBOL ":\n"
#else
#define SYMBOL "msl_switch"
#define BEGIN ".text\n.p2align 4\n.globl " SYMBOL "\n.hidden " SYMBOL "\n.type " SYMBOL ",%function\n" SYMBOL ":\n"
#endif

// Callee-saved registers go on the fiber's own stack; a function call has already saved the others.
#if defined(__x86_64__)
constexpr int RETURN_WORD = 6;  // `ret` takes the entry point from here
constexpr int FRAME_WORDS =
    8;  // with the null return address of the entry point: rsp % 16 == 8 on entry, as after a call
asm(BEGIN
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");
#elif defined(__aarch64__)
constexpr int RETURN_WORD = 11;  // x30, the link register
constexpr int FRAME_WORDS = 20;  // x19-x30 and d8-d15: 160 bytes, sp stays 16-byte aligned
asm(BEGIN
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n"
    "str x9, [x0]\n"
    "mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");
#else
#error "the emulator has no fiber switch for this processor: x86-64 and aarch64 are supported"
#endif

namespace fiber {

static char* stacks;

bool create_stacks() {
  if (stacks) return true;
  void* memory = mmap(nullptr, COUNT * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  stacks = (char*)memory;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < COUNT; i++) mprotect(stacks + i * STACK, page, PROT_NONE);  // an overflow faults
  return true;
}

void* prepare(int index, void (*entry)()) {
  const size_t stagger = (size_t)(index % 31) * 128;  // equal offsets in all stacks would fight for the same cache sets
  void** top = (void**)(stacks + (size_t)(index + 1) * STACK - 64 - stagger);
  void** frame = top - FRAME_WORDS;
  for (int i = 0; i < FRAME_WORDS; i++) frame[i] = nullptr;
  frame[RETURN_WORD] = (void*)entry;
  return frame;
}

bool on_stack(const void* address) {
  return (const char*)address >= stacks && (const char*)address < stacks + COUNT * STACK;
}

}  // namespace fiber
