/* Ranks that do not play along, over NCCL: what each is told, and that every wait, abort and destroy ends in time. */
#include <pthread.h>

#include "pair.h"

#define TOKENS 40
#define CASE_SECONDS 20
#define TIMEOUT_MS 3000 /* the group's, once it is made: on a cold machine that may take longer */
#define CREATE_MS 12000
#define GRACE_MS 5000 /* beyond the timeout, all that a fault may cost */
#define MEMORY_TOLERANCE ((size_t)64 << 20)

/* ---- This rank ---- */

static moeflow_group *my_group(void) {
  return gpu.world.rank[my_rank].group;
}

static void open_for_faults(void) {
  gpu.world.timeout_ms = CREATE_MS;
  open_rank();
  my_group()->timeout_ms = TIMEOUT_MS;
  both_here();
}

/* The stream runs dry; without that nothing else can be said of this rank. */
static void expect_stream_ends(const char *what) {
  const int64_t deadline = deadline_in(GRACE_MS);
  unsigned naps = 0;
  CUresult result;
  while ((result = driver.cuStreamQuery(gpu.rank[my_rank].stream)) == CUDA_ERROR_NOT_READY && !deadline_passed(deadline)) {
    deadline_nap(&naps);
  }
  EXPECT(result == CUDA_SUCCESS, "rank %d: %s: %s", my_rank, what,
         result == CUDA_ERROR_NOT_READY ? "the stream is still busy" : (driver_status(result, what), moeflow_last_error()));
  if (result == CUDA_SUCCESS) return;
  fflush(NULL);
  _exit(1);
}

/* As gpu_step_one, with bounded waits; the statuses and messages are in `step`. */
static void step_bounded(struct step *step, int misaligned) {
  const struct world_rank *mine = &gpu.world.rank[my_rank];
  gpu_put(&gpu, step, my_rank);
  moeflow_forward_args args = gpu_args(&gpu, step, my_rank);
  args.hidden = (const char *)args.hidden + misaligned;
  step->forward[my_rank] = moeflow_forward(mine->layer, &args);
  if (step->forward[my_rank]) snprintf(step->forward_message[my_rank], 512, "%s", moeflow_last_error());
  step->poll[my_rank] = moeflow_poll(mine->group, TIMEOUT_MS);
  if (step->poll[my_rank]) snprintf(step->poll_message[my_rank], 512, "%s", moeflow_last_error());
}

static void step_end(struct step *step, const char *what) {
  expect_stream_ends(what);
  gpu_get(&gpu, step, my_rank);
}

static void expect_nan(const struct step *step, const char *what) {
  const int count = step->tokens[my_rank] * gpu.world.spec.hidden;
  int other = 0;
  while (other < count && step->out[my_rank][other] == 0x7fc0) other++;
  EXPECT(other == count, "rank %d: %s: element %d of %d is 0x%04x, and all should be NaN", my_rank, what, other, count,
         other < count ? step->out[my_rank][other] : 0);
}

/* What may be said when the other rank is lost: it is silent, it gave up, or NCCL saw its connection go. */
static void expect_lost(moeflow_status status, const char *message) {
  EXPECT(status == MOEFLOW_ERROR_TIMEOUT || status == MOEFLOW_ERROR_PEER || status == MOEFLOW_ERROR_NCCL, "rank %d: %s: %s",
         my_rank, moeflow_status_name(status), status ? message : "poll reports nothing");
}

static void expect_within(int64_t begin, int64_t limit_ms, const char *what) {
  const int64_t took = deadline_now_ms() - begin;
  EXPECT(took <= limit_ms, "rank %d: %s took %lld ms, more than %lld", my_rank, what, (long long)took, (long long)limit_ms);
}

static void abort_group(void) {
  const int64_t begin = deadline_now_ms();
  EXPECT(moeflow_abort(my_group()) == MOEFLOW_OK, "rank %d: %s", my_rank, moeflow_last_error());
  expect_within(begin, GRACE_MS, "moeflow_abort");
  EXPECT(moeflow_poll(my_group(), 0) == MOEFLOW_ERROR_PEER, "rank %d: %s", my_rank, moeflow_last_error());
}

static void close_in_time(void) {
  const int64_t begin = deadline_now_ms();
  close_rank();
  expect_within(begin, TIMEOUT_MS + GRACE_MS, "destroying layer, group and context");
}

