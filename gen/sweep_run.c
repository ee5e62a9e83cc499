#include "sweep_run.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "progress.h"
#include "status.h"

#define BREAKS_MAX 2
#define SCREENING_SHARE 0.6 /* of a point's time; the rest is for skew and pairs */
#define PROBE_SECONDS 60

struct device {
  struct sweep_worker worker;
  struct sweep_request request; /* while the worker is busy */
  int point;                    /* -1: none taken */
  double closing, over;         /* when the point's phases begin; 0: never */
  int breaks;                   /* in a row */
  int given_up;
};

struct run {
  const struct sweep_job *job;
  struct device devices[SWEEP_DEVICES_MAX];
  char taken[SWEEP_POINTS_MAX];
  struct progress progress;
  char broken[320]; /* why the last device was given up */
};

static volatile sig_atomic_t stop_signals;

static void note_signal(int number) {
  (void)number;
  stop_signals++;
}

/* ---- One device ---- */

static enum sweep_phase phase_of(const struct device *device) {
  const double now = progress_seconds();
  if (device->over && now >= device->over) return SWEEP_OVER;
  return device->closing && now >= device->closing ? SWEEP_CLOSING : SWEEP_OPEN;
}

/* Takes the first point that nobody has, with a share of the time that is left: the devices take the others alike. */
static int take_point(struct run *run, struct device *device) {
  const struct sweep_job *job = run->job;
  const double now = progress_seconds();
  int left = 0;
  for (int i = job->point_count - 1; i >= 0; i--) {
    if (run->taken[i]) continue;
    device->point = i;
    left++;
  }
  if (!left) return 0;
  run->taken[device->point] = 1;
  device->closing = device->over = 0;
  if (!job->end) return 1;
  const double rounds = (double)left / job->device_count;
  const double share = (job->end - now) / (rounds > 1 ? rounds : 1);
  device->closing = now + SCREENING_SHARE * share;
  device->over = now + share;
  return 1;
}

/* The next request of this device's point, or of the next point. 0: there is nothing for it to do. */
static int find_work(struct run *run, struct device *device) {
  const struct sweep_job *job = run->job;
  for (;;) {
    if (device->point < 0 && !take_point(run, device)) return 0;
    if (sweep_next(job->arms, &job->points[device->point], phase_of(device), &device->request)) return 1;
    device->point = -1;
  }
}

static int count_left(const struct run *run) {
  const struct sweep_job *job = run->job;
  int left = 0;
  for (int d = 0; d < job->device_count; d++) {
    const struct device *device = &run->devices[d];
    if (device->point >= 0) left += sweep_left(job->arms, &job->points[device->point], phase_of(device));
  }
  for (int i = 0; i < job->point_count; i++)
    if (!run->taken[i]) left += sweep_left(job->arms, &job->points[i], SWEEP_OPEN);
  return left;
}

static void say(struct run *run, const struct sweep_record *record) {
  char line[400];
  int used = snprintf(line, sizeof line, "rows %d %s", record->rows, record->arm);
  if (record->event == SWEEP_FAILED) {
    snprintf(line + used, sizeof line - (size_t)used, " failed: %s", record->why);
  } else if (record->event == SWEEP_SKIPPED) {
    snprintf(line + used, sizeof line - (size_t)used, " not measured at this size: %s", record->why);
  } else if (record->event == SWEEP_PAIRED) {
    snprintf(line + used, sizeof line - (size_t)used, " %+.2f %% (%.2f to %.2f) against the default's %.1f us",
             record->values[SWEEP_GAP], record->values[SWEEP_GAP_LOW], record->values[SWEEP_GAP_HIGH],
             record->values[SWEEP_DEFAULT_US]);
  } else {
    snprintf(line + used, sizeof line - (size_t)used, " %.1f us%s", record->values[SWEEP_US],
             record->event == SWEEP_SKEWED ? " skewed" : "");
  }
  if ((record->event == SWEEP_FAILED || record->event == SWEEP_SKIPPED) && run->progress.terminal)
    fprintf(stderr, "\r\033[K%s\n", line);
  run->progress.total = run->progress.done + 1 + count_left(run);
  progress_step(&run->progress, line);
}

