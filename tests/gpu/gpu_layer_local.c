/* The whole layer on one GPU, its ranks in streams of their own, against the reference. */
#include "gpu_world.h"

#include <math.h>

static struct spec small(void) {
  return world_spec(512, 256, 16, 4);
}

static void check_step(struct gpu *gpu, struct step *step, int seed, const char *what) {
  step_fill(&gpu->world, step, seed);
  gpu_run(gpu, step);
  step_expect(&gpu->world, step, what);
  step_free(&gpu->world, step);
}

static void test_reference(struct gpu *gpu, int ranks) {
  const int counts[] = {1, 7, 33, 128};
  gpu->world.spec = small();
  gpu->world.ranks = ranks;
  gpu->world.capacity = 128;
  gpu_open(gpu);
  for (int i = 0; i < 4; i++) {
    struct step step = {.tokens_max = counts[i]};
    for (int r = 0; r < ranks; r++) step.tokens[r] = counts[i];
    check_step(gpu, &step, 10 + i, "same number on all ranks");
  }
  struct step uneven = {.tokens_max = 40};
  for (int r = 0; r < ranks; r++) uneven.tokens[r] = r % 2 ? 0 : 40 - r;
  check_step(gpu, &uneven, 20, "some ranks have none");
  struct step none = {.tokens_max = 8};
  check_step(gpu, &none, 21, "no rank has any");
  struct step identity = {.tokens_max = 40, .flags = MOEFLOW_FORWARD_IDENTITY};
  for (int r = 0; r < ranks; r++) identity.tokens[r] = 40;
  check_step(gpu, &identity, 22, "identity experts");
  gpu_close(gpu);
}

/* With choices returned one by one, the sums do not depend on who computed them: the same bits for every number of ranks. */
static void test_choices(struct gpu *gpu) {
  const int sizes[] = {1, 2, 3, 4, 8};
  const int tokens = 50;
  static uint16_t first[50 * 512];
  gpu->world.spec = small();
  gpu->world.spec.reduce = SPEC_REDUCE_CHOICES;
  for (int i = 0; i < 5; i++) {
    struct step step = {.tokens_max = 64};
    gpu->world.ranks = sizes[i];
    gpu->world.capacity = 64;
    gpu_open(gpu);
    for (int r = 0; r < sizes[i]; r++) step.tokens[r] = tokens;
    step_fill(&gpu->world, &step, 30);
    gpu_run(gpu, &step);
    step_expect(&gpu->world, &step, "choices");
    if (i == 0) memcpy(first, step.out[0], sizeof first);
    EXPECT(!memcmp(first, step.out[0], sizeof first), "%d ranks give other bits than one", sizes[i]);
    step_free(&gpu->world, &step);
    gpu_close(gpu);
  }
}

/* Ids that no expert has, zero weights with a hidden row of NaN behind them, and one expert named twice. */
static void test_hostile_ids(struct gpu *gpu) {
  struct step step = {.tokens = {6, 6}, .tokens_max = 6};
  const int32_t hostile[] = {-1, 16, INT32_MAX, INT32_MIN};
  gpu->world.spec = small();
  gpu->world.ranks = 2;
  gpu->world.capacity = 8;
  gpu_open(gpu);
  step_fill(&gpu->world, &step, 40);
  for (int r = 0; r < 2; r++) {
    for (int k = 0; k < 4; k++) {
      step.ids[r][k] = hostile[k]; /* token 0: nobody's */
      step.weights[r][4 + k] = 0;  /* token 1: all weights zero */
    }
    memset(step.hidden[r], 0xff, 2 * 512 * 2); /* and both rows NaN */
    step.ids[r][8] = step.ids[r][9] = 5;       /* token 2: twice the same */
    step.ids[r][12] = -7;                      /* token 3: three valid ones; its skipped weight is NaN */
    step.weights[r][12] = NAN;
  }
  gpu_run(gpu, &step);
  for (int r = 0; r < 2; r++) {
    for (int i = 0; i < 2 * 512; i++) EXPECT((step.out[r][i] & 0x7fff) == 0, "rank %d: element %d of a skipped row", r, i);
    step.ids[r][12] = 0; /* the reference multiplies */
    step.weights[r][12] = 0;
    memset(step.hidden[r], 0, 2 * 512 * 2);
  }
  step_expect(&gpu->world, &step, "hostile ids");
  step_free(&gpu->world, &step);
  gpu_close(gpu);
}

