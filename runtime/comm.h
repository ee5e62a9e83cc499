/* A transport: how rows travel between the ranks of a group. forward.c knows nothing of it beyond this table. */
#ifndef MOEFLOW_COMM_H
#define MOEFLOW_COMM_H

#include "abi.h"
#include "moeflow.h"

struct moeflow_group;
struct group_lane;

struct comm { /* the transport's own struct begins with this */
  const struct comm_ops *ops;
};

struct comm_ops {
  const char *name;
  int one_sided; /* kernels store into the peers' buffers; no send buffers, and blocks of C rows instead of R */
  int broadcast; /* each row goes once, to all ranks; the owners' sums come home as one, added: `send` and `returned` have one
                    block, and rows without an entry on a rank come from it as zeros */
  int over_nccl; /* its version is part of the ranks' fingerprint */
  /* Collective, bounded by the group's timeout. */
  moeflow_status (*create)(struct moeflow_group *group, const moeflow_group_config *config, struct comm **comm);
  void (*destroy)(struct comm *comm);
  /* Collective on the host: all[r] = rank r's bytes (up to 512), for fingerprints. Bounded by the group's timeout. */
  moeflow_status (*gather)(struct comm *comm, const void *mine, size_t bytes, void *all);
  /* Collective, once the lane's buffers stand: fills the lane's target arrays. */
  moeflow_status (*attach)(struct comm *comm, struct group_lane *lane);
  /* Enqueues one exchange of `rows` rows of row_bytes per peer. phase: MOEFLOW_PHASE_DISPATCH or _RETURN. */
  moeflow_status (*exchange)(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                             int64_t row_bytes, void *stream);
  /* An asynchronous failure of the transport, MOEFLOW_OK when there is none. Any thread. */
  moeflow_status (*health)(struct comm *comm);
  void (*abort)(struct comm *comm); /* any thread */
  /* The rest may be NULL. Collective, bounded, from the first moeflow_prepare and before any step: exchanges `rows` rows each
   * way once, so that the transport connects now. */
  moeflow_status (*connect)(struct comm *comm, struct group_lane *lane, int rows);
  /* Memory for a lane's window, zero-filled; NULL: group_allocate. Not collective. */
  moeflow_status (*window_allocate)(struct comm *comm, size_t bytes, void **memory);
  /* Takes a lane's window back, before destroy, and frees it once no peer can store into it; NULL: group_release, after
   * destroy. */
  void (*window_release)(struct comm *comm, void *memory, size_t bytes);
};
extern const struct comm_ops comm_nccl;
extern const struct comm_ops comm_allgather;
extern const struct comm_ops comm_local;
extern const struct comm_ops comm_window;

/* A fresh id: NCCL's own, or random bytes behind a mark that NCCL's ids do not carry. */
moeflow_status comm_nccl_unique_id(moeflow_unique_id *id);
moeflow_status comm_local_unique_id(moeflow_unique_id *id);
int comm_local_made(const moeflow_unique_id *id);
moeflow_status comm_window_unique_id(moeflow_unique_id *id);
int comm_window_made(const moeflow_unique_id *id);

/* The loaded NCCL's version for the ranks' fingerprint, 0 where none is used. */
int comm_nccl_version(void);
#endif