/* Once more, then never: the point goes back, for another device to take. */
static void broke(struct run *run, struct device *device, const char *why) {
  progress_end(&run->progress);
  fprintf(stderr, "moeflow-gen sweep: GPU %d: %s%s\n", device->worker.device, why,
          ++device->breaks < BREAKS_MAX ? "; once more" : "; given up");
  if (device->breaks < BREAKS_MAX) return;
  device->given_up = 1;
  run->taken[device->point] = 0;
  device->point = -1;
  snprintf(run->broken, sizeof run->broken, "GPU %d: %s", device->worker.device, why);
}

static moeflow_status hear(struct run *run, struct device *device) {
  const struct sweep_job *job = run->job;
  struct sweep_point *point = &job->points[device->point];
  struct sweep_answer answer;
  struct sweep_record record;
  const enum sweep_outcome outcome = sweep_worker_hear(&device->worker, &answer);
  if (outcome == SWEEP_WAITING) return MOEFLOW_OK;
  if (outcome == SWEEP_BROKEN) {
    broke(run, device, answer.why);
    return MOEFLOW_OK;
  }
  device->breaks = 0;
  sweep_judge(job->arms, point, &device->request, &answer, &record);
  moeflow_status status = sweep_log_append(job->log, &record);
  if (status != MOEFLOW_OK) return status;
  sweep_learn(job->arms, job->points, job->point_count, &record);
  say(run, &record);
  return MOEFLOW_OK;
}

/* ---- All of them ---- */

/* Gives every idle device its next request. *busy: how many are at work. */
static moeflow_status hand_out(struct run *run, int *busy) {
  const struct sweep_job *job = run->job;
  *busy = 0;
  for (int d = 0; d < job->device_count; d++) {
    struct device *device = &run->devices[d];
    if (!device->worker.busy && !stop_signals && !device->given_up && find_work(run, device)) {
      moeflow_status status = sweep_worker_ask(&device->worker, &device->request);
      if (status != MOEFLOW_OK) return status;
    }
    *busy += device->worker.busy;
  }
  return MOEFLOW_OK;
}

