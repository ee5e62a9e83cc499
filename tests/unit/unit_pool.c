/* Workers that crash, hang, fail or are interrupted: the parent says which and leaves nothing behind. */
#include "pool.h"

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "scratch.h"
#include "status.h"
#include "test.h"

enum behaviour { GOOD, SEGFAULT, ABORT, HANG, FAIL_ONE, EXIT, LONG_LOG };

struct scene {
  enum behaviour behaviour;
  int bad_task;
  int seen[100];
  int failures;
  pid_t worker; /* the last one heard of */
  char log[64];
};

static moeflow_status work(void *user, int task, struct pool_output *output) {
  struct scene *scene = user;
  pid_t self = getpid();
  memcpy(output->bytes, &self, sizeof self);
  output->size = sizeof self;
  if (scene->behaviour == LONG_LOG) {
    output->log = calloc(1, 300001);
    memset(output->log, 'a' + task, 300000);
  }
  if (task != scene->bad_task) return MOEFLOW_OK;
  if (scene->behaviour == SEGFAULT) {
    signal(SIGSEGV, SIG_DFL); /* a sanitizer would turn it into an exit code */
    raise(SIGSEGV);
  }
  if (scene->behaviour == ABORT) abort();
  if (scene->behaviour == EXIT) _exit(3);
  if (scene->behaviour == HANG) {
    int fd = open(scratch_path("pids"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(fd, &self, sizeof self) != sizeof self) abort();
    for (;;) pause();
  }
  if (scene->behaviour == FAIL_ONE) {
    output->log = strdup("file.cuh:12: error");
    return status_set(MOEFLOW_ERROR_FORMAT, "task %d is bad", task);
  }
  return MOEFLOW_OK;
}

static void done(void *user, int task, moeflow_status status, const struct pool_output *output) {
  struct scene *scene = user;
  scene->seen[task]++;
  scene->failures += status != MOEFLOW_OK;
  memcpy(&scene->worker, output->bytes, sizeof scene->worker);
  snprintf(scene->log, sizeof scene->log, "%.60s", output->log);
  if (scene->behaviour == LONG_LOG) {
    EXPECT(strlen(output->log) == 300000 && output->log[0] == 'a' + task && output->log[299999] == 'a' + task);
  }
  EXPECT(scene->worker != getpid(), "tasks run in workers");
}

static const char *name(void *user, int task) {
  static char text[16];
  (void)user;
  snprintf(text, sizeof text, "task-%d", task);
  return text;
}

static moeflow_status run(struct scene *scene, int tasks, int workers, int timeout_s, int *interrupted) {
  struct pool_job job = {tasks, workers, timeout_s, scene, work, done, name};
  return pool_run(&job, interrupted);
}

static void expect_no_children(void) {
  EXPECT(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "a worker is left");
}

static void good(void) {
  for (int workers = 0; workers <= 5; workers++) {
    struct scene scene = {.behaviour = GOOD, .bad_task = -1};
    int interrupted;
    EXPECT(run(&scene, 20, workers, 30, &interrupted) == MOEFLOW_OK && !interrupted, "%s", moeflow_last_error());
    for (int i = 0; i < 20; i++) EXPECT(scene.seen[i] == 1, "task %d ran %d times", i, scene.seen[i]);
    expect_no_children();
  }
  struct scene nothing = {.behaviour = GOOD}, logs = {.behaviour = LONG_LOG, .bad_task = -1};
  int interrupted;
  EXPECT(run(&nothing, 0, 4, 30, &interrupted) == MOEFLOW_OK);
  EXPECT(run(&logs, 6, 3, 30, &interrupted) == MOEFLOW_OK && logs.seen[5] == 1);
}

static void expect_failure(enum behaviour behaviour, moeflow_status expected, const char *words) {
  struct scene scene = {.behaviour = behaviour, .bad_task = 3};
  int interrupted;
  moeflow_status status = run(&scene, 50, 2, behaviour == HANG ? 1 : 30, &interrupted); /* a busy machine is no hang */
  EXPECT(status == expected, "%s: %s", moeflow_status_name(status), moeflow_last_error());
  EXPECT(strstr(moeflow_last_error(), words), "'%s' is not in: %s", words, moeflow_last_error());
  EXPECT(!interrupted);
  int finished = 0;
  for (int i = 0; i < 50; i++) finished += scene.seen[i];
  if (behaviour == FAIL_ONE) {
    EXPECT(scene.failures == 1 && finished < 50, "the first failure stops the rest, %d of 50 ran", finished);
    EXPECT(strcmp(scene.log, "file.cuh:12: error") == 0, "'%s'", scene.log);
  }
  expect_no_children();
}

/* A process that runs the pool gets SIGINT: it comes back with interrupted = 1 and its hanging worker is gone. */
static void interrupted_run(int number, int kill_parent) {
  struct timespec begin, end;
  pid_t worker = 0;
  unlink(scratch_path("pids"));
  pid_t child = fork();
  if (child == 0) {
    struct scene scene = {.behaviour = HANG, .bad_task = 0};
    int interrupted = 0;
    moeflow_status status = run(&scene, 2, 2, 60, &interrupted);
    _exit(status != MOEFLOW_OK && interrupted ? 30 : 1);
  }
  for (int fd = -1; worker == 0; usleep(1000)) {
    if (fd < 0) fd = open(scratch_path("pids"), O_RDONLY);
    if (fd >= 0 && read(fd, &worker, sizeof worker) == sizeof worker) close(fd);
  }
  clock_gettime(CLOCK_MONOTONIC, &begin);
  kill(child, number);
  int how;
  EXPECT(waitpid(child, &how, 0) == child);
  clock_gettime(CLOCK_MONOTONIC, &end);
  EXPECT(end.tv_sec - begin.tv_sec < 5);
  if (!kill_parent) EXPECT(WIFEXITED(how) && WEXITSTATUS(how) == 30, "it ended with %x", how);
  for (int i = 0; i < 1000 && kill(worker, 0) == 0; i++) {
    waitpid(worker, NULL, WNOHANG); /* an orphan is ours to reap */
    usleep(1000);
  }
  EXPECT(kill(worker, 0) == -1 && errno == ESRCH, "worker %d outlives its parent", (int)worker);
}

int main(void) {
  scratch_make();
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  good();
  expect_failure(SEGFAULT, MOEFLOW_ERROR_ENVIRONMENT, "SIGSEGV");
  expect_failure(ABORT, MOEFLOW_ERROR_ENVIRONMENT, "task-3");
  expect_failure(EXIT, MOEFLOW_ERROR_ENVIRONMENT, "exit code 3");
  expect_failure(HANG, MOEFLOW_ERROR_TIMEOUT, "task-3 took longer than 1 s");
  expect_failure(FAIL_ONE, MOEFLOW_ERROR_FORMAT, "task 3 is bad");
  interrupted_run(SIGINT, 0);
  interrupted_run(SIGTERM, 0);
  interrupted_run(SIGKILL, 1);
  scratch_remove();
  TEST_END;
}
