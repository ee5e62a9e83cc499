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

/* What serves up to `rows` received rows without a measurement. An expert has no more rows than there are, so the tile need
 * not be wider; the fewer rows, the more the last units matter, so down's depth is cut into parts. */
/* clang-format off */
static const struct experts_default {
  int32_t kernel, rows; /* ascending for each kernel; 0 = no bound */
  struct experts_shape shape;
} experts_defaults[] = {
    {KERNEL_EXPERTS_STREAM, 8, {8, 64, 512, 32, 4, 2}},
    {KERNEL_EXPERTS_STREAM, 16, {16, 64, 512, 32, 2, 2}},
    {KERNEL_EXPERTS_STREAM, 32, {32, 64, 512, 32, 1, 2}},
    {KERNEL_EXPERTS_STREAM, 0, {64, 64, 256, 16, 1, 2}},
    {KERNEL_EXPERTS, 8, {8, 128, 256, 3, 2, 1}},
    {KERNEL_EXPERTS, 16, {16, 128, 256, 3, 2, 1}},
    {KERNEL_EXPERTS, 1024, {64, 128, 128, 5, 1, 1}},
};
/* clang-format on */
#define EXPERTS_DEFAULTS ((int)(sizeof experts_defaults / sizeof experts_defaults[0]))

/* The other kernels: one variant each. matrices: weight tiles of a GEMM's stage, 0 for kernels that are none. */
static const struct kernel_row {
  int32_t threads, order_tag, matrices;
} kernel_rows[KERNEL_COUNT] = {
    [KERNEL_ROUTER] = {128, 1, 0},         [KERNEL_PACK] = {256, 0, 0},           [KERNEL_EXCHANGE] = {128, 0, 0},
    [KERNEL_DISPATCH] = {256, 1, 0},       [KERNEL_RETURN_COMBINE] = {256, 1, 0}, [KERNEL_EXPERT_INDEX] = {256, 0, 0},
    [KERNEL_EXPERT_PREPARE] = {256, 0, 0}, [KERNEL_GATE_UP] = {0, 0, 2},          [KERNEL_DOWN] = {0, 0, 1},
    [KERNEL_PACK_WEIGHTS] = {256, 0, 0},   [KERNEL_IDENTITY] = {256, 0, 0},       [KERNEL_OWNER_REDUCE] = {256, 1, 0},
    [KERNEL_COMBINE] = {256, 1, 0},        [KERNEL_COMBINE_RING] = {256, 1, 0},   [KERNEL_FILL] = {256, 0, 0},
};

/* One order of additions for any number of received rows: asked for, or because choices return one by one so that their sums
 * are the same however many ranks there are, and with them the rows. */
static int one_order(const struct spec *spec) {
  return spec->batch_invariant || spec->reduce == SPEC_REDUCE_CHOICES;
}

#define ROUTER_WIDE_EXPERTS 1024 /* beyond, a warp's scores need the shared memory of the whole block */

static int is_experts(int32_t kernel) {
  return kernel == KERNEL_EXPERTS || kernel == KERNEL_EXPERTS_STREAM;
}

struct builder {
  const struct plan_options *options;
  const struct arch *arch;
  struct plan_draft *draft;
  const struct tune *tune;  /* NULL: none for this arch */
  int served[KERNEL_COUNT]; /* of both experts kernels: this plan has them */
};

/* ---- Variants ---- */

static moeflow_status add_variant(struct plan_draft *draft, const struct plan_variant *variant) {
  struct plan *plan = &draft->plan;
  if (plan->variant_count == PLAN_VARIANTS_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "more than %d variants in a plan", PLAN_VARIANTS_MAX);
  }
  plan->variants[plan->variant_count++] = *variant;
  return MOEFLOW_OK;
}

