/* The experts kernel on one GPU: every variant of the plan on shapes that no tile divides, against the reference, and every
 * layout of the weights; the same bits from all variants of one order tag, from all layouts, for a token alone and inside
 * any batch, from sums in the kernel and from owner_reduce. */
#include "gpu_world.h"

#define TOKENS_MAX 128
#define ROW_MAX 4096
#define CAPACITY (2 * TOKENS_MAX) /* outputs in two parts for every batch */
#define TAGS 4                    /* of the experts kernel: outputs in 1, 2, 4 or 8 parts */

enum routing {
  SPREAD, /* as step_fill draws it: a token has the same choices in a batch of any size */
  SKEWED, /* of two ranks' 256 rows, 192 for one expert, 96 for another, some for each of the others */
  SAME,   /* every row has the same experts: full tiles, which wide variants take in pairs of blocks */
  ROUTINGS
};
static const char *const routing_names[ROUTINGS] = {"spread", "skewed", "same"};

static const struct batch {
  enum routing routing;
  int tokens; /* of each rank */
} every_batch[] = {{SPREAD, 1}, {SPREAD, 5}, {SPREAD, 33}, {SPREAD, TOKENS_MAX}, {SKEWED, TOKENS_MAX}, {SAME, TOKENS_MAX}},
  few_batches[] = {{SPREAD, 33}, {SAME, TOKENS_MAX}};

static const struct layout {
  const char *name;
  moeflow_gate_up_order order;
  enum world_weights weights;
  int pad;
} layouts[] = {
    {"gate rows first", MOEFLOW_GATE_UP, WORLD_STACKED, 0},
    {"up rows first", MOEFLOW_UP_GATE, WORLD_STACKED, 0},
    {"interleaved, padded", MOEFLOW_INTERLEAVED, WORLD_STACKED, 1},
    {"pointers", MOEFLOW_GATE_UP, WORLD_POINTERS, 0},
};
#define LAYOUTS ((int)(sizeof layouts / sizeof *layouts))
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- What a shape should give; neither variants nor layouts change it ---- */

/* Rank 0's rows of the largest batch so far, by order tag and routing. */
static struct known {
  int tag, rows; /* tag 0: free */
  enum routing routing;
  uint16_t out[TOKENS_MAX * ROW_MAX];
} known[TAGS * ROUTINGS];

static uint16_t *expected[ROUTINGS]; /* the reference's rows, [ranks][TOKENS_MAX][H]; NULL: not wanted so far */

static void forget(void) {
  memset(known, 0, sizeof known);
  for (int i = 0; i < ROUTINGS; i++) {
    free(expected[i]);
    expected[i] = NULL;
  }
}

static struct known *known_of(int tag, enum routing routing) {
  for (int i = 0; i < TAGS * ROUTINGS; i++) {
    if (known[i].tag == tag && known[i].routing == routing) return &known[i];
    if (known[i].tag) continue;
    known[i].tag = tag;
    known[i].routing = routing;
    return &known[i];
  }
  fprintf(stderr, "more than %d order tags\n", TAGS);
  exit(1);
}

static int32_t choice_of(const struct spec *spec, enum routing routing, int token, int k) {
  if (routing == SAME) return k * (spec->experts / spec->top_k);
  if (k == 0) return token < 96 ? 0 : 1 + token % (spec->experts - 2);
  return k == 1 && token >= 32 && token < 80 ? spec->experts - 1 : -1;
}

static void fill(const struct gpu *gpu, const struct batch *batch, struct step *step) {
  const struct spec *spec = &gpu->world.spec;
  *step = (struct step){.tokens_max = batch->tokens};
  for (int r = 0; r < gpu->world.ranks; r++) step->tokens[r] = batch->tokens;
  step_fill(&gpu->world, step, 90);
  for (int r = 0; r < gpu->world.ranks && batch->routing != SPREAD; r++) {
    for (int i = 0; i < batch->tokens * spec->top_k; i++) {
      step->ids[r][i] = choice_of(spec, batch->routing, i / spec->top_k, i % spec->top_k);
    }
  }
}

