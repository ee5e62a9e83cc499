/* Whether an arm computes the experts' outputs: sampled rows in double precision on the CPU vouch for gate_up + down, and
 * that for every row of every arm. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experts_state.h"
#include "reference.h"

#define SAMPLES_PER_ROUTING 2

static size_t row_values(const struct experts_bench *bench) {
  return (size_t)bench->plan.spec.hidden;
}

static size_t all_values(const struct experts_bench *bench) {
  return BENCH_ROUTINGS * (size_t)experts_bench_rows(bench) * row_values(bench);
}

/* ---- Samples ---- */

struct sample {
  int count;
  int routing[BENCH_ROUTINGS * SAMPLES_PER_ROUTING], row[BENCH_ROUTINGS * SAMPLES_PER_ROUTING];
  uint16_t *hidden, *got, *want;
  int32_t *ids;
  float *weights;
};

static void sample_free(struct sample *sample) {
  free(sample->hidden);
  free(sample->got);
  free(sample->want);
  free(sample->ids);
  free(sample->weights);
}

/* The rows of a routing with the most entries, of which most is to be seen; the later of equals, where padding begins. */
static void choose_rows(const struct routing *routing, int index, struct sample *sample) {
  int taken = -1;
  for (int s = 0; s < SAMPLES_PER_ROUTING; s++) {
    int best = -1;
    for (int row = 0; row < routing->rows; row++) {
      if (row == taken || !routing->row_entries[row]) continue;
      if (best < 0 || routing->row_entries[row] >= routing->row_entries[best]) best = row;
    }
    if (best < 0) return;
    sample->routing[sample->count] = index;
    sample->row[sample->count++] = taken = best;
  }
}

static moeflow_status sample_new(const struct experts_bench *bench, const uint16_t *rows, struct sample *sample) {
  const size_t h = row_values(bench), k = (size_t)bench->plan.spec.top_k;
  *sample = (struct sample){.count = 0};
  for (int i = 0; i < BENCH_ROUTINGS; i++) choose_rows(&bench->routings[i], i, sample);
  const size_t count = (size_t)sample->count + 1;
  sample->hidden = malloc(count * h * sizeof *sample->hidden);
  sample->got = malloc(count * h * sizeof *sample->got);
  sample->want = malloc(count * h * sizeof *sample->want);
  sample->ids = malloc(count * k * sizeof *sample->ids);
  sample->weights = malloc(count * k * sizeof *sample->weights);
  if (!sample->hidden || !sample->got || !sample->want || !sample->ids || !sample->weights)
    return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the reference of %d rows", sample->count);
  for (int s = 0; s < sample->count; s++) {
    const struct routing *routing = &bench->routings[sample->routing[s]];
    const size_t row = (size_t)sample->row[s];
    const size_t at = ((size_t)sample->routing[s] * (size_t)experts_bench_rows(bench) + row) * h;
    experts_hidden(bench, sample->routing[s], sample->row[s], sample->hidden + (size_t)s * h);
    memcpy(sample->got + (size_t)s * h, rows + at, h * sizeof *rows);
    memcpy(sample->ids + (size_t)s * k, routing->ids + row * k, k * sizeof *sample->ids);
    memcpy(sample->weights + (size_t)s * k, routing->weights + row * k, k * sizeof *sample->weights);
  }
  return MOEFLOW_OK;
}

static void draw_weights(void *user, int expert, int down, uint16_t *matrix) {
  const struct experts_bench *bench = user;
  inputs_weights(&bench->plan.spec, bench->inputs.seed, expert, down, matrix);
}

/* One rank that owns all: the others' experts are no ids here. Its sum is rounded to bf16 once, before any scale. */
static struct reference_layer reference_of(const struct experts_bench *bench) {
  const struct spec *spec = &bench->plan.spec;
  return (struct reference_layer){.hidden = spec->hidden,
                                  .intermediate = spec->intermediate,
                                  .experts = spec->experts,
                                  .top_k = spec->top_k,
                                  .clamp = spec->activation == SPEC_SWIGLU_CLAMP,
                                  .limit = spec->activation_limit,
                                  .ranks = 1,
                                  .output_scale = 1.0,
                                  .weights = draw_weights,
                                  .weights_user = (void *)bench};
}

