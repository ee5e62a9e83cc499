/* The ranks' connection and what becomes of a run when one of them fails, dies, hangs or never comes. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deadline.h"
#include "launch.h"
#include "status.h"
#include "test.h"

#define RANKS 4

enum act { ACT_NOTHING, ACT_FAIL, ACT_KILLED, ACT_EXIT, ACT_SILENT, ACT_HANG };

struct scene {
  int rank; /* who acts */
  enum act act;
  int others_hang; /* the others notice nothing */
  int code;        /* what all return in the end */
};

static moeflow_status perform(const struct scene *scene, int rank) {
  if (rank != scene->rank) return MOEFLOW_OK;
  switch (scene->act) {
    case ACT_NOTHING:
      break;
    case ACT_FAIL:
      return status_set(MOEFLOW_ERROR_CACHE, "no cubin");
    case ACT_KILLED:
      raise(SIGKILL);
      break;
    case ACT_EXIT:
      _exit(3);
    case ACT_SILENT:
      sleep(2);
      break;
    case ACT_HANG:
      for (;;) pause();
  }
  return MOEFLOW_OK;
}

/* A few rounds of everything; wrong data is MOEFLOW_ERROR_INTERNAL, exit code 1. */
static moeflow_status rounds(struct star *star) {
  moeflow_status status = MOEFLOW_OK;
  for (int round = 0; round < 50; round++) {
    int32_t mine[300], all[RANKS][300], told = star->rank == 0 ? 77 + round : -1;
    for (int i = 0; i < 300; i++) mine[i] = star->rank * 1000 + i + round;
    CHECK(star_gather(star, mine, sizeof mine, all));
    for (int rank = 0; star->rank == 0 && rank < star->size; rank++)
      for (int i = 0; i < 300; i++)
        if (all[rank][i] != rank * 1000 + i + round) FAIL(MOEFLOW_ERROR_INTERNAL, "gather: rank %d", rank);
    CHECK(star_broadcast(star, &told, sizeof told));
    if (told != 77 + round) FAIL(MOEFLOW_ERROR_INTERNAL, "broadcast: %d", told);
    CHECK(star_agree(star, MOEFLOW_OK, NULL));
  }

cleanup:
  return status;
}

static int body(void *user, int rank, struct star *star, struct launch_failure *failure) {
  const struct scene *scene = user;
  moeflow_status status = MOEFLOW_OK;
  CHECK(rounds(star));
  status = perform(scene, rank);
  if (scene->others_hang && rank != scene->rank)
    for (;;) pause();
  CHECK(star_agree(star, status, NULL));
  return scene->code;

cleanup:
  snprintf(failure->message, sizeof failure->message, "%s", moeflow_last_error());
  return status_exit_code(status);
}

static void expect_run(const char *what, struct scene scene, int fork_it, int timeout_ms, int code, const char *named,
                       int64_t within_ms) {
  struct launch_failure failure = {.message = ""};
  const int64_t begin = deadline_now_ms();
  const int got = fork_it ? launch_fork(RANKS, timeout_ms, 500, body, &scene, &failure)
                          : launch_threads(RANKS, timeout_ms, body, &scene, &failure);
  const int64_t took = deadline_now_ms() - begin;
  EXPECT(got == code, "%s: code %d, %s", what, got, failure.message);
  EXPECT(!named || strstr(failure.message, named), "%s: '%s' lacks '%s'", what, failure.message, named ? named : "");
  EXPECT(named || !failure.message[0], "%s: %s", what, failure.message);
  EXPECT(took < within_ms, "%s took %lld ms", what, (long long)took);
  EXPECT(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "%s: a child is left", what);
}

