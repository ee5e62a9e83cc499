#include "inputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"
#include "status.h"

#define BIAS_HALF_RANGE (1.0 / 16) /* small against the scores of likely experts, large enough to change picks */

/* ---- Weights: a few hundred million elements a run, so for wider vector units where there are any ---- */

static inline __attribute__((always_inline)) void fill_columns(uint32_t key, int32_t columns, int32_t shift, uint16_t *row) {
  for (int32_t column = 0; column < columns; column++)
    row[column] = moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)column), shift);
}

typedef void (*fill_fn)(uint32_t key, int32_t columns, int32_t shift, uint16_t *row);

__attribute__((optimize("O3"))) static void fill_row(uint32_t key, int32_t columns, int32_t shift, uint16_t *row) {
  fill_columns(key, columns, shift, row);
}

#if defined(__x86_64__)
__attribute__((optimize("O3"), target("avx2"))) static void fill_row_avx2(uint32_t key, int32_t columns, int32_t shift,
                                                                          uint16_t *row) {
  fill_columns(key, columns, shift, row);
}
__attribute__((optimize("O3"), target("avx512f,avx512bw,prefer-vector-width=512"))) static void fill_row_avx512(
    uint32_t key, int32_t columns, int32_t shift, uint16_t *row) {
  fill_columns(key, columns, shift, row);
}
#endif

static fill_fn choose_fill(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw")) return fill_row_avx512;
  if (__builtin_cpu_supports("avx2")) return fill_row_avx2;
#endif
  return fill_row;
}

static void fill_matrix(uint64_t seed, int expert, enum moeflow_random_matrix matrix, int64_t rows, int32_t columns,
                        int32_t shift, uint16_t *out) {
  const fill_fn fill = choose_fill();
  for (int64_t row = 0; row < rows; row++)
    fill(moeflow_random_row(seed, (uint32_t)expert, (uint32_t)matrix, (uint32_t)row), columns, shift, out + row * columns);
}

void inputs_weights(const struct spec *spec, uint64_t seed, int expert, int down, uint16_t *matrix) {
  if (down) {
    fill_matrix(seed, expert, MOEFLOW_RANDOM_DOWN, spec->hidden, spec->intermediate,
                moeflow_random_shift(spec->intermediate), matrix);
  } else {
    fill_matrix(seed, expert, MOEFLOW_RANDOM_GATE_UP, 2 * (int64_t)spec->intermediate, spec->hidden,
                moeflow_random_shift(spec->hidden), matrix);
  }
}

/* ---- Tokens ---- */

static uint64_t point_seed(const struct inputs *inputs, int point) {
  return inputs->seed + (uint64_t)(point + 1) * 0x9e3779b97f4a7c15u; /* weights have point -1: no step */
}

void inputs_hidden(const struct inputs *inputs, int point, int rank, int token, uint16_t *hidden) {
  choose_fill()(moeflow_random_row(point_seed(inputs, point), (uint32_t)rank, MOEFLOW_RANDOM_HIDDEN, (uint32_t)token),
                inputs->spec->hidden, 0, hidden);
}

/* In the open interval (0, 1). */
static double uniform(uint32_t bits) {
  return (bits + 0.5) * 0x1p-32;
}

void inputs_logits(const struct inputs *inputs, int point, int rank, int token, float *logits) {
  const uint32_t key = moeflow_random_row(point_seed(inputs, point), (uint32_t)rank, MOEFLOW_RANDOM_LOGITS, (uint32_t)token);
  for (int e = 0; e < inputs->spec->experts; e++) {
    const double gumbel = -log(-log(uniform(moeflow_random_bits(key, (uint32_t)e))));
    logits[e] = (float)(inputs->popularity[e] + gumbel);
  }
}

/* ---- Popularity and bias ---- */

struct ticket { /* a place in a shuffle */
  uint32_t draw;
  int expert;
};

static int ticket_order(const void *a, const void *b) {
  const struct ticket *left = a, *right = b;
  if (left->draw != right->draw) return left->draw < right->draw ? -1 : 1;
  return left->expert - right->expert;
}

/* Box and Muller's normal from two uniforms. */
static void lognormal(uint64_t seed, int experts, double sigma, float *popularity) {
  for (int e = 0; e < experts; e++) {
    const uint32_t key = moeflow_random_row(seed, 0, MOEFLOW_RANDOM_POPULARITY, (uint32_t)e);
    const double radius = sqrt(-2 * log(uniform(moeflow_random_bits(key, 0))));
    popularity[e] = (float)(sigma * radius * cos(6.283185307179586 * uniform(moeflow_random_bits(key, 1))));
  }
}

/* Weight 1 / n^s for the n-th most popular expert; which one that is, is shuffled. */
static moeflow_status zipf(uint64_t seed, int experts, double exponent, float *popularity) {
  struct ticket *tickets = malloc((size_t)experts * sizeof *tickets);
  if (!tickets) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d experts", experts);
  for (int e = 0; e < experts; e++)
    tickets[e] = (struct ticket){moeflow_random_row(seed, 0, MOEFLOW_RANDOM_POPULARITY, (uint32_t)e), e};
  qsort(tickets, (size_t)experts, sizeof *tickets, ticket_order);
  for (int n = 0; n < experts; n++) popularity[tickets[n].expert] = (float)(-exponent * log(n + 1));
  free(tickets);
  return MOEFLOW_OK;
}

moeflow_status inputs_create(const struct spec *spec, uint64_t seed, const struct options_routing *routing,
                             struct inputs *inputs) {
  moeflow_status status = MOEFLOW_OK;
  *inputs = (struct inputs){.spec = spec, .seed = seed};
  inputs->popularity = calloc((size_t)spec->experts, sizeof(float));
  if (spec->correction_bias) inputs->bias = calloc((size_t)spec->experts, sizeof(float));
  if (!inputs->popularity || (spec->correction_bias && !inputs->bias))
    FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d experts", spec->experts);
  if (routing->kind == ROUTING_LOGNORMAL) lognormal(seed, spec->experts, routing->parameter, inputs->popularity);
  if (routing->kind == ROUTING_ZIPF) CHECK(zipf(seed, spec->experts, routing->parameter, inputs->popularity));
  const uint32_t key = moeflow_random_row(seed, 0, MOEFLOW_RANDOM_BIAS, 0);
  for (int e = 0; inputs->bias && e < spec->experts; e++)
    inputs->bias[e] = (float)((2 * uniform(moeflow_random_bits(key, (uint32_t)e)) - 1) * BIAS_HALF_RANGE);
  return MOEFLOW_OK;

cleanup:
  inputs_destroy(inputs);
  return status;
}

void inputs_destroy(struct inputs *inputs) {
  free(inputs->popularity);
  free(inputs->bias);
  inputs->popularity = inputs->bias = NULL;
}

struct reference_router inputs_router(const struct inputs *inputs) {
  const struct spec *spec = inputs->spec;
  return (struct reference_router){
      .experts = spec->experts,
      .top_k = spec->top_k,
      .softmax = spec->score == SPEC_SOFTMAX,
      .bias = inputs->bias,
      .groups = spec->groups,
      .top_groups = spec->top_groups,
      .group_top2 = spec->group_score == SPEC_GROUP_TOP2,
      .renormalize = spec->renormalize, /* both count none, sum + 1e-20, sum + 1e-6, max 1e-12 */
      .scale = spec->scale_on == SPEC_SCALE_WEIGHTS ? (float)spec->scale : 1.0f,
  };
}
