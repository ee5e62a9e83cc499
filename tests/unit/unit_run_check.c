/* Every part of moeflow-run's check must find what it is there for: each is shown one right and several wrong results. */
#include "check.h"

#include <math.h>

#include "report.h"
#include "test.h"

#define HIDDEN 64
#define INTERMEDIATE 64
#define EXPERTS 7
#define TOP_K 2
#define RANKS 2
#define TOKENS 5 /* of rank 0; rank 1 has 2 */
#define ROWS 8   /* the bucket of 5 */

static struct setup setup;
static struct moeflow_context context;
static struct comm_ops two_sided = {.name = "two-sided", .one_sided = 0};
static struct comm comm = {&two_sided};
static struct moeflow_group group;
static struct moeflow_layer layer;
static struct moeflow_record record;
static struct worker worker;
static struct point_result result;
static struct check check;
static int32_t counts[RANKS] = {TOKENS, 2};
static uint16_t hidden[TOKENS * HIDDEN], output[TOKENS * HIDDEN], scratch[TOKENS * HIDDEN];
static float logits[TOKENS * EXPERTS], weights[TOKENS * TOP_K];
static int32_t ids[TOKENS * TOP_K];

static void set_up(void) {
  const struct options_routing uniform = {ROUTING_UNIFORM, 0};
  struct spec *spec = &setup.model.spec;
  *spec = (struct spec){.name = "tiny",
                        .hidden = HIDDEN,
                        .intermediate = INTERMEDIATE,
                        .experts = EXPERTS,
                        .top_k = TOP_K,
                        .score = SPEC_SIGMOID,
                        .groups = 1,
                        .top_groups = 1,
                        .renormalize = SPEC_SUM_1E_20,
                        .scale = 2.5};
  setup.options = (struct options){.seed = 1, .check_rows = 3, .point_count = 1, .points = {{RANKS, counts}}};
  setup.ep = RANKS;
  setup.capacity = 8;
  setup.threads_per_rank = 1;
  EXPECT(inputs_create(spec, 1, &uniform, &setup.inputs) == MOEFLOW_OK);
  context.backend = &backend_cpu;
  context.plan.spec = *spec;
  group = (struct moeflow_group){.rank = 1, .ranks = RANKS, .capacity = 8, .lane_count = 1, .comm = &comm};
  group.lanes[0].record = &record;
  record.finished = 41;
  layer.group = &group;
  layer.context = &context;
  worker = (struct worker){.setup = &setup, .rank = 1, .context = &context, .group = &group, .layer = &layer};
}

/* A fresh check of rank 0's tokens, whose picks are the reference's. */
static void begin(int rank) {
  const struct reference_router router = inputs_router(&setup.inputs);
  worker.rank = rank;
  result = (struct point_result){.dispatch_exact = POINT_YES, .repeat_exact = POINT_YES};
  check = (struct check){.worker = &worker,
                         .hidden = hidden,
                         .logits = logits,
                         .ids = ids,
                         .weights = weights,
                         .output = output,
                         .scratch = scratch,
                         .result = &result};
  check.step = (struct stage_step){.tokens = counts[rank], .tokens_max = TOKENS, .form = STAGE_LOGITS};
  for (int t = 0; t < counts[rank]; t++) {
    inputs_hidden(&setup.inputs, 0, rank, t, hidden + t * HIDDEN);
    inputs_logits(&setup.inputs, 0, rank, t, logits + t * EXPERTS);
    reference_route(&router, logits + t * EXPERTS, ids + t * TOP_K, weights + t * TOP_K);
  }
}

static int says(const char *a, const char *b) {
  return strstr(result.message, a) && strstr(result.message, b);
}