static void test_runs(void) {
  const struct scene fine = {-1, ACT_NOTHING, 0, 0}, failed_check = {-1, ACT_NOTHING, 0, 4};
  expect_run("threads", fine, 0, 5000, 0, NULL, 4000);
  expect_run("fork", fine, 1, 5000, 0, NULL, 4000);
  expect_run("all return 4", failed_check, 1, 5000, 4, NULL, 4000);
  for (int rank = 0; rank < RANKS; rank++) {
    char named[64];
    snprintf(named, sizeof named, "rank %d: no cubin", rank);
    expect_run("a thread fails", (struct scene){rank, ACT_FAIL, 0, 0}, 0, 20000, 6, named, 4000);
    expect_run("a process fails", (struct scene){rank, ACT_FAIL, 0, 0}, 1, 20000, 6, named, 4000);
    snprintf(named, sizeof named, "rank %d was killed by signal 9", rank);
    expect_run("kill -9", (struct scene){rank, ACT_KILLED, 0, 0}, 1, 20000, 7, named, 4000);
    snprintf(named, sizeof named, "rank %d ended with exit code 3", rank);
    expect_run("_exit", (struct scene){rank, ACT_EXIT, 0, 0}, 1, 20000, 7, named, 4000);
  }
  expect_run("the others do not notice", (struct scene){2, ACT_KILLED, 1, 0}, 1, 20000, 7, "rank 2 was killed", 4000);
  expect_run("a silent rank", (struct scene){3, ACT_SILENT, 0, 0}, 0, 300, 7, "rank 3 was silent for 300 ms", 4000);
  expect_run("a hanging rank", (struct scene){1, ACT_HANG, 0, 0}, 1, 300, 7, "rank 1 was silent for 300 ms", 4000);
}

/* Ctrl-C in the middle: 130, and no child survives its parent. */
static void test_interrupt(void) {
  const struct scene hang = {0, ACT_HANG, 1, 0};
  int ends[2], wait_status = 0;
  char byte;
  EXPECT(pipe(ends) == 0);
  fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) { /* the children inherit the pipe's end: it closes when the last of them is gone */
    struct launch_failure failure;
    close(ends[0]);
    _exit(launch_fork(RANKS, 20000, 500, body, (void *)&hang, &failure));
  }
  close(ends[1]);
  const struct timespec nap = {0, 400 * 1000000};
  nanosleep(&nap, NULL);
  kill(pid, SIGINT);
  EXPECT(waitpid(pid, &wait_status, 0) == pid && WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 130, "status %#x",
         (unsigned)wait_status);
  EXPECT(read(ends[0], &byte, 1) == 0, "children are left");
  close(ends[0]);
}

/* ---- TCP ---- */

struct caller {
  int rank, size, port, timeout_ms;
  moeflow_status status;
  char message[STAR_MESSAGE_MAX];
  int leaves; /* as soon as it is connected */
};

static void *call(void *argument) {
  struct caller *caller = argument;
  struct star star = {0};
  caller->status = star_connect(caller->rank, caller->size, "127.0.0.1", caller->port, caller->timeout_ms, &star);
  if (caller->status == MOEFLOW_OK && !caller->leaves) caller->status = rounds(&star);
  snprintf(caller->message, sizeof caller->message, "%s", caller->status == MOEFLOW_OK ? "" : moeflow_last_error());
  star_close(&star);
  return NULL;
}

