/* An NCCL between threads of one process over the fake libcuda: a collective ends once all ranks have posted it, until then
 * its stream is busy. Communicators may be non-blocking; creation ends when all ranks came, or never. */
#ifndef MOEFLOW_FAKE_NCCL_H
#define MOEFLOW_FAKE_NCCL_H

#include <stdatomic.h>
#include <stddef.h>

#define FAKE_COLLECTIVES_MAX 256

struct fake_collective {
  char name[24]; /* "ncclAllGather" */
  int rank, type, at; /* at: the clock when it was called */
  size_t count;
  const void *send;
  void *receive, *stream;
};

struct fake_nccl {
  int version;
  int init_never;               /* a non-blocking creation stays in progress */
  int fail_init;                /* creation fails */
  int fail_async;               /* ncclCommGetAsyncError reports ncclRemoteError */
  _Atomic(const char *) fail_collective; /* the next one of this name fails */
  atomic_int graphs;            /* captured: communicators end only when none is left */
  atomic_int all_to_all_blocks; /* as a full launch queue does, until an abort */
  int destroy_meets;            /* ncclCommDestroy returns when all ranks have called it */
  atomic_int live;              /* communicators */
  atomic_int aborted, destroyed;
  atomic_int all_to_alls, sends, receives, gathers;
  const int *clock; /* the driver's count of calls, to tell what came before what; may be NULL */
  int collective_count;
  struct fake_collective collectives[FAKE_COLLECTIVES_MAX];
};

typedef struct fake_nccl *(*fake_nccl_fn)(void);
#endif
