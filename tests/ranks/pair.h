/* Two processes over NCCL or windows, each with a GPU of its own unless they share one: for tests. The parent never
 * touches CUDA; each case is a fresh pair, forked and awaited for a bounded time. Cubins are built once, by a child, into a
 * cache that all cases share. */
#ifndef MOEFLOW_PAIR_H
#define MOEFLOW_PAIR_H

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "deadline.h"
#include "gpu/gpu_world.h"
#include "nccl_library.h"

#define RANKS 2
#define BUILD_SECONDS 150

static struct gpu gpu = {.world = {.ranks = RANKS, .capacity = 64}};
static moeflow_transport pair_transport = MOEFLOW_TRANSPORT_NCCL;
static int pair_gpus = RANKS;
static int pair_may_share; /* one GPU does for both where there is no second */
static int my_rank;
static int pipes[RANKS][2]; /* into each rank from the other */

/* ---- Between the two ---- */

static void tell(const void *bytes, size_t size) {
  EXPECT(write(pipes[1 - my_rank][1], bytes, size) == (ssize_t)size, "rank %d: %s", my_rank, strerror(errno));
}

/* At most 10 s: the other rank may be gone, or stuck. */
static void hear(void *bytes, size_t size) {
  struct pollfd look = {.fd = pipes[my_rank][0], .events = POLLIN};
  const int ready = poll(&look, 1, 10000);
  EXPECT(ready == 1 && read(look.fd, bytes, size) == (ssize_t)size, "rank %d hears nothing from the other", my_rank);
}

static void both_here(void) {
  char byte = 1;
  tell(&byte, 1);
  hear(&byte, 1);
}

/* ---- This process's rank ---- */

static void start(void) {
  gpu_defaults(&gpu);
  gpu.device = my_rank % pair_gpus;
  gpu.transport = pair_transport;
  gpu_start(&gpu);
  if (my_rank == 1) {
    hear(&gpu.world.id, sizeof gpu.world.id);
    return;
  }
  EXPECT(moeflow_get_unique_id(pair_transport, &gpu.world.id) == MOEFLOW_OK, "%s", moeflow_last_error());
  tell(&gpu.world.id, sizeof gpu.world.id);
}

static void open_rank(void) {
  start();
  gpu_open_one(&gpu.world, my_rank, &gpu);
  EXPECT(gpu.world.rank[my_rank].status == MOEFLOW_OK, "rank %d: %s", my_rank, gpu.world.rank[my_rank].message);
  if (gpu.world.rank[my_rank].status != MOEFLOW_OK) exit(1);
}

static void close_rank(void) {
  gpu_close_one(&gpu.world, my_rank, &gpu);
}

static void run(struct step *step) {
  struct gpu_step both = {&gpu, step};
  gpu_step_one(&gpu.world, my_rank, &both);
}

/* This rank's tokens against the reference; the other rank's are its own business. */
static void expect_mine(const struct step *step, const char *what) {
  struct step mine = *step;
  for (int r = 0; r < RANKS; r++) {
    if (r != my_rank) mine.tokens[r] = 0;
  }
  step_expect(&gpu.world, &mine, what);
}

static void fill(struct step *step, int first, int second, int seed) {
  step->tokens[0] = first;
  step->tokens[1] = second;
  step_fill(&gpu.world, step, seed);
}

/* ---- The parent ---- */

/* 0 without NCCL where that is needed. */
static int gpus(void) {
  int devices = 0;
  if (driver_load() != MOEFLOW_OK) return 0;
  if (pair_transport != MOEFLOW_TRANSPORT_WINDOW && nccl_load() != MOEFLOW_OK) return 0;
  return driver.cuDeviceGetCount(&devices) == CUDA_SUCCESS ? devices : 0;
}

/* Of a child: its exit code, 128 + the signal that ended it, or -1 when it had to be killed at the deadline. */
static int exit_code(pid_t child, int64_t deadline) {
  const struct timespec nap = {0, 20000000};
  int result;
  while (waitpid(child, &result, WNOHANG) == 0) {
    if (deadline_passed(deadline)) {
      kill(child, SIGKILL);
      waitpid(child, &result, 0);
      return -1;
    }
    nanosleep(&nap, NULL);
  }
  return WIFEXITED(result) ? WEXITSTATUS(result) : 128 + WTERMSIG(result);
}

static void build(void) {
  gpu_defaults(&gpu);
  for (gpu.device = 0; gpu.device < pair_gpus; gpu.device++) {
    gpu_start(&gpu);
    gpu_build(&gpu.world.spec, gpu.arch);
  }
}

/* The model's cubins, made by a child. */
static void pair_build(void) {
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    build();
    fflush(NULL);
    _exit(test_failures != 0);
  }
  const int code = exit_code(child, deadline_in(BUILD_SECONDS * 1000));
  EXPECT(code == 0, "building the cubins %s %d", code == -1 ? "hung:" : "ends with", code);
}

/* Skips without the GPUs or NCCL, and leaves a cache with the model's cubins; pair_end removes it. */
static void pair_begin(void) {
  const char *given = getenv("MOEFLOW_TEST_CACHE");
  int result = 0;
  signal(SIGPIPE, SIG_IGN); /* the other rank may be gone */
  pid_t child = fork();
  if (child == 0) _exit(gpus());
  waitpid(child, &result, 0);
  if (pair_may_share && WIFEXITED(result) && WEXITSTATUS(result) == 1) pair_gpus = 1;
  if (!WIFEXITED(result) || WEXITSTATUS(result) < pair_gpus)
    SKIP("%d GPU(s) that the transport can use, and %d are needed", WEXITSTATUS(result), pair_gpus);
  scratch_make();
  snprintf(gpu_cache, sizeof gpu_cache, "%s", given && *given ? given : scratch_path("cache"));
  pair_build();
}

static void pair_end(void) {
  scratch_remove();
}

static void run_rank(int rank, void (*run_it)(void)) {
  my_rank = rank;
  close(pipes[rank][1]);
  close(pipes[1 - rank][0]);
  test_checks = test_failures = 0;
  run_it();
  fflush(NULL);
  exit(test_failures != 0);
}

/* Both ranks run the case in at most `seconds`; rank 0 ends with 0, and rank 1 with `ends`. */
static void run_pair(const char *name, void (*run_it)(void), int seconds, int ends) {
  pid_t children[RANKS];
  if (pipe(pipes[0]) || pipe(pipes[1])) exit(1);
  fflush(NULL);
  const int64_t begin = deadline_now_ms();
  for (int r = 0; r < RANKS; r++) {
    children[r] = fork();
    if (children[r] == 0) run_rank(r, run_it);
  }
  for (int i = 0; i < 2 * RANKS; i++) close(pipes[i / 2][i % 2]);
  for (int r = 0; r < RANKS; r++) {
    const int code = exit_code(children[r], begin + seconds * 1000);
    EXPECT(code == (r ? ends : 0), "%s: rank %d %s %d", name, r, code == -1 ? "hung:" : "ends with", code);
  }
  printf("%s: %.1f s\n", name, (double)(deadline_now_ms() - begin) / 1000);
}
#endif
