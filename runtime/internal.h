/* The runtime's own structs: context, group, lane, layer. Only runtime/ (and white-box tests and moeflow-run, which reads received
 * rows for --check) include this. */
#ifndef MOEFLOW_INTERNAL_H
#define MOEFLOW_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "abi.h"
#include "backend.h"
#include "comm.h"
#include "moeflow.h"
#include "plan.h"
#include "status.h"

#define GROUP_LANES_MAX 2

struct moeflow_context {
  const struct backend *backend;
  int device;
  int64_t process;         /* getpid() at creation: use after fork is MOEFLOW_ERROR_STATE */
  struct plan plan;        /* CPU from spec text: only plan.spec is set */
  char spec_text[SPEC_TEXT_MAX];
  char spec_hash[65];
  char plan_hash[65];      /* CPU from spec text: the spec's hash */
  moeflow_log_fn log;
  void *log_user;
  atomic_int groups;       /* living groups that use the context */
  void *backend_state;     /* CUDA: device, context, modules, functions */
};

/* One micro-batch in flight: its own buffers, epoch and flags. All pointers are backend memory unless said otherwise. */
struct group_lane {
  struct moeflow_lane *state;
  struct moeflow_record *record;        /* host view */
  struct moeflow_record *record_device; /* the same memory as kernels see it */
  uint8_t *send;                        /* dispatch rows out, [ranks][R]; NULL for one-sided transports */
  uint8_t *received;                    /* dispatch rows in */
  uint8_t *return_send;                 /* NULL for one-sided transports */
  uint8_t *returned;
  uint8_t **dispatch_targets;           /* [ranks], see moeflow_rows_out */
  uint8_t **return_targets;
  uint32_t *flags;                      /* one-sided: [3][ranks], see moeflow_exchange_params */
  uint32_t **peer_flags;                /* one-sided: [ranks] */
  /* workspace, in the order of a step */
  int32_t *ids;                         /* router: [C, K] */
  float *weights;
  int32_t *token_places;                /* pack: [C, K] */
  float *token_weights;
  int32_t *chunk_counts;                /* [chunks, local_experts_max] */
  int32_t *expert_offsets;
  int32_t *entries;
  int32_t *positions;
  struct moeflow_tile *tiles;
  int32_t *tile_count;
  uint16_t *activations;
  float *outputs;
  void *arena;                          /* the one allocation behind all of the above except record and targets' owners */
};

struct moeflow_group {
  moeflow_context **contexts;
  int context_count;
  int rank, ranks, capacity, lane_count, timeout_ms, local_experts_max;
  moeflow_transport transport;          /* resolved, never AUTO */
  moeflow_allocator allocator;          /* allocate may be NULL: the backend's */
  struct comm *comm;
  int64_t row_bytes_max;                /* over the contexts */
  int64_t return_bytes_max;             /* per token: row bytes * rows per token */
  struct group_lane lanes[GROUP_LANES_MAX];
  volatile uint32_t *abort;             /* host memory that kernels can read */
  volatile uint32_t *abort_device;
  atomic_int layers;
  atomic_int aborted;
};

struct moeflow_layer {
  struct moeflow_group *group;
  struct moeflow_context *context;
  moeflow_combine combine;
  int32_t *places;                      /* backend memory [E, replicas] */
  int32_t *places_host;
  int replicas;
  int local_experts;
  int bound;
  int prepared_tokens;                  /* 0 = not prepared */
  struct moeflow_matrix gate_up, down;
  int32_t gate_row, up_row, row_step;
  moeflow_lend_fn lend;
  void *lend_user;
  const float *correction_bias;
  int64_t *expert_load;
};

/* R: rows per peer that a step with this tokens_max moves: the next power of two, at least 1 and at most the capacity. */
int layer_rows(const struct moeflow_group *group, int tokens_max);

/* Formats and sends one line to the context's log callback; free when there is none. */
void context_log(const struct moeflow_context *context, moeflow_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#endif
