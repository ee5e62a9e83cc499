#include "pool.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "status.h"

struct reply { /* on the pipe, then output.bytes, then the log */
  int32_t task;
  int32_t status;
  uint32_t size;
  uint32_t log_size;
  char message[2048];
};

struct worker {
  pid_t process; /* 0: gone */
  int requests;  /* parent writes task numbers */
  int replies;
  int task; /* -1: idle */
  double deadline;
};

struct pool {
  const struct pool_job *job;
  struct worker workers[POOL_WORKERS_MAX];
  int count;
  int next; /* the first task not handed out */
  int finished;
  struct sigaction old_interrupt, old_terminate, old_hangup, old_pipe;
  sigset_t old_mask;
};

static volatile sig_atomic_t stop_signal;

static void note_signal(int number) {
  stop_signal = number;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int pool_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  long count = sysconf(_SC_NPROCESSORS_ONLN);
  return count > 0 ? (int)count : 1;
}

/* ---- In the worker ---- */

static int transfer(int fd, void *bytes, size_t size, int writing) {
  for (size_t done = 0; done < size;) {
    ssize_t n = writing ? write(fd, (char *)bytes + done, size - done) : read(fd, (char *)bytes + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return -1;
    done += (size_t)n;
  }
  return 0;
}

/* CPU seconds are counted over the worker's life, so each task gets a fresh margin. */
static void limit_cpu(int timeout_s) {
  struct rusage usage;
  struct rlimit limit;
  if (getrusage(RUSAGE_SELF, &usage) != 0 || getrlimit(RLIMIT_CPU, &limit) != 0) return;
  rlim_t soft = (rlim_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 2 + timeout_s);
  if (limit.rlim_max == RLIM_INFINITY || soft < limit.rlim_max) limit.rlim_cur = soft;
  setrlimit(RLIMIT_CPU, &limit);
}

static void worker_signals(const struct pool *pool) {
  struct sigaction standard = {.sa_handler = SIG_DFL};
  sigaction(SIGINT, &standard, NULL);
  sigaction(SIGTERM, &standard, NULL);
  sigaction(SIGHUP, &standard, NULL);
  sigaction(SIGPIPE, &standard, NULL);
  sigprocmask(SIG_SETMASK, &pool->old_mask, NULL);
}

__attribute__((noreturn)) static void worker_main(const struct pool *pool, int requests, int replies, pid_t parent) {
  struct rlimit none = {0, 0};
  int32_t task;
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* a killed parent leaves nothing behind */
  if (getppid() != parent) _exit(1);
  worker_signals(pool);
  setrlimit(RLIMIT_CORE, &none);
  while (transfer(requests, &task, sizeof task, 0) == 0) {
    struct pool_output output = {.size = 0};
    struct reply reply = {.task = task};
    limit_cpu(pool->job->timeout_s);
    reply.status = pool->job->work(pool->job->user, task, &output);
    reply.size = (uint32_t)output.size;
    size_t log_size = output.log ? strlen(output.log) : 0;
    reply.log_size = (uint32_t)(log_size < POOL_OUTPUT_MAX ? log_size : POOL_OUTPUT_MAX);
    if (reply.status != MOEFLOW_OK) snprintf(reply.message, sizeof reply.message, "%s", moeflow_last_error());
    int failed = transfer(replies, &reply, sizeof reply, 1) || transfer(replies, output.bytes, output.size, 1) ||
                 transfer(replies, output.log, reply.log_size, 1);
    free(output.log);
    if (failed) break;
  }
  _exit(0);
}

/* ---- In the parent ---- */

static void close_worker(struct worker *worker) {
  if (worker->requests >= 0) close(worker->requests);
  if (worker->replies >= 0) close(worker->replies);
  worker->requests = worker->replies = -1;
}

static moeflow_status start_worker(struct pool *pool) {
  int requests[2] = {-1, -1}, replies[2] = {-1, -1};
  struct worker *worker = &pool->workers[pool->count];
  pid_t parent = getpid();
  if (pipe(requests) != 0 || pipe(replies) != 0) goto fail;
  fflush(NULL);
  worker->process = fork();
  if (worker->process < 0) goto fail;
  if (worker->process == 0) {
    setpgid(0, 0); /* a terminal's Ctrl-C goes to the parent, which ends the workers in order */
    for (int i = 0; i < pool->count; i++) close_worker(&pool->workers[i]);
    close(requests[1]);
    close(replies[0]);
    worker_main(pool, requests[0], replies[1], parent);
  }
  setpgid(worker->process, worker->process);
  close(requests[0]);
  close(replies[1]);
  worker->requests = requests[1];
  worker->replies = replies[0];
  worker->task = -1;
  pool->count++;
  return MOEFLOW_OK;
fail:
  status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot start a worker process: %s", strerror(errno));
  worker->process = 0;
  for (int i = 0; i < 2; i++) {
    if (requests[i] >= 0) close(requests[i]);
    if (replies[i] >= 0) close(replies[i]);
  }
  return MOEFLOW_ERROR_ENVIRONMENT;
}

static void kill_worker(struct worker *worker) {
  close_worker(worker);
  if (!worker->process) return;
  kill(-worker->process, SIGKILL);
  kill(worker->process, SIGKILL);
  while (waitpid(worker->process, NULL, 0) < 0 && errno == EINTR) continue;
  worker->process = 0;
}

/* The worker ended without an answer: say how. */
static moeflow_status report_death(const struct pool *pool, struct worker *worker) {
  int how = 0;
  const char *name = pool->job->name(pool->job->user, worker->task);
  close_worker(worker);
  while (waitpid(worker->process, &how, 0) < 0 && errno == EINTR) continue;
  worker->process = 0;
  if (WIFSIGNALED(how)) {
    const char *abbreviation = sigabbrev_np(WTERMSIG(how));
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the worker on %s was killed by signal %d (SIG%s)%s", name, WTERMSIG(how),
                      abbreviation ? abbreviation : "?",
                      WTERMSIG(how) == SIGKILL ? "; out of memory? try fewer --jobs" : "");
  }
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the worker on %s ended without an answer (exit code %d)", name,
                    WEXITSTATUS(how));
}

