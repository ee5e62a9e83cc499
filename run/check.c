#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "random.h"
#include "sha256.h"

#define SAMPLE_FROM 512        /* tokens over all ranks from which the reference computes a sample of the rows */
#define ROUTER_WEIGHT_MAX 1e-5 /* relative; FP32 exponentials and sums in another order */
#define PATIENT_MS 7200000 /* the reference of a large point takes its time; a dead rank is noticed at once all the same */

void check_fail(struct check *check, int32_t *verdict, const char *format, ...) {
  struct point_result *result = check->result;
  va_list arguments;
  *verdict = POINT_NO;
  if (result->message[0]) return;
  va_start(arguments, format);
  vsnprintf(result->message, sizeof result->message, format, arguments);
  va_end(arguments);
}

void check_experts(const struct check *check, int token, char text[256]) {
  const int top_k = check->worker->setup->model.spec.top_k;
  int length = snprintf(text, 256, " (experts");
  for (int k = 0; k < top_k && length < 240; k++)
    length += snprintf(text + length, 256 - (size_t)length, "%s %d", k ? "," : "", check->ids[(size_t)token * top_k + k]);
  snprintf(text + length, 256 - (size_t)length, ")");
}

/* ---- One rank's tokens ---- */

static void check_free(struct check *check) {
  free(check->hidden);
  free(check->logits);
  free(check->ids);
  free(check->weights);
  free(check->output);
  free(check->scratch);
}

static moeflow_status check_new(struct worker *worker, int point, struct point_result *result, struct check *check) {
  const struct setup *setup = worker->setup;
  const struct spec *spec = &setup->model.spec;
  const struct options_point *tokens_of = &setup->options.points[point];
  const int tokens = options_tokens(tokens_of, worker->rank), most = options_tokens_max(tokens_of);
  *check = (struct check){.worker = worker, .point = point, .result = result};
  check->step = (struct stage_step){.tokens = tokens, .tokens_max = most > 0 ? most : 1, .form = STAGE_LOGITS};
  if (setup->options.ids) check->step.form = point % 2 ? STAGE_IDS64 : STAGE_IDS32;
  const size_t picks = (size_t)check->step.tokens_max * (size_t)spec->top_k,
               values = (size_t)tokens * (size_t)spec->hidden + 1;
  check->hidden = malloc(values * sizeof(uint16_t));
  check->output = malloc(values * sizeof(uint16_t));
  check->scratch = malloc(values * sizeof(uint16_t));
  check->logits = malloc(((size_t)tokens * (size_t)spec->experts + 1) * sizeof(float));
  check->ids = calloc(picks, sizeof(int32_t)); /* tokens_max rows: the ranks exchange them at one size */
  check->weights = calloc(picks, sizeof(float));
  if (!check->hidden || !check->output || !check->scratch || !check->logits || !check->ids || !check->weights)
    return status_set(MOEFLOW_ERROR_MEMORY, "no host memory for %d tokens", tokens);
  for (int t = 0; t < tokens; t++) {
    inputs_hidden(&setup->inputs, point, worker->rank, t, check->hidden + (size_t)t * spec->hidden);
    inputs_logits(&setup->inputs, point, worker->rank, t, check->logits + (size_t)t * spec->experts);
  }
  return MOEFLOW_OK;
}

/* Loads the inputs of the main form. With --ids the reference routes; else check->ids is filled after the step. */
static moeflow_status load_inputs(struct check *check) {
  const struct setup *setup = check->worker->setup;
  const struct spec *spec = &setup->model.spec;
  const struct reference_router router = inputs_router(&setup->inputs);
  struct stage *stage = &check->worker->stage;
  moeflow_status status = stage_load(stage, check->step.tokens, check->hidden, check->logits);
  if (status != MOEFLOW_OK || check->step.form == STAGE_LOGITS) return status;
  for (int t = 0; t < check->step.tokens; t++)
    reference_route(&router, check->logits + (size_t)t * spec->experts, check->ids + (size_t)t * spec->top_k,
                    check->weights + (size_t)t * spec->top_k);
  return stage_load_ids(stage, check->step.tokens, check->ids, check->weights);
}

