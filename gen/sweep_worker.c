#include "sweep_worker.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "number.h"
#include "progress.h"
#include "status.h"

/* The lines. Parent: "<task> <tokens> <skew> <arm> <against> <count>". Worker: "ready" when the arm's part begins, then one
 * of "gpu <multiprocessors> <major> <minor> <driver> <name>", "ok <number>...", "bad <why>", "short <why>" (of memory).
 * After the last two it exits: what a faulty kernel leaves behind in a CUDA context is not to be measured in. */
#define LINE_BYTES 8192

static const char *const task_names[] = {"probe", "screen", "skew", "pair"};

/* ---- In the worker ---- */

struct serving {
  const struct sweep_measure *measure;
  int device, opened;
  FILE *replies;
};

static void put_numbers(struct serving *serving, const double *numbers, int count) {
  for (int i = 0; i < count; i++) {
    char text[NUMBER_TEXT_MAX];
    number_write(numbers[i], text);
    fprintf(serving->replies, " %s", text);
  }
}

static moeflow_status probe(struct serving *serving) {
  struct sweep_gpu gpu = {.name = ""};
  moeflow_status status = serving->measure->probe(serving->measure->user, serving->device, &gpu);
  if (status == MOEFLOW_OK)
    fprintf(serving->replies, "gpu %d %d %d %d %s\n", gpu.multiprocessors, gpu.major, gpu.minor, gpu.driver, gpu.name);
  return status;
}

static moeflow_status prepare(struct serving *serving, const struct sweep_request *request) {
  moeflow_status status = MOEFLOW_OK;
  const struct sweep_measure *measure = serving->measure;
  if (!serving->opened) CHECK(measure->open(measure->user, serving->device));
  serving->opened = 1;
  CHECK(measure->prepare(measure->user, request));
cleanup:
  return status;
}

static moeflow_status time_arm(const struct serving *serving, int arm, int launches, double *us) {
  moeflow_status status = serving->measure->time(serving->measure->user, arm, launches, us);
  if (status == MOEFLOW_OK && !(*us > 0 && isfinite(*us)))
    return status_set(MOEFLOW_ERROR_INTERNAL, "a layer is said to take %g us", *us);
  return status;
}

/* Of a routing that is uniform or skewed. */
static moeflow_status screen(struct serving *serving, const struct sweep_request *request) {
  moeflow_status status = MOEFLOW_OK;
  double results[2];
  CHECK(serving->measure->check(serving->measure->user, request->arm, &results[0]));
  if (!(results[0] <= SWEEP_REL_L2_MAX)) /* NaN is wrong too */
    FAIL(MOEFLOW_ERROR_INTERNAL, "wrong: rel-L2 %.3g of a row, more than %.3g", results[0], SWEEP_REL_L2_MAX);
  CHECK(time_arm(serving, request->arm, request->count, &results[1]));
  fputs("ok", serving->replies);
  put_numbers(serving, results, 2);
  fputs("\n", serving->replies);
cleanup:
  return status;
}

/* A B, B A, A B, ...: a drift of the clock falls on both alike. */
static moeflow_status pair(struct serving *serving, const struct sweep_request *request) {
  moeflow_status status = MOEFLOW_OK;
  double us[SWEEP_PAIRS_MAX][2];
  for (int i = 0; i < request->count; i++) {
    for (int turn = 0; turn < 2; turn++) {
      const int second = (i + turn) % 2;
      CHECK(time_arm(serving, second ? request->against : request->arm, SWEEP_PAIR_LAUNCHES, &us[i][second]));
    }
  }
  fputs("ok", serving->replies);
  for (int i = 0; i < request->count; i++) put_numbers(serving, us[i], 2);
  fputs("\n", serving->replies);
cleanup:
  return status;
}

static int read_request(char *line, struct sweep_request *request) {
  char name[16], skew_text[32], *end;
  if (sscanf(line, "%15s %d %31s %d %d %d", name, &request->tokens, skew_text, &request->arm, &request->against,
             &request->count) != 6)
    return -1;
  request->skew = strtod(skew_text, &end);
  for (int i = 0; i < 4; i++) {
    if (strcmp(name, task_names[i])) continue;
    request->task = (enum sweep_task)i;
    return 0;
  }
  return -1;
}

static moeflow_status serve(struct serving *serving, const struct sweep_request *request) {
  static moeflow_status (*const tasks[])(struct serving *, const struct sweep_request *) = {NULL, screen, screen, pair};
  if (request->task == SWEEP_PROBE) return probe(serving);
  moeflow_status status = prepare(serving, request);
  if (status != MOEFLOW_OK) return status;
  fputs("ready\n", serving->replies);
  fflush(serving->replies);
  return tasks[request->task](serving, request);
}

/* Signals of the parent's terminal are the parent's, which lets a measurement end; a standard output of its own keeps what
 * libraries print off the results. */
