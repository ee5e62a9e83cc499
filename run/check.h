/* What --check and the plain run do with one point. Collective; on every rank the same steps whatever the results, so that
 * a failed comparison is recorded and the ranks stay in step. A status other than MOEFLOW_OK has been agreed on by all
 * ranks. */
#ifndef MOEFLOW_RUN_CHECK_H
#define MOEFLOW_RUN_CHECK_H

#include "worker.h"

moeflow_status check_point(struct worker *worker, int point, struct point_result *result);

/* Steps without comparisons; their median time is no benchmark. */
moeflow_status check_nothing(struct worker *worker, int point, struct point_result *result);

/* ---- The parts of the check, for its files and tests: each records what it finds in check->result ---- */

struct check { /* one rank at one point */
  struct worker *worker;
  int point;
  struct stage_step step; /* the main form */
  uint16_t *hidden;       /* [tokens, H] */
  float *logits;          /* [tokens, E] */
  int32_t *ids;           /* [tokens, K] what the router chose, or with --ids the reference's choice */
  float *weights;
  uint16_t *output;       /* of the first step, compared with the reference; everything else with it, bitwise */
  uint16_t *scratch;      /* another step's output */
  struct point_result *result;
};

/* Clears the verdict and keeps the message if it is the first. */
void check_fail(struct check *check, int32_t *verdict, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* " of experts 3, 17" of a token's picks, for messages. */
void check_experts(const struct check *check, int token, char text[256]);

/* Every live row that this rank received in the last step on the main form's lane, against what its source sent. all_ids and
 * all_weights: [ranks, tokens_max, K], gathered from the ranks. */
moeflow_status check_dispatch(struct check *check, const int32_t *all_ids, const float *all_weights);

/* The router's picks in check->ids and check->weights against the reference's; main form STAGE_LOGITS only. */
void check_router(struct check *check);

/* Which of this rank's tokens the reference computes: all, or from 512 tokens over all ranks up a seeded sample with the
 * first and the last. rows has room for all; returns how many were chosen. */
int check_choose_rows(const struct check *check, int *rows);

/* check->output of the chosen rows against the reference, given check->ids and check->weights. */
moeflow_status check_reference(struct check *check);

/* check->scratch against check->output, bit for bit; `what` and `number` name the step. */
void check_same(struct check *check, int32_t *verdict, const char *what, int number);

/* One step of identity experts with one live choice a token: the hidden state must come home bit for bit. */
moeflow_status check_identity(struct check *check);

/* Its comparison: check->scratch against the hidden state, times the scale if that is on the output. */
void check_returned(struct check *check, const int32_t *ids);
#endif
