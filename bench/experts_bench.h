/* One model's experts on one GPU as one rank of `ep` runs them, timed as they are served: a captured graph of BENCH_ROUTINGS
 * layers, each with a routing and hidden rows of its own, so that the weights come from memory and not from the L2.
 *
 * Weights [E / ep] are drawn by the fill kernel. Every routing has a group of one LOCAL rank whose step holds the rows that
 * all `ep` ranks would send: as many as model_rows says, in which ids of other ranks' experts are -1. The rank played is, in
 * each routing, the one with the most active experts, renamed to rank 0. Small models get several copies of the weights,
 * each for some of the routings.
 *
 * One thread; all calls leave the device's work finished. Order: open, routing, then any number of arms; a new routing
 * needs all arms destroyed. */
#ifndef MOEFLOW_BENCH_EXPERTS_BENCH_H
#define MOEFLOW_BENCH_EXPERTS_BENCH_H

#include <stdint.h>

#include "plan.h"

#define BENCH_ROUTINGS 16
#define BENCH_SKEW_SAME (-1.0) /* every token picks the same K experts, all of the rank played */

struct experts_bench_config {
  const char *plan;  /* plan file */
  const char *cache; /* NULL: as moeflow_open finds it */
  int device;
  int ep;
  int capacity;   /* of a rank: no step moves more rows unless it has more tokens */
  int tokens_max; /* largest T, tokens per rank */
  uint64_t seed;
  moeflow_backend backend; /* CPU: a launch runs the layers one after the other, for tests */
};

struct experts_bench;
struct experts_arm;

enum experts_bench_kernel {
  BENCH_PORTABLE,      /* gate_up + down of the bucket; `variant` is ignored */
  BENCH_EXPERTS,       /* the plan's experts variant number `variant` */
  BENCH_EXPERTS_STREAM /* the plan's experts_stream variant number `variant`, on packed weights */
};

/* MOEFLOW_ERROR_ENVIRONMENT without a GPU. The plan is opened as moeflow_open does, so a missing one is
 * MOEFLOW_ERROR_CACHE with the line to run. */
moeflow_status experts_bench_open(const struct experts_bench_config *config, struct experts_bench **bench);
void experts_bench_close(struct experts_bench *bench); /* NULL is allowed */

/* Draws the routings for T = tokens per rank, uploads their rows. skew: 0 uniform; > 0 lognormal popularity of that sigma;
 * BENCH_SKEW_SAME. MOEFLOW_ERROR_STATE while arms live. */
moeflow_status experts_bench_routing(struct experts_bench *bench, int tokens, double skew);

/* What one layer of this routing (0 .. BENCH_ROUTINGS - 1) does on the rank played. */
int experts_bench_active(const struct experts_bench *bench, int routing);      /* experts with at least one row */
int64_t experts_bench_entries(const struct experts_bench *bench, int routing); /* (row, choice) pairs */
int64_t experts_bench_bytes(const struct experts_bench *bench, int routing);   /* weights of the active experts */
int64_t experts_bench_flops(const struct experts_bench *bench, int routing);   /* of the entries' three matrices */

/* The plan that was opened, as written (arms do not change what this shows), and the rows its buckets count: ep * R. */
const struct plan *experts_bench_plan(const struct experts_bench *bench);
int experts_bench_rows(const struct experts_bench *bench);

/* An arm: makes the variant serve, runs one whole step per routing, which leaves its lists on the device, and captures one
 * graph of BENCH_ROUTINGS forwards with MOEFLOW_FORWARD_EXPERTS. with_sum: owner reduce into an output of its own is part
 * of what is timed. Arms of one bench live side by side and may be launched in any order. */
moeflow_status experts_bench_arm(struct experts_bench *bench, enum experts_bench_kernel kernel, int variant, int with_sum,
                                 struct experts_arm **arm);
void experts_arm_destroy(struct experts_arm *arm); /* NULL is allowed */

/* One launch of the graph between two events, awaited; microseconds a layer. */
moeflow_status experts_arm_launch(struct experts_arm *arm, double *microseconds);

/* Poisons the outputs with NaN, launches the arm's graph, and compares every row of every routing with the reference rows:
 * relative L2 error of a row at most EXPERTS_ROW_L2_MAX, none but rows without an entry zero. The reference is what
 * gate_up + down gave, of which sampled rows were first checked in double precision on the CPU. A comparison that fails is
 * MOEFLOW_OK with *passed = 0 and the first row's story in moeflow_last_error(). */
#define EXPERTS_ROW_L2_MAX 2e-3
moeflow_status experts_arm_check(struct experts_arm *arm, double *worst, int *passed);

/* Of the outputs of one launch, one hash a routing, for bitwise comparisons. */
moeflow_status experts_arm_hash(struct experts_arm *arm, uint64_t hash[BENCH_ROUTINGS]);
#endif
