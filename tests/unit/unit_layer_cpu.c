/* The layer end to end on the CPU backend, all ranks in this process: every shape, map and layout against the reference. */
#include "cpu_world.h"

#include <math.h>

static const int ep_sizes[] = {1, 2, 3, 4, 8};
#define EP_SIZES (int)(sizeof ep_sizes / sizeof *ep_sizes)

static void run_once(struct world *world, struct step *step, const char *what) {
  world_open(world);
  step_fill(world, step, 1);
  world_step(world, step);
  step_expect(world, step, what);
  step_free(world, step);
  world_close(world);
}

static void test_ep_sizes(void) { /* 10 experts: not divisible by 3, 4 and 8; tokens from none to the capacity */
  for (int i = 0; i < EP_SIZES; i++) {
    struct world world = {.spec = world_spec(32, 24, 10, 3), .ranks = ep_sizes[i], .capacity = 9};
    struct step step = {.tokens = {5, 0, 9, 1, 8, 2, 0, 7}};
    run_once(&world, &step, "EP sizes");
  }
}

static void test_shapes(void) {
  static const struct {
    int hidden, intermediate, experts, top_k;
  } shapes[] = {{8, 8, 1, 1}, {8, 40, 8, 8}, {2880, 96, 5, 1}, {24, 704, 33, 3}, {72, 8, 257, 2}, {16, 16, 64, 32}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    struct world world = {.spec = world_spec(shapes[i].hidden, shapes[i].intermediate, shapes[i].experts, shapes[i].top_k),
                          .ranks = shapes[i].experts > 1 ? 2 : 1,
                          .capacity = 16};
    struct step step = {.tokens = {16, 3}};
    run_once(&world, &step, "shapes");
  }
}

static void test_forms(void) { /* what a model may say: activation, return dtype, reduce, scale, ring */
  for (int form = 0; form < 6; form++) {
    struct world world = {.spec = world_spec(40, 24, 12, 4), .ranks = 3, .capacity = 8};
    struct step step = {.tokens = {8, 2, 5}};
    if (form == 1) world.spec.activation = SPEC_SWIGLU_CLAMP, world.spec.activation_limit = 0.5;
    if (form == 2) world.spec.returned = SPEC_WIRE_FP32;
    if (form == 3) world.spec.reduce = SPEC_REDUCE_CHOICES;
    if (form == 4) world.combine = MOEFLOW_COMBINE_RING;
    if (form == 5) world.spec.scale_on = SPEC_SCALE_OUTPUT, world.spec.scale = 2.5;
    run_once(&world, &step, "forms");
  }
}

static void test_layouts(void) { /* each order of gate and up, packed and padded, stacked, by pointers and lent */
  for (int order = 0; order < 3; order++) {
    for (int weights = 0; weights < 3; weights++) {
      struct world world = {.spec = world_spec(32, 16, 6, 2),
                            .ranks = 2,
                            .capacity = 4,
                            .order = (moeflow_gate_up_order)order,
                            .weights = (enum world_weights)weights,
                            .pad = weights < 2 ? order : 0};
      struct step step = {.tokens = {4, 4}};
      run_once(&world, &step, "layouts");
    }
  }
}

static void test_places(void) { /* experts on one rank, on several, on none; a rank with no experts */
  static const int32_t places[7][3] = {{0 << 16, 1 << 16, 2 << 16},    {1 << 16 | 1, -1, -1}, {2 << 16 | 1, -1, -1},
                                       {0 << 16 | 1, 2 << 16 | 2, -1}, {1 << 16 | 2, -1, -1}, {-1, -1, -1},
                                       {0 << 16 | 2, -1, -1}};
  struct world world = {.spec = world_spec(16, 16, 7, 3),
                        .ranks = 4,
                        .capacity = 32,
                        .places = places[0],
                        .replicas = 3,
                        .weights = WORLD_POINTERS};
  struct step step = {.tokens = {32, 7, 0, 20}};
  world_open(&world);
  EXPECT(world.rank[0].local_experts == 3 && world.rank[2].local_experts == 3 && world.rank[3].local_experts == 0, "slots");
  step_fill(&world, &step, 1);
  world_step(&world, &step);
  step_expect(&world, &step, "places");
  int64_t pairs = 0;
  for (int r = 0; r < 4; r++) {
    for (int slot = 0; slot < world.rank[r].local_experts; slot++) pairs += world.rank[r].load[slot];
    for (int i = 0; i < step.tokens[r] * 3; i++) pairs -= step.ids[r][i] != 5;
  }
  EXPECT(pairs == 0, "each pair is counted once, those of expert 5 never: off by %lld", (long long)pairs);
  EXPECT(world.rank[0].load[0] > 0 && world.rank[1].load[0] > 0 && world.rank[2].load[0] > 0, "all replicas serve");
  step_free(&world, &step);
  world_close(&world);
}

