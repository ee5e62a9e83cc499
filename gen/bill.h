/* What a deployment of a model costs: the packed rows byte by byte, and the memory of one rank. */
#ifndef MOEFLOW_BILL_H
#define MOEFLOW_BILL_H

#include <stdint.h>

#include "model.h"
#include "plan.h"

struct row_part {
  const char *name;
  int64_t offset, bytes;
  char content[80];
};

#define ROW_PARTS_MAX 8
struct row_layout {
  struct row_part parts[ROW_PARTS_MAX]; /* gapless, padding is a part */
  int count;
  int64_t bytes;
};

void row_layout_dispatch(const struct spec *spec, struct row_layout *layout);
void row_layout_return(const struct spec *spec, struct row_layout *layout);

struct bill {                /* bytes on one rank */
  int32_t local_experts_max; /* ceil(E / ep) */
  int32_t local_experts_min;
  int32_t ranks_with_max;   /* E % ep, or all of them */
  int64_t dispatch_buffers; /* nccl: one to send from and one to receive into, ep * C rows each */
  int64_t return_buffers;   /* the same, for the way home */
  int64_t workspace;        /* work lists, activations, FP32 outputs */
  int64_t lane;             /* the three together: once per lane, shared by all layers of a group */
  int64_t gate_up;          /* of all local experts of one layer, on the rank that has most */
  int64_t down;
  int64_t weights;
  int64_t total; /* one lane, one layer */
};

/* `plan` may be NULL where there is none (FP8); tiles are then counted for the smallest tile. */
moeflow_status bill_make(const struct model *model, const struct plan *plan, struct bill *bill);
#endif