/* ---- Ranks that call with different tokens_max ---- */

/* Both move 8 rows: the headers tell. */
static void case_tokens_max_in_a_bucket(void) {
  const char *const values[] = {"5 here, 7 there", "7 here, 5 there"};
  struct step step = {.tokens_max = my_rank ? 7 : 5};
  open_for_faults();
  fill(&step, 5, 7, 400);
  step_bounded(&step, 0);
  step_end(&step, "the step that differs");
  EXPECT(step.forward[my_rank] == MOEFLOW_OK, "rank %d: %s", my_rank, step.forward_message[my_rank]);
  EXPECT(step.poll[my_rank] == MOEFLOW_ERROR_PEER, "rank %d: %s: %s", my_rank, moeflow_status_name(step.poll[my_rank]),
         step.poll_message[my_rank]);
  EXPECT(strstr(step.poll_message[my_rank], values[my_rank]), "rank %d: no '%s' in: %s", my_rank, values[my_rank],
         step.poll_message[my_rank]);
  expect_nan(&step, "the step that differs");
  step.tokens_max = 8;
  step_bounded(&step, 0);
  step_end(&step, "the step after");
  EXPECT(step.poll[my_rank] == MOEFLOW_ERROR_PEER, "rank %d: %s: %s", my_rank, moeflow_status_name(step.poll[my_rank]),
         step.poll_message[my_rank]);
  expect_nan(&step, "the step after");
  step_free(&gpu.world, &step);
  both_here();
  close_in_time();
}

/* 4 rows here and 64 there: NCCL says nothing of all-to-alls that differ in size. Whatever it does, both ranks get away. */
static void case_tokens_max_across_buckets(void) {
  struct step step = {.tokens_max = my_rank ? 40 : 4};
  open_for_faults();
  fill(&step, 4, 40, 410);
  const int64_t begin = deadline_now_ms();
  step_bounded(&step, 0);
  expect_lost(step.poll[my_rank], step.poll_message[my_rank]);
  abort_group();
  step_end(&step, "the step that differs");
  expect_nan(&step, "the step that differs");
  close_in_time();
  expect_within(begin, TIMEOUT_MS + GRACE_MS, "step, poll, abort and destroy");
  step_free(&gpu.world, &step);
}

/* ---- An error mark ---- */

static int marked(const struct step *step) {
  return step->poll[my_rank] == MOEFLOW_ERROR_PEER && strstr(step->poll_message[my_rank], "rank 1 joined step") != NULL;
}

static void case_error_mark(void) {
  static uint16_t before[TOKENS * 512];
  struct step step = {.tokens_max = TOKENS};
  open_for_faults();
  fill(&step, TOKENS, TOKENS - 7, 420);
  const size_t bytes = (size_t)step.tokens[my_rank] * 1024;
  step_bounded(&step, 0);
  step_end(&step, "the step before");
  expect_mine(&step, "the step before");
  memcpy(before, step.out[my_rank], bytes);

  step_bounded(&step, my_rank ? 2 : 0);
  step_end(&step, "the marked step");
  if (my_rank == 0) {
    EXPECT(step.forward[0] == MOEFLOW_OK, "%s", step.forward_message[0]);
    EXPECT(marked(&step), "%s: %s", moeflow_status_name(step.poll[0]), step.poll_message[0]);
    step.poll[0] = MOEFLOW_OK;
    expect_mine(&step, "the marked step");
  } else {
    EXPECT(step.forward[1] == MOEFLOW_ERROR_ARGUMENT && strstr(step.forward_message[1], "hidden is at"), "%s: %s",
           moeflow_status_name(step.forward[1]), step.forward_message[1]);
    EXPECT(step.poll[1] == MOEFLOW_OK || marked(&step), "%s: %s", moeflow_status_name(step.poll[1]), step.poll_message[1]);
  }
  EXPECT(moeflow_poll(my_group(), TIMEOUT_MS) == MOEFLOW_OK, "rank %d: told once: %s", my_rank, moeflow_last_error());

  step_bounded(&step, 0);
  step_end(&step, "the step after");
  expect_mine(&step, "the step after");
  EXPECT(!memcmp(before, step.out[my_rank], bytes), "rank %d: the step after differs from the one before", my_rank);
  step_free(&gpu.world, &step);
  both_here();
  close_in_time();
}

