#include "plan_build.h"

#include <string.h>

#include "abi.h"
#include "arch.h"
#include "status.h"

#define STATIC_SHARED_RESERVE 1024 /* what a GEMM's static variables may take beside its ring */
#define STAGES_MIN 2               /* one stage being filled, one being read */

/* Tilings of both GEMMs, from few to many rows an expert. The bounds are where the next tile starts to pay: tile 8 runs a
 * full tensor-core tile of 8 up to 8 rows; above 48 rows an expert, re-reading weights per 32 rows costs more than padding.
 */
static const struct gemm_tile {
  int32_t tile_tokens, tile_rows, tile_depth, stages, threads, order_tag;
  int32_t rows_per_expert; /* serves up to so many expected rows per expert; 0 = no bound, the last row */
} gemm_tiles[] = {
    {8, 64, 64, 4, 128, 1, 8},
    {32, 64, 64, 4, 128, 1, 48},
    {64, 64, 64, 4, 128, 1, 0},
};
#define GEMM_TILES ((int)(sizeof gemm_tiles / sizeof gemm_tiles[0]))

/* The other kernels: one variant each. matrices: weight tiles of a GEMM's stage, 0 for kernels that are none. */
static const struct kernel_row {
  int32_t threads, order_tag, matrices;
} kernel_rows[KERNEL_COUNT] = {
    [KERNEL_ROUTER] = {128, 1, 0},       [KERNEL_PACK] = {256, 0, 0},           [KERNEL_EXCHANGE] = {128, 0, 0},
    [KERNEL_EXPERT_INDEX] = {256, 0, 0}, [KERNEL_EXPERT_PREPARE] = {256, 0, 0}, [KERNEL_GATE_UP] = {0, 0, 2},
    [KERNEL_DOWN] = {0, 0, 1},           [KERNEL_IDENTITY] = {256, 0, 0},       [KERNEL_OWNER_REDUCE] = {256, 1, 0},
    [KERNEL_COMBINE] = {256, 1, 0},      [KERNEL_COMBINE_RING] = {256, 1, 0},   [KERNEL_FILL] = {256, 0, 0},
};

#define ROUTER_WIDE_EXPERTS 1024 /* beyond, a warp's scores need the shared memory of the whole block */

/* The ring adds owners' sums, and with `reduce: choices` there are none. */
static int kernel_wanted(int32_t kernel, const struct spec *spec) {
  return kernel != KERNEL_COMBINE_RING || spec->reduce == SPEC_REDUCE_OWNER;
}

static int32_t kernel_threads(int32_t kernel, const struct spec *spec) {
  if (kernel == KERNEL_ROUTER && spec->experts > ROUTER_WIDE_EXPERTS) return 32;
  return kernel_rows[kernel].threads;
}

/* Stages that fit, 0 when fewer than STAGES_MIN do. */
static int32_t fitting_stages(const struct gemm_tile *tile, int matrices, int32_t shared_max) {
  for (int32_t stages = tile->stages; stages >= STAGES_MIN; stages--) {
    int64_t bytes = moeflow_gemm_shared_bytes(matrices, tile->tile_tokens, tile->tile_rows, tile->tile_depth, stages);
    if (bytes + STATIC_SHARED_RESERVE <= shared_max) return stages;
  }
  return 0;
}

static struct plan_variant *add_variant(struct plan_draft *draft, int32_t kernel, int32_t threads, int32_t order_tag) {
  struct plan_variant *variant = &draft->plan.variants[draft->plan.variant_count++];
  *variant = (struct plan_variant){.kernel = kernel, .threads = threads, .order_tag = order_tag};
  return variant;
}

/* Adds the GEMM's variants and notes which of them serves each row of gemm_tiles: its own, else the last one that fits. */
static moeflow_status add_gemm(struct plan_draft *draft, int32_t kernel, int32_t serves[GEMM_TILES]) {
  int32_t matrices = kernel_rows[kernel].matrices, tag = 0, count = 0;
  for (int i = 0; i < GEMM_TILES; i++) {
    const struct gemm_tile *tile = &gemm_tiles[i];
    int32_t stages = fitting_stages(tile, matrices, draft->shared_max);
    if (stages && (!draft->plan.spec.batch_invariant || !tag || tile->order_tag == tag)) {
      tag = tag ? tag : tile->order_tag;
      draft->depth[draft->plan.variant_count] = (struct variant_depth){tile->tile_depth, stages};
      struct plan_variant *variant = add_variant(draft, kernel, tile->threads, tile->order_tag);
      variant->tile_tokens = tile->tile_tokens;
      variant->tile_rows = tile->tile_rows;
      variant->shared_bytes =
          (int32_t)moeflow_gemm_shared_bytes(matrices, tile->tile_tokens, tile->tile_rows, tile->tile_depth, stages);
      count++;
    }
    serves[i] = count ? count - 1 : 0;
  }
  if (!count) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "no tiling of %s fits %d bytes of shared memory per block on %s",
                      kernel_names[kernel], draft->shared_max, draft->plan.arch);
  }
  return MOEFLOW_OK;
}

