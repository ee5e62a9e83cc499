/* Made-up inputs: the same bits everywhere, and statistics as promised. */
#include <math.h>

#include "cpu.h"
#include "inputs.h"
#include "random.h"
#include "status.h"
#include "test.h"

static const struct spec spec = {.name = "tiny",
                                 .hidden = 200,
                                 .intermediate = 72,
                                 .experts = 33,
                                 .top_k = 3,
                                 .correction_bias = 1,
                                 .groups = 1,
                                 .top_groups = 1,
                                 .scale = 1};
static const struct options_routing uniform = {ROUTING_UNIFORM, 0};

#define GATE_UP_VALUES (2 * 72 * 200)

/* The vector code against the rule, element by element; widths that leave a tail. */
static void test_rule(void) {
  static uint16_t gate_up[GATE_UP_VALUES], down[200 * 72];
  inputs_weights(&spec, 5, 7, 0, gate_up);
  inputs_weights(&spec, 5, 7, 1, down);
  int wrong = 0;
  for (int row = 0; row < 2 * 72; row++) {
    const uint32_t key = moeflow_random_row(5, 7, MOEFLOW_RANDOM_GATE_UP, (uint32_t)row);
    for (int column = 0; column < 200; column++)
      wrong += gate_up[row * 200 + column] !=
               moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)column), moeflow_random_shift(200));
  }
  for (int row = 0; row < 200; row++) {
    const uint32_t key = moeflow_random_row(5, 7, MOEFLOW_RANDOM_DOWN, (uint32_t)row);
    for (int column = 0; column < 72; column++)
      wrong += down[row * 72 + column] !=
               moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)column), moeflow_random_shift(72));
  }
  EXPECT(wrong == 0, "%d elements", wrong);
}

/* What the backend's fill kernel writes into a GPU's memory is what the reference is given. */
static void test_fill_kernel(void) {
  static uint16_t filled[3 * GATE_UP_VALUES], drawn[GATE_UP_VALUES];
  const struct moeflow_fill_params params = {.out = filled,
                                             .seed = 5,
                                             .rows = 2 * 72,
                                             .columns = 200,
                                             .first_expert = 6,
                                             .experts = 3,
                                             .matrix = MOEFLOW_RANDOM_GATE_UP,
                                             .shift = moeflow_random_shift(200)};
  const struct cpu_call call = {&spec, NULL, NULL, 1};
  EXPECT(cpu_fill(&call, &params) == MOEFLOW_OK);
  for (int e = 0; e < 3; e++) {
    inputs_weights(&spec, 5, 6 + e, 0, drawn);
    EXPECT(!memcmp(drawn, filled + e * GATE_UP_VALUES, sizeof drawn), "expert %d", 6 + e);
  }
}

static void test_different(void) {
  static uint16_t a[GATE_UP_VALUES], b[GATE_UP_VALUES];
  inputs_weights(&spec, 5, 7, 0, a);
  inputs_weights(&spec, 5, 7, 0, b);
  EXPECT(!memcmp(a, b, sizeof a), "same seed, same expert");
  inputs_weights(&spec, 6, 7, 0, b);
  EXPECT(memcmp(a, b, sizeof a), "seeds 5 and 6");
  inputs_weights(&spec, 5 + (1ull << 32), 7, 0, b);
  EXPECT(memcmp(a, b, sizeof a), "the seed's upper half");
  inputs_weights(&spec, 5, 8, 0, b);
  EXPECT(memcmp(a, b, sizeof a), "experts 7 and 8");
}

static void statistics(const uint16_t *values, int count, double *mean, double *deviation) {
  double sum = 0, square = 0;
  for (int i = 0; i < count; i++) {
    const double value = reference_from_bf16(values[i]);
    sum += value;
    square += value * value;
  }
  *mean = sum / count;
  *deviation = sqrt(square / count - *mean * *mean);
}

static void test_statistics(void) {
  static uint16_t values[GATE_UP_VALUES];
  double mean, deviation;
  for (int down = 0; down < 2; down++) {
    const int fan_in = down ? spec.intermediate : spec.hidden, count = down ? 200 * 72 : GATE_UP_VALUES;
    inputs_weights(&spec, 1, 3, down, values);
    statistics(values, count, &mean, &deviation);
    const double ideal = 1 / sqrt(fan_in);
    EXPECT(fabs(mean) < 0.05 * ideal, "mean %g beside 1/sqrt(fan-in) %g", mean, ideal);
    EXPECT(deviation > 0.6 * ideal && deviation < 1.7 * ideal, "deviation %g beside 1/sqrt(fan-in) %g", deviation, ideal);
    int zeros = 0;
    for (int i = 0; i < count; i++) zeros += (values[i] & 0x7fff) == 0 || (values[i] & 0x7f80) == 0x7f80;
    EXPECT(zeros == 0, "%d zeros, NaNs or infinities", zeros);
  }
}