/* NaN is never within the bar. */
static int beyond(double l2) {
  return !(l2 <= EXPERTS_ROW_L2_MAX);
}

/* Rows as gate_up + down gave them, against the reference. */
static moeflow_status check_samples(const struct experts_bench *bench, const uint16_t *rows, int *passed) {
  const struct reference_layer layer = reference_of(bench);
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  struct reference_difference difference;
  struct sample sample;
  moeflow_status status = MOEFLOW_OK;
  CHECK(sample_new(bench, rows, &sample));
  if (reference_run(&layer, sample.count, sample.hidden, sample.ids, sample.weights, NULL, sample.want, NULL,
                    cores > 1 ? (int)cores : 1))
    FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the reference of %d rows", sample.count);
  reference_compare(sample.got, sample.want, sample.count, layer.hidden, &difference);
  *passed = !beyond(difference.l2);
  if (!*passed) {
    status_set(MOEFLOW_OK,
               "gate_up + down, which others are compared with: routing %d row %d is off by %.3g of its L2 norm "
               "(at most %.3g), value %d is %g instead of %g",
               sample.routing[difference.l2_row], sample.row[difference.l2_row], difference.l2, EXPERTS_ROW_L2_MAX,
               difference.column, difference.got, difference.want);
  }

cleanup:
  sample_free(&sample);
  return status;
}

/* ---- The reference of every row ---- */

/* NaN equals NaN in a comparison, so a row that gate_up + down left as poison must not become the reference. */
static int all_written(const struct experts_bench *bench, const uint16_t *rows) {
  for (size_t i = 0; i < all_values(bench); i++) {
    if ((rows[i] & 0x7f80) != 0x7f80) continue;
    const size_t row = i / row_values(bench), count = (size_t)experts_bench_rows(bench);
    status_set(MOEFLOW_OK, "gate_up + down, which others are compared with: routing %zu row %zu value %zu is %g",
               row / count, row % count, i % row_values(bench), reference_from_bf16(rows[i]));
    return 0;
  }
  return 1;
}

static moeflow_status make_reference(struct experts_bench *bench, int *passed) {
  struct experts_arm *portable = NULL;
  uint16_t *rows = malloc(all_values(bench) * sizeof *rows);
  moeflow_status status = MOEFLOW_OK;
  *passed = 1;
  if (!rows) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu values", all_values(bench));
  CHECK(experts_bench_arm(bench, BENCH_PORTABLE, 0, 1, &portable));
  CHECK(experts_arm_poison(portable));
  CHECK(experts_arm_run(portable, 1));
  CHECK(experts_arm_rows(portable, rows));
  *passed = all_written(bench, rows);
  if (*passed) CHECK(check_samples(bench, rows, passed));
  if (!*passed) goto cleanup;
  bench->reference = rows;
  rows = NULL;

cleanup:
  experts_arm_destroy(portable);
  free(rows);
  return status;
}

static void compare_rows(const struct experts_bench *bench, const uint16_t *rows, double *worst, int *passed) {
  const int count = experts_bench_rows(bench), columns = bench->plan.spec.hidden;
  struct reference_difference difference;
  *worst = 0;
  *passed = 1;
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    const size_t at = (size_t)i * (size_t)count * row_values(bench);
    reference_compare(rows + at, bench->reference + at, count, columns, &difference);
    if (!(difference.l2 <= *worst)) *worst = difference.l2;
    if (!beyond(difference.l2)) continue;
    const size_t row = (size_t)difference.l2_row * row_values(bench);
    const int entries = difference.l2_row < bench->routings[i].rows ? bench->routings[i].row_entries[difference.l2_row] : 0;
    reference_compare(rows + at + row, bench->reference + at + row, 1, columns, &difference);
    status_set(MOEFLOW_OK,
               "routing %d row %zu (%d entries): off by %.3g of its L2 norm (at most %.3g), value %d is %g instead "
               "of %g",
               i, row / row_values(bench), entries, difference.l2, EXPERTS_ROW_L2_MAX, difference.column, difference.got,
               difference.want);
    *passed = 0;
    return;
  }
}