static moeflow_status first_step(struct check *check) {
  struct stage *stage = &check->worker->stage;
  moeflow_status status = MOEFLOW_OK;
  CHECK(load_inputs(check));
  CHECK(stage_run(stage, &check->step));
  CHECK(stage_output(stage, check->step.tokens, check->output));
  if (check->step.tokens)
    sha256(check->output, (size_t)check->step.tokens * (size_t)check->worker->setup->model.spec.hidden * sizeof(uint16_t),
           check->result->output_sha256);
  if (check->step.form == STAGE_LOGITS)
    CHECK(stage_picks(stage, check->step.lane, check->step.tokens, check->ids, check->weights));

cleanup:
  return status;
}

/* ---- Router ---- */

/* Picks of one token against the reference's. A token whose candidates were too close keeps the layer's picks. */
static void check_token_picks(struct check *check, const struct reference_router *router, int token) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const int32_t *ids = check->ids + (size_t)token * spec->top_k;
  const float *weights = check->weights + (size_t)token * spec->top_k;
  int32_t want_ids[MOEFLOW_CHOICES_MAX];
  float want_weights[MOEFLOW_CHOICES_MAX];
  const double margin = reference_route(router, check->logits + (size_t)token * spec->experts, want_ids, want_weights);
  for (int k = 0; k < spec->top_k; k++) {
    if (ids[k] != want_ids[k]) {
      if (margin < REFERENCE_TOO_CLOSE) {
        check->result->close_calls++;
        return;
      }
      check_fail(check, &check->result->router_exact,
                 "router: rank %d token %d choice %d is expert %d with weight %.9g instead of expert %d with %.9g",
                 check->worker->rank, token, k, ids[k], (double)weights[k], want_ids[k], (double)want_weights[k]);
    } else if (!(fabs((double)weights[k] - want_weights[k]) <= ROUTER_WEIGHT_MAX * fabs((double)want_weights[k]))) {
      check_fail(check, &check->result->router_exact, "router: rank %d token %d expert %d has weight %.9g instead of %.9g",
                 check->worker->rank, token, ids[k], (double)weights[k], (double)want_weights[k]);
    }
  }
}

void check_router(struct check *check) {
  const struct reference_router router = inputs_router(&check->worker->setup->inputs);
  if (check->step.form != STAGE_LOGITS) return;
  check->result->router_exact = POINT_YES;
  for (int t = 0; t < check->step.tokens; t++) check_token_picks(check, &router, t);
}

/* ---- Reference ---- */

static void draw_weights(void *user, int expert, int down, uint16_t *matrix) {
  const struct setup *setup = user;
  const uint64_t seed = setup->options.reference_seed ? setup->options.reference_seed : setup->options.seed;
  inputs_weights(&setup->model.spec, seed, expert, down, matrix);
}

/* Whether each sum of the owners' is rounded: NCCL adds them around a ring, in the return dtype. */
static int rounds_sums(const struct setup *setup) {
  if (setup->transport == MOEFLOW_TRANSPORT_ALLGATHER) return setup->model.spec.returned == SPEC_WIRE_BF16;
  return setup->options.combine == MOEFLOW_COMBINE_RING;
}

static struct reference_layer reference_of(const struct setup *setup) {
  const struct spec *spec = &setup->model.spec;
  return (struct reference_layer){
      .hidden = spec->hidden,
      .intermediate = spec->intermediate,
      .experts = spec->experts,
      .top_k = spec->top_k,
      .clamp = spec->activation == SPEC_SWIGLU_CLAMP,
      .limit = spec->activation_limit,
      .ranks = setup->ep,
      .choices = spec->reduce == SPEC_REDUCE_CHOICES,
      .return_fp32 = spec->returned == SPEC_WIRE_FP32,
      .ring = rounds_sums(setup),
      .output_scale = spec->scale_on == SPEC_SCALE_OUTPUT ? spec->scale : 1.0,
      .weights = draw_weights,
      .weights_user = (void *)setup,
  };
}

