#include "findings.h"

#include "scheduler.h"

namespace findings {

static msl_launch* launch;

void begin(msl_launch* l) {
  launch = l;
  launch->finding_count = 0;
}

bool full() { return launch->finding_count == launch->finding_capacity; }

static bool same_place(const msl_site& a, const msl_site& b) {
  return a.file == b.file && a.line == b.line && a.column == b.column;
}

msl_finding* report(Kind kind, const char* action, const msl_site& site) {
  if (launch->allowed >> kind & 1 || full()) return nullptr;
  for (int i = 0; i < launch->finding_count; i++) {
    const msl_finding& f = launch->findings[i];
    if (f.kind == kind && same_place(f.party[0].site, site)) return nullptr;
  }
  msl_finding* f = &launch->findings[launch->finding_count++];
  *f = msl_finding{};
  f->kind = kind;
  f->parties = 1;
  f->party[0] = msl_party{group.number, current ? current->index : 0, action, site};
  return f;
}

void other(msl_finding* f, unsigned threadgroup, unsigned thread, const char* action, const msl_site& site) {
  f->parties = 2;
  f->party[1] = msl_party{threadgroup, thread, action, site};
}

}  // namespace findings