static moeflow_status add_other(struct plan_draft *draft, int32_t kernel) {
  const struct spec *spec = &draft->plan.spec;
  int32_t threads = kernel_rows[kernel].threads;
  if (kernel == KERNEL_ROUTER && spec->experts > ROUTER_WIDE_EXPERTS) threads = 32;
  return add_variant(
      draft,
      &(struct plan_variant){
          .kernel = kernel, .parts = 1, .residency = 1, .threads = threads, .order_tag = kernel_rows[kernel].order_tag});
}

/* Stages that fit, 0 when fewer than STAGES_MIN do. */
static int32_t fitting_stages(const struct gemm_tile *tile, int matrices, int32_t shared_max) {
  for (int32_t stages = tile->stages; stages >= STAGES_MIN; stages--) {
    int64_t bytes = moeflow_gemm_shared_bytes(matrices, tile->tile_tokens, tile->tile_rows, tile->tile_depth, stages);
    if (bytes + STATIC_SHARED_RESERVE <= shared_max) return stages;
  }
  return 0;
}

/* Adds the GEMM's variants and notes which of them serves each row of gemm_tiles: its own, else the last one that fits. */
static moeflow_status add_gemm(struct plan_draft *draft, int32_t kernel, int32_t serves[GEMM_TILES]) {
  moeflow_status status = MOEFLOW_OK;
  int32_t matrices = kernel_rows[kernel].matrices, tag = 0, count = 0;
  for (int i = 0; i < GEMM_TILES; i++) {
    const struct gemm_tile *tile = &gemm_tiles[i];
    int32_t stages = fitting_stages(tile, matrices, draft->shared_max);
    if (stages && (!one_order(&draft->plan.spec) || !tag || tile->order_tag == tag)) {
      tag = tag ? tag : tile->order_tag;
      const struct plan_variant variant = {.kernel = kernel,
                                           .tile_tokens = tile->tile_tokens,
                                           .tile_rows = tile->tile_rows,
                                           .tile_depth = tile->tile_depth,
                                           .stages = stages,
                                           .parts = 1,
                                           .residency = 1,
                                           .threads = tile->threads,
                                           .shared_bytes = (int32_t)moeflow_gemm_shared_bytes(
                                               matrices, tile->tile_tokens, tile->tile_rows, tile->tile_depth, stages),
                                           .order_tag = tile->order_tag};
      CHECK(add_variant(draft, &variant));
      count++;
    }
    serves[i] = count ? count - 1 : 0;
  }
  if (!count) {
    FAIL(MOEFLOW_ERROR_UNSUPPORTED, "no tiling of %s fits %d bytes of shared memory per block on %s", kernel_names[kernel],
         draft->shared_max, draft->plan.arch);
  }
cleanup:
  return status;
}

int32_t plan_find_experts(const struct plan *plan, int32_t kernel, const struct experts_shape *shape) {
  const struct plan_variant *variant;
  for (int32_t i = 0; (variant = plan_variant(plan, kernel, i)); i++) {
    struct experts_shape other;
    experts_shape_of(variant, &other);
    if (experts_shape_same(&other, shape)) return i;
  }
  return PLAN_NONE;
}

static moeflow_status add_experts(struct plan_draft *draft, int32_t kernel, const struct experts_shape *shape,
                                  int32_t *number) {
  struct plan_variant variant;
  *number = plan_find_experts(&draft->plan, kernel, shape);
  if (*number != PLAN_NONE) return MOEFLOW_OK;
  experts_variant(kernel, shape, &variant);
  moeflow_status status = add_variant(draft, &variant);
  *number = plan_find_experts(&draft->plan, kernel, shape);
  return status;
}

/* ---- Defaults of the experts kernels ---- */

/* A layer too narrow for the shape, or an arch with less shared memory, gets the nearest one that is legal: of those with no
 * more of anything, the one that keeps most bytes in flight, and of equals the one with most parts, then the deepest. */
