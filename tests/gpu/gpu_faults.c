/* Ranks that do not play along, on one GPU: what each is told, and that nothing hangs or passes off stale values. */
#include "gpu_world.h"

#define RANKS 2

static struct gpu gpu = {.world = {.ranks = RANKS, .capacity = 16, .timeout_ms = 1500}};

static void fill(struct step *step, int seed) {
  for (int r = 0; r < RANKS; r++) step->tokens[r] = 8;
  step->tokens_max = 8;
  step_fill(&gpu.world, step, seed);
}

static int all_nan(const struct step *step, int rank) {
  for (int i = 0; i < step->tokens[rank] * 512; i++) {
    if (step->out[rank][i] != 0x7fc0) return 0;
  }
  return 1;
}

/* As gpu_run, with each rank's arguments changed by `change` first; NULL args: the rank does not come. */
struct odd {
  struct step *step;
  int (*change)(int rank, moeflow_forward_args *args);
};

static void odd_one(struct world *world, int rank, void *argument) {
  struct odd *odd = argument;
  struct step *step = odd->step;
  CU(cuCtxPushCurrent(gpu.context));
  gpu_put(&gpu, step, rank);
  moeflow_forward_args args = gpu_args(&gpu, step, rank);
  step->forward[rank] = step->poll[rank] = MOEFLOW_OK;
  if (odd->change(rank, &args)) return;
  step->forward[rank] = moeflow_forward(world->rank[rank].layer, &args);
  if (step->forward[rank]) snprintf(step->forward_message[rank], 512, "%s", moeflow_last_error());
  step->poll[rank] = moeflow_poll(world->rank[rank].group, 20000);
  if (step->poll[rank]) snprintf(step->poll_message[rank], 512, "%s", moeflow_last_error());
  gpu_get(&gpu, step, rank);
}

static void run_odd(struct step *step, int (*change)(int, moeflow_forward_args *)) {
  struct odd odd = {step, change};
  world_each(&gpu.world, odd_one, &odd);
}

static int fewer_tokens_max(int rank, moeflow_forward_args *args) {
  if (rank == 1) args->tokens_max = 9;
  return 0;
}

static void test_tokens_max_differs(void) {
  struct step step = {.tokens_max = 0};
  gpu_open(&gpu);
  fill(&step, 200);
  run_odd(&step, fewer_tokens_max);
  for (int r = 0; r < RANKS; r++) {
    EXPECT(step.poll[r] == MOEFLOW_ERROR_PEER, "rank %d: %d %s", r, step.poll[r], step.poll_message[r]);
    EXPECT(all_nan(&step, r), "rank %d: output of a poisoned step", r);
  }
  EXPECT(strstr(step.poll_message[0], "8 here, 9 there") || strstr(step.poll_message[1], "9 here, 8 there"), "%s / %s",
         step.poll_message[0], step.poll_message[1]);
  gpu_run(&gpu, &step); /* it stays so */
  for (int r = 0; r < RANKS; r++) EXPECT(step.poll[r] == MOEFLOW_ERROR_PEER && all_nan(&step, r), "rank %d: still", r);
  gpu_close(&gpu);
  gpu_open(&gpu); /* a new group is well */
  gpu_run(&gpu, &step);
  step_expect(&gpu.world, &step, "after a new start");
  step_free(&gpu.world, &step);
  gpu_close(&gpu);
}

static int bad_pointer(int rank, moeflow_forward_args *args) {
  if (rank == 1) args->hidden = (const char *)args->hidden + 2;
  return 0;
}

static void test_failed_join(void) {
  struct step step = {.tokens_max = 0};
  gpu_open(&gpu);
  fill(&step, 210);
  run_odd(&step, bad_pointer);
  EXPECT(step.forward[1] == MOEFLOW_ERROR_ARGUMENT && step.forward[0] == MOEFLOW_OK, "%s", step.forward_message[0]);
  EXPECT(step.poll[0] == MOEFLOW_ERROR_PEER && strstr(step.poll_message[0], "rank 1 joined step"), "%s",
         step.poll_message[0]);
  gpu_run(&gpu, &step);
  step_expect(&gpu.world, &step, "the step after");
  step_free(&gpu.world, &step);
  gpu_close(&gpu);
}

static int one_stays_away(int rank, moeflow_forward_args *args) {
  (void)args;
  return rank == 1;
}

static void test_silent_rank(void) {
  struct step step = {.tokens_max = 0};
  gpu_open(&gpu);
  fill(&step, 220);
  run_odd(&step, one_stays_away);
  EXPECT(step.poll[0] == MOEFLOW_ERROR_TIMEOUT, "%d %s", step.poll[0], step.poll_message[0]);
  EXPECT(strstr(step.poll_message[0], "rank 1, dispatch phase, step 1"), "%s", step.poll_message[0]);
  EXPECT(all_nan(&step, 0));
  step_free(&gpu.world, &step);
  gpu_close(&gpu);
}

static void *abort_soon(void *group) {
  usleep(300000);
  EXPECT(moeflow_abort(group) == MOEFLOW_OK, "%s", moeflow_last_error());
  return NULL;
}

static void test_abort(void) {
  struct step step = {.tokens_max = 0};
  pthread_t thread;
  gpu.world.timeout_ms = 60000;
  gpu_open(&gpu);
  fill(&step, 230);
  pthread_create(&thread, NULL, abort_soon, gpu.world.rank[0].group);
  run_odd(&step, one_stays_away); /* rank 0 waits until the abort */
  pthread_join(thread, NULL);
  EXPECT(step.poll[0] == MOEFLOW_ERROR_PEER && strstr(step.poll_message[0], "abort"), "%s", step.poll_message[0]);
  EXPECT(all_nan(&step, 0));
  step_free(&gpu.world, &step);
  gpu_close(&gpu);
  gpu.world.timeout_ms = 1500;
}

static void test_large_allocation(void) {
  moeflow_open_config open = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_context *context;
  moeflow_group *group;
  size_t before, after, total;
  open.model = gpu.world.spec.name;
  open.cache = gpu_cache;
  EXPECT(moeflow_open(&open, &context) == MOEFLOW_OK, "%s", moeflow_last_error());
  CU(cuMemGetInfo(&before, &total));
  config.capacity = 1 << 28; /* 2^30 entries of 2 KB and more */
  EXPECT(moeflow_group_create(&context, 1, &config, &group) == MOEFLOW_ERROR_MEMORY, "%s", moeflow_last_error());
  EXPECT(strstr(moeflow_last_error(), "bytes free"), "%s", moeflow_last_error());
  CU(cuMemGetInfo(&after, &total));
  EXPECT(after + (4 << 20) >= before, "%zu bytes were free, now %zu", before, after);
  config.capacity = 16;
  EXPECT(moeflow_group_create(&context, 1, &config, &group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_group_destroy(group) == MOEFLOW_OK && moeflow_close(context) == MOEFLOW_OK);
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  test_tokens_max_differs();
  test_failed_join();
  test_silent_rank();
  test_abort();
  test_large_allocation();
  TEST_END;
}
