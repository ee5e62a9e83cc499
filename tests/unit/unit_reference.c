/* The reference itself: numbers worked out by hand, and a second implementation that is as plain as can be. */
#include "reference.h"

#include <float.h>
#include <math.h>

#include "random.h"
#include "test.h"

static void test_bf16(void) {
  for (uint32_t bits = 0; bits < 0x7f80; bits++) { /* every finite value and the middle between it and the next */
    const double value = reference_from_bf16((uint16_t)bits), next = reference_from_bf16((uint16_t)(bits + 1));
    EXPECT(reference_to_bf16(value) == bits, "%04x", bits);
    EXPECT(reference_to_bf16(-value) == (bits | 0x8000), "-%04x", bits);
    if (bits == 0x7f7f) continue; /* the next is infinity */
    const double middle = (value + next) / 2;
    EXPECT(reference_to_bf16(middle) == bits + (bits & 1), "middle above %04x", bits);
    EXPECT(reference_to_bf16(nextafter(middle, 0)) == bits, "below the middle above %04x", bits);
    EXPECT(reference_to_bf16(nextafter(middle, INFINITY)) == bits + 1, "above the middle above %04x", bits);
  }
  const double largest = reference_from_bf16(0x7f7f), half_step = 0x1p119;
  EXPECT(reference_to_bf16(largest + half_step) == 0x7f80, "rounds to infinity");
  EXPECT(reference_to_bf16(nextafter(largest + half_step, 0)) == 0x7f7f, "stays finite");
  EXPECT(reference_to_bf16(INFINITY) == 0x7f80 && reference_to_bf16(-INFINITY) == 0xff80, "infinities");
  EXPECT(reference_to_bf16(NAN) == 0x7fc0, "NaN");
}

static void test_owner(void) {
  static const int owners[10] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 2}; /* runs begin at 0, 3 and 6 of 10 experts */
  for (int e = 0; e < 10; e++) EXPECT(reference_linear_owner(10, 3, e) == owners[e], "expert %d", e);
  EXPECT(reference_linear_owner(288, 1, 287) == 0, "one rank owns all");
  EXPECT(reference_linear_owner(288, 2, 143) == 0 && reference_linear_owner(288, 2, 144) == 1, "the border of halves");
}

/* ---- By hand: H = 2, I = 1, two experts ----
 * Expert 0: gate row (1, 0), up row (0, 1), down column (1, 2). Expert 1: gate (0, 2), up (1, 0), down (4, -1).
 * Token (0.5, 3): expert 0 has gate 0.5, up 3: silu(0.5) * 3 = 0.311230 * 3 = 0.933689, bf16 0.93359375; down: (0.93359375,
 * 1.8671875). Expert 1 has gate 6, up 0.5: silu(6) * 0.5 = 5.985164 * 0.5 = 2.992582, bf16 3 (steps of 1/64: 191.525);
 * down: (12, -3). */
static void hand_weights(void *user, int expert, int down, uint16_t *matrix) {
  static const double gate_up[2][4] = {{1, 0, 0, 1}, {0, 2, 1, 0}}, downs[2][2] = {{1, 2}, {4, -1}};
  (void)user;
  for (int i = 0; i < (down ? 2 : 4); i++) matrix[i] = reference_to_bf16(down ? downs[expert][i] : gate_up[expert][i]);
}