static void become_worker(pid_t parent) {
  const struct rlimit none = {0, 0};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  setpgid(0, 0);
  for (const int *number = (const int[]){SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGSEGV, SIGBUS, SIGABRT, 0}; *number; number++)
    signal(*number, SIG_DFL);
  sigset_t all;
  sigemptyset(&all);
  sigprocmask(SIG_SETMASK, &all, NULL);
  setrlimit(RLIMIT_CORE, &none);
  dup2(STDERR_FILENO, STDOUT_FILENO);
}

__attribute__((noreturn)) static void worker_main(const struct sweep_worker *worker, int requests, int replies,
                                                  pid_t parent) {
  struct serving serving = {.measure = worker->measure, .device = worker->device, .replies = fdopen(replies, "w")};
  FILE *input = fdopen(requests, "r");
  char line[256];
  become_worker(parent);
  while (input && serving.replies && fgets(line, sizeof line, input)) {
    struct sweep_request request;
    if (read_request(line, &request)) _exit(1);
    const moeflow_status status = serve(&serving, &request);
    if (status != MOEFLOW_OK) {
      fprintf(serving.replies, "%s %.*s\n", status == MOEFLOW_ERROR_MEMORY ? "short" : "bad", LINE_BYTES / 16,
              moeflow_last_error());
      fflush(serving.replies);
      _exit(0);
    }
    if (fflush(serving.replies)) break;
  }
  _exit(0);
}

/* ---- In the parent ---- */

moeflow_status sweep_worker_make(struct sweep_worker *worker, const struct sweep_measure *measure, int device,
                                 struct sweep_patience patience) {
  *worker = (struct sweep_worker){
      .device = device, .requests = -1, .replies = -1, .measure = measure, .patience = patience, .line = malloc(LINE_BYTES)};
  return worker->line ? MOEFLOW_OK : status_set(MOEFLOW_ERROR_MEMORY, "no memory for a worker's line");
}

static void close_pipes(struct sweep_worker *worker) {
  if (worker->requests >= 0) close(worker->requests);
  if (worker->replies >= 0) close(worker->replies);
  worker->requests = worker->replies = -1;
}

static int reap(struct sweep_worker *worker) {
  int how = 0;
  while (waitpid(worker->process, &how, 0) < 0 && errno == EINTR) continue;
  worker->process = 0;
  worker->busy = worker->preparing = 0;
  close_pipes(worker);
  return how;
}

void sweep_worker_stop(struct sweep_worker *worker) {
  if (!worker->process) return;
  kill(worker->process, SIGKILL);
  reap(worker);
}

void sweep_worker_free(struct sweep_worker *worker) {
  sweep_worker_stop(worker);
  free(worker->line);
  worker->line = NULL;
}

static moeflow_status start(struct sweep_worker *worker) {
  moeflow_status status = MOEFLOW_OK;
  int requests[2] = {-1, -1}, replies[2] = {-1, -1};
  const pid_t parent = getpid();
  if (pipe(requests) || pipe(replies)) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "no pipe for a worker: %s", strerror(errno));
  fflush(NULL);
  worker->process = fork();
  if (worker->process < 0) {
    worker->process = 0;
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot start a worker process: %s", strerror(errno));
  }
  if (!worker->process) {
    close(requests[1]);
    close(replies[0]);
    worker_main(worker, requests[0], replies[1], parent);
  }
  setpgid(worker->process, worker->process);
  worker->requests = requests[1];
  worker->replies = replies[0];
  requests[1] = replies[0] = -1;
cleanup:
  for (int i = 0; i < 2; i++) {
    if (requests[i] >= 0) close(requests[i]);
    if (replies[i] >= 0) close(replies[i]);
  }
  return status;
}

moeflow_status sweep_worker_ask(struct sweep_worker *worker, const struct sweep_request *request) {
  char line[256], skew_text[NUMBER_TEXT_MAX];
  if (!worker->process) {
    moeflow_status status = start(worker);
    if (status != MOEFLOW_OK) return status;
  }
  number_write(request->skew, skew_text);
  const int length = snprintf(line, sizeof line, "%s %d %s %d %d %d\n", task_names[request->task], request->tokens,
                              skew_text, request->arm, request->against, request->count);
  worker->busy = worker->preparing = 1;
  worker->line_size = 0;
  worker->deadline = progress_seconds() + worker->patience.prepare;
  /* Short of PIPE_BUF: whole or not at all. A worker that is gone is seen at the other pipe. */
  if (write(worker->requests, line, (size_t)length) < 0 && errno != EPIPE)
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot write to a worker: %s", strerror(errno));
  return MOEFLOW_OK;
}

/* Whatever became of the worker is no arm's affair before the arm's part began. */
static enum sweep_outcome lost_as(const struct sweep_worker *worker, enum sweep_outcome outcome,
                                  struct sweep_answer *answer) {
  answer->outcome = worker->preparing ? SWEEP_BROKEN : outcome;
  return answer->outcome;
}