int check_choose_rows(const struct check *check, int *rows) {
  const struct setup *setup = check->worker->setup;
  const struct options_point *point = &setup->options.points[check->point];
  const int tokens = check->step.tokens;
  int64_t all = 0;
  for (int rank = 0; rank < setup->ep; rank++) all += options_tokens(point, rank);
  for (int t = 0; t < tokens; t++) rows[t] = t;
  if (all < SAMPLE_FROM || tokens <= setup->options.check_rows) return tokens;
  const int count = (int)setup->options.check_rows;
  const uint32_t key = moeflow_random_mix((uint32_t)setup->options.seed + (uint32_t)check->worker->rank);
  for (int i = 0; i < count; i++) { /* the head of a shuffle, then both ends put in */
    const int other = i + (int)(moeflow_random_bits(key, (uint32_t)i) % (uint32_t)(tokens - i));
    const int row = rows[i];
    rows[i] = rows[other];
    rows[other] = row;
  }
  int first = -1, last = -1;
  for (int i = 0; i < count; i++) {
    if (rows[i] == 0) first = i;
    if (rows[i] == tokens - 1) last = i;
  }
  if (first < 0) rows[first = last == 0 && count > 1 ? 1 : 0] = 0;
  if (last < 0 && count > 1) rows[first == count - 1 ? 0 : count - 1] = tokens - 1;
  return count;
}

/* The gathered inputs and outputs of the chosen rows. */
struct sample {
  int count;
  int *rows;
  uint16_t *hidden, *got, *want;
  int32_t *ids, *sources;
  float *weights;
};

static void sample_free(struct sample *sample) {
  free(sample->rows);
  free(sample->hidden);
  free(sample->got);
  free(sample->want);
  free(sample->ids);
  free(sample->sources);
  free(sample->weights);
}

static moeflow_status sample_new(const struct check *check, struct sample *sample) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const size_t h = (size_t)spec->hidden, k = (size_t)spec->top_k;
  *sample = (struct sample){.rows = malloc(((size_t)check->step.tokens + 1) * sizeof(int))};
  if (sample->rows) sample->count = check_choose_rows(check, sample->rows);
  const size_t count = (size_t)sample->count + 1;
  sample->hidden = malloc(count * h * sizeof(uint16_t));
  sample->got = malloc(count * h * sizeof(uint16_t));
  sample->want = malloc(count * h * sizeof(uint16_t));
  sample->ids = malloc(count * k * sizeof(int32_t));
  sample->weights = malloc(count * k * sizeof(float));
  sample->sources = malloc(count * sizeof(int32_t));
  if (!sample->rows || !sample->hidden || !sample->got || !sample->want || !sample->ids || !sample->weights ||
      !sample->sources)
    return status_set(MOEFLOW_ERROR_MEMORY, "no host memory for the reference of %d rows", sample->count);
  for (int i = 0; i < sample->count; i++) {
    const size_t row = (size_t)sample->rows[i];
    memcpy(sample->hidden + i * h, check->hidden + row * h, h * sizeof(uint16_t));
    memcpy(sample->got + i * h, check->output + row * h, h * sizeof(uint16_t));
    memcpy(sample->ids + i * k, check->ids + row * k, k * sizeof(int32_t));
    memcpy(sample->weights + i * k, check->weights + row * k, k * sizeof(float));
    sample->sources[i] = check->worker->rank;
  }
  return MOEFLOW_OK;
}

/* Says where the worst row is off: the one with the largest L2, or the one with the largest element. */
static void tell_difference(struct check *check, const struct sample *sample,
                            const struct reference_difference *difference) {
  const int columns = check->worker->setup->model.spec.hidden;
  const int row = difference->l2 > REFERENCE_L2_MAX ? difference->l2_row : difference->row;
  struct reference_difference one;
  char experts[256];
  int32_t close = POINT_YES;
  reference_compare(sample->got + (size_t)row * columns, sample->want + (size_t)row * columns, 1, columns, &one);
  check_experts(check, sample->rows[row], experts);
  check_fail(check, &close,
             "rank %d token %d%s: value %d is %g instead of %g; relative L2 of the row %.3g (at most %.3g), largest "
             "error %.3g of the row's largest value (at most %.3g)",
             check->worker->rank, sample->rows[row], experts, one.column, one.got, one.want, one.l2, REFERENCE_L2_MAX,
             one.element, REFERENCE_ELEMENT_MAX);
}

