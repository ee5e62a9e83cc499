/* Ranks that do not play along, on one GPU: what each is told, and that nothing hangs or passes off stale values. */
#include "deadline.h"
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

/* An abort in the middle of a loop of steps. Two inputs take turns, so that a result of the step before shows. */
struct loop {
  struct step inputs[2];
  uint16_t *want[2][RANKS];
  atomic_int steps;        /* that rank 0 has ended */
  int delay_us;            /* of the abort, after rank 0's 20th step */
  int errors[RANKS];       /* number of the first step with an error, -1: none */
  atomic_llong aborted_ms; /* when moeflow_abort was called, 0: not yet */
  atomic_int aborted;      /* it has returned */
  int64_t heard_ms[RANKS]; /* when a rank's first step with an error had ended */
  char message[RANKS][512];
};
#define LOOP_STEPS 5000
#define LOOP_TIMEOUT_MS 15000

static void *abort_in_loop(void *argument) {
  struct loop *loop = argument;
  const int64_t deadline = deadline_in(LOOP_TIMEOUT_MS);
  while (atomic_load(&loop->steps) < 20 && !deadline_passed(deadline)) usleep(50);
  usleep((useconds_t)loop->delay_us);
  atomic_store(&loop->aborted_ms, deadline_now_ms());
  EXPECT(moeflow_abort(gpu.world.rank[0].group) == MOEFLOW_OK, "%s", moeflow_last_error());
  atomic_store(&loop->aborted, 1);
  return NULL;
}

enum rows { ROWS_RIGHT, ROWS_RIGHT_OR_NAN, ROWS_NAN };

/* Of each token as a whole. */
static void expect_rows(const struct loop *loop, const uint16_t *out, int rank, int number, enum rows allowed) {
  const int hidden = gpu.world.spec.hidden, tokens = loop->inputs[0].tokens[rank];
  for (int t = 0; t < tokens; t++) {
    const uint16_t *row = out + (size_t)t * hidden, *want = loop->want[number % 2][rank] + (size_t)t * hidden;
    int nan = 0;
    while (nan < hidden && row[nan] == 0x7fc0) nan++;
    const int right = !memcmp(row, want, (size_t)hidden * 2);
    EXPECT((right && allowed != ROWS_NAN) || (nan == hidden && allowed != ROWS_RIGHT),
           "rank %d, step %d, token %d: %s; %d NaN, 0x%04x and should be %s0x%04x; the row of the step before %s", rank,
           number, t, right ? "right" : "wrong", nan, row[nan % hidden], allowed ? "NaN or " : "", want[nan % hidden],
           memcmp(row, loop->want[1 - number % 2][rank] + (size_t)t * hidden, (size_t)hidden * 2) ? "differs" : "it is");
  }
}

static moeflow_status loop_step(struct loop *loop, struct step *step, int rank, int number) {
  const struct world_rank *mine = &gpu.world.rank[rank];
  gpu_put(&gpu, step, rank);
  moeflow_forward_args args = gpu_args(&gpu, step, rank);
  moeflow_status status = moeflow_forward(mine->layer, &args);
  if (status == MOEFLOW_OK) status = moeflow_poll(mine->group, LOOP_TIMEOUT_MS);
  if (status != MOEFLOW_OK && loop->errors[rank] < 0) {
    loop->errors[rank] = number;
    snprintf(loop->message[rank], sizeof loop->message[rank], "%s: %s", moeflow_status_name(status), moeflow_last_error());
  }
  gpu_get(&gpu, step, rank);
  if (loop->errors[rank] == number) loop->heard_ms[rank] = deadline_now_ms();
  return status;
}

