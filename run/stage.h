/* One rank's inputs and output in the backend's memory, its stream, and steps run on them: eagerly or as a captured graph.
 * One thread at a time, with the context entered. */
#ifndef MOEFLOW_RUN_STAGE_H
#define MOEFLOW_RUN_STAGE_H

#include <stdint.h>

#include "internal.h"

enum stage_form { /* how a step is told where tokens go */
  STAGE_LOGITS,   /* the layer's router chooses */
  STAGE_IDS32,
  STAGE_IDS64
};

struct stage_step {
  int tokens, tokens_max;
  enum stage_form form;
  int lane;
  unsigned flags; /* moeflow_forward_flags */
};

struct stage {
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  int cuda, timeout_ms;
  void *hidden, *logits, *ids32, *ids64, *weights, *out;
  void *stream; /* CUstream and so on; NULL on the CPU */
  void *graph;
  void *events[2];
};

/* Room for tokens_max tokens. */
moeflow_status stage_create(moeflow_layer *layer, int tokens_max, int timeout_ms, struct stage *stage);
void stage_destroy(struct stage *stage);

/* hidden [tokens, H] bf16 and, unless NULL, logits [tokens, E]. */
moeflow_status stage_load(struct stage *stage, int tokens, const uint16_t *hidden, const float *logits);

/* ids and weights [tokens, K], in both widths. */
moeflow_status stage_load_ids(struct stage *stage, int tokens, const int32_t *ids, const float *weights);

/* Fills the output with NaN, runs one step to its end (bounded), and polls the group. */
moeflow_status stage_run(struct stage *stage, const struct stage_step *step);

/* GPU only: captures the step on the stream; replays it as stage_run would run it. *ms (may be NULL): how long it took. */
moeflow_status stage_capture(struct stage *stage, const struct stage_step *step);
moeflow_status stage_replay(struct stage *stage, const struct stage_step *step, float *ms);
void stage_forget_graph(struct stage *stage);

/* The output of the last step; the ids and weights that the lane's router chose in it. */
moeflow_status stage_output(struct stage *stage, int tokens, uint16_t *out);
moeflow_status stage_picks(struct stage *stage, int lane, int tokens, int32_t *ids, float *weights);
#endif
