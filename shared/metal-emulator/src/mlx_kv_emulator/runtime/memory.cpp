#include "memory.h"

#include <stdlib.h>

#include "fiber.h"
#include "region.h"

namespace memory {

static msl_launch* launch;
static Region* buffers;
static Region threadgroup;

static size_t threadgroup_size() { return (size_t)(launch->threadgroup_end - launch->threadgroup_begin); }

bool begin(msl_launch* l) {
  launch = l;
  buffers = (Region*)calloc((size_t)launch->buffer_count + 1, sizeof(Region));
  if (!buffers || !threadgroup.allocate(threadgroup_size(), true)) return false;
  for (int i = 0; i < launch->buffer_count; i++) {
    const msl_buffer& b = launch->buffers[i];
    if (!buffers[i].allocate(b.size, b.writable)) return false;
    if (b.initialised) memset(buffers[i].touched, INITIALISED, b.size);
  }
  return true;
}

void begin_threadgroup() { threadgroup.clear(); }

static void count(msl_buffer& b, const Region& region) {
  for (unsigned long i = 0; i < b.size; i++) {
    const uint8_t touched = region.touched[i];
    b.distinct_bytes_read += touched & TOUCHED_BY_READ ? 1 : 0;
    b.distinct_bytes_written += touched & TOUCHED_BY_WRITE ? 1 : 0;
    if (b.writable && !(touched & (TOUCHED_BY_WRITE | INITIALISED)) && !b.unwritten++) b.first_unwritten = i;
  }
}

void end() {
  for (int i = 0; i < launch->buffer_count; i++) {
    if (buffers[i].touched) count(launch->buffers[i], buffers[i]);
    buffers[i].release();
  }
  threadgroup.release();
  free(buffers);
}

// ---- where an access goes

struct Place {
  Space space;
  const char* name;
  char* begin;
  size_t size;
};

static msl_finding* report(Kind kind, const Place& place, char* address, size_t size, const char* action,
                           uint32_t site) {
  msl_finding* f = findings::report(kind, action, launch->sites[site]);
  if (!f) return nullptr;
  f->space = place.space;
  f->memory = place.name;
  f->offset = address - place.begin;
  f->access_size = size;
  f->memory_size = place.size;
  return f;
}

static const char* name_of(int action) {
  if (action & ATOMIC) return action & WRITE ? "atomic write" : "atomic read";
  return action & WRITE ? "write" : "read";
}

[[noreturn]] static void out_of_bounds(const Place& nearest, char* address, size_t size, int action, uint32_t site) {
  report(BOUNDS, nearest, address, size, name_of(action), site);
  abandon_launch();
}

static size_t distance(const Place& p, const char* address) {
  if (address < p.begin) return (size_t)(p.begin - address);
  return address < p.begin + p.size ? 0 : (size_t)(address - (p.begin + p.size)) + 1;
}

static bool inside(const Place& p, const char* address, size_t size) {
  return address >= p.begin && address + size <= p.begin + p.size;
}

// ---- what it does there

static Access running_access(Space space, int action, uint32_t site) {
  const Epochs &own = simdgroups[current->simdgroup].epochs, &all = group.epochs;
  Access a{};
  a.threadgroup_plus_1 = group.number + 1;
  a.barrier = space == BUFFER ? all.device : all.threadgroup;
  a.simdgroup_barrier = space == BUFFER ? own.device : own.threadgroup;
  a.thread = current->index;
  a.atomic = action & ATOMIC ? 1 : 0;
  a.site = site;
  return a;
}

// `offset` is the place's offset in its region: a threadgroup variable is a part of one region.
static void check_bytes(Region& region, size_t offset, const Place& place, char* address, size_t size, int action,
                        uint32_t site) {
  const size_t begin = offset + (size_t)(address - place.begin);
  for (size_t i = 0; i < size; i++) {
    uint8_t& touched = region.touched[begin + i];
    if (action & READ) {
      if (!(touched & (TOUCHED_BY_WRITE | INITIALISED))) {
        report(UNINITIALISED, place, address + i, size, name_of(action & ~WRITE), site);
        touched |= INITIALISED;  // one report for a byte
      }
      touched |= TOUCHED_BY_READ;
    }
    if (action & WRITE) touched |= TOUCHED_BY_WRITE;
  }
  if (!region.histories) return;
  while ((begin | size) % region.granule) region.halve_granule();
  const Access now = running_access(place.space, action, site);
  for (size_t i = 0; i < size; i += region.granule) {
    History& history = region.histories[(begin + i) / region.granule];
    const Access* earlier = action & WRITE ? history.race_with_write(now) : history.race_with_read(now);
    if (earlier) {
      if (msl_finding* f = report(RACE, place, address + i, size, name_of(action), site)) {
        const int what = (history.is_read(earlier) ? READ : WRITE) | (earlier->atomic ? ATOMIC : 0);
        findings::other(f, earlier->threadgroup(), earlier->thread, name_of(what), launch->sites[earlier->site]);
      }
    }
    if (action & WRITE) history.add_write(now);
    else history.add_read(now);
  }
}

static void access_buffer(char* address, size_t size, int action, uint32_t site) {
  Place nearest{};
  for (int i = 0; i < launch->buffer_count; i++) {
    msl_buffer& b = launch->buffers[i];
    const Place place{BUFFER, b.name, b.data, b.size};
    if (!inside(place, address, size)) {
      if (!nearest.name || distance(place, address) < distance(nearest, address)) nearest = place;
      continue;
    }
    if (action & READ) b.bytes_read += size;
    if (action & WRITE) {
      b.bytes_written += size;
      if (!b.writable) {
        report(READ_ONLY, place, address, size, name_of(action), site);
        abandon_launch();
      }
    }
    return check_bytes(buffers[i], 0, place, address, size, action, site);
  }
  out_of_bounds(nearest, address, size, action, site);
}

static void access_threadgroup(char* address, size_t size, int action, uint32_t site) {
  Place nearest{};
  for (int i = 0; i < launch->variable_count; i++) {
    const msl_variable& v = launch->variables[i];
    const Place place{THREADGROUP, v.name, v.data, v.size};
    if (inside(place, address, size)) {
      return check_bytes(threadgroup, (size_t)(v.data - launch->threadgroup_begin), place, address, size, action, site);
    }
    if (!nearest.name || distance(place, address) < distance(nearest, address)) nearest = place;
  }
  out_of_bounds(nearest, address, size, action, site);
}

static bool within(const char* address, const void* begin, const void* end) {
  return address >= (const char*)begin && address < (const char*)end;
}

void access(char* address, size_t size, int action, uint32_t site) {
  if (!current || !size || fiber::on_stack(address)) return;
  if (within(address, launch->threadgroup_begin, launch->threadgroup_end))
    return access_threadgroup(address, size, action, site);
  if (within(address, launch->arena_begin, launch->arena_end)) return access_buffer(address, size, action, site);
  if (within(address, launch->image_begin, launch->image_end)) return;
  if (within(address, simdgroups, simdgroups + MAX_THREADS / WIDTH)) return;  // values exchanged by SIMD operations
  if (within(address, threads, threads + MAX_THREADS)) return;                // the thread's own position
  out_of_bounds(Place{NOWHERE, nullptr, address, 0}, address, size, action, site);
}

}  // namespace memory
