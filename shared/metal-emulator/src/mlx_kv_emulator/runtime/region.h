#pragma once
// What a checked launch remembers about a block of memory.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "findings.h"
#include "history.h"

namespace memory {

enum Touched : uint8_t { TOUCHED_BY_READ = 1, TOUCHED_BY_WRITE = 2, INITIALISED = 4 };

struct Region {
  size_t size;
  uint8_t* touched;    // one mask of Touched per byte
  History* histories;  // one per granule, null for read-only buffers
  size_t granule;      // bytes; halved when an access needs it

  bool allocate(size_t bytes, bool with_histories) {
    size = bytes;
    granule = 4;
    touched = (uint8_t*)calloc(size + 1, 1);
    histories = with_histories ? (History*)calloc(size / granule + 1, sizeof(History)) : nullptr;
    return touched && (histories || !with_histories);
  }

  void clear() {
    memset(touched, 0, size);
    memset(histories, 0, (size / granule + 1) * sizeof(History));
  }

  void halve_granule() {
    const size_t count = size / granule + 1;
    History* finer = (History*)calloc(2 * count + 1, sizeof(History));
    if (!finer) abandon_launch();
    for (size_t i = 0; i < count; i++) finer[2 * i] = finer[2 * i + 1] = histories[i];
    free(histories);
    histories = finer;
    granule /= 2;
  }

  void release() {
    free(touched);
    free(histories);
  }
};

}  // namespace memory
