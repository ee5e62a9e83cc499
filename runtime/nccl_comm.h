/* NCCL communicators with bounded waits: what the transports over NCCL share, which are comm_nccl.c and comm_allgather.c. Each
 * brings its own exchange; the rest of their tables are these functions.
 *
 * A non-blocking communicator comes first: its creation can be given up, so that a rank which never comes is an error and
 * not a hang. It carries the host's gathers. It cannot carry the exchanges, since a non-blocking communicator enqueues from
 * a thread of its own, after the call has returned. The lanes' communicators are blocking ones, made once everybody is
 * there, each in a helper thread whose end is awaited for a bounded time. An adopted communicator is both, of whichever kind.
 * Memory is plain device memory: with several kinds of collectives captured over ncclMemAlloc memory, replays of NCCL 2.28
 * were seen to hang. */
#ifndef MOEFLOW_NCCL_COMM_H
#define MOEFLOW_NCCL_COMM_H

#include <pthread.h>

#include "driver.h"
#include "internal.h"
#include "nccl_library.h"

struct nccl_comm {
  struct comm comm;
  struct moeflow_group *group;
  pthread_mutex_t mutex; /* each call on a communicator, so that abort does not free one in use */
  atomic_int aborted;
  int adopted; /* the caller's communicator is both control and lane 0: never freed here */
  int stuck;   /* an adopted communicator never ended a gather: its stream and buffer must stay */
  ncclComm_t control;
  ncclComm_t lanes[GROUP_LANES_MAX];
  CUstream stream;                        /* gathers and connects */
  uint8_t *buffer;                        /* device memory: [ranks + 1][FINGERPRINT_BYTES_MAX]; the last is mine */
  pthread_t closers[GROUP_LANES_MAX + 1]; /* threads that end a communicator each */
  int closing;
};

static inline struct nccl_comm *nccl_comm_of(struct comm *comm) { return (struct nccl_comm *)comm; }

/* One collective on a lane's communicator, from and to the lane's buffers. */
struct nccl_exchange {
  const char *name; /* NCCL's, for messages */
  ncclResult_t (*enqueue)(const struct nccl_exchange *exchange, ncclComm_t comm, cudaStream_t stream);
  const uint8_t *send;
  uint8_t *receive;
  size_t bytes;        /* of the rows from one rank, or for one */
  int ranks;
  ncclDataType_t type; /* of what is added */
};

/* Enqueues it, and waits for a bounded time until a non-blocking communicator has taken it. Nothing in an aborted group. */
moeflow_status nccl_comm_exchange(struct comm *comm, const struct group_lane *lane, const struct nccl_exchange *exchange,
                                  void *stream);

/* ---- Parts of a transport's table, see comm.h ---- */

moeflow_status nccl_comm_create(const struct comm_ops *ops, struct moeflow_group *group, const moeflow_group_config *config,
                                struct comm **comm);
void nccl_comm_destroy(struct comm *comm);
moeflow_status nccl_comm_gather(struct comm *comm, const void *mine, size_t bytes, void *all);
moeflow_status nccl_comm_attach(struct comm *comm, struct group_lane *lane);
moeflow_status nccl_comm_connect(struct comm *comm, struct group_lane *lane, int rows);
moeflow_status nccl_comm_health(struct comm *comm);
void nccl_comm_abort(struct comm *comm);
#endif