static int fit(const struct plan_draft *draft, int32_t kernel, const struct experts_shape *wanted,
               struct experts_shape *best) {
  int64_t most = 0;
  struct experts_shape shape = {.tile_tokens = wanted->tile_tokens};
  for (shape.tile_rows = wanted->tile_rows; shape.tile_rows >= MOEFLOW_UNIT_ROWS; shape.tile_rows /= 2) {
    for (shape.residency = wanted->residency; shape.residency >= 1; shape.residency--) {
      for (shape.parts = wanted->parts; shape.parts >= 1; shape.parts /= 2) {
        for (shape.tile_depth = wanted->tile_depth; shape.tile_depth >= 64; shape.tile_depth /= 2) {
          for (shape.stages = wanted->stages; shape.stages >= 3; shape.stages--) {
            int64_t bytes = experts_bytes_in_flight(kernel, &shape);
            if (bytes <= most) break; /* fewer stages are fewer bytes */
            if (experts_shape_check(&draft->plan.spec, kernel, &shape, draft->shared_max, NULL) != EXPERTS_LEGAL) continue;
            most = bytes;
            *best = shape;
          }
        }
      }
    }
  }
  return most > 0;
}

/* With one order of additions, that serves all rows, few and many: down in one part, and the experts kernel, if
 * there is one, in the open bucket too. The portable form alone would cost decode the memory's rate, which is what a layer
 * is served for; the widest tile reads weights no oftener than the portable form does. */
static int default_shape(const struct plan_draft *draft, int32_t kernel, int32_t rows, struct experts_shape *shape) {
  const struct experts_default *chosen = NULL;
  for (int i = 0; i < EXPERTS_DEFAULTS; i++) {
    const struct experts_default *row = &experts_defaults[i];
    if (row->kernel != kernel) continue;
    if (one_order(&draft->plan.spec)) chosen = row; /* in the end the widest one, if none suits before */
    if (row->rows && (!rows || rows > row->rows)) continue;
    chosen = row;
    break;
  }
  if (!chosen) return 0;
  struct experts_shape wanted = chosen->shape;
  if (one_order(&draft->plan.spec)) wanted.parts = 1;
  return fit(draft, kernel, &wanted, shape);
}

/* Where the plan's rules want a kernel in all buckets or in none, it is in all: each default has a legal form for every
 * model, as unit_plan_build checks. */
static int is_served(const struct builder *builder, int32_t kernel) {
  return experts_kernel_on(kernel, builder->arch) && (kernel != KERNEL_EXPERTS_STREAM || builder->options->packed);
}

/* ---- Buckets ---- */

/* The measurement that speaks for a bucket: of the next size at which there was one. */
static const struct tune_line *tune_line_for(const struct tune *tune, int32_t rows) {
  for (int i = 0; tune && rows && i < tune->count; i++) {
    if (rows <= tune->lines[i].rows) return &tune->lines[i];
  }
  return NULL;
}

/* Why a line cannot be used in this plan, NULL when it can. */
static const char *unusable(const struct builder *builder, const struct tune_line *line) {
  if (line->kernel == KERNEL_EXPERTS_STREAM && !builder->options->packed) return "packed weights won: build --packed";
  if (is_experts(line->kernel) && !builder->served[line->kernel]) return "the winner is no kernel of this arch";
  if (one_order(&builder->draft->plan.spec) && (!is_experts(line->kernel) || line->shape.parts != 1)) {
    return "the winner adds in another order: batch_invariant, reduce: choices";
  }
  return NULL;
}

/* Whether the line says which variant of an experts kernel serves, or that none does. */
static int decides(const struct tune_line *line, int32_t kernel) {
  return line->kernel == kernel || (line->kernel == KERNEL_GATE_UP && kernel == KERNEL_EXPERTS);
}

/* Expected rows per expert are received_rows * K / E, so a bound of n of them is a bound of n * E / K received rows. */
static int32_t gemm_bound(const struct spec *spec, int i) {
  return (int32_t)((int64_t)gemm_tiles[i].rows_per_expert * spec->experts / spec->top_k);
}

