/* A process that measures on one GPU, so that a kernel that crashes or hangs takes it along and nothing else. The parent,
 * which never starts CUDA, asks in lines of text over a pipe; a worker keeps its weights from one request to the next. */
#ifndef MOEFLOW_SWEEP_WORKER_H
#define MOEFLOW_SWEEP_WORKER_H

#include <sys/types.h>

#include "moeflow.h"

#define SWEEP_REL_L2_MAX 2e-3 /* of every row against the reference: beyond, an arm is wrong and is not timed */
#define SWEEP_PAIRS_MAX 64
#define SWEEP_GPU_NAME_MAX 128

struct sweep_gpu {
  char name[SWEEP_GPU_NAME_MAX]; /* as the driver says it */
  int multiprocessors;
  int major, minor; /* compute capability */
  int driver;       /* CUDA version of the driver: 13000 */
};

enum sweep_task {
  SWEEP_PROBE,
  SWEEP_SCREEN, /* check; then, if it is right, time by `count` launches */
  SWEEP_SKEW,   /* the same on a skewed routing */
  SWEEP_PAIR    /* `count` pairs in turns (ABBA) with `against`, SWEEP_PAIR_LAUNCHES each */
};
#define SWEEP_PAIR_LAUNCHES 3

struct sweep_request {
  enum sweep_task task;
  int tokens;
  double skew;
  int arm, against;
  int count;
};

/* How an arm is measured. All but `user` is called in worker processes alone: CUDA starts in `probe` or `open`. */
struct sweep_measure {
  void *user;
  moeflow_status (*probe)(void *user, int device, struct sweep_gpu *gpu); /* what the GPU is, nothing more */
  moeflow_status (*open)(void *user, int device);
  /* Whatever the request needs: weights, and routings of so many tokens a rank, uniform (skew 0) or skewed. Called before
   * each request; quick when all is there. */
  moeflow_status (*prepare)(void *user, const struct sweep_request *request);
  /* rel-L2 of the worst row of all routings. */
  moeflow_status (*check)(void *user, int arm, double *rel_l2);
  /* Mean time of a layer over `launches` launches, each of which serves all routings. */
  moeflow_status (*time)(void *user, int arm, int launches, double *microseconds);
};

enum sweep_outcome {
  SWEEP_WAITING, /* no answer yet */
  SWEEP_DONE,
  SWEEP_SHORT, /* memory ran out, which is not the arm's fault: `why`; the worker is gone */
  SWEEP_BAD,   /* the arm is to blame: `why`; the worker is gone */
  SWEEP_BROKEN /* the worker is gone before it came to the arm: `why` */
};

struct sweep_answer {
  enum sweep_outcome outcome;
  char why[256];
  struct sweep_gpu gpu;           /* PROBE */
  double rel_l2, us;              /* SCREEN, SKEW */
  int pairs;                      /* PAIR */
  double arm_us[SWEEP_PAIRS_MAX]; /* by pair */
  double against_us[SWEEP_PAIRS_MAX];
};

struct sweep_patience { /* seconds of silence before a worker counts as hung */
  double prepare;       /* to start CUDA, fill the weights, draw routings and compute their reference */
  double measure;
};

struct sweep_worker {
  pid_t process; /* 0: none; started by the next request */
  int device;
  int requests, replies; /* pipes */
  const struct sweep_measure *measure;
  struct sweep_patience patience;
  int busy;      /* a request is being answered */
  int preparing; /* ... and the arm has no part in it yet */
  double deadline;
  char *line; /* what of the answer has come */
  size_t line_size;
};

moeflow_status sweep_worker_make(struct sweep_worker *worker, const struct sweep_measure *measure, int device,
                                 struct sweep_patience patience);
void sweep_worker_stop(struct sweep_worker *worker); /* kills the process, if any */
void sweep_worker_free(struct sweep_worker *worker);

/* Starts the process if there is none. Errors are of this machine: no process, no pipe. */
moeflow_status sweep_worker_ask(struct sweep_worker *worker, const struct sweep_request *request);

/* What has become of the request, without waiting: call it when `replies` can be read or the deadline is over. Anything but
 * DONE and WAITING has ended the process. */
enum sweep_outcome sweep_worker_hear(struct sweep_worker *worker, struct sweep_answer *answer);
#endif