/* With --allow-roundings, rows beyond the bars are judged again by what roundings on the edge allow: some in ten thousand
 * rows of a layer only 64 wide. Where more are beyond, it is not roundings. */
static moeflow_status allow_roundings(struct check *check, const struct reference_layer *layer, struct sample *sample) {
  const size_t h = (size_t)layer->hidden, k = (size_t)layer->top_k;
  const int most = 8 + sample->count / 64;
  moeflow_status status = MOEFLOW_OK;
  struct reference_difference difference;
  uint16_t *want = malloc(h * sizeof *want);
  int tried = 0;
  for (size_t i = 0; want && i < (size_t)sample->count && tried < most; i++) {
    const uint16_t *got = sample->got + i * h;
    reference_compare(got, sample->want + i * h, 1, layer->hidden, &difference);
    if (reference_close(&difference)) continue;
    tried++;
    memcpy(want, sample->want + i * h, h * sizeof *want);
    if (reference_allow(layer, sample->hidden + i * h, sample->ids + i * k, sample->weights + i * k, sample->sources[i], got,
                        want))
      FAIL(MOEFLOW_ERROR_MEMORY, "no host memory for the reference of a row");
    reference_compare(got, want, 1, layer->hidden, &difference);
    if (!reference_close(&difference)) continue; /* told as it was */
    memcpy(sample->want + i * h, want, h * sizeof *want);
    check->result->rounding_rows++;
  }
  if (!want) status = status_set(MOEFLOW_ERROR_MEMORY, "no host memory for a row");

cleanup:
  free(want);
  return status;
}

moeflow_status check_reference(struct check *check) {
  const struct setup *setup = check->worker->setup;
  const struct reference_layer layer = reference_of(setup);
  struct reference_difference difference;
  struct sample sample;
  moeflow_status status = sample_new(check, &sample);
  if (status == MOEFLOW_OK && reference_run(&layer, sample.count, sample.hidden, sample.ids, sample.weights, sample.sources,
                                            sample.want, NULL, setup->threads_per_rank))
    status = status_set(MOEFLOW_ERROR_MEMORY, "no host memory for the reference of %d rows", sample.count);
  if (status == MOEFLOW_OK) {
    reference_compare(sample.got, sample.want, sample.count, setup->model.spec.hidden, &difference);
    check->result->rel_l2_max = difference.l2; /* the figures told are those before any allowance */
    check->result->max_error_ratio = difference.element;
    check->result->rows_checked = sample.count;
    if (setup->options.allow_roundings) status = allow_roundings(check, &layer, &sample);
  }
  if (status == MOEFLOW_OK) {
    reference_compare(sample.got, sample.want, sample.count, setup->model.spec.hidden, &difference);
    check->result->passed = reference_close(&difference);
    if (!check->result->passed) tell_difference(check, &sample, &difference);
  }
  sample_free(&sample);
  return status;
}

/* ---- Bitwise ---- */

void check_same(struct check *check, int32_t *verdict, const char *what, int number) {
  const size_t columns = (size_t)check->worker->setup->model.spec.hidden;
  const size_t values = (size_t)check->step.tokens * columns;
  char experts[256];
  if (!memcmp(check->scratch, check->output, values * sizeof(uint16_t))) return;
  size_t at = 0;
  while (check->scratch[at] == check->output[at]) at++;
  check_experts(check, (int)(at / columns), experts);
  check_fail(check, verdict, "%s %d: rank %d token %zu%s: value %zu is %g (%#06x) instead of %g (%#06x)", what, number,
             check->worker->rank, at / columns, experts, at % columns, reference_from_bf16(check->scratch[at]),
             check->scratch[at], reference_from_bf16(check->output[at]), check->output[at]);
}

