/* The GPU that a command measures on: looked at before CUDA is used, then taken. */
#ifndef MOEFLOW_BENCH_GPU_H
#define MOEFLOW_BENCH_GPU_H

#include "bench_options.h"
#include "driver.h"
#include "gpus.h"
#include "read_rate.h"

struct bench_gpu {
  struct gpus all;
  const struct gpu *gpu;
  struct read_kernels read; /* compiled for it */
  CUdevice device;
  int taken;
};

/* First `find`, then `take` when nothing is left to be done without CUDA. MOEFLOW_ERROR_ENVIRONMENT: no GPU. */
moeflow_status bench_gpu_find(const struct bench_options *options, struct bench_gpu *gpu);
moeflow_status bench_gpu_take(const struct bench_options *options, struct bench_gpu *gpu); /* its context is current */
void bench_gpu_leave(struct bench_gpu *gpu);

/* Prints "moeflow-bench COMMAND: <last error>" on stderr, unless all is well, and returns the status's exit code. */
int bench_exit_code(const struct bench_options *options, moeflow_status status);
#endif