/* Until an answer, the nearest deadline or a signal; signals are let in only here. */
static moeflow_status wait_once(struct run *run, const sigset_t *open_mask) {
  const struct sweep_job *job = run->job;
  struct pollfd fds[SWEEP_DEVICES_MAX];
  const double now = progress_seconds();
  double nearest = now + 3600;
  for (int d = 0; d < job->device_count; d++) {
    const struct sweep_worker *worker = &run->devices[d].worker;
    fds[d] = (struct pollfd){.fd = worker->busy ? worker->replies : -1, .events = POLLIN};
    if (worker->busy && worker->deadline < nearest) nearest = worker->deadline;
  }
  const double left = nearest > now ? nearest - now + 0.001 : 0;
  const struct timespec timeout = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
  const int ready = ppoll(fds, (nfds_t)job->device_count, &timeout, open_mask);
  if (ready < 0 && errno != EINTR) return status_set(MOEFLOW_ERROR_INTERNAL, "poll: %s", strerror(errno));
  sigset_t blocked; /* ppoll leaves a signal pending that came together with an answer */
  sigprocmask(SIG_SETMASK, open_mask, &blocked);
  sigprocmask(SIG_SETMASK, &blocked, NULL);
  for (int d = 0; d < job->device_count; d++) {
    if (!run->devices[d].worker.busy) continue;
    moeflow_status status = hear(run, &run->devices[d]);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

static moeflow_status check_devices(struct run *run) {
  int alive = 0;
  for (int d = 0; d < run->job->device_count; d++) alive += !run->devices[d].given_up;
  return alive ? MOEFLOW_OK : status_set(MOEFLOW_ERROR_ENVIRONMENT, "no GPU can measure: %s", run->broken);
}

static moeflow_status loop(struct run *run, const sigset_t *open_mask) {
  moeflow_status status = MOEFLOW_OK;
  int busy, told = 0;
  for (;;) {
    CHECK(hand_out(run, &busy));
    if (!busy || stop_signals > 1) break;
    if (stop_signals && !told++) {
      progress_end(&run->progress);
      fprintf(stderr, "moeflow-gen sweep: ending what is being measured; once more to stop at once\n");
    }
    CHECK(wait_once(run, open_mask));
    CHECK(check_devices(run));
  }
cleanup:
  return status;
}

moeflow_status sweep_run(const struct sweep_job *job, int *interrupted) {
  moeflow_status status = MOEFLOW_OK;
  struct run run = {.job = job};
  struct sigaction note = {.sa_handler = note_signal}, ignore = {.sa_handler = SIG_IGN}, old[4];
  sigset_t blocked, open_mask;
  stop_signals = 0;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGINT);
  sigaddset(&blocked, SIGTERM);
  sigaddset(&blocked, SIGHUP);
  sigprocmask(SIG_BLOCK, &blocked, &open_mask);
  sigaction(SIGINT, &note, &old[0]);
  sigaction(SIGTERM, &note, &old[1]);
  sigaction(SIGHUP, &note, &old[3]); /* a closed terminal: what is known stays, and no folder is left behind */
  sigaction(SIGPIPE, &ignore, &old[2]);
  progress_begin(&run.progress, 0);
  for (int d = 0; d < job->device_count; d++) {
    run.devices[d].point = -1;
    CHECK(sweep_worker_make(&run.devices[d].worker, job->measure, job->devices[d], job->patience));
  }
  CHECK(loop(&run, &open_mask));
cleanup:
  progress_end(&run.progress);
  for (int d = 0; d < job->device_count; d++) sweep_worker_free(&run.devices[d].worker);
  sigprocmask(SIG_SETMASK, &open_mask, NULL); /* a pending one is noted now */
  sigaction(SIGINT, &old[0], NULL);
  sigaction(SIGTERM, &old[1], NULL);
  sigaction(SIGHUP, &old[3], NULL);
  sigaction(SIGPIPE, &old[2], NULL);
  *interrupted = stop_signals > 0;
  return status;
}

/* ---- What the GPUs are ---- */

static moeflow_status probe_one(const struct sweep_measure *measure, int device, struct sweep_gpu *gpu) {
  moeflow_status status = MOEFLOW_OK;
  struct sweep_worker worker;
  struct sweep_answer answer = {.outcome = SWEEP_WAITING};
  CHECK(sweep_worker_make(&worker, measure, device, (struct sweep_patience){PROBE_SECONDS, PROBE_SECONDS}));
  CHECK(sweep_worker_ask(&worker, &(struct sweep_request){.task = SWEEP_PROBE}));
  while (answer.outcome == SWEEP_WAITING) {
    struct pollfd ready = {.fd = worker.replies, .events = POLLIN};
    poll(&ready, 1, 1000);
    sweep_worker_hear(&worker, &answer);
  }
  if (answer.outcome != SWEEP_DONE) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "GPU %d: %s", device, answer.why);
  *gpu = answer.gpu;
cleanup:
  sweep_worker_free(&worker);
  return status;
}

moeflow_status sweep_probe(const struct sweep_measure *measure, const int *devices, int count, struct sweep_gpu *gpu) {
  for (int i = 0; i < count; i++) {
    struct sweep_gpu other;
    moeflow_status status = probe_one(measure, devices[i], i ? &other : gpu);
    if (status != MOEFLOW_OK) return status;
    if (i && (strcmp(gpu->name, other.name) || gpu->multiprocessors != other.multiprocessors))
      return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                        "GPU %d is a %s with %d multiprocessors, GPU %d a %s with %d: give devices of one kind", devices[0],
                        gpu->name, gpu->multiprocessors, devices[i], other.name, other.multiprocessors);
  }
  return MOEFLOW_OK;
}
