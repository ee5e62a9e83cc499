/* Worker processes: forked once, each does one task after another, results come back over pipes. The parent never runs a
 * task, so a compiler that crashes or hangs takes a worker with it and nothing else. */
#ifndef MOEFLOW_POOL_H
#define MOEFLOW_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

#define POOL_WORKERS_MAX 64
#define POOL_OUTPUT_MAX (1 << 20)

struct pool_output { /* what a task hands back: bytes of the task's own making, a malloc'ed log that may be NULL */
  uint8_t bytes[1024];
  size_t size;
  char *log;
};

struct pool_job {
  int tasks;
  int workers;   /* at most POOL_WORKERS_MAX; 0: the number of CPUs this process may use */
  int timeout_s; /* per task; the worker is killed */
  void *user;
  /* In a worker. The status's message travels too. */
  moeflow_status (*work)(void *user, int task, struct pool_output *output);
  /* In the parent, once per finished task, in order of finishing. `status` is the task's; moeflow_last_error() its message.
   */
  void (*done)(void *user, int task, moeflow_status status, const struct pool_output *output);
  const char *(*name)(void *user, int task); /* for messages about killed workers */
};

/* Runs all tasks; the first failure stops the rest. Its status, with its message; MOEFLOW_ERROR_TIMEOUT or _ENVIRONMENT for
 * a worker that was killed (by which signal). *interrupted is 1 after SIGINT or SIGTERM: workers are gone, the caller exits
 * with 130. Call it before NVRTC or the driver is loaded and while the process has one thread. */
moeflow_status pool_run(const struct pool_job *job, int *interrupted);

/* CPUs that this process may run on. */
int pool_cpus(void);
#endif
