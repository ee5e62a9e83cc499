/* `moeflow-gen sweep`: what its parts share with the measuring, which the tool alone links. */
#ifndef MOEFLOW_SWEEP_H
#define MOEFLOW_SWEEP_H

#include <stdint.h>

#include "sweep_compile.h"

#define SWEEP_TOKENS_DEFAULT "1,2,4,8,16,32,64,128"
#define SWEEP_TOKENS_LAST 128

struct sweep_setting { /* what the measuring is given as `user` */
  const struct sweep_arms *arms;
  const struct sweep_plans *plans;
  const char *cache;
  int ep, capacity;
  int tokens_max; /* of all points */
  uint64_t seed;  /* of weights, rows and routings: the same in every sweep */
};

/* Set by main() to what measures on a GPU (sweep_measure.c); `user` is filled in by the command. NULL in programs that link
 * the generator alone. */
extern const struct sweep_measure *sweep_measuring;
extern const struct sweep_measure sweep_measure_bench;

/* "1,2,4" into ascending numbers, none twice: how many, or -1 after status_set(MOEFLOW_ERROR_ARGUMENT). */
int sweep_read_list(const char *option, const char *text, int64_t least, int64_t most, int *numbers, int room);

/* Lines of a tune file for what was decided, beside those that `old` (may be NULL) has for other rows. */
moeflow_status sweep_tune_lines(const struct sweep_arms *arms, const struct sweep_point *points, int count,
                                const struct tune *old, struct tune *tune);
#endif