/* Expected rows per expert are received_rows * K / E, so a bound of n of them is a bound of n * E / K received rows. */
static void add_buckets(struct plan *plan, const int32_t gate_up[GEMM_TILES], const int32_t down[GEMM_TILES]) {
  for (int i = 0; i < GEMM_TILES; i++) {
    int64_t rows = (int64_t)gemm_tiles[i].rows_per_expert * plan->spec.experts / plan->spec.top_k;
    plan->buckets[plan->bucket_count++] = (struct plan_bucket){(int32_t)rows, gate_up[i], down[i]};
  }
}

moeflow_status plan_build(const struct spec *spec, const char *arch, struct plan_draft *draft) {
  moeflow_status status = MOEFLOW_OK;
  int32_t serves[KERNEL_COUNT][GEMM_TILES];
  const struct arch *target = arch_find(arch);
  if (!target) return MOEFLOW_ERROR_ARGUMENT;
  if (spec->dtype != SPEC_BF16 || spec->dispatch != SPEC_WIRE_BF16) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "no kernels for %s weights with this dispatch yet; build with --dtype bf16",
                      spec_dtype_name(spec->dtype));
  }
  memset(draft, 0, sizeof *draft);
  draft->plan.spec = *spec;
  draft->shared_max = target->shared_bytes;
  snprintf(draft->plan.arch, sizeof draft->plan.arch, "%s", target->name);
  for (int32_t kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    if (kernel_rows[kernel].matrices) {
      CHECK(add_gemm(draft, kernel, serves[kernel]));
    } else if (kernel_wanted(kernel, spec)) {
      add_variant(draft, kernel, kernel_threads(kernel, spec), kernel_rows[kernel].order_tag);
    }
  }
  add_buckets(&draft->plan, serves[KERNEL_GATE_UP], serves[KERNEL_DOWN]);
cleanup:
  return status;
}

static void print_variants(const struct plan_draft *draft, FILE *file) {
  fprintf(file, "%-16s %8s %7s %11s %9s %6s %6s %9s\n", "kernel", "variant", "threads", "tile tokens", "tile rows", "depth",
          "stages", "shared B");
  int seen[KERNEL_COUNT] = {0};
  for (int i = 0; i < draft->plan.variant_count; i++) {
    const struct plan_variant *variant = &draft->plan.variants[i];
    const char *name = kernel_names[variant->kernel];
    int number = seen[variant->kernel]++;
    if (variant->tile_tokens) {
      fprintf(file, "%-16s %8d %7d %11d %9d %6d %6d %9d\n", name, number, variant->threads, variant->tile_tokens,
              variant->tile_rows, draft->depth[i].tile_depth, draft->depth[i].stages, variant->shared_bytes);
    } else {
      fprintf(file, "%-16s %8d %7d %11s %9s %6s %6s %9d\n", name, number, variant->threads, "-", "-", "-", "-",
              variant->shared_bytes);
    }
  }
}

void plan_print(const struct plan_draft *draft, FILE *file) {
  const struct plan *plan = &draft->plan;
  print_variants(draft, file);
  fprintf(file, "\nreceived rows    gate_up  down  why (expected rows per expert = received rows * %d / %d)\n",
          plan->spec.top_k, plan->spec.experts);
  for (int i = 0; i < plan->bucket_count; i++) {
    const struct plan_bucket *bucket = &plan->buckets[i];
    const struct plan_variant *gate_up = plan_variant(plan, KERNEL_GATE_UP, bucket->gate_up);
    char rows[24] = "more";
    if (bucket->rows_max) snprintf(rows, sizeof rows, "up to %d", bucket->rows_max);
    fprintf(file, "%-16s %7d %5d  ", rows, bucket->gate_up, bucket->down);
    if (bucket->rows_max) {
      fprintf(file, "at most %d rows per expert: tiles of %d\n", gemm_tiles[i].rows_per_expert, gate_up->tile_tokens);
    } else {
      fprintf(file, "many rows per expert: tiles of %d\n", gate_up->tile_tokens);
    }
  }
}
