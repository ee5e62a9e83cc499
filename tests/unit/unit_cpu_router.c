/* CPU router against the reference: random logits in both dtypes, and the inputs that routers get wrong. */
#include "cpu.h"
#include "random.h"
#include "reference.h"

#include <math.h>

#include "test.h"

#define E_MAX 4096
#define K_MAX 32

static struct reference_router reference_of(const struct spec *spec, const float *bias) {
  return (struct reference_router){.experts = spec->experts,
                                   .top_k = spec->top_k,
                                   .softmax = spec->score == SPEC_SOFTMAX,
                                   .bias = spec->correction_bias ? bias : NULL,
                                   .groups = spec->groups,
                                   .top_groups = spec->top_groups,
                                   .group_top2 = spec->group_score == SPEC_GROUP_TOP2,
                                   .renormalize = spec->renormalize,
                                   .scale = spec->scale_on == SPEC_SCALE_WEIGHTS ? (float)spec->scale : 1.0f};
}

static void run(const struct spec *spec, const void *logits, int bf16, const float *bias, int32_t *ids, float *weights) {
  struct moeflow_lane lane = {0};
  const struct cpu_call call = {.spec = spec, .threads = 1};
  const struct moeflow_router_params params = {&lane, logits, bias, ids, weights, 1, bf16};
  memset(ids, 0x55, sizeof *ids * K_MAX);
  memset(weights, 0x55, sizeof *weights * K_MAX);
  cpu_router(&call, &params);
}

/* One token; picks must be the reference's unless they were too close to call, weights within a few last places. */
static void expect_token(const struct spec *spec, const float *logits, const float *bias, int bf16, const char *what) {
  int32_t ids[K_MAX], want_ids[K_MAX];
  float weights[K_MAX], want_weights[K_MAX];
  uint16_t half[E_MAX];
  for (int e = 0; e < spec->experts; e++) half[e] = reference_to_bf16(logits[e]);
  const struct reference_router router = reference_of(spec, bias);
  const double margin = reference_route(&router, logits, want_ids, want_weights);
  run(spec, bf16 ? (const void *)half : logits, bf16, bias, ids, weights);
  for (int k = 0; k < spec->top_k && margin >= REFERENCE_TOO_CLOSE; k++) {
    EXPECT(ids[k] == want_ids[k], "%s: pick %d is %d, want %d", what, k, ids[k], want_ids[k]);
    EXPECT(fabsf(weights[k] - want_weights[k]) <= 4e-6f * fabsf(want_weights[k]), "%s: weight %d is %g, want %g", what, k,
           weights[k], want_weights[k]);
  }
}

static float draw(uint32_t seed, uint32_t i) { /* about normal, in steps of 1/256 so that bf16 and ties come into it */
  const uint32_t bits = moeflow_random_bits(moeflow_random_row(seed, 0, MOEFLOW_RANDOM_LOGITS, 0), i);
  const int sum = (int)(bits & 255) + (int)(bits >> 8 & 255) + (int)(bits >> 16 & 255) + (int)(bits >> 24);
  return reference_from_bf16(reference_to_bf16((sum - 510) / 128.0));
}

static void test_random(void) {
  static const struct spec specs[] = {
      {.experts = 288,
       .top_k = 8,
       .score = SPEC_SIGMOID,
       .correction_bias = 1,
       .groups = 1,
       .top_groups = 1,
       .renormalize = 1,
       .scale = 2.5},
      {.experts = 256,
       .top_k = 8,
       .score = SPEC_SIGMOID,
       .correction_bias = 1,
       .groups = 8,
       .top_groups = 4,
       .group_score = SPEC_GROUP_TOP2,
       .renormalize = 1,
       .scale = 2.5},
      {.experts = 160, .top_k = 6, .score = SPEC_SOFTMAX, .groups = 8, .top_groups = 3, .scale = 16},
      {.experts = 64, .top_k = 6, .score = SPEC_SOFTMAX, .groups = 1, .top_groups = 1, .scale = 1},
      {.experts = 33, .top_k = 1, .score = SPEC_SOFTMAX, .groups = 1, .top_groups = 1, .renormalize = 2, .scale = 1.5},
      {.experts = 512,
       .top_k = 32,
       .score = SPEC_SIGMOID,
       .groups = 1,
       .top_groups = 1,
       .renormalize = 3,
       .scale = 3,
       .scale_on = SPEC_SCALE_OUTPUT},
      {.experts = 5, .top_k = 5, .score = SPEC_SIGMOID, .groups = 5, .top_groups = 5, .scale = 1}};
  float logits[E_MAX], bias[E_MAX];
  for (size_t s = 0; s < sizeof specs / sizeof *specs; s++) {
    for (uint32_t t = 0; t < 50; t++) {
      for (uint32_t e = 0; e < (uint32_t)specs[s].experts; e++) {
        logits[e] = draw(1 + t, e);
        bias[e] = draw(1000, e) / 4;
      }
      expect_token(&specs[s], logits, bias, 0, "FP32 logits");
      expect_token(&specs[s], logits, bias, 1, "bf16 logits");
    }
  }
}

