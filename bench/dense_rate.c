#include "dense_rate.h"

#include <dlfcn.h>
#include <stdio.h>

#include "statistics.h"
#include "timer.h"

#define M 16384
#define N 4096
#define K 4096
#define PRODUCTS 8 /* in one sample */
#define SAMPLES 9  /* the median counts; one more warms up */

/* cuBLAS's own numbers (cublas_api.h, library_types.h), which are part of its ABI. */
enum { CUBLAS_N = 0, CUBLAS_T = 1, CUBLAS_BF16 = 14, CUBLAS_FP32_SUMS = 68, CUBLAS_DEFAULT = -1 };

struct cublas {
  void *library, *handle;
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*set_stream)(void *handle, void *stream);
  int (*gemm)(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
              int a_type, int a_stride, const void *b, int b_type, int b_stride, const void *beta, void *c, int c_type,
              int c_stride, int compute, int algorithm);
};

/* Not here: 0, and *result says why. The library stays loaded: it does not like to be unloaded. */
static int find(const char *path, struct cublas *cublas, struct dense_result *result) {
  const char *const names[] = {path ? path : "libcublas.so.13", path ? path : "libcublas.so.12"};
  const struct {
    const char *name;
    void **function;
  } functions[] = {{"cublasCreate_v2", (void **)&cublas->create},
                   {"cublasDestroy_v2", (void **)&cublas->destroy},
                   {"cublasSetStream_v2", (void **)&cublas->set_stream},
                   {"cublasGemmEx", (void **)&cublas->gemm}};
  for (int i = 0; i < 2 && !cublas->library; i++) cublas->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  if (!cublas->library) {
    snprintf(result->why, sizeof result->why, "%.150s; --cublas FILE or LD_LIBRARY_PATH may say where cuBLAS is", dlerror());
    return 0;
  }
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    *functions[i].function = dlsym(cublas->library, functions[i].name);
    if (*functions[i].function) continue;
    snprintf(result->why, sizeof result->why, "cuBLAS has no %s", functions[i].name);
    return 0;
  }
  return 1;
}

struct product {
  struct cublas *cublas;
  const uint16_t *a, *b;
  void *c;
};

static moeflow_status multiply(void *user, CUstream stream) {
  const struct product *product = user;
  const float one = 1, zero = 0;
  (void)stream;
  for (int i = 0; i < PRODUCTS; i++) {
    /* Column-major: C [N, M] = A' [N, K] B [K, M], which is rows of M tokens times weights. */
    const int failed = product->cublas->gemm(product->cublas->handle, CUBLAS_T, CUBLAS_N, N, M, K, &one, product->a,
                                             CUBLAS_BF16, K, product->b, CUBLAS_BF16, K, &zero, product->c, CUBLAS_BF16, N,
                                             CUBLAS_FP32_SUMS, CUBLAS_DEFAULT);
    if (failed) return status_set(MOEFLOW_ERROR_CUDA, "cublasGemmEx: status %d", failed);
  }
  return MOEFLOW_OK;
}

static moeflow_status measure(struct timer *timer, struct product *product, struct dense_result *result) {
  double samples[SAMPLES + 1];
  moeflow_status status = MOEFLOW_OK;
  CHECK(multiply(product, timer->stream)); /* what cuBLAS sets up at its first call must not meet a stream that waits */
  CHECK_CUDA(cuStreamSynchronize(timer->stream));
  for (int i = 0; i < SAMPLES + 1; i++) CHECK(timer_run(timer, multiply, product, &samples[i]));
  result->teraflops = 2.0 * M * N * K * PRODUCTS / statistics_median(samples + 1, SAMPLES) / 1e6;

cleanup:
  return status;
}

moeflow_status dense_rate_measure(const char *path, const void *memory, int64_t bytes, struct dense_result *result) {
  struct cublas cublas = {.library = NULL};
  struct product product = {.cublas = &cublas, .a = memory, .b = (const uint16_t *)memory + (size_t)N * K};
  struct timer timer = {.stream = NULL};
  CUdeviceptr c = 0;
  moeflow_status status = MOEFLOW_OK;
  int failed;
  *result = (struct dense_result){.m = M, .n = N, .k = K};
  if (!find(path, &cublas, result)) return MOEFLOW_OK;
  if (bytes < ((int64_t)N * K + (int64_t)M * K) * 2)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "%lld bytes are too few", (long long)bytes);
  CHECK(timer_open(&timer));
  CHECK_CUDA(cuMemAlloc(&c, (size_t)M * N * 2));
  product.c = (void *)(uintptr_t)c;
  if ((failed = cublas.create(&cublas.handle)) || (failed = cublas.set_stream(cublas.handle, timer.stream)))
    FAIL(MOEFLOW_ERROR_CUDA, "cuBLAS cannot start: status %d", failed);
  CHECK(measure(&timer, &product, result));

cleanup:
  if (cublas.handle) cublas.destroy(cublas.handle);
  if (c) driver.cuMemFree(c);
  timer_close(&timer);
  return status;
}