/* The first row of gemm_tiles whose bound holds the bucket. */
static int gemm_row(const struct spec *spec, int32_t rows) {
  int i = 0;
  while (gemm_tiles[i].rows_per_expert && (!rows || rows > gemm_bound(spec, i))) i++;
  return i;
}

/* Keeps the buckets ascending, each bound once. 0 when there is no room: the last place is the open bucket's. */
static int add_bound(struct plan *plan, int32_t rows) {
  int at = plan->bucket_count;
  while (at > 0 && plan->buckets[at - 1].rows_max >= rows) at--;
  if (at < plan->bucket_count && plan->buckets[at].rows_max == rows) return 1;
  if (plan->bucket_count == PLAN_BUCKETS_MAX - 1) return 0;
  memmove(&plan->buckets[at + 1], &plan->buckets[at], (size_t)(plan->bucket_count - at) * sizeof plan->buckets[0]);
  plan->buckets[at].rows_max = rows;
  plan->bucket_count++;
  return 1;
}

_Static_assert(GEMM_TILES - 1 + TUNE_ROWS_MAX + 1 < PLAN_BUCKETS_MAX, "room for a default beyond what was measured");

/* Where any kernel's choice changes: the GEMMs' tiles, sizes that were measured, and defaults where no measurement decides,
 * the largest first: where there is no room for more, the next larger one serves. */
static void add_bounds(const struct builder *builder) {
  struct plan *plan = &builder->draft->plan;
  for (int i = 0; i < GEMM_TILES - 1; i++) add_bound(plan, gemm_bound(&plan->spec, i));
  for (int i = 0; builder->tune && i < builder->tune->count; i++) add_bound(plan, builder->tune->lines[i].rows);
  for (int i = EXPERTS_DEFAULTS - 1; i >= 0; i--) {
    const struct experts_default *row = &experts_defaults[i];
    const struct tune_line *line = tune_line_for(builder->tune, row->rows);
    if (!row->rows || !builder->served[row->kernel]) continue;
    if (!line || unusable(builder, line) || !decides(line, row->kernel)) add_bound(plan, row->rows);
  }
  plan->buckets[plan->bucket_count++].rows_max = 0;
}

/* Whether the bucket's line can be used here; if not, `note` says why. */
static moeflow_status consider(const struct builder *builder, const struct tune_line *line, struct bucket_reason *reason) {
  const struct plan_draft *draft = builder->draft;
  char why[EXPERTS_WHY_MAX];
  if (is_experts(line->kernel) &&
      experts_shape_check(&draft->plan.spec, line->kernel, &line->shape, draft->shared_max, why) != EXPERTS_LEGAL) {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s: rows %d: %s", builder->tune->path, line->rows, why);
  }
  const char *note = unusable(builder, line);
  snprintf(reason->note, sizeof reason->note, "%s", note ? note : "");
  if (note) return MOEFLOW_OK;
  reason->source = BUCKET_TUNED;
  reason->line = *line;
  return MOEFLOW_OK;
}

static moeflow_status explain_bucket(const struct builder *builder, int bucket) {
  struct plan_draft *draft = builder->draft;
  struct bucket_reason *reason = &draft->reasons[bucket];
  struct experts_shape shape;
  int32_t rows = draft->plan.buckets[bucket].rows_max;
  const struct tune_line *line = tune_line_for(builder->tune, rows);
  int choice = 0;
  for (int32_t kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    if (is_experts(kernel) && builder->served[kernel]) choice |= default_shape(draft, kernel, rows, &shape);
  }
  reason->rows_per_expert = gemm_tiles[gemm_row(&draft->plan.spec, rows)].rows_per_expert;
  reason->source = choice ? BUCKET_DEFAULT : BUCKET_ONLY;
  return line ? consider(builder, line, reason) : MOEFLOW_OK;
}

