/* The runtime's own structs: context, group, lane, layer. Only runtime/ (and white-box tests and moeflow-run, which reads received
 * rows for --check) include this. */
#ifndef MOEFLOW_INTERNAL_H
#define MOEFLOW_INTERNAL_H

#include <stdatomic.h>

#include "abi.h"
#include "backend.h"
#include "cache.h"
#include "comm.h"
#include "handle.h"
#include "moeflow.h"
#include "plan.h"
#include "status.h"

#define GROUP_LANES_MAX 2
#define MOEFLOW_ENTRIES_MAX (INT32_MAX - 1023) /* kernels count in int32 and step beyond the last by a chunk, tile or block */
#define SPEC_ONLY_TILE_TOKENS 8 /* a context opened from spec text (CPU) has no variants: tiles as small as any variant's */

struct moeflow_context {
  struct handle handle;
  const struct backend *backend;
  int device;
  int multiprocessors;     /* of the device; CPU: 1 */
  int cache_fd;            /* during moeflow_open, for the backend to read entries; -1 without a cache */
  char cache_path[CACHE_PATH_MAX];
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
  uint8_t *send;                        /* dispatch rows out, [ranks][R], or [R] for all; NULL for one-sided transports */
  uint8_t *received;                    /* dispatch rows in */
  uint8_t *return_send;                 /* NULL for one-sided transports */
  uint8_t *returned;
  uint8_t **dispatch_targets;           /* [ranks], see moeflow_rows_out */
  uint8_t **return_targets;
  uint32_t *flags;                      /* one-sided: a flag block, see abi.h */
  uint32_t **peer_flags;                /* one-sided: [ranks], each rank's flag block */
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
  int64_t activations_max;              /* values that there is room for */
  int64_t outputs_max;                  /* floats */
  struct moeflow_experts_control *control;
  int32_t tiles_max;                    /* of `tiles` and `control`, the same for every layer */
  /* what the lists above were made for, by the last whole step */
  const struct moeflow_layer *listed_layer;
  int listed_rows, listed_tile_tokens;
  void *window;                         /* the allocation behind flags, received and returned: what peers store into */
  size_t window_bytes;                  /* the same on all ranks, as are the parts' places in it */
  void *arena;                          /* the one behind the rest of the above except the record */
  size_t arena_bytes;
  atomic_uint eager;                    /* steps enqueued outside captures: moeflow_poll waits until so many have ended */
  atomic_uint failed_told;              /* the last failed_step that moeflow_poll has reported */
};

/* Host memory that kernels write (records) and read (abort). */
struct group_shared {
  struct moeflow_record records[GROUP_LANES_MAX];
  uint32_t abort;
  uint32_t reserved[31];
};

struct moeflow_group {
  struct handle handle;
  moeflow_context **contexts;
  int context_count;
  int rank, ranks, capacity, lane_count, timeout_ms, local_experts_max;
  int flag_words;                       /* one-sided: of each phase and source */
  moeflow_transport transport;          /* resolved, never AUTO */
  moeflow_allocator allocator;          /* allocate may be NULL: the backend's */
  struct comm *comm;
  int64_t row_bytes_max;                /* over the contexts */
  int64_t return_bytes_max;             /* per token: row bytes * rows per token */
  struct group_lane lanes[GROUP_LANES_MAX];
  struct group_shared *shared;          /* host memory that kernels can read: abort word and records */
  volatile uint32_t *abort;             /* in `shared` */
  volatile uint32_t *abort_device;
  int connected;                        /* the transport's connect ran */
  char *flight;                         /* the flight record's path, NULL for none */
  atomic_int flown;                     /* it was written */
  struct moeflow_group *workspace_of;   /* whose activations and outputs this group uses; NULL: its own */
  atomic_int borrowers;                 /* living groups that use this one's */
  atomic_int layers;
  atomic_int aborted;
};

struct layer_weights { /* as moeflow_layer_bind has checked them */
  struct moeflow_matrix gate_up, down;
  int32_t gate_row, up_row, row_step; /* gate row i of gate_up is gate_row + i * row_step */
  int packed;                         /* both are fragments; the rows mean nothing */
};

struct tensor_maps { /* of one binding, in backend memory; older ones stay while graphs may hold them */
  struct tensor_maps *older;
  struct moeflow_tensor_map *gate_up; /* [local_experts] */
  struct moeflow_tensor_map *down;    /* [local_experts], behind it in the same allocation */
  size_t bytes;                       /* of both */
  int32_t up_first;
};

struct moeflow_layer {
  struct handle handle;
  struct moeflow_group *group;
  struct moeflow_context *context;
  moeflow_combine combine;
  int32_t *places;                      /* backend memory [E, replicas] */
  int32_t *places_host;
  int replicas;
  int local_experts;
  int bound;
  int separate_sums;                    /* tools: owner_reduce adds the outputs, not the experts kernel */
  int prepared_tokens;                  /* 0 = not prepared */
  char places_hash[65];
  struct layer_weights weights;
  struct tensor_maps *maps;             /* of `weights`; NULL: the experts kernel cannot serve this layer */
  moeflow_lend_fn lend;
  void *lend_user;
  const float *correction_bias;
  int64_t *expert_load;
};

/* R: rows per peer that a step with this tokens_max moves: the next power of two, at least 1 and at most the capacity. */
int layer_rows(const struct moeflow_group *group, int tokens_max);

/* Bytes that one token takes on its way out (a row) or home (K rows with `reduce: choices`). */
int64_t layer_token_bytes(const struct moeflow_layer *layer, enum moeflow_phase phase);

/* Bytes between the blocks of two ranks in a lane's buffers for this phase. Two-sided transports move R tokens a rank. The
 * buffers of one-sided ones are divided for C tokens of the largest shape, whatever the layer, since peers store into them. */
int64_t layer_block_bytes(const struct moeflow_layer *layer, enum moeflow_phase phase, int rows);
int64_t group_block_bytes(const struct moeflow_group *group, enum moeflow_phase phase);

/* MOEFLOW_ERROR_UNSUPPORTED when a step of up to tokens_max tokens would need more blocks than a grid may have. */
moeflow_status layer_check_grids(const struct moeflow_layer *layer, int tokens_max);

/* Most blocks, at so many a multiprocessor, of a kernel that waits on the device for other ranks: what they wait for must
 * still find room. */
int group_waiting_blocks(const struct moeflow_group *group, int residency);

/* What the ranks agree on before anybody goes on: each rank brings its own status (and its last message when that is a
 * failure). Returns MOEFLOW_OK when all are; this rank's own failure; else MOEFLOW_ERROR_PEER with the peer's message. */
moeflow_status group_agree(struct moeflow_group *group, moeflow_status mine);

/* Gives the group up: the abort word ends waits on peers, every lane is poisoned. Any thread; the device is current. */
void group_poison(struct moeflow_group *group);

/* Memory from the group's allocator or the backend, zero-filled. */
moeflow_status group_allocate(struct moeflow_group *group, size_t bytes, void **memory);
void group_release(struct moeflow_group *group, void *memory, size_t bytes);

/* Make the device current on this thread around backend and transport calls. */
moeflow_status context_enter(struct moeflow_context *context);
void context_leave(struct moeflow_context *context);

/* Formats and sends one line to the context's log callback; free when there is none. */
void context_log(const struct moeflow_context *context, moeflow_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#endif