/* The router's picks are the reference's; NaN logits are never picked, and a row of them gives zeros. */
static void test_logits(struct gpu *gpu) {
  struct step step = {.tokens = {9, 5}, .tokens_max = 16};
  struct reference_router router = {.experts = 16, .top_k = 4, .groups = 1, .top_groups = 1, .scale = 1};
  gpu->world.spec = small();
  gpu->world.ranks = 2;
  gpu->world.capacity = 16;
  gpu_open(gpu);
  step_fill(&gpu->world, &step, 50);
  for (int r = 0; r < 2; r++) {
    step.logits[r] = calloc(16 * 16, sizeof(float));
    for (int i = 0; i < 16 * step.tokens[r]; i++) step.logits[r][i] = (float)(int32_t)step_draw(51, r, i) / 1e9f;
    for (int e = 0; e < 16; e++) {
      step.logits[r][e] = NAN;                       /* token 0: nothing selectable */
      if (e % 3) step.logits[r][16 + e] = NAN;       /* token 1: six */
      if (e > 1) step.logits[r][32 + e] = -INFINITY; /* token 2: two */
    }
    step.logits[r][48 + 11] = INFINITY; /* token 3: certain */
    for (int t = 0; t < step.tokens[r]; t++) {
      reference_route(&router, step.logits[r] + 16 * t, step.ids[r] + 4 * t, step.weights[r] + 4 * t);
    }
  }
  gpu_run(gpu, &step);
  for (int i = 0; i < 512; i++) EXPECT((step.out[0][i] & 0x7fff) == 0, "element %d of the row of NaN", i);
  step_expect(&gpu->world, &step, "logits");
  step_free(&gpu->world, &step);
  gpu_close(gpu);
}

static void test_ring_and_fp32(struct gpu *gpu) {
  struct step step = {.tokens = {20, 20, 20, 20}, .tokens_max = 20};
  gpu->world.spec = small();
  gpu->world.ranks = 4;
  gpu->world.capacity = 32;
  gpu->world.combine = MOEFLOW_COMBINE_RING;
  gpu_open(gpu);
  check_step(gpu, &step, 60, "ring");
  gpu_close(gpu);
  gpu->world.combine = MOEFLOW_COMBINE_PLAN;
  gpu->world.spec.returned = SPEC_WIRE_FP32;
  gpu_open(gpu);
  check_step(gpu, &step, 61, "fp32 return");
  gpu_close(gpu);
}

static void test_lanes(struct gpu *gpu) {
  gpu->world.spec = small();
  gpu->world.ranks = 2;
  gpu->world.capacity = 32;
  gpu->world.lanes = 2;
  gpu_open(gpu);
  for (int i = 0; i < 6; i++) {
    struct step step = {.tokens = {3 * i, 30 - 4 * i}, .tokens_max = 32, .lane = i % 2};
    check_step(gpu, &step, 70 + i, "two lanes");
  }
  gpu_close(gpu);
  gpu->world.lanes = 1;
}

int main(void) {
  static struct gpu gpu;
  const int sizes[] = {1, 2, 4, 8};
  for (int i = 0; i < 4; i++) test_reference(&gpu, sizes[i]);
  test_choices(&gpu);
  test_hostile_ids(&gpu);
  test_logits(&gpu);
  test_ring_and_fp32(&gpu);
  test_lanes(&gpu);
  TEST_END;
}