static moeflow_status same_step(struct check *check, const struct stage_step *step, int32_t *verdict, const char *what,
                                int number) {
  struct stage *stage = &check->worker->stage;
  moeflow_status status = stage_run(stage, step);
  if (status == MOEFLOW_OK) status = stage_output(stage, step->tokens, check->scratch);
  if (status == MOEFLOW_OK) check_same(check, verdict, what, number);
  return status;
}

/* The router's own choice handed in as ids and weights must give the same bits as logits. */
static moeflow_status check_forms(struct check *check) {
  struct stage_step step = check->step;
  if (step.form != STAGE_LOGITS) return MOEFLOW_OK;
  check->result->forms_exact = POINT_YES;
  step.form = check->point % 2 ? STAGE_IDS64 : STAGE_IDS32;
  const moeflow_status status = stage_load_ids(&check->worker->stage, step.tokens, check->ids, check->weights);
  return status != MOEFLOW_OK ? status
                              : same_step(check, &step, &check->result->forms_exact, "ids instead of logits, form",
                                          step.form == STAGE_IDS64 ? 64 : 32);
}

static moeflow_status check_repeats(struct check *check) {
  const struct setup *setup = check->worker->setup;
  moeflow_status status = MOEFLOW_OK;
  CHECK(check_forms(check));
  CHECK(check_identity(check));
  CHECK(load_inputs(check)); /* the identity's choices are still there with --ids */
  check->result->repeat_exact = POINT_YES;
  for (int i = 0; i < setup->replays; i++) {
    struct stage_step step = check->step;
    step.lane = i % (int)setup->options.lanes;
    CHECK(same_step(check, &step, &check->result->repeat_exact, "repeat", i + 1));
  }

cleanup:
  return status;
}

static moeflow_status check_replays(struct check *check, const struct stage_step *step) {
  struct stage *stage = &check->worker->stage;
  moeflow_status status = MOEFLOW_OK;
  check->result->replay_exact = POINT_YES;
  for (int i = 0; i < check->worker->setup->replays; i++) {
    CHECK(stage_replay(stage, step, NULL));
    CHECK(stage_output(stage, step->tokens, check->scratch));
    check_same(check, &check->result->replay_exact, "replay", i + 1);
  }

cleanup:
  return status;
}

/* ---- A point ---- */

/* Every rank's picks on every rank: [ranks, tokens_max, K] of ids, then of weights. */
static moeflow_status gather_picks(struct check *check, int32_t **all_ids, float **all_weights) {
  struct worker *worker = check->worker;
  const size_t picks = (size_t)check->step.tokens_max * (size_t)worker->setup->model.spec.top_k;
  const size_t ranks = (size_t)worker->setup->ep;
  moeflow_status status = MOEFLOW_OK;
  *all_ids = malloc(ranks * picks * sizeof(int32_t));
  *all_weights = malloc(ranks * picks * sizeof(float));
  if (!*all_ids || !*all_weights) status = status_set(MOEFLOW_ERROR_MEMORY, "no host memory for the picks of all ranks");
  CHECK(worker_agree(worker, status));
  CHECK(star_gather(worker->star, check->ids, picks * sizeof(int32_t), *all_ids));
  CHECK(star_broadcast(worker->star, *all_ids, ranks * picks * sizeof(int32_t)));
  CHECK(star_gather(worker->star, check->weights, picks * sizeof(float), *all_weights));
  CHECK(star_broadcast(worker->star, *all_weights, ranks * picks * sizeof(float)));

cleanup:
  return status;
}

static moeflow_status exchange_and_compare(struct check *check) {
  int32_t *all_ids = NULL;
  float *all_weights = NULL;
  moeflow_status status = MOEFLOW_OK;
  CHECK(gather_picks(check, &all_ids, &all_weights));
  check->result->dispatch_exact = POINT_YES;
  CHECK(worker_agree(check->worker, check_dispatch(check, all_ids, all_weights)));
  check_router(check);

cleanup:
  free(all_ids);
  free(all_weights);
  return status;
}

