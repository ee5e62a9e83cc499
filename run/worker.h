/* One rank's life: open, group, layer, weights, points, and everything back again. The ranks agree after each part, so
 * that a failure on one ends all of them with its message; between two agreements a rank does not talk to the others. */
#ifndef MOEFLOW_RUN_WORKER_H
#define MOEFLOW_RUN_WORKER_H

#include "launch.h"
#include "setup.h"
#include "stage.h"

#define POINT_MESSAGE_MAX 768

enum point_verdict { POINT_NO = 0, POINT_YES = 1, POINT_NOT_CHECKED = 2 };

struct point_result {     /* one rank's, then the worst over the ranks */
  double rel_l2_max;      /* largest |got - want| / |want| of a row */
  double max_error_ratio; /* largest element error over its row's largest value */
  double step_us;         /* without --check: median time of a step */
  int32_t rows_checked;
  int32_t rounding_rows; /* rows beyond the bars that activations on the edge between two bf16 values explain */
  int32_t close_calls;   /* tokens whose router candidates were too close to tell apart */
  int32_t dispatch_exact, replay_exact, repeat_exact, router_exact, forms_exact; /* enum point_verdict */
  int32_t passed;
  uint8_t output_sha256[32];       /* of [tokens, H] bf16; all zero without tokens */
  char message[POINT_MESSAGE_MAX]; /* of the first check that failed, "" for none */
};

struct worker_shared { /* by the ranks of one process */
  const struct setup *setup;
  moeflow_context *context; /* opened by the lowest rank; each process has its own */
};

struct worker {
  struct worker_shared *shared;
  const struct setup *setup;
  struct star *star;
  int rank;
  int agreed; /* the failure is known to all ranks */
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  void *gate_up, *down, *bias; /* weights in the backend's memory */
  struct stage stage;
  struct point_result *results; /* one per point */
};

/* A launch_body; `user` is a struct worker_shared. */
int worker_run(void *user, int rank, struct star *star, struct launch_failure *failure);

/* star_agree; a rank that fails gives its group up first, so that peers do not wait for its steps. */
moeflow_status worker_agree(struct worker *worker, moeflow_status mine);
#endif
