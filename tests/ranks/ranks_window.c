/* Two processes over the window transport, each with a GPU of its own, or on one that runs them in turns: then every wait
 * for the other takes slices of time, so the steps are few. */
#include "pair.h"

#define TOKENS 16
#define HIDDEN 512
#define CASE_SECONDS 90
#define TIMEOUT_MS 3000 /* of the cases in which somebody is gone, once the group is made */
#define GRACE_MS 5000   /* beyond the timeout, all that it may cost */
#define REPLAYS 3
#define KILLED (128 + SIGKILL)

static moeflow_group *my_group(void) {
  return gpu.world.rank[my_rank].group;
}

/* Three launches and nine give the same bits, close to the reference. */
static void expect_both_ways(struct step *step, const char *what) {
  static uint16_t fused[TOKENS * HIDDEN];
  const size_t bytes = (size_t)step->tokens[my_rank] * HIDDEN * 2;
  run(step);
  expect_mine(step, what);
  memcpy(fused, step->out[my_rank], bytes);
  step->flags = MOEFLOW_FORWARD_STEPWISE;
  run(step);
  expect_mine(step, "the same stepwise");
  EXPECT(!memcmp(fused, step->out[my_rank], bytes), "rank %d: %s: fused and stepwise differ", my_rank, what);
  step->flags = 0;
}

static void case_layer(void) {
  static const int counts[][2] = {{1, 1}, {TOKENS, TOKENS - 3}, {0, 5}, {7, 0}, {0, 0}};
  open_rank();
  for (int i = 0; i < 5; i++) {
    struct step step = {.tokens_max = i ? TOKENS : 1};
    fill(&step, counts[i][0], counts[i][1], 600 + i);
    expect_both_ways(&step, "a step");
    step_free(&gpu.world, &step);
  }
  close_rank();
}

static void case_two_lanes(void) {
  gpu.world.lanes = 2;
  open_rank();
  for (int i = 0; i < 4; i++) {
    struct step step = {.tokens_max = TOKENS, .lane = i % 2};
    fill(&step, TOKENS - i, 3 * i, 610 + i);
    run(&step);
    expect_mine(&step, "two lanes");
    step_free(&gpu.world, &step);
  }
  close_rank();
}

static void case_graph(void) {
  static uint16_t eager[TOKENS * HIDDEN];
  struct step step = {.tokens_max = TOKENS};
  open_rank();
  fill(&step, TOKENS, TOKENS - 7, 620);
  run(&step);
  expect_mine(&step, "eager");
  const size_t bytes = (size_t)step.tokens[my_rank] * HIDDEN * 2;
  memcpy(eager, step.out[my_rank], bytes);
  CUgraphExec exec = gpu_capture(&gpu, &step, my_rank);
  for (int i = 0; i < REPLAYS; i++) {
    gpu_put(&gpu, &step, my_rank);
    CUX(cuGraphLaunch(exec, gpu.rank[my_rank].stream));
    gpu_get(&gpu, &step, my_rank);
    EXPECT(!memcmp(eager, step.out[my_rank], bytes), "rank %d: replay %d", my_rank, i);
  }
  CUX(cuGraphExecDestroy(exec));
  step_free(&gpu.world, &step);
  close_rank();
}

/* ---- Somebody is gone ---- */

static void forward(struct step *step) {
  gpu_put(&gpu, step, my_rank);
  moeflow_forward_args args = gpu_args(&gpu, step, my_rank);
  const moeflow_status status = moeflow_forward(gpu.world.rank[my_rank].layer, &args);
  EXPECT(status == MOEFLOW_OK, "rank %d: %s", my_rank, moeflow_last_error());
}