static const uint16_t *expected_rows(struct gpu *gpu, enum routing routing) {
  const struct batch largest = {routing, TOKENS_MAX};
  struct step step;
  if (expected[routing]) return expected[routing];
  fill(gpu, &largest, &step);
  struct step_tokens all = step_gather(&gpu->world, &step);
  const struct reference_layer reference = world_reference(&gpu->world, &all);
  EXPECT(reference_run(&reference, all.count, all.hidden, all.ids, all.weights, all.sources, all.want, NULL, 8) == 0,
         "memory");
  expected[routing] = all.want;
  all.want = NULL;
  step_tokens_free(&all);
  step_free(&gpu->world, &step);
  return expected[routing];
}

/* Row by row. In a narrow layer one activation on the edge between two roundings may show: a few rows get what
 * reference_allow allows. */
static void expect_rows(struct gpu *gpu, const struct batch *batch, const struct step *step, const char *what) {
  const size_t h = (size_t)gpu->world.spec.hidden, k = (size_t)gpu->world.spec.top_k;
  const uint16_t *rows = expected_rows(gpu, batch->routing);
  struct step_tokens all = step_gather(&gpu->world, step);
  const struct reference_layer reference = world_reference(&gpu->world, &all);
  struct reference_difference difference, first = {0};
  int wrong = 0, first_row = 0, allowed = 0;
  step_expect_ok(&gpu->world, step, what);
  for (size_t i = 0; i < (size_t)all.count; i++) {
    uint16_t *want = all.want + i * h;
    memcpy(want, rows + (size_t)(all.sources[i] * TOKENS_MAX + all.numbers[i]) * h, h * sizeof *want);
    reference_compare(all.got + i * h, want, 1, (int)h, &difference);
    if (!reference_close(&difference) && allowed++ < 8) {
      EXPECT(reference_allow(&reference, all.hidden + i * h, all.ids + i * k, all.weights + i * k, all.sources[i],
                             all.got + i * h, want) == 0,
             "memory");
      reference_compare(all.got + i * h, want, 1, (int)h, &difference);
    }
    if (reference_close(&difference) || wrong++) continue;
    first = difference;
    first_row = (int)i;
  }
  EXPECT(wrong == 0, "%s: %d of %d rows, the first one rank %d token %d: l2 %g; column %d: %g, want %g", what, wrong,
         all.count, all.sources[first_row], all.numbers[first_row], first.l2, first.column, first.got, first.want);
  step_tokens_free(&all);
}

/* ---- A variant on a batch ---- */

/* All buckets are served by experts variant `number`; 0 when the lane has no room for its parts of so many rows. */
static int serve(struct gpu *gpu, int number, int tokens) {
  for (int r = 0; r < gpu->world.ranks; r++) {
    struct moeflow_context *context = gpu->world.rank[r].context;
    const struct plan_variant *variant = plan_variant(&context->plan, KERNEL_EXPERTS, number);
    const struct group_lane *lane = &gpu->world.rank[r].group->lanes[0];
    const int64_t rows = (int64_t)gpu->world.ranks * layer_rows(gpu->world.rank[r].group, tokens);
    if (variant->parts * rows * context->plan.spec.top_k * context->plan.spec.hidden > lane->outputs_max) return 0;
    for (int b = 0; b < context->plan.bucket_count; b++) context->plan.buckets[b].experts = number;
  }
  return 1;
}

static void run(struct gpu *gpu, const struct batch *batch, int separate, struct step *step) {
  for (int r = 0; r < gpu->world.ranks; r++) gpu->world.rank[r].layer->separate_sums = separate;
  fill(gpu, batch, step);
  gpu_run(gpu, step);
}

/* Against what variants of this tag gave before, with this layout or another. */
static void expect_bits(const struct gpu *gpu, int tag, const struct batch *batch, const struct step *step,
                        const char *what) {
  struct known *before = known_of(tag, batch->routing);
  const size_t row = (size_t)gpu->world.spec.hidden * sizeof(uint16_t);
  const int shared = batch->tokens < before->rows ? batch->tokens : before->rows;
  EXPECT(!memcmp(step->out[0], before->out, (size_t)shared * row), "%s: other bits than order tag %d gave before", what,
         tag);
  if (batch->tokens <= before->rows) return;
  memcpy(before->out, step->out[0], (size_t)batch->tokens * row);
  before->rows = batch->tokens;
}

