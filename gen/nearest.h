/* A plan against what the cache holds: is it there, and if not, what comes nearest and where does that differ. */
#ifndef MOEFLOW_NEAREST_H
#define MOEFLOW_NEAREST_H

#include <stdio.h>

#include "catalog.h"
#include "unit.h"

enum nearest_state {
  NEAREST_READY,  /* the very plan, and all its entries */
  NEAREST_STALE,  /* same spec and arch, but entries of other templates or of another toolchain, damaged ones, or other
                     buckets */
  NEAREST_OTHER,  /* no plan of this spec and arch; `plan` has the fewest differing fields */
  NEAREST_NOTHING /* no plan at all */
};

struct nearest {
  enum nearest_state state;
  const struct catalog_plan *plan; /* NULL for NEAREST_NOTHING */
  int differing;                   /* STALE: variants, 0 if only buckets differ; OTHER: fields, the arch among them */
};

/* `keyed`: the draft's entry hashes are known (there is a toolchain). */
void nearest_find(const struct catalog *catalog, const struct plan *plan, int keyed, struct nearest *nearest);

/* For each differing field (OTHER): its key and both values as the canonical text spells them. */
typedef void (*nearest_field)(void *user, const char *key, const char *cached, const char *wanted);
void nearest_fields(const struct plan *cached, const struct plan *wanted, nearest_field each, void *user);
#endif