/* The stream runs dry, the output is NaN, and this rank can leave. */
static void expect_end(struct step *step, const char *what) {
  const int64_t begin = deadline_now_ms();
  int other = 0;
  gpu_get(&gpu, step, my_rank);
  for (int i = 0; i < step->tokens[my_rank] * HIDDEN; i++) other += step->out[my_rank][i] != 0x7fc0;
  EXPECT(other == 0, "%s: %d values are not NaN", what, other);
  close_rank();
  EXPECT(deadline_now_ms() - begin < TIMEOUT_MS + GRACE_MS, "%s: %lld ms to leave", what,
         (long long)(deadline_now_ms() - begin));
}

/* Rank 1 is killed before a step; rank 0 is told who is silent. */
static void case_rank_dies(void) {
  struct step step = {.tokens_max = TOKENS};
  open_rank();
  fill(&step, 8, 8, 630);
  run(&step);
  expect_mine(&step, "before");
  both_here();
  if (my_rank == 1) raise(SIGKILL);
  sleep(1);
  my_group()->timeout_ms = TIMEOUT_MS;
  const int64_t begin = deadline_now_ms();
  forward(&step);
  const moeflow_status status = moeflow_poll(my_group(), TIMEOUT_MS + GRACE_MS);
  EXPECT(status == MOEFLOW_ERROR_TIMEOUT && strstr(moeflow_last_error(), "rank 1"), "%s: %s", moeflow_status_name(status),
         moeflow_last_error());
  EXPECT(deadline_now_ms() - begin < TIMEOUT_MS + GRACE_MS, "late");
  expect_end(&step, "a dead rank");
  step_free(&gpu.world, &step);
}

/* Rank 1 gives the group up while rank 0 waits for it: rank 0 hears of it long before its timeout. */
static void case_abort(void) {
  struct step step = {.tokens_max = TOKENS};
  open_rank();
  fill(&step, 8, 8, 640);
  run(&step);
  if (my_rank == 0) forward(&step);
  both_here();
  const int64_t begin = deadline_now_ms();
  if (my_rank == 1) EXPECT(moeflow_abort(my_group()) == MOEFLOW_OK, "%s", moeflow_last_error());
  const moeflow_status status = moeflow_poll(my_group(), GRACE_MS);
  EXPECT(status == MOEFLOW_ERROR_PEER, "rank %d: %s: %s", my_rank, moeflow_status_name(status), moeflow_last_error());
  EXPECT(deadline_now_ms() - begin < GRACE_MS, "late");
  if (my_rank == 0) expect_end(&step, "an aborted peer");
  if (my_rank == 1) close_rank();
  step_free(&gpu.world, &step);
}

/* Rank 1 never joins. */
static void case_rank_missing(void) {
  gpu.world.timeout_ms = TIMEOUT_MS;
  start();
  if (my_rank == 1) return;
  const int64_t begin = deadline_now_ms();
  gpu_open_one(&gpu.world, my_rank, &gpu);
  const struct world_rank *mine = &gpu.world.rank[my_rank];
  EXPECT(mine->status == MOEFLOW_ERROR_TIMEOUT && strstr(mine->message, "rank 1 of 2 did not join"), "%d: %s", mine->status,
         mine->message);
  EXPECT(deadline_now_ms() - begin < 2 * TIMEOUT_MS + GRACE_MS, "late");
  EXPECT(moeflow_close(mine->context) == MOEFLOW_OK, "%s", moeflow_last_error());
}

int main(void) {
  gpu.world.spec = world_spec(HIDDEN, 256, 16, 4);
  pair_transport = MOEFLOW_TRANSPORT_WINDOW;
  pair_may_share = 1;
  pair_begin();
  run_pair("layer", case_layer, CASE_SECONDS, 0);
  run_pair("two lanes", case_two_lanes, CASE_SECONDS, 0);
  run_pair("graph", case_graph, CASE_SECONDS, 0);
  run_pair("rank dies", case_rank_dies, CASE_SECONDS, KILLED);
  run_pair("abort", case_abort, CASE_SECONDS, 0);
  run_pair("rank missing", case_rank_missing, CASE_SECONDS, 0);
  pair_end();
  TEST_END;
}