/* Ids that must not count, duplicates, zero weights, NaN where nothing may look. */
static void test_ids(int ids_int64) {
  struct world world = {.spec = world_spec(16, 24, 9, 4), .ranks = 3, .capacity = 8};
  struct step step = {.tokens = {6, 1, 3}, .ids_int64 = ids_int64};
  static const int32_t ids[6][4] = {
      {-1, 9, INT32_MAX, INT32_MIN}, {4, 4, 4, 0}, {8, -1, 0, 10}, {0, 1, 2, 3}, {5, 5, 9, -2}, {3, 6, 2, 8}};
  world_open(&world);
  step_fill(&world, &step, 3);
  memcpy(step.ids[0], ids, sizeof ids);
  for (int k = 0; k < 4; k++) step.weights[0][3 * 4 + k] = k % 2 ? 0.0f : -0.0f;
  step.weights[0][0] = NAN;
  memset(step.hidden[0], 0xff, 16 * 2);          /* token 0: NaN, and selects nothing */
  memset(step.hidden[0] + 3 * 16, 0xff, 16 * 2); /* token 3: NaN, and all weights are 0 */
  step.ids[1][2] = 9;
  world_step(&world, &step);
  step_expect(&world, &step, "ids");
  for (int c = 0; c < 16; c++) EXPECT(step.out[0][c] == 0 && step.out[0][48 + c] == 0, "exactly zero, column %d", c);
  step_free(&world, &step);
  world_close(&world);
}

static void test_nan_stays(void) { /* a selected NaN token is NaN itself and harms nobody else */
  struct world world = {.spec = world_spec(16, 24, 4, 2), .ranks = 2, .capacity = 8};
  struct step step = {.tokens = {8, 8}};
  world_open(&world);
  step_fill(&world, &step, 4);
  step.hidden[0][3 * 16 + 5] = 0x7fc0;
  step.hidden[1][7 * 16] = 0x7f80;
  world_step(&world, &step);
  step_expect(&world, &step, "NaN");
  step_free(&world, &step);
  world_close(&world);
}

static void test_skew(void) { /* every token to one expert, at the capacity; and to one rank's experts only */
  for (int spread = 0; spread < 2; spread++) {
    struct world world = {.spec = world_spec(16, 16, 8, 2), .ranks = 4, .capacity = 70};
    struct step step = {.tokens = {70, 70, 70, 70}};
    world_open(&world);
    step_fill(&world, &step, 5);
    for (int r = 0; r < 4; r++) {
      for (int i = 0; i < 140; i++) step.ids[r][i] = spread ? 4 + i % 2 : 5;
    }
    world_step(&world, &step);
    step_expect(&world, &step, "skew");
    EXPECT(world.rank[2].load[1] == (spread ? 280 : 560), "load %lld", (long long)world.rank[2].load[1]);
    step_free(&world, &step);
    world_close(&world);
  }
}

/* ---- Bits ---- */

static void test_choices_bits(void) { /* with `reduce: choices` the result does not depend on EP or placement */
  uint16_t *want = NULL;
  for (int i = 0; i < EP_SIZES; i++) {
    const int ranks = ep_sizes[i];
    struct world world = {.spec = world_spec(48, 40, 11, 5), .ranks = ranks, .capacity = 24};
    struct step step = {.tokens = {24}}, all = {.tokens = {0}};
    world.spec.reduce = SPEC_REDUCE_CHOICES;
    world_open(&world);
    struct world one = world;
    one.ranks = 1;
    step_fill(&one, &step, 6); /* the 24 tokens of one rank ... */
    for (int r = 0; r < ranks; r++) all.tokens[r] = (r + 1) * 24 / ranks - r * 24 / ranks;
    step_fill(&world, &all, 0);
    for (int r = 0, t = 0; r < ranks; t += all.tokens[r++]) { /* ... dealt out to all */
      memcpy(all.hidden[r], step.hidden[0] + t * 48, (size_t)all.tokens[r] * 48 * 2);
      memcpy(all.ids[r], step.ids[0] + t * 5, (size_t)all.tokens[r] * 5 * 4);
      memcpy(all.weights[r], step.weights[0] + t * 5, (size_t)all.tokens[r] * 5 * 4);
    }
    world_step(&world, &all);
    step_expect(&world, &all, "choices");
    for (int r = 0, t = 0; r < ranks; t += all.tokens[r++])
      memcpy(step.out[0] + t * 48, all.out[r], (size_t)all.tokens[r] * 48 * 2);
    if (!want) want = memcpy(malloc(24 * 48 * 2), step.out[0], 24 * 48 * 2);
    EXPECT(!memcmp(want, step.out[0], 24 * 48 * 2), "%d ranks give other bits than one", ranks);
    step_free(&world, &all);
    step_free(&one, &step);
    world_close(&world);
  }
  free(want);
}