/* Graphs are made while no step is in flight on any rank: with `local` on one GPU a driver call that waits for the device
 * would wait for a peer's kernel that waits for ours. */
static moeflow_status capture_and_replay(struct check *check) {
  struct worker *worker = check->worker;
  struct stage_step step = check->step;
  moeflow_status status = MOEFLOW_OK;
  if (worker->setup->backend != MOEFLOW_BACKEND_CUDA) return MOEFLOW_OK;
  step.lane = (int)worker->setup->options.lanes - 1;
  CHECK(worker_agree(worker, stage_capture(&worker->stage, &step)));
  CHECK(worker_agree(worker, check_replays(check, &step)));
  stage_forget_graph(&worker->stage);

cleanup:
  return status;
}

/* The reference takes long on some ranks, and the others wait. */
static moeflow_status agree_patiently(struct worker *worker, moeflow_status mine) {
  const int timeout_ms = worker->star->timeout_ms;
  if (timeout_ms < PATIENT_MS) worker->star->timeout_ms = PATIENT_MS;
  const moeflow_status status = worker_agree(worker, mine);
  worker->star->timeout_ms = timeout_ms;
  return status;
}

static void clear(struct point_result *result) {
  *result = (struct point_result){.dispatch_exact = POINT_NOT_CHECKED,
                                  .replay_exact = POINT_NOT_CHECKED,
                                  .repeat_exact = POINT_NOT_CHECKED,
                                  .router_exact = POINT_NOT_CHECKED,
                                  .forms_exact = POINT_NOT_CHECKED};
}

moeflow_status check_point(struct worker *worker, int point, struct point_result *result) {
  struct check check = {0};
  moeflow_status status = MOEFLOW_OK;
  clear(result);
  status = check_new(worker, point, result, &check);
  CHECK(worker_agree(worker, status));
  CHECK(worker_agree(worker, first_step(&check)));
  CHECK(exchange_and_compare(&check));
  CHECK(agree_patiently(worker, check_reference(&check)));
  CHECK(worker_agree(worker, check_repeats(&check)));
  CHECK(capture_and_replay(&check));
  result->passed = result->passed && result->dispatch_exact == POINT_YES && result->repeat_exact == POINT_YES &&
                   result->replay_exact != POINT_NO && result->router_exact != POINT_NO && result->forms_exact != POINT_NO;

cleanup:
  check_free(&check);
  return status;
}

/* ---- Without --check ---- */

static int by_value(const void *a, const void *b) {
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

static double wall_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static moeflow_status time_steps(struct check *check, double *median_us) {
  struct stage *stage = &check->worker->stage;
  const int count = check->worker->setup->replays;
  moeflow_status status = MOEFLOW_OK;
  double *samples = malloc((size_t)count * sizeof *samples);
  if (!samples) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d samples", count);
  for (int i = 0; i < count; i++) {
    float ms = 0;
    const double begin = wall_us();
    if (stage->cuda) {
      CHECK(stage_replay(stage, &check->step, &ms));
    } else {
      CHECK(stage_run(stage, &check->step));
    }
    samples[i] = stage->cuda ? (double)ms * 1e3 : wall_us() - begin;
  }
  qsort(samples, (size_t)count, sizeof *samples, by_value);
  *median_us = count % 2 ? samples[count / 2] : (samples[count / 2 - 1] + samples[count / 2]) / 2;

cleanup:
  free(samples);
  return status;
}

moeflow_status check_nothing(struct worker *worker, int point, struct point_result *result) {
  struct check check = {0};
  moeflow_status status = MOEFLOW_OK;
  clear(result);
  status = check_new(worker, point, result, &check);
  CHECK(worker_agree(worker, status));
  CHECK(worker_agree(worker, first_step(&check)));
  if (worker->stage.cuda) CHECK(worker_agree(worker, stage_capture(&worker->stage, &check.step)));
  CHECK(worker_agree(worker, time_steps(&check, &result->step_us)));
  if (worker->stage.cuda) stage_forget_graph(&worker->stage);

cleanup:
  check_free(&check);
  return status;
}
