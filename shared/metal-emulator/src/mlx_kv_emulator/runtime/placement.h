#pragma once
// Where a threadgroup and its threads lie in the grid.
#include "scheduler.h"

// Fills in the `threads` of threadgroup `number`; all are ready. The last threadgroup of a dimension may be smaller.
Threadgroup place_threadgroup(const msl_launch& launch, unsigned number);
