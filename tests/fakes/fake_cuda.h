/* A libcuda without a GPU, for the runtime's host logic: memory is the host's, launches are written down and not run. The
 * test loads the same file and steers it through fake_cuda(). */
#ifndef MOEFLOW_FAKE_CUDA_H
#define MOEFLOW_FAKE_CUDA_H

#include <stdatomic.h>
#include <stddef.h>

#include "abi.h"

#define FAKE_LOG_MAX 512

struct fake_call {
  char name[48];   /* the driver function */
  char kernel[48]; /* cuLaunchKernel: "moeflow_pack" */
  unsigned blocks, threads, shared_bytes;
  int early; /* it may be set up while the kernel before it ends */
  void *stream;
  unsigned char params[384];
};

struct fake_stream {  /* what a CUstream points to; NULL is `legacy` */
  atomic_int pending; /* collectives that have not ended */
};

#define FAKE_TENSOR_MAP 0x6d61702d66616b65ull

struct fake_tensor_map { /* in place of the driver's 128 bytes: what cuTensorMapEncodeTiled was asked for */
  unsigned long long magic;
  const void *base;
  unsigned long long size[4], stride[3];
  unsigned box[4];
  unsigned short dimensions, swizzle, promotion, fill;
};

struct fake_cuda {
  int version; /* of the driver */
  int devices;
  int major, minor;
  int multiprocessors;
  int fail_allocation; /* 1: the next one fails, 2: the one after, ...; 0: none */
  int fail_launch;     /* the same for launches */
  int fail_encode;     /* the same for tensor maps */
  char fail_share[40]; /* calls of this name around memory that processes share fail */
  int share_wrong;     /* what is opened is not what was shared */
  int capturing;
  atomic_int live;        /* allocations, modules, streams and retained contexts that are not given back */
  atomic_int allocations; /* ever */
  int call_count;
  struct fake_call calls[FAKE_LOG_MAX];
  struct fake_stream legacy;
};

typedef struct fake_cuda *(*fake_cuda_fn)(void);
#endif
