#pragma once
// What compiled kernels, this runtime and abi.py agree on. Kernels include it too, so it includes nothing.

// A place in the kernel's source. Sites of one kernel form a table; entry 0 stands for "unknown".
struct msl_site {
  const char* file;
  unsigned line, column;
  unsigned caller;  // the site of the call that was inlined here, 0 if there is none
};

// Where one thread stands, for the attributes of a kernel's parameters.
struct msl_thread {
  unsigned position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  unsigned threads_per_grid[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3],
      threadgroups_per_grid[3];
  unsigned index_in_threadgroup, lane, simdgroup;
  unsigned simdgroups, dispatch_simdgroups, quadgroups, dispatch_quadgroups;
};

// One SIMD operation: what every lane brought to it.
struct msl_exchange {
  unsigned mask;  // lanes that take part
  unsigned lane;  // the lane that runs now
  bool reduced;   // `result` holds the answer of a reduction already
  alignas(16) char value[32][64];
  alignas(16) char result[64];
};

// A kernel argument that lives in memory. The lower half is filled in by a checked run.
struct msl_buffer {
  char* data;
  unsigned long size;
  int writable, initialised;
  const char* name;
  unsigned long bytes_read, distinct_bytes_read, bytes_written, distinct_bytes_written;
  unsigned long unwritten, first_unwritten;
};

// A variable in threadgroup memory.
struct msl_variable {
  char* data;
  unsigned long size;
  const char* name;
};

// One side of a finding: a thread, what it did, and where.
struct msl_party {
  unsigned threadgroup, thread;
  const char* action;
  msl_site site;
};

struct msl_finding {
  int kind;            // findings.h and abi.py list them in the same order
  int space;           // 0 none, 1 a buffer, 2 threadgroup memory
  const char* memory;  // name of the buffer or variable
  long offset;         // of the access, in bytes from its start
  unsigned long access_size, memory_size;
  int parties;
  msl_party party[2];
  unsigned lanes[2];  // masks, for findings about a simdgroup
  unsigned count;     // threads that arrived, for a barrier that not all threads reached
};

struct msl_launch {
  void (*entry)(void** arguments, const msl_thread* thread);
  void** arguments;
  unsigned grid[3], threadgroup[3];
  int reverse;                                // run threads and threadgroups in descending order
  int checked;                                // the kernel is instrumented
  unsigned allowed;                           // bit mask of finding kinds that are not reported
  char *threadgroup_begin, *threadgroup_end;  // threadgroup memory, padding included
  char *image_begin, *image_end;              // the kernel's own library: its constants
  char *arena_begin, *arena_end;              // buffers and the guard zones around them
  msl_buffer* buffers;
  int buffer_count;
  const msl_variable* variables;
  int variable_count;
  const msl_site* sites;
  msl_finding* findings;
  int finding_capacity;
  // results
  int finding_count;
  int abandoned;  // the launch did not run to its end
  unsigned long barriers, simdgroup_barriers, simd_operations;
};
