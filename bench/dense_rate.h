/* How fast this GPU multiplies dense bf16 matrices: the limit where many rows share an expert. By cuBLAS, if it is here. */
#ifndef MOEFLOW_BENCH_DENSE_RATE_H
#define MOEFLOW_BENCH_DENSE_RATE_H

#include <stdint.h>

#include "moeflow.h"

struct dense_result {
  double teraflops; /* 1e12 per second; 0: cuBLAS is not here, `why` says what was looked for */
  int m, n, k;
  char why[256];
};

/* With the device's context current. cublas: the library's path, or NULL to find it as programs are linked. `memory`: random
 * bf16 values to multiply. Without cuBLAS MOEFLOW_OK and a rate of 0. */
moeflow_status dense_rate_measure(const char *cublas, const void *memory, int64_t bytes, struct dense_result *result);
#endif