static void test_router(void) {
  begin(0);
  check_router(&check);
  EXPECT(result.router_exact == POINT_YES && result.close_calls == 0, "%s", result.message);
  begin(0);
  ids[2 * TOP_K + 1] =
      (ids[2 * TOP_K] + 1) % EXPERTS == ids[2 * TOP_K + 1] ? (ids[2 * TOP_K] + 2) % EXPERTS : (ids[2 * TOP_K] + 1) % EXPERTS;
  check_router(&check);
  EXPECT(result.router_exact == POINT_NO && says("rank 0 token 2 choice 1", "instead of"), "%s", result.message);
  begin(0);
  weights[TOP_K] *= 1.0001f;
  check_router(&check);
  EXPECT(result.router_exact == POINT_NO && says("rank 0 token 1 expert", "weight"), "%s", result.message);
  begin(0);
  weights[TOP_K] = NAN;
  check_router(&check);
  EXPECT(result.router_exact == POINT_NO, "a NaN weight");
  begin(0); /* two logits one unit apart (a few in their scores), picked the other way round */
  for (int e = 0; e < EXPERTS; e++) logits[e] = (float)(-10 - e);
  logits[4] = -3.0f;
  logits[5] = nextafterf(-3.0f, 0.0f);
  ids[0] = 4;
  ids[1] = 5;
  check_router(&check);
  EXPECT(result.router_exact == POINT_YES && result.close_calls == 1, "%s", result.message);
}

static void test_rows(void) {
  static int32_t many[RANKS] = {1000, 100};
  static int rows[1000];
  const int wanted[] = {1, 2, 3, 64, 999};
  begin(0);
  setup.options.points[0].tokens = many;
  check.step.tokens = 1000;
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    for (int seed = 0; seed < 20; seed++) {
      char seen[1000] = {0};
      setup.options.check_rows = wanted[i];
      setup.options.seed = (uint64_t)seed;
      const int chosen = check_choose_rows(&check, rows);
      int distinct = 0;
      for (int r = 0; r < chosen; r++) {
        if (rows[r] < 0 || rows[r] > 999 || seen[rows[r]]) continue;
        seen[rows[r]] = 1;
        distinct++;
      }
      EXPECT(chosen == wanted[i] && distinct == chosen && seen[0] && (seen[999] || chosen == 1), "%d rows, seed %d", chosen,
             seed);
    }
  }
  setup.options.check_rows = 3;
  setup.options.seed = 1;
  many[0] = check.step.tokens = 411; /* 511 over all ranks */
  EXPECT(check_choose_rows(&check, rows) == 411 && rows[0] == 0 && rows[200] == 200 && rows[410] == 410);
  setup.options.points[0].tokens = counts;
}

static void draw(void *user, int expert, int down, uint16_t *matrix) {
  (void)user;
  inputs_weights(&setup.model.spec, setup.options.seed, expert, down, matrix);
}

static void test_reference(void) {
  const struct reference_layer right = {.hidden = HIDDEN,
                                        .intermediate = INTERMEDIATE,
                                        .experts = EXPERTS,
                                        .top_k = TOP_K,
                                        .ranks = RANKS,
                                        .output_scale = 1,
                                        .weights = draw};
  begin(0);
  EXPECT(reference_run(&right, TOKENS, hidden, ids, weights, NULL, output, NULL, 1) == 0);
  EXPECT(check_reference(&check) == MOEFLOW_OK && result.passed && result.rel_l2_max == 0, "%s", result.message);
  EXPECT(result.rows_checked == TOKENS);
  begin(0); /* one token's output in another's place */
  memcpy(output + 4 * HIDDEN, output, HIDDEN * sizeof *output);
  EXPECT(check_reference(&check) == MOEFLOW_OK && !result.passed && result.rel_l2_max > 0.1, "%g", result.rel_l2_max);
  EXPECT(says("rank 0 token 4 (experts ", " instead of ") && says("relative L2", "largest error"), "%s", result.message);
  begin(0);
  output[2 * HIDDEN + 9] = 0x7fc0;
  memcpy(output + 4 * HIDDEN, output + 3 * HIDDEN, HIDDEN * sizeof *output);
  EXPECT(check_reference(&check) == MOEFLOW_OK && !result.passed && !isfinite(result.rel_l2_max));
  EXPECT(says("rank 0 token 2", "value 9 is nan"), "%s", result.message);
}

