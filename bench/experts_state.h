/* What the files of the experts bench share. */
#ifndef MOEFLOW_BENCH_EXPERTS_STATE_H
#define MOEFLOW_BENCH_EXPERTS_STATE_H

#include "experts_bench.h"
#include "inputs.h"
#include "internal.h"
#include "routing.h"
#include "timer.h"

struct experts_weights { /* [E / ep] matrices in the backend's memory; NULL: none yet */
  void *gate_up, *down;
};

struct experts_rows { /* of one routing, in the backend's memory */
  void *hidden, *ids, *weights;
};

struct experts_bench {
  moeflow_context *context;
  int cuda, entered;
  int ep, capacity, tokens_max, local_experts;
  struct plan plan; /* as it was opened; the context's own has the buckets of the arm at work */
  struct inputs inputs;
  int32_t *places;    /* [E]: rank 0 of one has the first E / ep, nobody the rest */
  struct timer timer; /* GPU only */
  int copies;         /* of the weights: routing i uses i % copies */
  struct experts_weights plain[BENCH_ROUTINGS], packed[BENCH_ROUTINGS];
  struct experts_rows memory[BENCH_ROUTINGS];
  /* of the present routing */
  int tokens; /* T; 0: none yet */
  struct routing routings[BENCH_ROUTINGS];
  uint16_t *reference; /* host [BENCH_ROUTINGS][rows, H], once it is known */
  int arms;            /* that live */
};

struct experts_arm {
  struct experts_bench *bench;
  enum experts_bench_kernel kernel;
  int with_sum, parts;
  struct plan_bucket serving; /* in place of the plan's bucket of these rows */
  moeflow_group *groups[BENCH_ROUTINGS];
  moeflow_layer *layers[BENCH_ROUTINGS];
  uint16_t *out;              /* [BENCH_ROUTINGS][rows, H] */
  CUgraphExec timed, checked; /* GPU: without and with the sums, or twice the same */
};

/* Experts' inputs of row `row` of a routing: H values. */
void experts_hidden(const struct experts_bench *bench, int routing, int row, uint16_t *hidden);

/* Backend memory that starts as zeros. */
moeflow_status experts_allocate(struct experts_bench *bench, size_t bytes, void **memory);
void experts_release(struct experts_bench *bench, void *memory);

/* Fills the arm's outputs, and what the kernels put down on the way to them, with NaN; runs the layers once, those that are
 * timed or those with sums; waits. */
moeflow_status experts_arm_poison(struct experts_arm *arm);
moeflow_status experts_arm_run(struct experts_arm *arm, int checked);

/* Copies the rows out: host [BENCH_ROUTINGS][rows, H]. */
moeflow_status experts_arm_rows(struct experts_arm *arm, uint16_t *rows);
#endif
