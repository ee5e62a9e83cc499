/* What the command `sweep` knows while it runs: shared by what asks (sweep.c) and what tells (sweep_result.c). */
#ifndef MOEFLOW_SWEEP_COMMAND_H
#define MOEFLOW_SWEEP_COMMAND_H

#include "command.h"
#include "sweep.h"
#include "sweep_run.h"
#include "sweep_space.h"
#include "tune_find.h"

struct sweep {
  const struct gen_options *options;
  struct model model; /* of one arch: the GPU's */
  struct sweep_gpu gpu;
  struct sweep_measure measure;
  struct sweep_setting setting;
  struct toolchain toolchain;
  struct store store;
  struct units units; /* of the default plan */
  struct sweep_arms arms;
  struct sweep_point points[SWEEP_POINTS_MAX];
  int point_count;
  struct sweep_plans plans;
  struct sweep_log log;
  struct sweep_job job;
  struct tune old, tune; /* what the file held, and what it will */
  char output[TUNE_PATH_MAX];
  int known; /* records of an earlier sweep */
  int legal, space;
  double start;
  int interrupted;
};

/* Lines for rows that this sweep does not measure stay, if they were measured with the same toolchain. A file that cannot be
 * read, or is of another model or GPU, is an error. Called before anything is measured, and again before writing. */
moeflow_status sweep_read_old(struct sweep *sweep);

/* The result on stdout, then the tuned file. MOEFLOW_ERROR_INTERNAL: at some size nothing is right. */
moeflow_status sweep_write_result(struct sweep *sweep);

/* How to go on, on stderr. */
void sweep_say_resume(const struct sweep *sweep, const char *why);
#endif