static void test_tokens(void) {
  struct inputs inputs;
  uint16_t a[200], b[200];
  float logits[33], again[33];
  EXPECT(inputs_create(&spec, 1, &uniform, &inputs) == MOEFLOW_OK);
  inputs_hidden(&inputs, 0, 0, 0, a);
  for (int other = 0; other < 3; other++) {
    inputs_hidden(&inputs, other == 0, other == 1, other == 2, b);
    EXPECT(memcmp(a, b, sizeof a), "point, rank, token: number %d", other);
  }
  inputs_logits(&inputs, 2, 1, 3, logits);
  inputs_logits(&inputs, 2, 1, 3, again);
  EXPECT(!memcmp(logits, again, sizeof logits));
  inputs_logits(&inputs, 2, 1, 4, again);
  EXPECT(memcmp(logits, again, sizeof logits));
  int changed = 0;
  for (int e = 0; e < 33; e++) {
    EXPECT(isfinite(logits[e]) && inputs.popularity[e] == 0);
    EXPECT(fabs(inputs.bias[e]) <= 1.0 / 16, "bias %g", (double)inputs.bias[e]);
    changed += inputs.bias[e] != inputs.bias[0];
  }
  EXPECT(changed > 25, "biases differ");
  inputs_destroy(&inputs);
}

/* With Gumbel noise the largest logit is expert e with probability softmax(popularity)[e]. */
static void test_popularity(const struct options_routing *routing) {
  struct inputs inputs;
  const int tokens = 20000;
  float logits[33];
  int hits[33] = {0};
  double total = 0, distance = 0;
  EXPECT(inputs_create(&spec, 3, routing, &inputs) == MOEFLOW_OK);
  for (int t = 0; t < tokens; t++) {
    int best = 0;
    inputs_logits(&inputs, 0, 0, t, logits);
    for (int e = 1; e < 33; e++)
      if (logits[e] > logits[best]) best = e;
    hits[best]++;
  }
  for (int e = 0; e < 33; e++) total += exp((double)inputs.popularity[e]);
  for (int e = 0; e < 33; e++) { /* chi-square over experts that are expected at all */
    const double expected = tokens * exp((double)inputs.popularity[e]) / total;
    if (expected > 5) distance += (hits[e] - expected) * (hits[e] - expected) / expected;
  }
  EXPECT(distance < 80, "chi-square %g with at most 32 degrees of freedom", distance); /* beyond 1 in 10,000 */
  inputs_destroy(&inputs);
}

static void test_shapes(void) {
  const struct options_routing zipf = {ROUTING_ZIPF, 1.5}, lognormal = {ROUTING_LOGNORMAL, 2};
  const struct spec wide = {.hidden = 64, .intermediate = 64, .experts = 4096, .top_k = 1};
  struct inputs inputs;
  double sum = 0, square = 0;
  int seen[33] = {0};
  EXPECT(inputs_create(&spec, 3, &zipf, &inputs) == MOEFLOW_OK);
  for (int e = 0; e < 33; e++) { /* each place n once, as -1.5 log n */
    const int n = (int)lround(exp(-(double)inputs.popularity[e] / 1.5));
    EXPECT(n >= 1 && n <= 33 && !seen[n - 1], "place %d", n);
    if (n >= 1 && n <= 33) seen[n - 1] = 1;
  }
  inputs_destroy(&inputs);
  EXPECT(inputs_create(&wide, 3, &lognormal, &inputs) == MOEFLOW_OK && !inputs.bias);
  for (int e = 0; e < 4096; e++) {
    sum += (double)inputs.popularity[e];
    square += (double)inputs.popularity[e] * (double)inputs.popularity[e];
  }
  EXPECT(fabs(sum / 4096) < 0.15 && fabs(sqrt(square / 4096) - 2) < 0.15, "normal: mean %g, deviation %g", sum / 4096,
         sqrt(square / 4096));
  inputs_destroy(&inputs);
}

int main(void) {
  const struct options_routing zipf = {ROUTING_ZIPF, 1}, lognormal = {ROUTING_LOGNORMAL, 1};
  test_rule();
  test_fill_kernel();
  test_different();
  test_statistics();
  test_tokens();
  test_popularity(&uniform);
  test_popularity(&zipf);
  test_popularity(&lognormal);
  test_shapes();
  TEST_END;
}
