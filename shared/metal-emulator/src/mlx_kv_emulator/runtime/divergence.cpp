#include "divergence.h"

#include "findings.h"

namespace divergence {

static msl_finding* report(const Thread& t) {
  msl_finding* f = findings::report(DIVERGENCE, t.operation, t.site);
  if (f) f->party[0].thread = t.index;
  return f;
}

void report_simd(const Thread& first, const Thread& other, unsigned active, unsigned rest) {
  if (msl_finding* f = report(first)) {
    f->lanes[0] = active;
    f->lanes[1] = rest;
    findings::other(f, group.number, other.index, other.operation ? other.operation : "nothing", other.site);
  }
}

void check_barrier() {
  const Thread* first = nullptr;
  for (int i = 0; i < group.threads; i++) {
    const Thread& t = threads[i];
    if (t.state != State::at_barrier) continue;
    if (!first) first = &t;
    if (same_operation(*first, t)) continue;
    if (msl_finding* f = report(*first)) findings::other(f, group.number, t.index, t.operation, t.site);
    return;
  }
  if (group.live == group.threads) return;
  if (msl_finding* f = report(*first)) f->count = (unsigned)group.live;
}

}  // namespace divergence
