/* A backend: memory and kernels. forward.c fills one parameter struct of templates/abi.h per kernel and hands it over; the CUDA
 * backend launches the plan's cubin, the CPU backend runs the same step in C over the same memory layout. */
#ifndef MOEFLOW_BACKEND_H
#define MOEFLOW_BACKEND_H

#include "plan.h"

struct moeflow_context;
struct moeflow_layer;
struct moeflow_tensor_map;

struct launch {
  const struct moeflow_layer *layer;  /* the CPU backend borrows weights through it; NULL for fill */
  enum kernel_id kernel;
  int variant;                        /* index among the kernel's variants in the plan */
  int64_t blocks;                     /* grid.x; the CPU backend ignores it */
  void *params;                       /* the kernel's struct */
  void *stream;
};

#define TENSOR_DIMENSIONS_MAX 5

/* bf16 in memory as a bulk tensor copy sees it, fastest dimension first; one copy takes `box` of each. */
struct tensor_view {
  const void *base;
  int dimensions;
  uint64_t size[TENSOR_DIMENSIONS_MAX];
  uint64_t stride[TENSOR_DIMENSIONS_MAX - 1]; /* bytes, of all but the fastest dimension */
  uint32_t box[TENSOR_DIMENSIONS_MAX];
};

struct backend {
  const char *name;
  moeflow_status (*open)(struct moeflow_context *context);   /* after the plan was read */
  void (*close)(struct moeflow_context *context);
  moeflow_status (*allocate)(struct moeflow_context *context, size_t bytes, void **memory);        /* zero-filled */
  void (*release)(struct moeflow_context *context, void *memory);
  moeflow_status (*allocate_record)(struct moeflow_context *context, size_t bytes, void **host, void **device);
  void (*release_record)(struct moeflow_context *context, void *host);
  moeflow_status (*upload)(struct moeflow_context *context, void *to, const void *from, size_t bytes);   /* blocking */
  moeflow_status (*download)(struct moeflow_context *context, void *to, const void *from, size_t bytes); /* blocking */
  moeflow_status (*prepare)(struct moeflow_context *context); /* load every kernel now */
  moeflow_status (*launch)(struct moeflow_context *context, const struct launch *launch);
  /* The rest may be NULL. */
  moeflow_status (*architectures)(struct moeflow_context *context, char names[][PLAN_ARCH_MAX], int names_max,
                                  int *count);        /* before open: what the device can run, best first; NULL: any plan */
  moeflow_status (*enter)(struct moeflow_context *context);             /* around every group of calls, on one thread */
  void (*leave)(struct moeflow_context *context);
  moeflow_status (*zero)(struct moeflow_context *context, void *memory, size_t bytes); /* NULL: memory is the host's */
  int (*capturing)(struct moeflow_context *context, void *stream);      /* the stream is being captured into a graph */
  moeflow_status (*encode)(struct moeflow_context *context, const struct tensor_view *view,
                           struct moeflow_tensor_map *map);             /* `map` is 64-byte aligned host memory */
};
extern const struct backend backend_cuda;
extern const struct backend backend_cpu;
#endif
