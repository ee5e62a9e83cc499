/* An NCCL between threads of one process over the fake libcuda: a collective ends once all ranks have posted it, until then
 * its stream is busy. Communicators may be non-blocking; creation ends when all ranks came, or never. */
#ifndef MOEFLOW_FAKE_NCCL_H
#define MOEFLOW_FAKE_NCCL_H

#include <stdatomic.h>

struct fake_nccl {
  int version;
  int init_never;               /* a non-blocking creation stays in progress */
  int fail_init;                /* creation fails */
  int fail_async;               /* ncclCommGetAsyncError reports ncclRemoteError */
  atomic_int graphs;            /* captured: communicators end only when none is left */
  atomic_int all_to_all_blocks; /* as a full launch queue does, until an abort */
  int destroy_meets;            /* ncclCommDestroy returns when all ranks have called it */
  atomic_int live;              /* communicators */
  atomic_int aborted, destroyed;
  atomic_int all_to_alls, sends, receives, gathers;
};

typedef struct fake_nccl *(*fake_nccl_fn)(void);
#endif