static void test_same(void) {
  begin(0);
  for (int i = 0; i < TOKENS * HIDDEN; i++) output[i] = (uint16_t)(i * 7);
  memcpy(scratch, output, sizeof scratch);
  check_same(&check, &result.repeat_exact, "repeat", 3);
  EXPECT(result.repeat_exact == POINT_YES && !result.message[0], "%s", result.message);
  scratch[4 * HIDDEN + 63] ^= 1;
  check_same(&check, &result.repeat_exact, "repeat", 3);
  EXPECT(result.repeat_exact == POINT_NO && says("repeat 3: rank 0 token 4", "value 63"), "%s", result.message);
}

static void test_returned(void) {
  struct spec *spec = &setup.model.spec;
  begin(0);
  memcpy(scratch, hidden, sizeof scratch);
  check_returned(&check, ids);
  EXPECT(result.dispatch_exact == POINT_YES, "%s", result.message);
  scratch[2 * HIDDEN + 5] ^= 1;
  check_returned(&check, ids);
  EXPECT(result.dispatch_exact == POINT_NO && says("rank 0 token 2", "value 5"), "%s", result.message);
  begin(0);
  spec->scale_on = SPEC_SCALE_OUTPUT;
  for (int i = 0; i < TOKENS * HIDDEN; i++) scratch[i] = reference_to_bf16(reference_from_bf16(hidden[i]) * 2.5);
  check_returned(&check, ids);
  EXPECT(result.dispatch_exact == POINT_YES, "scale on the output: %s", result.message);
  spec->scale_on = SPEC_SCALE_WEIGHTS;
}

/* ---- Dispatch: rank 1's receive buffer written by hand ---- */

static uint8_t received[RANKS * ROWS * 4096];
static int32_t all_ids[RANKS * TOKENS * TOP_K];
static float all_weights[RANKS * TOKENS * TOP_K];

static uint8_t *row_at(int source, int token) {
  return received + ((size_t)source * ROWS + (size_t)token) * (size_t)spec_row_bytes(&setup.model.spec);
}

static void put_row(int source, int token) {
  uint8_t *row = row_at(source, token);
  const uint32_t header[4] = {41, (uint32_t)counts[source], TOKENS, 0};
  uint16_t values[HIDDEN];
  memcpy(row, header, sizeof header);
  for (int k = 0; k < TOP_K; k++) {
    const int at = (source * TOKENS + token) * TOP_K + k, expert = all_ids[at];
    const int32_t place = expert < 3 ? expert : 1 << 16 | (expert - 3); /* 7 experts: 3 on rank 0, 4 on rank 1 */
    memcpy(row + 16 + 4 * k, &place, 4);
    memcpy(row + 16 + 4 * TOP_K + 4 * k, &all_weights[at], 4);
  }
  inputs_hidden(&setup.inputs, 0, source, token, values);
  memcpy(row + 128, values, sizeof values);
}

static void receive_all(void) {
  memset(received, 0xee, sizeof received);
  for (int source = RANKS - 1; source >= 0; source--) {
    begin(source);
    memcpy(all_ids + source * TOKENS * TOP_K, ids, (size_t)counts[source] * TOP_K * sizeof *ids);
    memcpy(all_weights + source * TOKENS * TOP_K, weights, (size_t)counts[source] * TOP_K * sizeof *weights);
    for (int token = 0; token < counts[source]; token++) put_row(source, token);
  }
  begin(1);
  group.lanes[0].received = received;
}

