#pragma once
// What goes wrong in a launch. The order of Kind is the order of KINDS in abi.py.
#include "abi.h"

enum Kind {
  RACE,
  BOUNDS,
  READ_ONLY,
  UNINITIALISED,
  DIVERGENCE,
  INACTIVE_LANE,
  SHIFT,
  DIVISION,
  CONVERSION,
  MISALIGNED,
  CRASH,
};

enum Space { NOWHERE, BUFFER, THREADGROUP };

namespace findings {

void begin(msl_launch* launch);

// A new record about the running thread at `site`; null when this kind is allowed or was reported for this place
// before.
msl_finding* report(Kind kind, const char* action, const msl_site& site);

// The second thread of a finding.
void other(msl_finding* finding, unsigned threadgroup, unsigned thread, const char* action, const msl_site& site);

bool full();

}  // namespace findings

// Gives up the launch: what the kernel would do next has no meaning.
[[noreturn]] void abandon_launch();
