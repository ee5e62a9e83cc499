/* A sweep's arms as cubins in the store, and as the plans through which they are measured. A plan holds the default's
 * variants and as many arms as fit beside them; a sweep of all legal shapes has several. */
#ifndef MOEFLOW_SWEEP_COMPILE_H
#define MOEFLOW_SWEEP_COMPILE_H

#include "sweep_choice.h"
#include "sweep_log.h"
#include "unit.h"

#define SWEEP_PLANS_MAX 64

struct sweep_plans {
  int count;
  char folder[64]; /* a private one, for the plan files */
  char paths[SWEEP_PLANS_MAX][96];
  int plan_of[SWEEP_ARMS_MAX]; /* by arm: the first plan that has it; those of the default plan are in all */
  int compiled, hits;          /* of all variants */
  int32_t nvrtc;               /* version that made the entries: 13000 */
  double seconds;
};

struct sweep_compiling {
  const struct model *model; /* of one arch */
  const char *templates;     /* --templates */
  int packed;
  int jobs;
  const struct toolchain *toolchain;
  struct store *store;
  struct sweep_log *log;
};

/* Compiles what is missing. An arm that does not compile, spills or takes too much shared memory becomes `refused`, on the
 * record; a kernel of the default plan that does so is an error. Forks: before any thread. sweep_plans_free, also after an
 * error. */
moeflow_status sweep_compile(const struct sweep_compiling *compiling, struct sweep_arms *arms, struct sweep_plans *plans,
                             int *interrupted);
void sweep_plans_free(struct sweep_plans *plans); /* removes the files */
#endif