/* ---- Graphs ---- */

/* An eager step, kept in `eager`, then the same one captured. */
static CUgraphExec capture(struct step *step, uint16_t *eager, int seed) {
  step->tokens_max = TOKENS;
  fill(step, TOKENS, TOKENS - 7, seed);
  step_bounded(step, 0);
  step_end(step, "eager");
  expect_mine(step, "eager");
  memcpy(eager, step->out[my_rank], (size_t)step->tokens[my_rank] * 1024);
  CUgraphExec exec = gpu_capture(&gpu, step, my_rank);
  both_here();
  return exec;
}

static void launch(CUgraphExec exec, const struct step *step) {
  gpu_put(&gpu, step, my_rank);
  CUX(cuGraphLaunch(exec, gpu.rank[my_rank].stream));
}

/* Until the replay has ended (MOEFLOW_OK) or poll reports an error. */
static moeflow_status follow(struct step *step) {
  const int64_t deadline = deadline_in(TIMEOUT_MS + GRACE_MS);
  unsigned naps = 0;
  while (driver.cuStreamQuery(gpu.rank[my_rank].stream) == CUDA_ERROR_NOT_READY && !deadline_passed(deadline)) {
    const moeflow_status status = moeflow_poll(my_group(), TIMEOUT_MS); /* OK before the replay's first kernel */
    if (status) {
      snprintf(step->poll_message[my_rank], 512, "%s", moeflow_last_error());
      return status;
    }
    deadline_nap(&naps);
  }
  return MOEFLOW_OK;
}

/* The other rank is lost in the middle of a replay: what this one is told, and its way out. */
static void expect_way_out(CUgraphExec exec, struct step *step, moeflow_status status, int64_t begin) {
  expect_lost(status, step->poll_message[my_rank]);
  expect_within(begin, TIMEOUT_MS + GRACE_MS, "to hear of the replay that cannot end");
  abort_group();
  step_end(step, "the replay after the abort");
  expect_nan(step, "the replay after the abort");
  CUX(cuGraphExecDestroy(exec));
  close_in_time();
}

static int replay_waits(void) {
  const int64_t deadline = deadline_in(TIMEOUT_MS);
  while (moeflow_poll(my_group(), 0) != MOEFLOW_ERROR_TIMEOUT) {
    if (deadline_passed(deadline)) return 0;
  }
  return 1;
}

/* Rank 0 gives its group up while it holds a graph and rank 1 waits for it in a replay. */
static void case_abort_with_graph(void) {
  static uint16_t eager[TOKENS * 512];
  struct step step = {.tokens_max = 0};
  char byte = 1;
  open_for_faults();
  CUgraphExec exec = capture(&step, eager, 430);
  launch(exec, &step);
  const moeflow_status status = follow(&step);
  EXPECT(status == MOEFLOW_OK, "rank %d: %s", my_rank, step.poll_message[my_rank]);
  step_end(&step, "a replay");
  EXPECT(!memcmp(eager, step.out[my_rank], (size_t)step.tokens[my_rank] * 1024), "rank %d: a replay", my_rank);
  both_here();
  if (my_rank == 0) {
    hear(&byte, 1);
    abort_group();
    CUX(cuGraphExecDestroy(exec)); /* before the group, as moeflow_group_destroy asks */
    close_in_time();
  } else {
    launch(exec, &step);
    EXPECT(replay_waits(), "the replay does not wait for rank 0: %s", moeflow_last_error());
    tell(&byte, 1);
    const int64_t begin = deadline_now_ms();
    expect_way_out(exec, &step, follow(&step), begin);
  }
  step_free(&gpu.world, &step);
}

static void *kill_soon(void *unused) {
  (void)unused;
  usleep(500000);
  kill(getpid(), SIGKILL);
  return NULL;
}

