/* The course of a sweep: each GPU takes one point after another, each answer becomes a record on the disk, until nothing is
 * left, the time is up or a signal comes. */
#ifndef MOEFLOW_SWEEP_RUN_H
#define MOEFLOW_SWEEP_RUN_H

#include "sweep_choice.h"

#define SWEEP_DEVICES_MAX 16

struct sweep_job {
  const struct sweep_measure *measure;
  struct sweep_patience patience;
  int devices[SWEEP_DEVICES_MAX];
  int device_count;
  struct sweep_arms *arms;
  struct sweep_point *points;
  int point_count;
  struct sweep_log *log;
  double end; /* progress_seconds() at which nothing new is begun; 0: never */
};

/* What the first of the GPUs is, said by a process of its own. MOEFLOW_ERROR_ENVIRONMENT when there is none, or when the
 * devices differ: they would vote on different questions. */
moeflow_status sweep_probe(const struct sweep_measure *measure, const int *devices, int count, struct sweep_gpu *gpu);

/* Progress goes to stderr. *interrupted: SIGINT or SIGTERM came; what was being measured has become a record, unless a
 * second signal came too. A GPU that breaks twice in a row is given up; MOEFLOW_ERROR_ENVIRONMENT when none is left. */
moeflow_status sweep_run(const struct sweep_job *job, int *interrupted);
#endif
