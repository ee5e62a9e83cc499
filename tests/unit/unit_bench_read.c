/* The limits: kernels that read memory compile for GPUs with and without bulk copies, and are launched within bounds. */
#include <math.h>

#include "dense_rate.h"
#include "fakes/fake_graph.h"
#include "read_memory.h"
#include "read_rate.h"
#include "toolchain.h"

static struct toolchain toolchain; /* large */

static void test_compiles(int major, int minor, int bulk) {
  struct read_kernels kernels = {.cubin = NULL};
  EXPECT(read_kernels_compile(major, minor, &kernels) == MOEFLOW_OK, "%d.%d: %s", major, minor, moeflow_last_error());
  EXPECT(kernels.cubin && !memcmp(kernels.cubin, "\177ELF", 4), "%d.%d: no cubin", major, minor);
  EXPECT(kernels.bulk == bulk, "%d.%d: bulk copies %d", major, minor, kernels.bulk);
  read_kernels_free(&kernels);
}

static void test_compiling(void) {
  struct read_kernels kernels;
  if (toolchain_find(&toolchain) != MOEFLOW_OK) {
    printf("skipped: the compiling: %s\n", moeflow_last_error());
    return;
  }
  test_compiles(9, 0, 1);
  test_compiles(8, 0, 0);
  EXPECT(read_kernels_compile(5, 0, &kernels) == MOEFLOW_ERROR_ENVIRONMENT, "compute capability 5.0 compiles");
  EXPECT(strstr(moeflow_last_error(), "5.0"), "%s", moeflow_last_error());
}

/* ---- On a fake GPU ---- */

static const uint8_t *memory;
static int64_t capacity;
static int moves; /* launches that read elsewhere than the one before */
static int lazy;  /* no two launches find the same digest */

/* What was launched must lie in the buffer, and chunks must cover it. */
static void launched(const char *kernel, void *given) {
  const struct moeflow_read_memory_params *params = given;
  if (!memory) return; /* the fill, while opening */
  const int64_t at = params->data - memory;
  EXPECT(at >= 0 && at + params->bytes <= capacity, "%s: %lld bytes at %lld of %lld", kernel, (long long)params->bytes,
         (long long)at, (long long)capacity);
  EXPECT(at % 16 == 0 && params->bytes % params->chunk == 0, "%s: chunks of %d do not cover %lld at %lld", kernel,
         params->chunk, (long long)params->bytes, (long long)at);
  EXPECT(params->chunk * params->stages <= 220 << 10 && params->stages <= MOEFLOW_READ_STAGES_MAX, "%s: %d x %d", kernel,
         params->chunk, params->stages);
  static const uint8_t *before;
  moves += params->data != before;
  before = params->data;
  *params->digest ^= lazy ? (uint32_t)++lazy : 3;
}

static struct read_bench *open_bench(const struct read_kernels *kernels, int64_t bytes) {
  struct read_bench *bench = NULL;
  CUcontext context;
  fake_load("fake_nccl");
  fake_graphs();
  seen.launched = launched;
  driver.cuOccupancyMaxActiveBlocksPerMultiprocessor = NULL;
  driver.cuDevicePrimaryCtxRetain(&context, 0);
  driver.cuCtxPushCurrent(context);
  EXPECT_OK(read_bench_open(kernels, 0, bytes, &bench));
  memory = read_bench_memory(bench, &capacity);
  return bench;
}

static void close_bench(struct read_bench *bench) {
  read_bench_close(bench);
  EXPECT(cuda->live == 1, "%d pieces of the driver are not given back beside the context", cuda->live);
  EXPECT(!seen.graphs && !seen.events, "%d graphs, %d events", seen.graphs, seen.events);
}

static void test_measure(void) {
  const struct read_kernels kernels = {.cubin = (uint8_t *)"fake cubin", .bulk = 1};
  const int64_t bytes = (40 << 20) + 1000;
  struct read_bench *bench = open_bench(&kernels, bytes);
  struct read_result result;
  for (int method = 0; method < 2; method++) {
    EXPECT_OK(read_bench_measure(bench, (enum read_method)method, bytes, &result));
    EXPECT(result.bytes >= bytes && result.bytes < bytes + (64 << 10) && result.bytes % (32 << 10) == 0, "%lld bytes",
           (long long)result.bytes);
    const double want = (double)result.bytes * 16 / 1600 / 1e3; /* 16 launches in 1.6 ms */
    EXPECT(fabs(result.gigabytes_per_second - want) < 1e-3 * want, "%g GB/s instead of %g", result.gigabytes_per_second,
           want);
    EXPECT(strstr(result.shape, method == READ_BULK ? "stages" : "loads"), "shape %s", result.shape);
    EXPECT(seen.captured == 16, "%d launches in a graph", seen.captured);
  }
  EXPECT(moves > 11 * 14, "%d launches read elsewhere than the one before", moves);
  EXPECT_OK(read_bench_measure(bench, READ_LOADS, 4 << 20, &result)); /* so small that 16 would stay in the L2 */
  EXPECT(seen.captured == 64, "%d launches of 4 MiB", seen.captured);
  EXPECT_STATUS(read_bench_measure(bench, READ_BULK, bytes + (1 << 20), &result), MOEFLOW_ERROR_ARGUMENT, "opened for 1 to");
  close_bench(bench);
}

static void test_lazy(void) {
  const struct read_kernels kernels = {.cubin = (uint8_t *)"fake cubin", .bulk = 1};
  struct read_bench *bench = open_bench(&kernels, 1 << 20);
  struct read_result result;
  lazy = 1;
  EXPECT_STATUS(read_bench_measure(bench, READ_BULK, 1 << 20, &result), MOEFLOW_ERROR_INTERNAL, "digest");
  EXPECT(*result.shape == 0, "a shape that read nothing is the best: %s", result.shape);
  lazy = 0;
  EXPECT_OK(read_bench_measure(bench, READ_LOADS, 1 << 20, &result));
  close_bench(bench);
}

static void test_older_gpu(void) {
  const struct read_kernels kernels = {.cubin = (uint8_t *)"fake cubin", .bulk = 0};
  struct read_bench *bench = open_bench(&kernels, 1 << 20);
  struct read_result result;
  EXPECT_STATUS(read_bench_measure(bench, READ_BULK, 1 << 20, &result), MOEFLOW_ERROR_UNSUPPORTED, "9.0");
  EXPECT_OK(read_bench_measure(bench, READ_LOADS, 1 << 20, &result));
  close_bench(bench);
}

static void test_no_cublas(void) {
  struct dense_result result;
  EXPECT_OK(dense_rate_measure("/nonexistent/libcublas.so", NULL, 0, &result));
  EXPECT(result.teraflops == 0 && strstr(result.why, "/nonexistent/libcublas.so") && strstr(result.why, "--cublas"), "%s",
         result.why);
}

int main(void) {
  test_no_cublas();
  test_compiling();
  in_child("measure", test_measure);
  in_child("lazy", test_lazy);
  in_child("older GPU", test_older_gpu);
  TEST_END;
}