/* Steps until an error, then one more, after the abort: it tells the peers, whatever the step with the error still could. */
static void loop_one(struct world *world, int rank, void *argument) {
  struct loop *loop = argument;
  int more = 2;
  CU(cuCtxPushCurrent(gpu.context));
  loop->errors[rank] = -1;
  for (int i = 0; i < LOOP_STEPS && more > 0; i++) {
    struct step step = loop->inputs[i % 2];
    const int late = loop->errors[rank] >= 0;
    step.out[rank] = step_memory((size_t)step.tokens[rank], 2 * (size_t)world->spec.hidden);
    while (late && !atomic_load(&loop->aborted)) usleep(50);
    const moeflow_status status = loop_step(loop, &step, rank, i);
    EXPECT(status == MOEFLOW_OK || status == MOEFLOW_ERROR_PEER, "rank %d, step %d: %s", rank, i, loop->message[rank]);
    /* rank 0's abort may come between its poll and the last block of its last kernel */
    const int touched = loop->errors[rank] >= 0 || (rank == 0 && atomic_load(&loop->aborted_ms));
    expect_rows(loop, step.out[rank], rank, i, late ? ROWS_NAN : touched ? ROWS_RIGHT_OR_NAN : ROWS_RIGHT);
    free(step.out[rank]);
    if (rank == 0) atomic_fetch_add(&loop->steps, 1);
    if (loop->errors[rank] >= 0) more--;
  }
}

/* Timeout and patience are 15 s: what ends within 2 s was not ended by them. */
static void abort_loop(struct loop *loop, int delay_us) {
  pthread_t thread;
  loop->delay_us = delay_us;
  atomic_store(&loop->steps, 0);
  atomic_store(&loop->aborted_ms, 0);
  atomic_store(&loop->aborted, 0);
  gpu_open(&gpu);
  EXPECT(pthread_create(&thread, NULL, abort_in_loop, loop) == 0);
  world_each(&gpu.world, loop_one, loop);
  pthread_join(thread, NULL);
  EXPECT(gpu_driver.cuCtxSynchronize() == CUDA_SUCCESS, "abort after %d us: the device has met an error", delay_us);
  for (int r = 0; r < RANKS; r++) {
    const long long late = loop->heard_ms[r] - atomic_load(&loop->aborted_ms);
    EXPECT(loop->errors[r] >= 0, "abort after %d us: rank %d never hears of it", delay_us, r);
    EXPECT(loop->errors[r] < 0 || late < 2000, "abort after %d us: rank %d hears of it %lld ms later: %s", delay_us, r, late,
           loop->message[r]);
  }
  EXPECT(loop->errors[1] <= loop->errors[0] + 1, "abort after %d us: rank 0 ends at step %d, and rank 1 at %d", delay_us,
         loop->errors[0], loop->errors[1]);
  gpu_close(&gpu);
}

static void test_abort_in_loop(void) {
  static struct loop loop;
  const int delays_us[] = {0, 13, 37, 71, 110, 157, 230, 1000};
  gpu.world.timeout_ms = LOOP_TIMEOUT_MS;
  gpu_open(&gpu);
  for (int i = 0; i < 2; i++) {
    fill(&loop.inputs[i], 240 + i);
    gpu_run(&gpu, &loop.inputs[i]);
    step_expect(&gpu.world, &loop.inputs[i], "before the loop");
    for (int r = 0; r < RANKS; r++) loop.want[i][r] = loop.inputs[i].out[r];
  }
  gpu_close(&gpu);
  for (size_t i = 0; i < sizeof delays_us / sizeof *delays_us; i++) abort_loop(&loop, delays_us[i]);
  for (int i = 0; i < 2; i++) step_free(&gpu.world, &loop.inputs[i]);
  gpu.world.timeout_ms = 1500;
}

/* An abort while nothing but the experts runs: a queue of launches on each rank, which share the GPU's multiprocessors, so
 * that some blocks of a launch look for poison before it is there and some after. Those that began must not wait for the
 * others. */
#define QUEUE_LAUNCHES 300
#define QUEUE_ROUNDS 16
#define QUEUE_MS 5000 /* all of a queue takes some milliseconds */

struct queue {
  struct step step;
  int delay_us;
  atomic_int launched; /* by both ranks */
  int busy;            /* queues that had not ended when they were aborted */
};