static void test_by_hand(void) {
  struct reference_layer layer = {.hidden = 2, .intermediate = 1, .experts = 2, .top_k = 2, .ranks = 1, .output_scale = 1};
  layer.weights = hand_weights;
  const uint16_t hidden[2] = {reference_to_bf16(0.5), reference_to_bf16(3)};
  const int32_t ids[2] = {0, 1};
  const float weights[2] = {0.5f, 0.25f};
  uint16_t out[2];
  float values[4];
  EXPECT(reference_run(&layer, 1, hidden, ids, weights, NULL, out, values, 1) == 0, "memory");
  EXPECT(values[0] == 0.93359375f && values[1] == 1.8671875f, "expert 0: %g %g", values[0], values[1]);
  EXPECT(values[2] == 12.0f && values[3] == -3.0f, "expert 1: %g %g", values[2], values[3]);
  /* 0.5 * 0.93359375 + 0.25 * 12 = 3.466796875, in bf16 (steps of 1/64) 222/64; 0.93359375 - 0.75 = 0.18359375, exact */
  EXPECT(reference_from_bf16(out[0]) == 222.0 / 64 && reference_from_bf16(out[1]) == 0.18359375, "sum %g %g",
         reference_from_bf16(out[0]), reference_from_bf16(out[1]));
  layer.clamp = 1;
  layer.limit =
      2; /* expert 0: up 2; expert 1: gate 2, silu(2) * 0.5 = 1.761594 * 0.5 = 0.880797, bf16 225.48/256 -> 225/256 */
  EXPECT(reference_run(&layer, 1, hidden, ids, weights, NULL, out, values, 1) == 0, "memory");
  EXPECT(values[0] == 159.0f / 256 && values[2] == 4 * 225.0f / 256, "clamped %g %g", values[0], values[2]);
}

/* ---- A second implementation ---- */

struct shape {
  int hidden, intermediate, experts, top_k, tokens, ranks, clamp, choices, fp32, ring;
};

static uint16_t element(int expert, int matrix, int row, int column) {
  return moeflow_random_bf16(
      moeflow_random_bits(moeflow_random_row(11, (uint32_t)expert, (uint32_t)matrix, (uint32_t)row), (uint32_t)column), 2);
}

static void random_weights(void *user, int expert, int down, uint16_t *matrix) {
  const struct shape *s = user;
  const int rows = down ? s->hidden : 2 * s->intermediate, columns = down ? s->intermediate : s->hidden;
  for (int i = 0; i < rows * columns; i++) matrix[i] = element(expert, down, i / columns, i % columns);
}

static double rounded(double value) {
  return reference_from_bf16(reference_to_bf16(value));
}

static double plain_expert(const struct shape *s, const uint16_t *hidden, int expert, int column) {
  double sum = 0;
  for (int i = 0; i < s->intermediate; i++) {
    double gate = 0, up = 0;
    for (int h = 0; h < s->hidden; h++) {
      gate += reference_from_bf16(element(expert, 0, i, h)) * reference_from_bf16(hidden[h]);
      up += reference_from_bf16(element(expert, 0, s->intermediate + i, h)) * reference_from_bf16(hidden[h]);
    }
    if (s->clamp) gate = fmin(gate, 0.5), up = fmax(fmin(up, 0.5), -0.5);
    sum += rounded(gate * up / (1 + exp(-gate))) * reference_from_bf16(element(expert, 1, column, i));
  }
  return (float)sum;
}

static double plain_column(const struct shape *s, const uint16_t *hidden, const int32_t *ids, const float *weights,
                           int source, int column) {
  double sum = 0, owned[16] = {0};
  int present[16] = {0}, first = 1;
  for (int k = 0; k < s->top_k; k++) {
    if (ids[k] < 0 || ids[k] >= s->experts || weights[k] == 0) continue;
    const double value = plain_expert(s, hidden, ids[k], column);
    const int owner = reference_linear_owner(s->experts, s->ranks, ids[k]);
    owned[owner] += weights[k] * value;
    present[owner] = 1;
    sum += weights[k] * (s->fp32 ? (float)value : rounded(value));
  }
  if (s->choices) return sum;
  sum = 0;
  for (int step = 0; step < s->ranks; step++) {
    const int owner = s->ring ? (source + 1 + step) % s->ranks : step;
    if (!present[owner]) continue;
    sum += s->fp32 ? (float)owned[owner] : rounded(owned[owner]);
    if (s->ring && !first) sum = rounded((float)sum);
    first = 0;
  }
  return sum;
}

