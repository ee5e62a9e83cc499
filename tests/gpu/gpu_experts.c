/* The experts kernel on one GPU: every variant of the plan on shapes that no tile divides, against the reference; the same
 * bits from all variants of one order tag, for a token alone and inside any batch, from sums in the kernel and from
 * owner_reduce. */
#include "gpu_world.h"

#define TOKENS_MAX 128
#define ROW_MAX 4096

static const int counts[] = {1, 5, 33, TOKENS_MAX};
#define COUNTS ((int)(sizeof counts / sizeof *counts))

/* Rank 0's rows of the largest batch so far, by order tag. */
static struct known {
  int tag, rows;
  uint16_t out[TOKENS_MAX * ROW_MAX];
} known[8];

static struct known *known_of(int tag) {
  for (int i = 0; i < 8; i++) {
    if (known[i].tag == tag) return &known[i];
    if (known[i].tag) continue;
    known[i].tag = tag;
    return &known[i];
  }
  return NULL;
}

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

/* The same seed gives token t the same inputs in a batch of any size. */
static void run(struct gpu *gpu, int tokens, int separate, struct step *step) {
  *step = (struct step){.tokens_max = tokens};
  for (int r = 0; r < gpu->world.ranks; r++) {
    step->tokens[r] = tokens;
    gpu->world.rank[r].layer->separate_sums = separate;
  }
  step_fill(&gpu->world, step, 90);
  gpu_run(gpu, step);
}

static void check_variant(struct gpu *gpu, int number, int tokens) {
  const struct plan_variant *variant = plan_variant(&gpu->world.rank[0].context->plan, KERNEL_EXPERTS, number);
  const size_t row = (size_t)gpu->world.spec.hidden * sizeof(uint16_t);
  struct known *before = known_of(variant->order_tag);
  struct step step, separate;
  char what[160];
  if (!serve(gpu, number, tokens)) return;
  snprintf(what, sizeof what, "H %d, I %d: %d x %d x %d, %d parts, %d tokens", gpu->world.spec.hidden,
           gpu->world.spec.intermediate, variant->tile_tokens, variant->tile_rows, variant->tile_depth, variant->parts,
           tokens);
  run(gpu, tokens, 0, &step);
  step_expect(&gpu->world, &step, what);
  run(gpu, tokens, 1, &separate);
  EXPECT(!memcmp(step.out[0], separate.out[0], (size_t)tokens * row), "%s: owner_reduce gives other sums", what);
  const int shared = tokens < before->rows ? tokens : before->rows;
  EXPECT(!memcmp(step.out[0], before->out, (size_t)shared * row), "%s: other bits than order tag %d gave before", what,
         variant->order_tag);
  if (tokens > before->rows) {
    memcpy(before->out, step.out[0], (size_t)tokens * row);
    before->rows = tokens;
  }
  step_free(&gpu->world, &step);
  step_free(&gpu->world, &separate);
}

static void test_shape(struct gpu *gpu, int ranks, struct spec spec) {
  memset(known, 0, sizeof known);
  gpu->world.spec = spec;
  gpu->world.ranks = ranks;
  gpu->world.capacity = TOKENS_MAX;
  gpu_open(gpu);
  int variants = 0;
  while (plan_variant(&gpu->world.rank[0].context->plan, KERNEL_EXPERTS, variants)) variants++;
  if (!variants) SKIP("no experts kernel for this GPU");
  for (int v = 0; v < variants; v++) {
    for (int i = 0; i < COUNTS; i++) check_variant(gpu, v, counts[i]);
  }
  gpu_close(gpu);
}

int main(void) {
  static struct gpu gpu;
  test_shape(&gpu, 1, world_spec(200, 72, 12, 3));
  test_shape(&gpu, 2, world_spec(1032, 264, 16, 4));
  test_shape(&gpu, 1, world_spec(776, 1160, 6, 2));
  test_shape(&gpu, 2, world_spec(4096, 256, 16, 8)); /* groups of columns */
  TEST_END;
}
