/* One point of the command `kernels`: a number of tokens and a routing, its limits, and the arms that were timed there. */
#ifndef MOEFLOW_BENCH_POINT_H
#define MOEFLOW_BENCH_POINT_H

#include "bench_options.h"
#include "dense_rate.h"
#include "experts_bench.h"
#include "kernel_facts.h"
#include "pairing.h"
#include "read_rate.h"
#include "statistics.h"

#define ARM_NAME_MAX 64
#define ARM_SERVED 0 /* index: "moeflow" */

struct arm {
  char name[ARM_NAME_MAX]; /* "moeflow", "control", "portable", "stream", "alone", or a variant's */
  enum experts_bench_kernel kernel;
  int variant, with_sum;
  int compared; /* does the same work as the served arm, and is no control */
  struct kernel_facts facts[2];
  int facts_count;
  int checked;   /* every check passed; else it is not timed any further, and `why` says what was wrong */
  double rel_l2; /* of the worst row */
  char why[512];
  int sample_count;                  /* launches * pairs when all went well */
  double *samples;                   /* microseconds a layer, launch by launch */
  double us, mean_us;                /* over launches: the mean of their medians, and of their means */
  struct interval median_ci95, ci95; /* of those two, by Student's t: a launch is one observation */
  double fraction;                   /* limit / us */
  double difference;                 /* (moeflow - this) / this, mean over launches */
  struct interval difference_ci95;
  double p; /* of no difference; after Holm's correction over its family in the table: */
  double p_adjusted;
  enum verdict verdict; /* of moeflow against this arm */
};

struct point {
  int tokens, rows; /* T; received rows, ep * T rounded up to a power of two, at most the capacity */
  double skew;
  int active[BENCH_ROUTINGS];
  int64_t entries[BENCH_ROUTINGS];
  double bytes, flops; /* a layer, mean over the routings */
  struct read_result read;
  double byte_us, flop_us, limit_us; /* the limit is the larger of both */
  int arm_count;
  struct arm arms[PAIRING_ARMS_MAX];
};

/* The arms that `options` asks for at so many received rows, by name and variant; nothing else of the point is touched. */
moeflow_status point_choose_arms(const struct bench_options *options, const struct plan *plan, int rows,
                                 struct point *point);

/* Measures limits and arms; an arm that computes something wrong is recorded, not an error. `dense`: its rate may be 0. */
moeflow_status point_measure(const struct bench_options *options, struct experts_bench *bench, struct read_bench *read,
                             const struct dense_result *dense, int tokens, double skew, struct point *point);
void point_free(struct point *point);

/* From the samples: medians, intervals, fractions and differences, all but what needs the whole table. */
void point_summarize(struct point *point, int launches, int pairs);

/* Holm's correction and the verdicts: arms that are compared are one family over the whole table, the others (controls, and
 * arms that do another kind of work) one of their own, since nothing follows from them. */
moeflow_status points_judge(struct point *points, int count);

/* Whether an arm was wrong anywhere; whether the served arm is slower than another somewhere. */
int points_wrong(const struct point *points, int count);
int points_slow(const struct point *points, int count);
#endif
