/* A plan: for one (spec, arch), which cubin entry serves which kernel at which number of rows. Written by moeflow-gen last
 * of all, read by the runtime; docs/file-formats.md describes the text.
 *
 *     moeflow-plan 3
 *     arch sm_90a
 *     minimum_driver 13000
 *     spec 22                                  <- number of canonical lines that follow
 *     name glm-5.3-flash
 *     ...
 *     kernel gate_up 3f..(64 hex) tile_tokens=8 tile_rows=64 tile_depth=64 stages=4 parts=1 residency=1 threads=128 ...
 *     ...
 *     bucket 64 gate_up=0 down=0 experts=1     <- received rows (ranks * rows) up to 64 use experts variant 1; the portable
 *                                                 form of it is gate_up variant 0 with down variant 0
 *     bucket 0 gate_up=2 down=2                <- 0: no upper bound; always the last one. No experts: the portable form
 *     end 5c..(64 hex)                         <- SHA-256 of every byte above
 */
#ifndef MOEFLOW_PLAN_H
#define MOEFLOW_PLAN_H

#include "spec.h"

#define PLAN_VERSION 3
#define PLAN_VARIANTS_MAX 64
#define PLAN_BUCKETS_MAX 16
#define PLAN_TEXT_MAX 65536
#define PLAN_ARCH_MAX 16

/* One row per kernel family: its name is the template file's, the entry symbol is `moeflow_<name>`. */
enum kernel_id {
  KERNEL_ROUTER,
  KERNEL_PACK,
  KERNEL_EXCHANGE,
  KERNEL_DISPATCH,       /* fused: router, pack and the way out; in plans that plan_fuses, with: */
  KERNEL_EXPERT_INDEX,
  KERNEL_EXPERT_PREPARE,
  KERNEL_GATE_UP,
  KERNEL_DOWN,
  KERNEL_EXPERTS,        /* gate_up, down and the rows' sums in one launch, plain weights; not on every arch */
  KERNEL_EXPERTS_STREAM, /* the same on packed weights; in plans that were built for them, with: */
  KERNEL_PACK_WEIGHTS,
  KERNEL_IDENTITY,
  KERNEL_OWNER_REDUCE,
  KERNEL_COMBINE,
  KERNEL_COMBINE_RING,
  KERNEL_RETURN_COMBINE, /* fused: the way home and combine */
  KERNEL_FILL,
  KERNEL_COUNT
};
extern const char *const kernel_names[KERNEL_COUNT]; /* "router", "pack", ... */

struct plan_variant {
  int32_t kernel;       /* enum kernel_id */
  char entry[65];       /* hash of the cubin entry in the store */
  int32_t tile_tokens;  /* GEMMs (gate_up, down, experts, experts_stream): received rows per tile; 0 for others */
  int32_t tile_rows;    /* GEMMs: weight rows of one matrix half (experts: of gate and up together) per unit of work */
  int32_t tile_depth;   /* GEMMs: bf16 columns of one stage */
  int32_t stages;       /* GEMMs: of the ring */
  int32_t parts;        /* experts, experts_stream: pieces of down's depth, each with outputs of its own; 1 for others */
  int32_t residency;    /* blocks that share a multiprocessor; 1 for all but experts and experts_stream */
  int32_t threads;      /* per block */
  int32_t shared_bytes; /* dynamic shared memory per block */
  int32_t order_tag;    /* results are bitwise equal among variants of one tag; 0 = no sums */
};

#define PLAN_NONE (-1)

struct plan_bucket { /* indices among the plan's variants of that kernel, in file order */
  int32_t rows_max;  /* ranks * rows, 0 = no upper bound */
  int32_t gate_up;
  int32_t down;
  int32_t experts;        /* what serves plain weights in place of gate_up and down, or PLAN_NONE */
  int32_t experts_stream; /* what serves packed weights: in every bucket, or PLAN_NONE in every one */
};

struct plan {
  char arch[PLAN_ARCH_MAX];
  int32_t minimum_driver; /* CUDA version that the cubins need, as cuDriverGetVersion reports it: 13000 */
  struct spec spec;
  int32_t variant_count;
  struct plan_variant variants[PLAN_VARIANTS_MAX];
  int32_t bucket_count;
  struct plan_bucket buckets[PLAN_BUCKETS_MAX];
};

/* Text into `text`; MOEFLOW_ERROR_INTERNAL if it does not fit. */
moeflow_status plan_write(const struct plan *plan, char *text, size_t text_size);

/* Strict reader; checks the hash line, ranges, that each kernel has its variants and that buckets ascend. */
moeflow_status plan_parse(const char *text, size_t length, const char *where, struct plan *plan);

/* SHA-256 of the plan's text: part of the ranks' fingerprint. */
void plan_hash(const struct plan *plan, char hex[65]);

/* The bucket that serves this number of received rows. */
const struct plan_bucket *plan_bucket_for(const struct plan *plan, int64_t received_rows);

/* Whether a kernel computes experts in tiles of received rows: gate_up, down and both forms of experts. */
int plan_is_gemm(int32_t kernel);

/* Whether the plan has the kernels of the fused pipeline: where experts add the rows' sums themselves. */
int plan_fuses(const struct plan *plan);

/* The n-th variant of a kernel in file order, NULL when there is none. */
const struct plan_variant *plan_variant(const struct plan *plan, enum kernel_id kernel, int n);

/* "<name>.<dtype>.<arch>.<first 16 digits of spec hash>.plan" */
void plan_file_name(const struct plan *plan, char name[160]);
#endif