static void connect_all(struct caller *callers, int count) {
  pthread_t threads[RANKS];
  for (int i = 0; i < count; i++) EXPECT(pthread_create(&threads[i], NULL, call, &callers[i]) == 0);
  for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void test_tcp(void) {
  const int port = 32000 + (int)(getpid() % 700);
  struct caller fine[RANKS], few[2] = {{0, 3, port, 400, 0, "", 0}, {1, 3, port, 400, 0, "", 0}};
  struct caller odd[2] = {{0, 2, port, 1000, 0, "", 0}, {1, 3, port, 1000, 0, "", 0}};
  for (int rank = 0; rank < RANKS; rank++) fine[rank] = (struct caller){rank, RANKS, port, 5000, 0, "", 0};
  connect_all(fine, RANKS);
  for (int rank = 0; rank < RANKS; rank++) EXPECT(fine[rank].status == MOEFLOW_OK, "rank %d: %s", rank, fine[rank].message);
  fine[2].leaves = 1;
  connect_all(fine, RANKS);
  for (int rank = 0; rank < RANKS; rank++) {
    if (rank == 2) continue;
    EXPECT(fine[rank].status == MOEFLOW_ERROR_PEER && strstr(fine[rank].message, "rank 2 is gone"), "rank %d: %s", rank,
           fine[rank].message);
  }
  connect_all(few, 2);
  EXPECT(few[0].status == MOEFLOW_ERROR_TIMEOUT && strstr(few[0].message, "rank 2 did not"), "%s", few[0].message);
  EXPECT(few[1].status != MOEFLOW_OK, "rank 1 of a run that never began");
  connect_all(odd, 2);
  EXPECT(odd[0].status == MOEFLOW_ERROR_MISMATCH && strstr(odd[0].message, "rank 1 of 3"), "%s", odd[0].message);
  struct caller alone = {1, 2, port, 300, 0, "", 0};
  connect_all(&alone, 1);
  EXPECT(alone.status == MOEFLOW_ERROR_TIMEOUT && strstr(alone.message, "rank 0 did not listen"), "%s", alone.message);
}

/* ---- Launchers ---- */

static void set(const char *name, const char *value) {
  if (value) {
    setenv(name, value, 1);
  } else {
    unsetenv(name);
  }
}

static void test_launchers(void) {
  static const char *const names[] = {"RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "PMI_RANK",
                                      "PMI_SIZE",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_LOCALID",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "SLURM_STEP_NUM_TASKS",
                                      "SLURM_NNODES"};
  static const struct {
    const char *names[3], *launcher;
  } rows[] = {{{"RANK", "WORLD_SIZE", "LOCAL_RANK"}, "torchrun"},
              {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}, "mpirun"},
              {{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"}, "mpirun"},
              {{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}, "srun"}};
  struct launcher launcher;
  char host[256];
  int port = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
  EXPECT(launcher_detect(&launcher) == MOEFLOW_OK && !launcher.name && launcher.size == 1);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const char *values[] = {"5", "8", "1"};
    for (int v = 0; v < 3; v++) set(rows[i].names[v], values[v]);
    EXPECT(launcher_detect(&launcher) == MOEFLOW_OK && launcher.name && !strcmp(launcher.name, rows[i].launcher));
    EXPECT(launcher.rank == 5 && launcher.size == 8 && launcher.local_rank == 1, "%s", rows[i].launcher);
    set(rows[i].names[0], "8");
    EXPECT(launcher_detect(&launcher) == MOEFLOW_ERROR_ARGUMENT, "%s: rank 8 of 8", rows[i].launcher);
    set(rows[i].names[0], "0");
    set(rows[i].names[1], "1");
    EXPECT(launcher_detect(&launcher) == MOEFLOW_OK && !launcher.name, "%s with one rank is none", rows[i].launcher);
    for (int v = 0; v < 3; v++) unsetenv(rows[i].names[v]);
  }
  const struct launcher one = {"torchrun", 0, 2, 0, 1}, far = {"srun", 0, 2, 0, 0};
  EXPECT(launcher_rendezvous(&one, "node1:1234", host, &port) == MOEFLOW_OK && port == 1234 && !strcmp(host, "node1"));
  EXPECT(launcher_rendezvous(&one, "node1", host, &port) == MOEFLOW_ERROR_ARGUMENT);
  EXPECT(launcher_rendezvous(&one, NULL, host, &port) == MOEFLOW_OK && port >= 20000 && !strcmp(host, "127.0.0.1"));
  EXPECT(launcher_rendezvous(&far, NULL, host, &port) == MOEFLOW_ERROR_ARGUMENT, "several machines need an address");
  setenv("MASTER_ADDR", "10.0.0.1", 1);
  setenv("MASTER_PORT", "29500", 1);
  EXPECT(launcher_rendezvous(&far, NULL, host, &port) == MOEFLOW_OK && port == 29501 && !strcmp(host, "10.0.0.1"));
}

int main(void) {
  test_runs();
  test_interrupt();
  test_tcp();
  test_launchers();
  TEST_END;
}
