/* What a run is, settled before anything starts: the command line, the model, the GPUs and the launcher put together. The
 * same on every rank but for the launcher's numbers. */
#ifndef MOEFLOW_RUN_SETUP_H
#define MOEFLOW_RUN_SETUP_H

#include "cache.h"
#include "gpus.h"
#include "inputs.h"
#include "launch.h"
#include "model.h"
#include "options.h"
#include "plan.h"

enum setup_ranks {
  RANKS_THREADS,  /* all in this process */
  RANKS_FORKED,   /* one child process each */
  RANKS_LAUNCHED, /* this process is one of a launcher's */
  RANKS_ELSEWHERE /* a launcher's process with nothing to do: all ranks are threads of its rank 0 */
};

struct setup {
  struct options options;
  int argc;
  char **argv;
  struct launcher launcher;
  struct model model; /* overridden by the options */
  struct gpus gpus;
  moeflow_backend backend;
  moeflow_transport transport; /* never AUTO */
  enum setup_ranks ranks;
  int log_level; /* moeflow_log_level that MOEFLOW_LOG asks for; OPTIONS_UNSET: nothing is printed */
  int ep, capacity;
  int replays;         /* repeats and graph replays of a check, launches of a timing */
  int threads_per_rank; /* of the reference */
  char yaml_sha256[65];
  char spec_text[SPEC_TEXT_MAX];
  char plan[CACHE_PATH_MAX + 256]; /* CUDA: the plan's file */
  struct inputs inputs;
};

/* From a parsed command line. Says on stderr, in one line each, what a user would not expect: no GPU, fewer GPUs than ranks,
 * shared experts left out. */
moeflow_status setup_create(struct setup *setup);
void setup_destroy(struct setup *setup);

int setup_tokens_max(const struct setup *setup); /* over all points */
#endif