/* The bucket's variant of an experts kernel: the one measured, none where the portable form has won, else the default. */
static moeflow_status choose_experts(const struct builder *builder, int32_t kernel, int bucket, int32_t *number) {
  struct plan_draft *draft = builder->draft;
  const struct bucket_reason *reason = &draft->reasons[bucket];
  struct experts_shape shape;
  *number = PLAN_NONE;
  if (!builder->served[kernel]) return MOEFLOW_OK;
  if (reason->source == BUCKET_TUNED && decides(&reason->line, kernel)) {
    if (reason->line.kernel != kernel) return MOEFLOW_OK;
    shape = reason->line.shape;
  } else if (!default_shape(draft, kernel, draft->plan.buckets[bucket].rows_max, &shape)) {
    return MOEFLOW_OK;
  }
  return add_experts(draft, kernel, &shape, number);
}

/* All variants of an experts kernel: the buckets', in their order, then candidates. */
static moeflow_status add_all_experts(const struct builder *builder, int32_t kernel) {
  moeflow_status status = MOEFLOW_OK;
  struct plan *plan = &builder->draft->plan;
  int32_t number;
  for (int i = 0; i < plan->bucket_count; i++) {
    CHECK(choose_experts(builder, kernel, i, &number));
    *(kernel == KERNEL_EXPERTS ? &plan->buckets[i].experts : &plan->buckets[i].experts_stream) = number;
  }
  for (int i = 0; i < builder->options->candidate_count; i++) {
    const struct plan_candidate *candidate = &builder->options->candidates[i];
    if (candidate->kernel == kernel) CHECK(add_experts(builder->draft, kernel, &candidate->shape, &number));
  }
cleanup:
  return status;
}

/* ---- The plan ---- */

static int kernel_wanted(const struct builder *builder, int32_t kernel) {
  if (kernel == KERNEL_PACK_WEIGHTS) return builder->served[KERNEL_EXPERTS_STREAM];
  if (kernel == KERNEL_DISPATCH || kernel == KERNEL_RETURN_COMBINE) { /* plan_fuses, before its experts are there */
    return builder->served[KERNEL_EXPERTS] && builder->draft->plan.spec.reduce == SPEC_REDUCE_OWNER;
  }
  /* the ring adds owners' sums, and with `reduce: choices` there are none */
  return kernel != KERNEL_COMBINE_RING || builder->draft->plan.spec.reduce == SPEC_REDUCE_OWNER;
}

static moeflow_status add_variants(const struct builder *builder) {
  moeflow_status status = MOEFLOW_OK;
  struct plan_draft *draft = builder->draft;
  int32_t serves[KERNEL_COUNT][GEMM_TILES];
  for (int32_t kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    if (kernel_rows[kernel].matrices) {
      CHECK(add_gemm(draft, kernel, serves[kernel]));
    } else if (is_experts(kernel)) {
      CHECK(add_all_experts(builder, kernel));
    } else if (kernel_wanted(builder, kernel)) {
      CHECK(add_other(draft, kernel));
    }
  }
  for (int i = 0; i < draft->plan.bucket_count; i++) {
    struct plan_bucket *bucket = &draft->plan.buckets[i];
    int row = gemm_row(&draft->plan.spec, bucket->rows_max);
    bucket->gate_up = serves[KERNEL_GATE_UP][row];
    bucket->down = serves[KERNEL_DOWN][row];
  }
cleanup:
  return status;
}

