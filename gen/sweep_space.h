/* The arms of a sweep: which shapes of the legal space are worth compiling for which number of tokens, by a simple model of
 * the time they take. Pure functions. */
#ifndef MOEFLOW_SWEEP_SPACE_H
#define MOEFLOW_SWEEP_SPACE_H

#include "model.h"
#include "plan_build.h"
#include "sweep_choice.h"

#define SWEEP_SHORTLIST_MAX 16 /* arms of a point, unless all are wanted */
#define SWEEP_SHORTLIST_MIN 8

struct sweep_space {
  const struct spec *spec;
  const struct plan_draft *draft; /* the default plan */
  const struct arch *arch;
  int ep;
  int multiprocessors;
  int packed;     /* experts_stream too */
  int exhaustive; /* every legal shape, at every point */
};

/* Microseconds of a layer by the floor model of sweep_space.c, for tokens tokens a rank. */
double sweep_estimate(const struct sweep_space *space, int32_t kernel, const struct experts_shape *shape, int tokens);

/* Legal shapes and all shapes of the kernels that are swept. */
void sweep_space_count(const struct sweep_space *space, int *legal, int *all);

/* Fills *arms, what the default plan uses first, and the points' orders; points hold their tokens and rows. The caller frees
 * with sweep_space_free, also after an error. */
moeflow_status sweep_space_arms(const struct sweep_space *space, struct sweep_arms *arms, struct sweep_point *points,
                                int count);
void sweep_space_free(struct sweep_arms *arms, struct sweep_point *points, int count);

/* How many arms one plan holds beside the default's kernels. */
int sweep_plan_room(const struct plan_draft *draft);
#endif