static void test_against_plain(const struct shape *s, int threads) {
  struct reference_layer layer = {s->hidden,      s->intermediate, s->experts, s->top_k, s->clamp, 0.5,  s->ranks,
                                  s->choices,     s->fp32,         s->ring,    0,        1.5,      NULL, NULL,
                                  random_weights, (void *)s};
  uint16_t hidden[16 * 40], out[16 * 40], want[16 * 40];
  int32_t ids[16 * 8], sources[16];
  float weights[16 * 8];
  for (int i = 0; i < s->tokens * s->hidden; i++) hidden[i] = element(i / s->hidden, 2, 0, i % s->hidden);
  for (int i = 0; i < s->tokens * s->top_k; i++) {
    const uint32_t bits = moeflow_random_bits(moeflow_random_row(5, 0, 6, 0), (uint32_t)i);
    ids[i] = (int32_t)(bits % (uint32_t)(s->experts + 2)) - 1; /* -1 and E come up too */
    weights[i] = bits % 7 == 0 ? 0.0f : (float)(bits >> 20) / 4096;
  }
  for (int t = 0; t < s->tokens; t++) sources[t] = t % s->ranks;
  EXPECT(reference_run(&layer, s->tokens, hidden, ids, weights, sources, out, NULL, threads) == 0, "memory");
  for (int i = 0; i < s->tokens * s->hidden; i++) {
    const int t = i / s->hidden, first = t * s->top_k;
    want[i] = reference_to_bf16(
        1.5 * plain_column(s, hidden + t * s->hidden, ids + first, weights + first, sources[t], i % s->hidden));
  }
  struct reference_difference difference;
  reference_compare(out, want, s->tokens, s->hidden, &difference);
  EXPECT(reference_close(&difference), "H %d K %d ranks %d choices %d ring %d: row %d column %d: %g, plain %g", s->hidden,
         s->top_k, s->ranks, s->choices, s->ring, difference.row, difference.column, difference.got, difference.want);
}

static void test_shapes(void) {
  static const struct shape shapes[] = {{8, 8, 4, 2, 5, 2, 0, 0, 0, 0},  {40, 24, 7, 3, 16, 3, 1, 0, 0, 0},
                                        {33, 5, 9, 8, 9, 4, 0, 1, 0, 0}, {16, 16, 8, 8, 12, 4, 0, 0, 0, 1},
                                        {8, 40, 3, 1, 3, 1, 1, 0, 1, 0}, {24, 8, 11, 5, 16, 8, 0, 0, 1, 1},
                                        {16, 8, 2, 2, 16, 2, 0, 1, 1, 0}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    test_against_plain(&shapes[i], 1);
    test_against_plain(&shapes[i], 3);
  }
}

static void test_identity(void) {
  struct reference_layer layer = {
      .hidden = 2, .intermediate = 1, .experts = 3, .top_k = 3, .ranks = 3, .identity = 1, .output_scale = 1};
  const uint16_t hidden[4] = {0x3f80, 0x7fc0, 0x4000, 0xc000};
  const int32_t ids[6] = {-1, 3, INT32_MAX, 0, 0, 1};
  const float weights[6] = {1, 1, 1, 0.25f, 0.25f, 0.5f};
  uint16_t out[4];
  EXPECT(reference_run(&layer, 2, hidden, ids, weights, NULL, out, NULL, 2) == 0, "memory");
  EXPECT(out[0] == 0 && out[1] == 0, "nothing selected: zero, even of NaN");
  EXPECT(out[2] == 0x4000 && out[3] == 0xc000, "a duplicate counts twice");
}

/* ---- Router ---- */

static double route(const struct reference_router *router, const float *logits, int32_t *ids, float *weights) {
  for (int k = 0; k < router->top_k; k++) ids[k] = -2, weights[k] = NAN;
  return reference_route(router, logits, ids, weights);
}