static enum sweep_outcome lost(const struct sweep_worker *worker, struct sweep_answer *answer) {
  return lost_as(worker, SWEEP_BAD, answer);
}

static enum sweep_outcome died(struct sweep_worker *worker, struct sweep_answer *answer) {
  lost(worker, answer);
  const int how = reap(worker);
  if (WIFSIGNALED(how)) {
    const char *name = sigabbrev_np(WTERMSIG(how));
    snprintf(answer->why, sizeof answer->why, "crashed SIG%s", name ? name : "?");
  } else {
    snprintf(answer->why, sizeof answer->why, "crashed: exit code %d", WEXITSTATUS(how));
  }
  return answer->outcome;
}

static enum sweep_outcome hung(struct sweep_worker *worker, struct sweep_answer *answer) {
  const double patience = worker->preparing ? worker->patience.prepare : worker->patience.measure;
  snprintf(answer->why, sizeof answer->why, "hung: no answer within %g s", patience);
  lost(worker, answer);
  sweep_worker_stop(worker);
  return answer->outcome;
}

/* The numbers after "ok": how many there were, -1 for other text. */
static int read_numbers(const char *text, double *numbers, int most) {
  int count = 0;
  for (char *end; *text; text = end, count++) {
    if (count == most) return -1;
    numbers[count] = strtod(text, &end);
    if (end == text) return -1;
  }
  return count;
}

static int read_answer(const char *line, struct sweep_answer *answer) {
  double numbers[2 * SWEEP_PAIRS_MAX];
  struct sweep_gpu *gpu = &answer->gpu;
  int name = 0;
  if (sscanf(line, "gpu %d %d %d %d %n", &gpu->multiprocessors, &gpu->major, &gpu->minor, &gpu->driver, &name) == 4 &&
      name) {
    snprintf(gpu->name, sizeof gpu->name, "%s", line + name);
    return 0;
  }
  if (strncmp(line, "ok ", 3)) return -1;
  const int count = read_numbers(line + 3, numbers, 2 * SWEEP_PAIRS_MAX);
  if (count < 1) return -1;
  answer->rel_l2 = numbers[0];
  answer->us = numbers[count > 1];
  answer->pairs = count / 2;
  for (int i = 0; i < answer->pairs; i++) {
    answer->arm_us[i] = numbers[2 * i];
    answer->against_us[i] = numbers[2 * i + 1];
  }
  return 0;
}

static enum sweep_outcome nonsense(struct sweep_worker *worker, struct sweep_answer *answer) {
  snprintf(answer->why, sizeof answer->why, "a worker's answer makes no sense: %.64s", worker->line);
  lost(worker, answer);
  sweep_worker_stop(worker);
  return answer->outcome;
}

/* One whole line of the worker's. */
static enum sweep_outcome take_line(struct sweep_worker *worker, const char *line, struct sweep_answer *answer) {
  if (!strcmp(line, "ready")) {
    worker->preparing = 0;
    worker->deadline = progress_seconds() + worker->patience.measure;
    return SWEEP_WAITING;
  }
  const int is_short = !strncmp(line, "short ", 6);
  if (is_short || !strncmp(line, "bad ", 4)) {
    snprintf(answer->why, sizeof answer->why, "%.250s", strchr(line, ' ') + 1);
    lost_as(worker, is_short ? SWEEP_SHORT : SWEEP_BAD, answer);
    sweep_worker_stop(worker);
    return answer->outcome;
  }
  if (read_answer(line, answer)) return nonsense(worker, answer);
  worker->busy = 0;
  return answer->outcome = SWEEP_DONE;
}

enum sweep_outcome sweep_worker_hear(struct sweep_worker *worker, struct sweep_answer *answer) {
  struct pollfd ready = {.fd = worker->replies, .events = POLLIN};
  *answer = (struct sweep_answer){.outcome = SWEEP_WAITING};
  while (poll(&ready, 1, 0) > 0) {
    if (worker->line_size == LINE_BYTES - 1) return nonsense(worker, answer);
    const ssize_t n = read(worker->replies, worker->line + worker->line_size, LINE_BYTES - 1 - worker->line_size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return died(worker, answer);
    worker->line_size += (size_t)n;
    worker->line[worker->line_size] = 0;
    for (char *end; worker->busy && (end = memchr(worker->line, '\n', worker->line_size));) {
      *end = 0;
      if (take_line(worker, worker->line, answer) != SWEEP_WAITING) return answer->outcome;
      worker->line_size -= (size_t)(end + 1 - worker->line);
      memmove(worker->line, end + 1, worker->line_size + 1);
    }
  }
  return progress_seconds() > worker->deadline ? hung(worker, answer) : SWEEP_WAITING;
}