static void copy_token(const struct world *world, struct step *to, int to_token, const struct step *from, int from_token) {
  const size_t h = (size_t)world->spec.hidden, k = (size_t)world->spec.top_k;
  memcpy(to->hidden[0] + to_token * h, from->hidden[0] + from_token * h, 2 * h);
  memcpy(to->ids[0] + to_token * k, from->ids[0] + from_token * k, 4 * k);
  memcpy(to->weights[0] + to_token * k, from->weights[0] + from_token * k, 4 * k);
}

static void test_batch_mates(void) { /* a token alone, then first and last of a full batch among other ranks' tokens */
  struct world world = {.spec = world_spec(40, 24, 6, 3), .ranks = 2, .capacity = 50};
  struct step alone = {.tokens = {1, 0}, .tokens_max = 1}, batch = {.tokens = {50, 50}};
  world_open(&world);
  step_fill(&world, &alone, 7);
  step_fill(&world, &batch, 8);
  copy_token(&world, &batch, 0, &alone, 0);
  copy_token(&world, &batch, 49, &alone, 0);
  world_step(&world, &alone);
  step_expect(&world, &alone, "alone");
  world_step(&world, &batch);
  step_expect(&world, &batch, "batch");
  EXPECT(!memcmp(alone.out[0], batch.out[0], 80) && !memcmp(alone.out[0], batch.out[0] + 49 * 40, 80),
         "other bits in a batch");
  step_free(&world, &alone);
  step_free(&world, &batch);
  world_close(&world);
}

static void test_repeats(void) { /* steps of different sizes leave nothing behind; the same step gives the same bits */
  struct world world = {.spec = world_spec(24, 16, 9, 3), .ranks = 3, .capacity = 20};
  struct step steps[4] = {
      {.tokens = {20, 20, 20}}, {.tokens = {0, 3, 1}, .tokens_max = 3}, {.tokens = {0, 0, 0}}, {.tokens = {7, 0, 20}}};
  world_open(&world);
  for (int i = 0; i < 4; i++) step_fill(&world, &steps[i], 10 + i);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 4; i++) {
      uint16_t before[20 * 24];
      memcpy(before, steps[i].out[2], (size_t)steps[i].tokens[2] * 48);
      world_step(&world, &steps[i]);
      step_expect(&world, &steps[i], "repeats");
      if (round) EXPECT(!memcmp(before, steps[i].out[2], (size_t)steps[i].tokens[2] * 48), "step %d, round %d", i, round);
    }
  }
  for (int i = 0; i < 4; i++) step_free(&world, &steps[i]);
  world_close(&world);
}

static void test_alias(void) { /* out may be hidden */
  struct world world = {.spec = world_spec(32, 16, 4, 2), .ranks = 2, .capacity = 6};
  struct step step = {.tokens = {6, 4}};
  world_open(&world);
  step_fill(&world, &step, 20);
  world_step(&world, &step);
  struct step same = step;
  for (int r = 0; r < 2; r++) same.out[r] = memcpy(step_memory(6, 64), step.hidden[r], (size_t)step.tokens[r] * 64);
  for (int r = 0; r < 2; r++) same.hidden[r] = same.out[r];
  world_step(&world, &same);
  step_expect_ok(&world, &same, "alias");
  for (int r = 0; r < 2; r++) {
    EXPECT(!memcmp(same.out[r], step.out[r], (size_t)step.tokens[r] * 64), "rank %d", r);
    free(same.out[r]);
  }
  step_free(&world, &step);
  world_close(&world);
}

static void test_identity(void) { /* dispatch and return bit for bit: one choice of weight 1 */
  struct world world = {.spec = world_spec(64, 8, 16, 1), .ranks = 8, .capacity = 16};
  struct step step = {.tokens = {16, 1, 0, 3, 16, 2, 5, 9}, .flags = MOEFLOW_FORWARD_IDENTITY};
  world_open(&world);
  step_fill(&world, &step, 21);
  for (int r = 0; r < 8; r++) {
    for (int t = 0; t < step.tokens[r]; t++) step.weights[r][t] = 1;
  }
  world_step(&world, &step);
  step_expect(&world, &step, "identity");
  for (int r = 0; r < 8; r++) EXPECT(!memcmp(step.out[r], step.hidden[r], (size_t)step.tokens[r] * 128), "rank %d", r);
  step_free(&world, &step);
  world_close(&world);
}

/* ---- Router ---- */