static void *abort_queue(void *argument) {
  struct queue *queue = argument;
  const int64_t deadline = deadline_in(QUEUE_MS);
  CU(cuCtxPushCurrent(gpu.context));
  while (atomic_load(&queue->launched) < 20 * RANKS && !deadline_passed(deadline)) continue;
  usleep((useconds_t)queue->delay_us);
  for (int r = 0; r < RANKS; r++) queue->busy += driver.cuStreamQuery(gpu.rank[r].stream) == CUDA_ERROR_NOT_READY;
  for (int r = 0; r < RANKS; r++) {
    EXPECT(moeflow_abort(gpu.world.rank[r].group) == MOEFLOW_OK, "%s", moeflow_last_error());
  }
  return NULL;
}

/* The rows are those of the step before; the sums of all ranks' 8 go to `out`, which has room for 16. */
static void queue_one(struct world *world, int rank, void *argument) {
  struct queue *queue = argument;
  moeflow_forward_args args = gpu_args(&gpu, &queue->step, rank);
  CUresult result;
  CU(cuCtxPushCurrent(gpu.context));
  args.flags = MOEFLOW_FORWARD_EXPERTS;
  for (int i = 0; i < QUEUE_LAUNCHES; i++) {
    const moeflow_status status = moeflow_forward(world->rank[rank].layer, &args);
    EXPECT(status == MOEFLOW_OK || status == MOEFLOW_ERROR_PEER, "rank %d, launch %d: %s", rank, i, moeflow_last_error());
    atomic_fetch_add(&queue->launched, 1);
  }
  const int64_t deadline = deadline_in(QUEUE_MS);
  while ((result = driver.cuStreamQuery(gpu.rank[rank].stream)) == CUDA_ERROR_NOT_READY && !deadline_passed(deadline)) {
    usleep(100);
  }
  if (result == CUDA_SUCCESS) return;
  fprintf(stderr, "abort after %d us: rank %d: its queue of launches %s\n", queue->delay_us, rank,
          result == CUDA_ERROR_NOT_READY ? "does not end: blocks wait for others that have left" : "has met an error");
  _Exit(EXIT_FAILURE); /* nothing that waits for the device would return */
}

static void abort_round(struct queue *queue, int delay_us) {
  pthread_t thread;
  queue->delay_us = delay_us;
  atomic_store(&queue->launched, 0);
  gpu_open(&gpu);
  gpu_run(&gpu, &queue->step);
  step_expect_ok(&gpu.world, &queue->step, "before the launches");
  const struct plan *plan = &gpu.world.rank[0].context->plan;
  EXPECT(!plan_variant(plan, KERNEL_EXPERTS, 0) || plan_bucket_for(plan, RANKS * 8)->experts != PLAN_NONE,
         "another kernel serves %d rows", RANKS * 8);
  EXPECT(pthread_create(&thread, NULL, abort_queue, queue) == 0);
  world_each(&gpu.world, queue_one, queue);
  pthread_join(thread, NULL);
  for (int r = 0; r < RANKS; r++) {
    EXPECT(moeflow_poll(gpu.world.rank[r].group, QUEUE_MS) == MOEFLOW_ERROR_PEER, "abort after %d us: rank %d: %s", delay_us,
           r, moeflow_last_error());
  }
  gpu_close(&gpu);
}

static void test_abort_in_experts(void) {
  static struct queue queue;
  gpu.world.timeout_ms = LOOP_TIMEOUT_MS;
  fill(&queue.step, 250);
  for (int i = 0; i < QUEUE_ROUNDS; i++) abort_round(&queue, i * 61);
  EXPECT(queue.busy > QUEUE_ROUNDS, "of %d queues only %d had launches left when they were aborted", RANKS * QUEUE_ROUNDS,
         queue.busy);
  step_free(&gpu.world, &queue.step);
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
  test_abort_in_loop();
  test_abort_in_experts();
  test_large_allocation();
  TEST_END;
}
