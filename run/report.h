/* What a run found: a table for people, JSON for everybody else. */
#ifndef MOEFLOW_RUN_REPORT_H
#define MOEFLOW_RUN_REPORT_H

#include "setup.h"
#include "worker.h"

struct report_facts { /* noted while the group lives */
  struct gpu *gpus;   /* [ep], by rank; names are "" on the CPU */
  int nccl;           /* NCCL's version, 0 without */
  struct plan *plan;  /* CUDA: with the cubins' hashes */
  char plan_hash[65];
  char backend[16], transport[16];
  int nvrtc;          /* major * 1000 + minor * 10, 0 unknown */
};

/* On rank 0, with context and group alive. */
moeflow_status report_facts_create(const struct setup *setup, const moeflow_context *context, const moeflow_group *group,
                                   struct report_facts *facts);
void report_facts_destroy(struct report_facts *facts);

/* results: [ep][points]. Writes the result to stdout and --output, and a failed check's message to stderr. */
moeflow_status report_write(const struct setup *setup, const struct report_facts *facts, const struct point_result *results,
                            int *passed);

/* The worst over the ranks of one point; the message is the first failing rank's. The output's hash is that of the hashes of
 * the ranks that have tokens, in rank order: with all tokens on rank 0 it can be compared between numbers of ranks. */
struct point_result report_merge(const struct point_result *results, int ranks, int points, int point);
#endif