/* Gives the worker its next task, if there is one. */
static moeflow_status hand_out(struct pool *pool, struct worker *worker) {
  worker->task = -1;
  if (pool->next >= pool->job->tasks) return MOEFLOW_OK;
  int32_t task = pool->next++;
  worker->task = task;
  worker->deadline = seconds() + pool->job->timeout_s;
  if (transfer(worker->requests, &task, sizeof task, 1) != 0) return report_death(pool, worker);
  return MOEFLOW_OK;
}

static moeflow_status collect(struct pool *pool, struct worker *worker) {
  struct reply reply;
  struct pool_output output = {.size = 0};
  moeflow_status status;
  if (transfer(worker->replies, &reply, sizeof reply, 0) != 0) return report_death(pool, worker);
  if (reply.size > sizeof output.bytes || reply.log_size > POOL_OUTPUT_MAX || reply.task != worker->task) {
    return status_set(MOEFLOW_ERROR_INTERNAL, "a worker's answer on task %d is malformed", worker->task);
  }
  output.size = reply.size;
  output.log = calloc(1, (size_t)reply.log_size + 1);
  if (!output.log) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a worker's log of %u bytes", reply.log_size);
  if (transfer(worker->replies, output.bytes, output.size, 0) != 0 ||
      transfer(worker->replies, output.log, reply.log_size, 0) != 0) {
    free(output.log);
    return report_death(pool, worker);
  }
  reply.message[sizeof reply.message - 1] = 0;
  status = (moeflow_status)reply.status;
  if (status != MOEFLOW_OK) status_set(status, "%s", reply.message);
  pool->finished++;
  pool->job->done(pool->job->user, reply.task, status, &output);
  if (status != MOEFLOW_OK) status_set(status, "%s", reply.message); /* `done` may have set another */
  free(output.log);
  return status != MOEFLOW_OK ? status : hand_out(pool, worker);
}