moeflow_status plan_build(const struct spec *spec, const char *arch, const struct plan_options *options,
                          struct plan_draft *draft) {
  moeflow_status status = MOEFLOW_OK;
  static const struct plan_options none;
  struct builder builder = {.options = options ? options : &none, .arch = arch_find(arch), .draft = draft};
  if (!builder.arch) return MOEFLOW_ERROR_ARGUMENT;
  if (spec->dtype != SPEC_BF16 || spec->dispatch != SPEC_WIRE_BF16) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "no kernels for %s weights with this dispatch yet; build with --dtype bf16",
                      spec_dtype_name(spec->dtype));
  }
  memset(draft, 0, sizeof *draft);
  draft->plan.spec = *spec;
  draft->shared_max = builder.arch->shared_bytes;
  snprintf(draft->plan.arch, sizeof draft->plan.arch, "%s", builder.arch->name);
  if (builder.options->tune && !strcmp(builder.options->tune->identity.arch, draft->plan.arch)) {
    builder.tune = builder.options->tune;
  }
  builder.served[KERNEL_EXPERTS] = is_served(&builder, KERNEL_EXPERTS);
  builder.served[KERNEL_EXPERTS_STREAM] = is_served(&builder, KERNEL_EXPERTS_STREAM);
  add_bounds(&builder);
  for (int i = 0; i < draft->plan.bucket_count; i++) CHECK(explain_bucket(&builder, i));
  CHECK(add_variants(&builder));
cleanup:
  return status;
}

int plan_guessed_bucket(const struct plan_draft *draft, int64_t rows) {
  for (int i = 0; i < draft->plan.bucket_count; i++) {
    const struct plan_bucket *before = i ? &draft->plan.buckets[i - 1] : NULL;
    if (before && before->rows_max >= rows) break;
    if (draft->reasons[i].source == BUCKET_DEFAULT) return i;
  }
  return -1;
}

/* ---- As tables ---- */

static void print_variants(const struct plan_draft *draft, FILE *file) {
  fprintf(file, "%-16s %8s %7s %11s %9s %6s %6s %5s %9s %9s\n", "kernel", "variant", "threads", "tile tokens", "tile rows",
          "depth", "stages", "parts", "residency", "shared B");
  int seen[KERNEL_COUNT] = {0};
  for (int i = 0; i < draft->plan.variant_count; i++) {
    const struct plan_variant *variant = &draft->plan.variants[i];
    const char *name = kernel_names[variant->kernel];
    int number = seen[variant->kernel]++;
    if (variant->tile_tokens) {
      fprintf(file, "%-16s %8d %7d %11d %9d %6d %6d %5d %9d %9d\n", name, number, variant->threads, variant->tile_tokens,
              variant->tile_rows, variant->tile_depth, variant->stages, variant->parts, variant->residency,
              variant->shared_bytes);
    } else {
      fprintf(file, "%-16s %8d %7d %11s %9s %6s %6s %5s %9s %9d\n", name, number, variant->threads, "-", "-", "-", "-", "-",
              "-", variant->shared_bytes);
    }
  }
}

static void print_space(const struct plan_draft *draft, int32_t kernel, FILE *file) {
  int count[EXPERTS_RULES], all = 0, commas = 0;
  if (!plan_variant(&draft->plan, kernel, 0)) return;
  experts_space_count(&draft->plan.spec, kernel, draft->shared_max, count);
  for (int rule = 0; rule < EXPERTS_RULES; rule++) all += count[rule];
  fprintf(file, "\n%s: %d of %d variants legal; pruned by", kernel_names[kernel], count[EXPERTS_LEGAL], all);
  for (int rule = EXPERTS_LEGAL + 1; rule < EXPERTS_RULES; rule++) {
    if (count[rule]) fprintf(file, "%s %s %d", commas++ ? "," : "", experts_rule_names[rule], count[rule]);
  }
  fputc('\n', file);
}

/* What a line measured, without the runner-up's name: --format json has it. */
/* The runner-up, whose name is long, has a line of its own. */
static void print_measured(const struct tune_line *line, FILE *file) {
  const int kept = line->us == line->default_us; /* the gap is then to the runner-up */
  fprintf(file, "tuned at %d: %s %.1f us", line->rows, kept ? "the default stays," : tune_kernel_name(line->kernel),
          line->us);
  if (kept && !line->runner_up[0]) {
    fprintf(file, "; no other came near");
    return;
  }
  fprintf(file, ", %.2f %% [%.2f, %.2f] less than the ", line->gap, line->gap_low, line->gap_high);
  if (kept) {
    fprintf(file, "runner-up's");
  } else {
    fprintf(file, "default's %.1f", line->default_us);
  }
  if (line->runner_up[0]) fprintf(file, "\n    runner-up: %s", line->runner_up);
}