static void test_router_scores(void) {
  struct reference_router router = {.experts = 4, .top_k = 2, .groups = 1, .top_groups = 1, .scale = 2};
  const float logits[4] = {0, 1, 1, -1};
  const float bias[4] = {0.5f, 0, 0, 0};
  int32_t ids[4];
  float weights[4];
  double margin = route(&router, logits, ids, weights);
  EXPECT(ids[0] == 1 && ids[1] == 2, "a tie goes to the lower id: %d %d", ids[0], ids[1]);
  EXPECT(fabsf(weights[0] - 2 * 0.7310586f) < 1e-6f && weights[0] == weights[1], "sigmoid(1) x 2: %g", weights[0]);
  EXPECT(margin > REFERENCE_TOO_CLOSE, "a true tie is not close: %g", margin);
  router.bias = bias;
  router.renormalize = 1;
  route(&router, logits, ids, weights);
  EXPECT(ids[0] == 0 && ids[1] == 1, "the bias selects: %d %d", ids[0], ids[1]);
  EXPECT(fabsf(weights[0] - 2 * 0.5f / 1.2310586f) < 1e-6f, "and does not weigh: %g", weights[0]);
  router.bias = NULL;
  router.softmax = 1;
  router.renormalize = 0;
  route(&router, logits, ids, weights);
  EXPECT(fabs(weights[0] - 2 * M_E / (1 + 2 * M_E + 1 / M_E)) < 1e-6, "softmax over all: %g", weights[0]);
}

static void test_router_values(void) {
  struct reference_router router = {.experts = 5, .top_k = 4, .groups = 1, .top_groups = 1, .scale = 1, .renormalize = 3};
  const float odd[5] = {NAN, -INFINITY, INFINITY, -200, INFINITY};
  const float low[5] = {-200, -200, -200, -200, -200};
  const float close[5] = {1, 1.0000001f, -1, -2, -3};
  int32_t ids[4];
  float weights[4];
  route(&router, odd, ids, weights);
  EXPECT(ids[0] == 2 && ids[1] == 4 && ids[2] == 3 && ids[3] == -1, "%d %d %d %d", ids[0], ids[1], ids[2], ids[3]);
  EXPECT(weights[0] == 0.5f && weights[1] == 0.5f && weights[2] == 0 && weights[3] == 0, "%g %g", weights[0], weights[2]);
  route(&router, low, ids, weights);
  EXPECT(ids[0] == 0 && ids[3] == 3 && weights[0] == 0, "all underflow: finite weights, %g", weights[0]);
  EXPECT(route(&router, close, ids, weights) < REFERENCE_TOO_CLOSE, "neighbouring floats are too close to call");
  router.softmax = 1;
  route(&router, odd, ids, weights);
  EXPECT(ids[0] == 2 && ids[1] == 4 && weights[0] == 0.5f, "+inf is the largest finite value: %g", weights[0]);
}

static void test_router_groups(void) {
  struct reference_router router = {.experts = 6, .top_k = 2, .groups = 3, .top_groups = 1, .scale = 1};
  const float logits[6] = {3, -9, 2, 2, NAN, 9}; /* best single: group 2; best pair: group 1 */
  int32_t ids[2];
  float weights[2];
  route(&router, logits, ids, weights);
  EXPECT(ids[0] == 5 && ids[1] == -1, "max: group 2 has one candidate: %d %d", ids[0], ids[1]);
  router.group_top2 = 1;
  route(&router, logits, ids, weights);
  EXPECT(ids[0] == 2 && ids[1] == 3, "top2: %d %d", ids[0], ids[1]);
  router.top_groups = 2; /* 0.9526 + 0.0001 against a single 0.9999 */
  route(&router, logits, ids, weights);
  EXPECT(ids[0] == 5 && ids[1] == 2, "two groups: %d %d", ids[0], ids[1]);
}