/* ---- Bits ---- */

/* FNV-1a over 8 bytes at a time, since outputs are hundreds of megabytes; `bytes` is a multiple of 8. */
static uint64_t hash_of(const void *memory, size_t bytes) {
  const char *at = memory;
  uint64_t hash = 0xcbf29ce484222325u, word;
  for (const char *end = at + bytes; at < end; at += sizeof word) {
    memcpy(&word, at, sizeof word);
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 32; /* words differ in high bits too */
  }
  return hash;
}

/* Outputs of the experts themselves, all parts, of the last routing: the workspace is shared. */
static moeflow_status hash_outputs(struct experts_arm *arm, uint64_t *hash) {
  struct experts_bench *bench = arm->bench;
  const struct spec *spec = &bench->plan.spec;
  const size_t bytes =
      (size_t)arm->parts * (size_t)experts_bench_rows(bench) * (size_t)spec->top_k * row_values(bench) * sizeof(float);
  moeflow_status status = MOEFLOW_OK;
  void *outputs = malloc(bytes);
  if (!outputs) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu bytes of outputs", bytes);
  CHECK(bench->context->backend->download(bench->context, outputs, arm->groups[0]->lanes[0].outputs, bytes));
  *hash = hash_of(outputs, bytes);

cleanup:
  free(outputs);
  return status;
}

/* The graph that is timed, which makes no sums, must leave the bits that the checked one summed. */
static moeflow_status check_timed(struct experts_arm *arm, int *passed) {
  uint64_t with, without;
  moeflow_status status = MOEFLOW_OK;
  CHECK(experts_arm_poison(arm));
  CHECK(experts_arm_run(arm, 1));
  CHECK(hash_outputs(arm, &with));
  CHECK(experts_arm_poison(arm));
  CHECK(experts_arm_run(arm, 0));
  CHECK(hash_outputs(arm, &without));
  *passed = with == without;
  if (!*passed) status_set(MOEFLOW_OK, "the experts' outputs differ between two launches");

cleanup:
  return status;
}

/* ---- The check ---- */

moeflow_status experts_arm_check(struct experts_arm *arm, double *worst, int *passed) {
  struct experts_bench *bench = arm->bench;
  uint16_t *rows = NULL;
  moeflow_status status = MOEFLOW_OK;
  *worst = NAN;
  *passed = 1;
  if (!bench->reference) CHECK(make_reference(bench, passed));
  if (!*passed) goto cleanup;
  rows = malloc(all_values(bench) * sizeof *rows);
  if (!rows) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu values", all_values(bench));
  CHECK(experts_arm_poison(arm));
  CHECK(experts_arm_run(arm, 1));
  CHECK(experts_arm_rows(arm, rows));
  compare_rows(bench, rows, worst, passed);
  if (*passed && !arm->with_sum) CHECK(check_timed(arm, passed));

cleanup:
  free(rows);
  return status;
}

moeflow_status experts_arm_hash(struct experts_arm *arm, uint64_t hash[BENCH_ROUTINGS]) {
  const size_t values = (size_t)experts_bench_rows(arm->bench) * row_values(arm->bench);
  moeflow_status status = MOEFLOW_OK;
  uint16_t *rows = malloc(all_values(arm->bench) * sizeof *rows);
  if (!rows) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu values", all_values(arm->bench));
  CHECK(experts_arm_poison(arm));
  CHECK(experts_arm_run(arm, 1));
  CHECK(experts_arm_rows(arm, rows));
  for (int i = 0; i < BENCH_ROUTINGS; i++) hash[i] = hash_of(rows + (size_t)i * values, values * sizeof *rows);

cleanup:
  free(rows);
  return status;
}