/* Whether the lane has room for it. */
static int check_variant(struct gpu *gpu, const struct layout *layout, int number, const struct batch *batch) {
  const struct spec *spec = &gpu->world.spec;
  const struct plan_variant *variant = plan_variant(&gpu->world.rank[0].context->plan, KERNEL_EXPERTS, number);
  struct step step, separate;
  char what[240];
  if (!serve(gpu, number, batch->tokens)) return 0;
  snprintf(what, sizeof what, "H %d, I %d%s, %s: %d x %d x %d, %d parts, %d tokens, %s", spec->hidden, spec->intermediate,
           spec->activation == SPEC_SWIGLU_CLAMP ? ", clamped" : "", layout->name, variant->tile_tokens, variant->tile_rows,
           variant->tile_depth, variant->parts, batch->tokens, routing_names[batch->routing]);
  run(gpu, batch, 0, &step);
  expect_rows(gpu, batch, &step, what);
  run(gpu, batch, 1, &separate);
  for (int r = 0; r < gpu->world.ranks; r++) {
    EXPECT(!memcmp(step.out[r], separate.out[r], (size_t)batch->tokens * (size_t)spec->hidden * sizeof(uint16_t)),
           "%s: rank %d: owner_reduce gives other sums", what, r);
  }
  expect_bits(gpu, variant->order_tag, batch, &step, what);
  step_free(&gpu->world, &step);
  step_free(&gpu->world, &separate);
  return 1;
}

/* ---- All variants ---- */

/* Whether full tiles make it take two blocks of weight rows at a time. */
static int pairs(const struct plan_variant *variant) {
  return variant->tile_tokens > MOEFLOW_DEEP_TILE && variant->tile_rows == 128;
}

/* On the world's shape, which the caller has set. Every variant has to run, and one of them in pairs. */
static void test_layout(struct gpu *gpu, const struct layout *layout, const struct batch *batches, int count) {
  int variants = 0, paired = 0;
  const struct plan_variant *variant;
  gpu->world.order = layout->order;
  gpu->world.weights = layout->weights;
  gpu->world.pad = layout->pad;
  gpu_open(gpu);
  for (; (variant = plan_variant(&gpu->world.rank[0].context->plan, KERNEL_EXPERTS, variants)); variants++) {
    int ran = 0;
    for (int i = 0; i < count; i++) {
      const int runs = check_variant(gpu, layout, variants, &batches[i]);
      ran += runs;
      paired += runs && batches[i].routing == SAME && pairs(variant);
    }
    EXPECT(ran > 0, "%s, %s: variant %d runs with none of %d batches", gpu->world.spec.name, layout->name, variants, count);
  }
  if (!variants) SKIP("no experts kernel for this GPU");
  EXPECT(paired > 0, "%s, %s: none of %d variants runs in pairs", gpu->world.spec.name, layout->name, variants);
  gpu_close(gpu);
}

static void set_shape(struct gpu *gpu, int ranks, struct spec spec) {
  forget();
  gpu->world.spec = spec;
  gpu->world.ranks = ranks;
  gpu->world.capacity = CAPACITY;
}

static void test_shape(struct gpu *gpu, int ranks, struct spec spec) {
  set_shape(gpu, ranks, spec);
  test_layout(gpu, &layouts[0], every_batch, COUNT(every_batch));
}

/* On top of the first layout: what it gave is what all must give. */
static void test_other_layouts(struct gpu *gpu) {
  for (int i = 1; i < LAYOUTS; i++) test_layout(gpu, &layouts[i], few_batches, COUNT(few_batches));
}

static void test_clamp(struct gpu *gpu, int ranks, struct spec spec) {
  spec.activation = SPEC_SWIGLU_CLAMP;
  spec.activation_limit = 0.5; /* less than half the standard deviation of gate and up */
  set_shape(gpu, ranks, spec);
  for (int i = 0; i < 2; i++) test_layout(gpu, &layouts[i], few_batches, COUNT(few_batches));
}

int main(void) {
  static struct gpu gpu;
  test_shape(&gpu, 1, world_spec(200, 72, 12, 3));
  test_other_layouts(&gpu);
  test_clamp(&gpu, 1, world_spec(200, 72, 12, 3));
  test_shape(&gpu, 2, world_spec(1032, 264, 16, 4));
  test_shape(&gpu, 1, world_spec(776, 1160, 6, 2));
  test_shape(&gpu, 2, world_spec(4096, 512, 16, 8)); /* groups of columns; outputs in parts where tiles are narrow */
  forget();
  TEST_END;
}