static void test_compare(void) {
  const uint16_t want[8] = {0x3f80, 0x4000, 0, 0x7fc0, 0, 0, 0, 0};
  uint16_t got[8];
  struct reference_difference difference;
  memcpy(got, want, sizeof got);
  reference_compare(got, want, 2, 4, &difference);
  EXPECT(difference.l2 == 0 && difference.element == 0, "equal, NaN included");
  got[1] = 0x4001; /* 2 + 1/64, of a row whose largest is 2 and whose norm is sqrt(5) */
  reference_compare(got, want, 2, 4, &difference);
  EXPECT(difference.element == 1.0 / 128 && difference.row == 0 && difference.column == 1, "%g", difference.element);
  EXPECT(fabs(difference.l2 - 1 / 64.0 / sqrt(5)) < 1e-12, "%g", difference.l2);
  got[6] = 1;
  reference_compare(got, want, 2, 4, &difference);
  EXPECT(difference.element == INFINITY && difference.row == 1 && difference.column == 2, "a row of zeros is met exactly");
  got[6] = 0;
  got[0] = 0x7fc0;
  reference_compare(got, want, 2, 4, &difference);
  EXPECT(difference.l2 == INFINITY && !reference_close(&difference), "NaN for a number");
}

/* One expert, one activation: 64 * up, and out[0] is that times the weight. */
static uint16_t edge_up; /* what is added to up's 1 */
static void edge_weights(void *user, int expert, int down, uint16_t *matrix) {
  (void)user, (void)expert;
  memset(matrix, 0, (down ? 8 : 16) * sizeof *matrix);
  matrix[0] = reference_to_bf16(down ? 1 : 64);
  if (down) return;
  matrix[8] = reference_to_bf16(1);
  matrix[9] = edge_up;
}

static int allowed(const struct reference_layer *layer, float weight, double value) {
  uint16_t hidden[8] = {0x3f80, 0x3f80}, want[8], got[8];
  const int32_t id = 0;
  struct reference_difference difference;
  EXPECT(reference_run(layer, 1, hidden, &id, &weight, NULL, want, NULL, 1) == 0, "memory");
  memcpy(got, want, sizeof got);
  got[0] = reference_to_bf16(value);
  EXPECT(reference_allow(layer, hidden, &id, &weight, 0, got, want) == 0, "memory");
  reference_compare(got, want, 1, 8, &difference);
  return reference_close(&difference);
}

static void test_roundings_on_the_edge(void) {
  struct reference_layer layer = {
      .hidden = 8, .intermediate = 1, .experts = 1, .top_k = 1, .ranks = 1, .output_scale = 1, .weights = edge_weights};
  for (int choices = 0; choices < 2; choices++) {
    layer.choices = choices;
    edge_up = reference_to_bf16(0x1p-8); /* half way between 1 and the next */
    EXPECT(allowed(&layer, 1, 64) && allowed(&layer, 1, 64.5), "either side of the edge");
    EXPECT(!allowed(&layer, 1, 65) && !allowed(&layer, 1, 63.5) && !allowed(&layer, 1, NAN), "beyond both");
    EXPECT(allowed(&layer, -2, -128) && allowed(&layer, -2, -129), "a negative weight");
    EXPECT(!allowed(&layer, -2, -130) && !allowed(&layer, -2, 128), "a negative weight, beyond");
    edge_up = reference_to_bf16(0x1p-8 + 0x1p-11);
    EXPECT(allowed(&layer, 1, 64.5) && !allowed(&layer, 1, 64), "past the edge there is one value");
  }
}

int main(void) {
  test_roundings_on_the_edge();
  test_bf16();
  test_owner();
  test_by_hand();
  test_shapes();
  test_identity();
  test_router_scores();
  test_router_values();
  test_router_groups();
  test_compare();
  TEST_END;
}