static void print_reason(const struct plan_draft *draft, const struct bucket_reason *reason, FILE *file) {
  const struct arch *arch = arch_find(draft->plan.arch);
  if (reason->source == BUCKET_TUNED) {
    print_measured(&reason->line, file);
    return;
  }
  if (reason->rows_per_expert) {
    fprintf(file, "at most %d rows per expert; ", reason->rows_per_expert);
  } else {
    fprintf(file, "many rows per expert; ");
  }
  if (reason->source == BUCKET_DEFAULT) {
    fprintf(file, "default (not tuned)%s%s", reason->note[0] ? "; " : "", reason->note);
  } else if (arch && !experts_kernel_on(KERNEL_EXPERTS, arch)) {
    fprintf(file, "the experts kernel is not for %s", arch->name);
  } else {
    fprintf(file, "no other kernel for this size");
  }
}

/* "2 (tile 64)": the variant's number, and what tells it from the others; "-" for none. */
static void name_variant(const struct plan *plan, int32_t kernel, int32_t number, char text[32]) {
  const struct plan_variant *variant = number == PLAN_NONE ? NULL : plan_variant(plan, kernel, number);
  if (variant) {
    snprintf(text, 32, "%d (tile %d)", number, variant->tile_tokens);
  } else {
    strcpy(text, "-");
  }
}

static int has_stream(const struct plan *plan) {
  return plan_variant(plan, KERNEL_EXPERTS_STREAM, 0) != NULL;
}

static void print_bucket(const struct plan *plan, const struct plan_bucket *bucket, FILE *file) {
  const struct {
    int32_t kernel, number;
  } columns[] = {{KERNEL_GATE_UP, bucket->gate_up},
                 {KERNEL_DOWN, bucket->down},
                 {KERNEL_EXPERTS, bucket->experts},
                 {KERNEL_EXPERTS_STREAM, bucket->experts_stream}};
  char rows[24] = "more", text[32];
  if (bucket->rows_max) snprintf(rows, sizeof rows, "up to %d", bucket->rows_max);
  fprintf(file, "%-16s", rows);
  for (int i = 0; i < 3 + has_stream(plan); i++) {
    name_variant(plan, columns[i].kernel, columns[i].number, text);
    fprintf(file, " %14s", text);
  }
}

static void print_buckets(const struct plan_draft *draft, FILE *file) {
  const struct plan *plan = &draft->plan;
  fprintf(file, "\n%-16s %14s %14s %14s%s  why\n", "received rows", "gate_up", "down", "experts",
          has_stream(plan) ? " experts_stream" : "");
  for (int i = 0; i < plan->bucket_count; i++) {
    print_bucket(plan, &plan->buckets[i], file);
    fprintf(file, "  ");
    print_reason(draft, &draft->reasons[i], file);
    fputc('\n', file);
  }
  fprintf(
      file,
      "A number is a variant above, its tile the rows of an expert that it takes at once; '-': gate_up and down serve.\n"
      "gate_up and down go by the expected rows per expert, received rows * %d / %d; the default of experts by received\n"
      "rows, which one expert may get all of. docs/kernels.md has the terms, docs/file-formats.md the tuned lines.\n",
      plan->spec.top_k, plan->spec.experts);
}

void plan_print(const struct plan_draft *draft, FILE *file) {
  print_variants(draft, file);
  print_space(draft, KERNEL_EXPERTS, file);
  print_space(draft, KERNEL_EXPERTS_STREAM, file);
  print_buckets(draft, file);
}
