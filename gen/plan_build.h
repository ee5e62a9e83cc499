/* spec + arch -> plan: which variants of each kernel to compile, and which of them serves how many received rows. A pure
 * function: no files, no GPU, no toolchain. */
#ifndef MOEFLOW_PLAN_BUILD_H
#define MOEFLOW_PLAN_BUILD_H

#include <stdio.h>

#include "tune.h"

struct plan_candidate { /* a variant of KERNEL_EXPERTS or KERNEL_EXPERTS_STREAM */
  int32_t kernel;
  struct experts_shape shape;
};

struct plan_options {
  const struct tune *tune;                 /* what was measured, of this spec; used for its arch alone. NULL: defaults */
  int packed;                              /* experts_stream and pack_weights, too */
  const struct plan_candidate *candidates; /* variants beside those that buckets use: for `sweep` */
  int candidate_count;
};

enum bucket_source {
  BUCKET_DEFAULT,
  BUCKET_TUNED,
  BUCKET_ONLY /* gate_up and down serve all of it: there is no other kernel for so many rows, this arch or this model */
};

struct bucket_reason {
  int32_t rows_per_expert; /* most expected ones, 0 = no bound */
  enum bucket_source source;
  struct tune_line line; /* TUNED: what says so */
  char note[128];        /* why a line for it was not used, "" */
};

struct plan_draft { /* a plan whose entries have no hashes yet */
  struct plan plan;
  struct bucket_reason reasons[PLAN_BUCKETS_MAX];
  int32_t shared_max; /* the arch's dynamic shared memory per block */
};

/* `options` may be NULL. MOEFLOW_ERROR_UNSUPPORTED for a dtype without kernels, MOEFLOW_ERROR_ARGUMENT for an unknown arch
 * or more variants than a plan holds, MOEFLOW_ERROR_FORMAT for a tuned shape that this model cannot have. */
moeflow_status plan_build(const struct spec *spec, const char *arch, const struct plan_options *options,
                          struct plan_draft *draft);

/* The number of the variant among those of its kernel, PLAN_NONE when the plan has none like it. */
int32_t plan_find_experts(const struct plan *plan, int32_t kernel, const struct experts_shape *shape);

/* The first bucket for at most `rows` received rows whose kernel was chosen without a measurement, -1: there is none. */
int plan_guessed_bucket(const struct plan_draft *draft, int64_t rows);

/* Tables: the variants, the space they come from, and the buckets with the reason of each. */
void plan_print(const struct plan_draft *draft, FILE *file);
#endif