static void route_by_reference(const struct world *world, struct step *step) {
  const struct spec *spec = &world->spec;
  const struct reference_router router = {.experts = spec->experts,
                                          .top_k = spec->top_k,
                                          .softmax = spec->score == SPEC_SOFTMAX,
                                          .bias = world->bias,
                                          .groups = spec->groups,
                                          .top_groups = spec->top_groups,
                                          .group_top2 = spec->group_score == SPEC_GROUP_TOP2,
                                          .renormalize = spec->renormalize,
                                          .scale = spec->scale_on == SPEC_SCALE_WEIGHTS ? (float)spec->scale : 1.0f};
  for (int r = 0; r < world->ranks; r++) {
    step->logits[r] = step_memory((size_t)step->tokens[r] * spec->experts, sizeof(float));
    for (int t = 0; t < step->tokens[r]; t++) {
      float *logits = step->logits[r] + t * spec->experts;
      for (int e = 0; e < spec->experts; e++) logits[e] = (float)(step_draw(30, r, t * 64 + e) % 4096) / 512 - 4;
      if (t == 1) logits[3] = NAN, logits[4] = -INFINITY, logits[5] = INFINITY;
      if (t == 2) memset(logits, 0xff, 4 * (size_t)spec->experts); /* all NaN: nothing is selected */
      reference_route(&router, logits, step->ids[r] + t * spec->top_k, step->weights[r] + t * spec->top_k);
    }
  }
}

static void test_router(int score) {
  float bias[12];
  for (int e = 0; e < 12; e++) bias[e] = (float)e / 64;
  struct world world = {
      .spec = world_spec(16, 16, 12, 3), .ranks = 2, .capacity = 8, .bias = score == SPEC_SIGMOID ? bias : NULL};
  struct step step = {.tokens = {8, 5}};
  world.spec.score = score;
  world.spec.correction_bias = score == SPEC_SIGMOID;
  world.spec.groups = 4;
  world.spec.top_groups = 2;
  world.spec.group_score = score == SPEC_SIGMOID ? SPEC_GROUP_TOP2 : SPEC_GROUP_MAX;
  world.spec.renormalize = score == SPEC_SIGMOID ? SPEC_SUM_1E_20 : SPEC_RENORMALIZE_NONE;
  world.spec.scale = 2.5;
  world_open(&world);
  step_fill(&world, &step, 22);
  route_by_reference(&world, &step);
  world_step(&world, &step);
  step_expect(&world, &step, "router");
  for (int c = 0; c < 16; c++) EXPECT(step.out[0][2 * 16 + c] == 0, "a token of NaN logits is zero");
  step_free(&world, &step);
  world_close(&world);
}

/* What each rank computes between the exchanges, once more and by itself: added up over the ranks it is the step's result,
 * bit for bit, and steps go on as if it had not been. */
static void test_experts_again(void) {
  struct world world = {.spec = world_spec(24, 16, 10, 3), .ranks = 3, .capacity = 9};
  struct step step = {.tokens = {5, 0, 7}, .tokens_max = 7};
  uint16_t rows[3][3 * 8][24]; /* R = 8 */
  world_open(&world);
  step_fill(&world, &step, 4);
  for (int again = 0; again < 2; again++) {
    world_step(&world, &step);
    step_expect(&world, &step, "a whole step");
    for (int r = 0; r < 3; r++) {
      moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
      args.tokens_max = 7;
      args.flags = MOEFLOW_FORWARD_EXPERTS;
      EXPECT(moeflow_forward(world.rank[r].layer, &args) == MOEFLOW_OK, "%s", moeflow_last_error());
      args.out = rows[r];
      memset(rows[r], 0xff, sizeof rows[r]);
      EXPECT(moeflow_forward(world.rank[r].layer, &args) == MOEFLOW_OK, "%s", moeflow_last_error());
    }
    for (int row = 0; row < 3 * 8; row++) {
      const int source = row / 8, token = row % 8, live = token < step.tokens[source];
      for (int c = 0; c < 24; c++) {
        float sum = 0;
        for (int r = 0; r < 3; r++) sum += (float)reference_from_bf16(rows[r][row][c]);
        const uint16_t want = live ? step.out[source][token * 24 + c] : 0;
        EXPECT(reference_to_bf16(sum) == want, "row %d, column %d: %g, want %04x", row, c, sum, want);
      }
    }
  }
  step_free(&world, &step);
  world_close(&world);
}

int main(void) {
  test_ep_sizes();
  test_shapes();
  test_forms();
  test_layouts();
  test_places();
  test_ids(0);
  test_ids(1);
  test_nan_stays();
  test_skew();
  test_choices_bits();
  test_batch_mates();
  test_repeats();
  test_alias();
  test_identity();
  test_experts_again();
  test_router(SPEC_SIGMOID);
  test_router(SPEC_SOFTMAX);
  TEST_END;
}