/* A token of rank 0 with (mine) or without an expert of rank 1. */
static int token_with(int mine) {
  for (int t = 0; t < TOKENS; t++)
    if ((all_ids[t * TOP_K] >= 3 || all_ids[t * TOP_K + 1] >= 3) == mine) return t;
  return -1;
}

static void expect_found(const char *what, uint8_t *byte, const char *named) {
  begin(1);
  *byte ^= 1;
  EXPECT(check_dispatch(&check, all_ids, all_weights) == MOEFLOW_OK && result.dispatch_exact == POINT_NO, "%s", what);
  EXPECT(says("rank 1 received token", named), "%s: %s", what, result.message);
  *byte ^= 1;
}

static void test_dispatch(void) {
  receive_all();
  EXPECT(check_dispatch(&check, all_ids, all_weights) == MOEFLOW_OK && result.dispatch_exact == POINT_YES, "%s",
         result.message);
  expect_found("epoch", row_at(1, 1), "header");
  expect_found("rows sent", row_at(0, 4) + 4, "header");
  expect_found("tokens_max", row_at(0, 0) + 8, "header");
  expect_found("flags", row_at(0, 3) + 12, "header");
  expect_found("a place", row_at(1, 0) + 16, "place");
  expect_found("an owner", row_at(0, 2) + 16 + 4 + 2, "place");
  expect_found("a weight", row_at(0, 1) + 16 + 4 * TOP_K, "weight");
  const int mine = token_with(1), theirs = token_with(0);
  EXPECT(mine >= 0, "no token for rank 1");
  expect_found("a hidden value", row_at(0, mine) + 128 + 2 * 17, "hidden[17]");
  if (theirs >= 0) { /* its hidden state is not sent here */
    begin(1);
    row_at(0, theirs)[128] ^= 1;
    EXPECT(check_dispatch(&check, all_ids, all_weights) == MOEFLOW_OK && result.dispatch_exact == POINT_YES, "%s",
           result.message);
    row_at(0, theirs)[128] ^= 1;
  }
  counts[1] = 0; /* a source without tokens still sends a header */
  all_ids[0] = ids[0];
  receive_all();
  put_row(1, 0);
  begin(1);
  EXPECT(check_dispatch(&check, all_ids, all_weights) == MOEFLOW_OK && result.dispatch_exact == POINT_YES, "%s",
         result.message);
  expect_found("epoch of a rank without tokens", row_at(1, 0), "header");
  counts[1] = 2;
}

static void test_merge(void) {
  struct point_result results[RANKS * 2]; /* [rank][point] */
  memset(results, 0, sizeof results);
  for (int i = 0; i < RANKS * 2; i++)
    results[i] = (struct point_result){.rel_l2_max = i,
                                       .rows_checked = 10 + i,
                                       .dispatch_exact = POINT_YES,
                                       .replay_exact = POINT_NOT_CHECKED,
                                       .repeat_exact = POINT_YES,
                                       .passed = 1};
  results[3].repeat_exact = POINT_NO;
  results[3].passed = 0;
  results[3].max_error_ratio = NAN;
  snprintf(results[3].message, sizeof results[3].message, "rank 1");
  const struct point_result first = report_merge(results, RANKS, 2, 0), second = report_merge(results, RANKS, 2, 1);
  EXPECT(first.rel_l2_max == 2 && first.rows_checked == 22 && first.passed && first.repeat_exact == POINT_YES);
  EXPECT(first.replay_exact == POINT_NOT_CHECKED && !first.message[0]);
  EXPECT(second.rel_l2_max == 3 && !second.passed && second.repeat_exact == POINT_NO && second.dispatch_exact == POINT_YES);
  EXPECT(isnan(second.max_error_ratio) && !strcmp(second.message, "rank 1"));
}

int main(void) {
  set_up();
  test_router();
  test_rows();
  test_reference();
  test_same();
  test_returned();
  test_dispatch();
  test_merge();
  inputs_destroy(&setup.inputs);
  TEST_END;
}