static void test_special_values(int score, int renormalize) {
  const struct spec spec = {.experts = 300,
                            .top_k = 4,
                            .score = score,
                            .correction_bias = 1,
                            .groups = 1,
                            .top_groups = 1,
                            .renormalize = renormalize,
                            .scale = 2};
  float logits[300], bias[300] = {0};
  for (int e = 0; e < 300; e++) logits[e] = e % 3 ? NAN : -INFINITY;
  expect_token(&spec, logits, bias, 0, "nothing selectable");
  logits[299] = INFINITY;
  logits[258] = -1;
  expect_token(&spec, logits, bias, 0, "two selectable, above 255");
  for (int e = 0; e < 300; e++) logits[e] = 0;
  expect_token(&spec, logits, bias, 0, "all tied");
  for (int e = 0; e < 300; e++) bias[e] = e < 3 ? 0 : -INFINITY;
  expect_token(&spec, logits, bias, 0, "a bias of -inf");
  for (int e = 0; e < 300; e++) bias[e] = -5;
  expect_token(&spec, logits, bias, 0, "all values below -1");
  for (int e = 0; e < 300; e++) logits[e] = -200, bias[e] = 0;
  expect_token(&spec, logits, bias, 0, "all scores underflow");
  for (int e = 0; e < 300; e++) logits[e] = e == 7 ? 1 : 0, bias[e] = e == 9 ? 1e-4f : 0;
  expect_token(&spec, logits, bias, 0, "a bias of 1e-4 decides");
}

static void test_groups(void) { /* the chosen group holds NaN and -inf: nobody of an excluded group may fill in */
  const struct spec spec = {.experts = 27,
                            .top_k = 4,
                            .score = SPEC_SIGMOID,
                            .groups = 3,
                            .top_groups = 1,
                            .scale = 1,
                            .group_score = SPEC_GROUP_TOP2};
  float logits[27];
  int32_t ids[K_MAX];
  float weights[K_MAX];
  for (int e = 0; e < 27; e++) logits[e] = e / 9 == 1 ? NAN : 0;
  logits[9] = logits[17] = 5;
  logits[12] = -INFINITY;
  run(&spec, logits, 0, NULL, ids, weights);
  EXPECT(ids[0] == 9 && ids[1] == 17 && ids[2] == -1 && ids[3] == -1, "%d %d %d %d", ids[0], ids[1], ids[2], ids[3]);
  EXPECT(weights[2] == 0 && weights[3] == 0, "weights of no pick");
  expect_token(&spec, logits, NULL, 0, "groups with NaN");
  for (int e = 0; e < 27; e++) logits[e] = 1;
  run(&spec, logits, 0, NULL, ids, weights);
  EXPECT(ids[0] == 0 && ids[3] == 3, "tied groups: the lower one: %d", ids[0]);
}

static void test_tokens(void) { /* several tokens, and a poisoned lane */
  const struct spec spec = {.experts = 2, .top_k = 1, .score = SPEC_SIGMOID, .groups = 1, .top_groups = 1, .scale = 1};
  const struct cpu_call call = {.spec = &spec, .threads = 1};
  const float logits[6] = {0, 1, 1, 0, -1, -2};
  struct moeflow_lane lane = {0};
  int32_t ids[4] = {9, 9, 9, 9};
  float weights[4] = {9, 9, 9, 9};
  const struct moeflow_router_params params = {&lane, logits, NULL, ids, weights, 3, 0};
  cpu_router(&call, &params);
  EXPECT(ids[0] == 1 && ids[1] == 0 && ids[2] == 0 && ids[3] == 9 && weights[3] == 9, "%d %d %d %d", ids[0], ids[1], ids[2],
         ids[3]);
  lane.poison = MOEFLOW_POISON_ABORT;
  ids[0] = 5;
  cpu_router(&call, &params);
  EXPECT(ids[0] == 5, "a poisoned lane routes nothing");
}

/* One logit far above 4095 others whose exponentials are a few thousandths of it together: a running sum loses them. */
static void test_many_experts(void) {
  const struct spec spec = {.experts = E_MAX, .top_k = 8, .score = SPEC_SOFTMAX, .groups = 1, .top_groups = 1, .scale = 1};
  static float logits[E_MAX];
  for (int peak = 0; peak < 8; peak++) {
    for (int e = 0; e < E_MAX; e++) logits[e] = draw(77, (uint32_t)e) * 0.25f;
    logits[peak * 37] = 14.0f + 0.1f * (float)peak;
    expect_token(&spec, logits, NULL, 0, "4096 experts");
  }
}

int main(void) {
  test_many_experts();
  test_random();
  for (int renormalize = 0; renormalize < 4; renormalize++) {
    test_special_values(SPEC_SIGMOID, renormalize);
    test_special_values(SPEC_SOFTMAX, renormalize);
  }
  test_groups();
  test_tokens();
  TEST_END;
}
