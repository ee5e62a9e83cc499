/* spec + arch -> plan: which variants of each kernel to compile, and which of them serves how many received rows. A pure
 * function: no files, no GPU, no toolchain. */
#ifndef MOEFLOW_PLAN_BUILD_H
#define MOEFLOW_PLAN_BUILD_H

#include <stdio.h>

#include "plan.h"

struct variant_depth { /* of a GEMM, what only its source text needs; 0 for the other kernels */
  int32_t tile_depth;  /* bf16 columns of one stage */
  int32_t stages;
};

struct plan_draft { /* a plan whose entries have no hashes yet */
  struct plan plan;
  struct variant_depth depth[PLAN_VARIANTS_MAX];
  int32_t shared_max; /* the arch's dynamic shared memory per block */
};

/* MOEFLOW_ERROR_UNSUPPORTED for a dtype without kernels, MOEFLOW_ERROR_ARGUMENT for an unknown arch. */
moeflow_status plan_build(const struct spec *spec, const char *arch, struct plan_draft *draft);

/* Two tables: the variants, and the buckets with the reason of each. */
void plan_print(const struct plan_draft *draft, FILE *file);
#endif
