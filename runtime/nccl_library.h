/* NCCL, found with dlopen and only when a group needs it: a copy that the process has loaded already (an engine's), then the
 * file that MOEFLOW_NCCL names, then libnccl.so.2 on the library path, then where the build saw one. Two copies of NCCL in
 * one process do not get along, hence that order. */
#ifndef MOEFLOW_NCCL_LIBRARY_H
#define MOEFLOW_NCCL_LIBRARY_H

#include <nccl.h>

#include "status.h"

#define NCCL_OLDEST 21900 /* ncclConfig_t as this library uses it */

#define NCCL_FUNCTIONS(X)   \
  X(ncclGetVersion)         \
  X(ncclGetUniqueId)        \
  X(ncclCommInitRankConfig) \
  X(ncclCommDestroy)        \
  X(ncclCommAbort)          \
  X(ncclCommGetAsyncError)  \
  X(ncclCommCount)          \
  X(ncclCommUserRank)       \
  X(ncclCommCuDevice)       \
  X(ncclAllGather)          \
  X(ncclReduceScatter)      \
  X(ncclSend)               \
  X(ncclRecv)               \
  X(ncclGroupStart)         \
  X(ncclGroupEnd)           \
  X(ncclGetErrorString)     \
  X(ncclGetLastError)

struct nccl {
#define NCCL_MEMBER(name) __typeof__(name) *name;
  NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
  /* 2.28 and newer, NULL else */
  ncclResult_t (*ncclAlltoAll)(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream);
  int version; /* 22809 */
  char path[4096];
};
extern struct nccl nccl; /* valid once nccl_load has returned MOEFLOW_OK */

/* Once a process; any thread. MOEFLOW_ERROR_ENVIRONMENT when no usable NCCL is found: which were tried, and why not. */
moeflow_status nccl_load(void);

/* MOEFLOW_ERROR_NCCL with the function's name and NCCL's own words. */
moeflow_status nccl_status(ncclResult_t result, const char *call, ncclComm_t comm);

/* `comm` for the error text may be NULL. */
#define CHECK_NCCL(comm, call)                        \
  do {                                                \
    ncclResult_t nccl_result = nccl.call;             \
    if (nccl_result != ncclSuccess) {                 \
      status = nccl_status(nccl_result, #call, comm); \
      goto cleanup;                                   \
    }                                                 \
  } while (0)
#endif
