/* Captured steps: replays equal eager steps bit for bit, inputs may change between replays, and nothing is left behind. */
#include "gpu_world.h"

#define REPLAYS 100
#define RANKS 4
#define TOKENS 24

static struct gpu gpu = {.world = {.ranks = RANKS, .capacity = 32}};

struct capture {
  struct step *step;
  CUgraphExec exec[RANKS];
  int replays;
};

static void capture_one(struct world *world, int rank, void *argument) {
  struct capture *capture = argument;
  (void)world;
  CU(cuCtxPushCurrent(gpu.context));
  capture->exec[rank] = gpu_capture(&gpu, capture->step, rank);
}

static void replay_one(struct world *world, int rank, void *argument) {
  struct capture *capture = argument;
  CU(cuCtxPushCurrent(gpu.context));
  gpu_put(&gpu, capture->step, rank);
  for (int i = 0; i < capture->replays; i++) CUX(cuGraphLaunch(capture->exec[rank], gpu.rank[rank].stream));
  gpu_get(&gpu, capture->step, rank);
  capture->step->forward[rank] = MOEFLOW_OK;
  capture->step->poll[rank] = moeflow_poll(world->rank[rank].group, 30000);
  if (capture->step->poll[rank]) snprintf(capture->step->poll_message[rank], 512, "%s", moeflow_last_error());
}

static void destroy_graphs(struct capture *capture) {
  for (int r = 0; r < gpu.world.ranks; r++) CUX(cuGraphExecDestroy(capture->exec[r]));
}

static void fill(struct step *step, int seed) {
  for (int r = 0; r < RANKS; r++) step->tokens[r] = TOKENS - 5 * r;
  step->tokens_max = TOKENS;
  step_fill(&gpu.world, step, seed);
}

/* Eager results of several inputs, then one graph replayed over all of them, one replay and many. */
static void test_replays(void) {
  struct step steps[3] = {{.tokens_max = 0}};
  static uint16_t eager[3][RANKS][TOKENS * 512];
  for (int i = 0; i < 3; i++) {
    fill(&steps[i], 100 + i);
    gpu_run(&gpu, &steps[i]);
    step_expect(&gpu.world, &steps[i], "eager");
    for (int r = 0; r < RANKS; r++) memcpy(eager[i][r], steps[i].out[r], (size_t)steps[i].tokens[r] * 1024);
  }
  struct capture capture = {.step = &steps[0], .replays = 1};
  world_each(&gpu.world, capture_one, &capture);
  const unsigned before = gpu.world.rank[0].group->lanes[0].record->finished;
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < 3; i++) {
      capture.step = &steps[i];
      capture.replays = round < 3 ? 1 : REPLAYS;
      world_each(&gpu.world, replay_one, &capture);
      step_expect_ok(&gpu.world, &steps[i], "replay");
      for (int r = 0; r < RANKS; r++) {
        EXPECT(!memcmp(eager[i][r], steps[i].out[r], (size_t)steps[i].tokens[r] * 1024), "round %d, input %d, rank %d",
               round, i, r);
      }
    }
  }
  const unsigned steps_run = gpu.world.rank[0].group->lanes[0].record->finished - before;
  EXPECT(steps_run == 9 + 3 * REPLAYS, "%u steps", steps_run);
  gpu_run(&gpu, &steps[1]); /* eager again, after replays */
  for (int r = 0; r < RANKS; r++) EXPECT(!memcmp(eager[1][r], steps[1].out[r], (size_t)steps[1].tokens[r] * 1024));
  destroy_graphs(&capture);
  for (int i = 0; i < 3; i++) step_free(&gpu.world, &steps[i]);
}

static void test_flat_memory(void) {
  struct step step = {.tokens_max = 0};
  size_t first = 0, available = 0, total;
  fill(&step, 110);
  for (int i = 0; i < 20; i++) {
    struct capture capture = {.step = &step, .replays = 3};
    world_each(&gpu.world, capture_one, &capture);
    world_each(&gpu.world, replay_one, &capture);
    step_expect_ok(&gpu.world, &step, "replay");
    destroy_graphs(&capture);
    CU(cuMemGetInfo(&available, &total));
    if (i == 4) first = available;
  }
  EXPECT(available + (1 << 20) >= first, "%zu bytes free after 5 captures, %zu after 20", first, available);
  step_free(&gpu.world, &step);
}

/* The very first step of a fresh group happens inside a capture. */
static void test_first_call_captured(void) {
  struct step step = {.tokens_max = 0};
  gpu_close(&gpu);
  gpu_open(&gpu);
  fill(&step, 120);
  struct capture capture = {.step = &step, .replays = 1};
  world_each(&gpu.world, capture_one, &capture);
  world_each(&gpu.world, replay_one, &capture);
  step_expect(&gpu.world, &step, "first call captured");
  destroy_graphs(&capture);
  step_free(&gpu.world, &step);
}

/* Refused and joined calls inside a capture leave the capture usable. */
static void test_errors_while_capturing(void) {
  CUgraph graph;
  struct step step = {.tokens_max = 0};
  fill(&step, 130);
  CUX(cuStreamBeginCapture(gpu.rank[0].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  moeflow_forward_args args = gpu_args(&gpu, &step, 0);
  args.tokens_max = 33;
  EXPECT(moeflow_forward(gpu.world.rank[0].layer, &args) == MOEFLOW_ERROR_CAPACITY, "%s", moeflow_last_error());
  args = gpu_args(&gpu, &step, 0);
  args.out = (char *)args.out + 8;
  EXPECT(moeflow_forward(gpu.world.rank[0].layer, &args) == MOEFLOW_ERROR_ARGUMENT, "%s", moeflow_last_error());
  CUX(cuStreamEndCapture(gpu.rank[0].stream, &graph));
  EXPECT(graph != NULL);
  CUX(cuGraphDestroy(graph));
  step_free(&gpu.world, &step);
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  gpu_open(&gpu);
  test_replays();
  test_flat_memory();
  test_first_call_captured();
  test_errors_while_capturing();
  gpu_close(&gpu);
  TEST_END;
}