static moeflow_status check_deadlines(struct pool *pool, double now) {
  for (int i = 0; i < pool->count; i++) {
    struct worker *worker = &pool->workers[i];
    if (worker->task >= 0 && now > worker->deadline) {
      return status_set(MOEFLOW_ERROR_TIMEOUT, "%s took longer than %d s; its worker was killed",
                        pool->job->name(pool->job->user, worker->task), pool->job->timeout_s);
    }
  }
  return MOEFLOW_OK;
}

/* Waits for answers until the nearest deadline; signals are let in only here, so that none is missed. */
static moeflow_status wait_once(struct pool *pool) {
  struct pollfd fds[POOL_WORKERS_MAX];
  double now = seconds(), nearest = now + 3600;
  moeflow_status status = MOEFLOW_OK;
  for (int i = 0; i < pool->count; i++) {
    fds[i] = (struct pollfd){.fd = pool->workers[i].task >= 0 ? pool->workers[i].replies : -1, .events = POLLIN};
    if (pool->workers[i].task >= 0 && pool->workers[i].deadline < nearest) nearest = pool->workers[i].deadline;
  }
  double left = nearest > now ? nearest - now : 0;
  struct timespec timeout = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
  int ready = ppoll(fds, (nfds_t)pool->count, &timeout, &pool->old_mask);
  if (ready < 0 && errno != EINTR) FAIL(MOEFLOW_ERROR_INTERNAL, "poll: %s", strerror(errno));
  for (int i = 0; ready > 0 && i < pool->count; i++) {
    if (fds[i].revents) CHECK(collect(pool, &pool->workers[i]));
  }
  CHECK(check_deadlines(pool, seconds()));
cleanup:
  return status;
}

static void signals_begin(struct pool *pool) {
  struct sigaction note = {.sa_handler = note_signal}, ignore = {.sa_handler = SIG_IGN};
  sigset_t blocked;
  stop_signal = 0;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGINT);
  sigaddset(&blocked, SIGTERM);
  sigaddset(&blocked, SIGHUP);
  sigprocmask(SIG_BLOCK, &blocked, &pool->old_mask);
  sigaction(SIGINT, &note, &pool->old_interrupt);
  sigaction(SIGTERM, &note, &pool->old_terminate);
  sigaction(SIGHUP, &note, &pool->old_hangup);
  sigaction(SIGPIPE, &ignore, &pool->old_pipe);
}

static void signals_end(struct pool *pool) {
  sigprocmask(SIG_SETMASK, &pool->old_mask, NULL); /* a pending one is noted now */
  sigaction(SIGINT, &pool->old_interrupt, NULL);
  sigaction(SIGTERM, &pool->old_terminate, NULL);
  sigaction(SIGHUP, &pool->old_hangup, NULL);
  sigaction(SIGPIPE, &pool->old_pipe, NULL);
}

moeflow_status pool_run(const struct pool_job *job, int *interrupted) {
  moeflow_status status = MOEFLOW_OK;
  struct pool pool = {.job = job};
  int workers = job->workers > 0 ? job->workers : pool_cpus();
  if (workers > job->tasks) workers = job->tasks;
  if (workers > POOL_WORKERS_MAX) workers = POOL_WORKERS_MAX;
  *interrupted = 0;
  signals_begin(&pool);
  for (int i = 0; i < workers; i++) CHECK(start_worker(&pool));
  for (int i = 0; i < workers; i++) CHECK(hand_out(&pool, &pool.workers[i]));
  while (pool.finished < job->tasks && !stop_signal) CHECK(wait_once(&pool));
cleanup:
  for (int i = 0; i < pool.count; i++) kill_worker(&pool.workers[i]);
  signals_end(&pool);
  if (stop_signal) {
    *interrupted = 1;
    status = status_set(MOEFLOW_ERROR_STATE, "interrupted by SIG%s", stop_signal == SIGINT ? "INT" : "TERM");
  }
  return status;
}