static void case_killed_in_replays(void) {
  static uint16_t eager[TOKENS * 512];
  struct step step = {.tokens_max = 0};
  moeflow_status status = MOEFLOW_OK;
  pthread_t thread;
  int64_t begin = 0;
  int replays = 0;
  open_for_faults();
  CUgraphExec exec = capture(&step, eager, 440);
  if (my_rank == 1) EXPECT(pthread_create(&thread, NULL, kill_soon, NULL) == 0);
  const int64_t deadline = deadline_in(TIMEOUT_MS);
  while (status == MOEFLOW_OK && !deadline_passed(deadline)) {
    begin = deadline_now_ms();
    launch(exec, &step);
    status = follow(&step);
    if (status != MOEFLOW_OK) break;
    step_end(&step, "a replay");
    EXPECT(!memcmp(eager, step.out[my_rank], (size_t)step.tokens[my_rank] * 1024), "rank %d: replay %d", my_rank, replays);
    replays++;
  }
  EXPECT(replays > 0 && my_rank == 0, "rank %d: %d replays before %s", my_rank, replays, step.poll_message[my_rank]);
  expect_way_out(exec, &step, status, begin);
  step_free(&gpu.world, &step);
}

/* ---- What a killed rank leaves behind ---- */

static int probe_pipe[2];
static int probe_device;
static size_t probe_want; /* 0: only look */

/* One rank alone, on its own group. */
static void use_gpu_alone(void) {
  struct step step = {.tokens = {17}, .tokens_max = TOKENS};
  gpu.world.ranks = 1;
  gpu.world.timeout_ms = CREATE_MS;
  gpu.transport = MOEFLOW_TRANSPORT_AUTO;
  gpu_open_one(&gpu.world, 0, &gpu);
  EXPECT(gpu.world.rank[0].status == MOEFLOW_OK, "GPU %d: %s", probe_device, gpu.world.rank[0].message);
  if (gpu.world.rank[0].status != MOEFLOW_OK) return;
  step_fill(&gpu.world, &step, 450);
  step_bounded(&step, 0);
  step_end(&step, "alone");
  step_expect(&gpu.world, &step, "alone");
  step_free(&gpu.world, &step);
  close_in_time();
}

/* Free bytes as a new process sees them; memory of a process that was killed may take a moment to return. */
static void probe(void) {
  const struct timespec nap = {0, 50000000};
  const int64_t deadline = deadline_in(GRACE_MS);
  size_t available = 0, total = 0;
  gpu.device = probe_device;
  gpu_defaults(&gpu);
  gpu_start(&gpu);
  do {
    CU(cuMemGetInfo(&available, &total));
    if (available + MEMORY_TOLERANCE >= probe_want) break;
    nanosleep(&nap, NULL);
  } while (!deadline_passed(deadline));
  EXPECT(write(probe_pipe[1], &available, sizeof available) == (ssize_t)sizeof available, "%s", strerror(errno));
  if (probe_want) use_gpu_alone();
}

static size_t probe_in_child(int device, size_t want) {
  size_t available = 0;
  if (pipe(probe_pipe)) exit(1);
  probe_device = device;
  probe_want = want;
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    test_checks = test_failures = 0;
    probe();
    fflush(NULL);
    exit(test_failures != 0);
  }
  close(probe_pipe[1]);
  const int code = exit_code(child, deadline_in(CASE_SECONDS * 1000));
  EXPECT(code == 0, "a new process on GPU %d %s %d", device, code == -1 ? "hung:" : "ends with", code);
  EXPECT(read(probe_pipe[0], &available, sizeof available) == (ssize_t)sizeof available, "GPU %d was not looked at", device);
  close(probe_pipe[0]);
  return available;
}

static void killed_in_replays(void) {
  size_t before[RANKS];
  for (int r = 0; r < RANKS; r++) before[r] = probe_in_child(r, 0);
  run_pair("killed in replays", case_killed_in_replays, CASE_SECONDS, 128 + SIGKILL);
  for (int r = 0; r < RANKS; r++) {
    const size_t after = probe_in_child(r, before[r]);
    EXPECT(after + MEMORY_TOLERANCE >= before[r], "GPU %d: %zu bytes were free, now %zu", r, before[r], after);
  }
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  pair_begin();
  run_pair("tokens_max differs in a bucket", case_tokens_max_in_a_bucket, CASE_SECONDS, 0);
  run_pair("tokens_max differs across buckets", case_tokens_max_across_buckets, CASE_SECONDS, 0);
  run_pair("error mark", case_error_mark, CASE_SECONDS, 0);
  run_pair("abort with a graph", case_abort_with_graph, CASE_SECONDS, 0);
  killed_in_replays();
  pair_end();
  TEST_END;
}
