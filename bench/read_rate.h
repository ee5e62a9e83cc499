/* How fast this GPU can only read its memory: bytes over the time of a kernel that does nothing else, launch included. The
 * limit of decoding is weight bytes over this rate, measured in the same command. */
#ifndef MOEFLOW_BENCH_READ_RATE_H
#define MOEFLOW_BENCH_READ_RATE_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

enum read_method {
  READ_BULK, /* 1-D bulk copies into shared memory; compute capability 9.0 and newer */
  READ_LOADS /* 16-byte loads */
};
extern const char *const read_method_names[]; /* "bulk copies", "16-byte loads" */

struct read_result {
  double gigabytes_per_second; /* 1e9 bytes */
  char shape[48];              /* the launch shape that reached it: "16 KiB x 12 stages" */
  int64_t bytes;               /* that each launch read: what was asked for, rounded up */
};

struct read_kernels { /* read_kernels_free */
  uint8_t *cubin;
  int bulk; /* has READ_BULK */
};

/* Compiles the kernels for a GPU of this compute capability with NVRTC. Before CUDA is used: it may take half a second. */
moeflow_status read_kernels_compile(int major, int minor, struct read_kernels *kernels);
void read_kernels_free(struct read_kernels *kernels);

struct read_bench;

/* With the device's context current. bytes_max: the most that will be measured; takes that and 512 MiB of memory. */
moeflow_status read_bench_open(const struct read_kernels *kernels, int device, int64_t bytes_max, struct read_bench **bench);
void read_bench_close(struct read_bench *bench); /* NULL is allowed */

/* The fastest of several launch shapes, each checked first by a digest of what it read: MOEFLOW_ERROR_INTERNAL when one has
 * not read everything. MOEFLOW_ERROR_UNSUPPORTED: no bulk copies on this GPU. */
moeflow_status read_bench_measure(struct read_bench *bench, enum read_method method, int64_t bytes,
                                  struct read_result *result);

/* Random bf16 values of which read_bench reads, for others to use between measurements. */
void *read_bench_memory(const struct read_bench *bench, int64_t *bytes);
#endif
