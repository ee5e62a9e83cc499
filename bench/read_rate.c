#include "read_rate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arch.h"
#include "compile.h"
#include "read_memory.h"
#include "statistics.h"
#include "timer.h"

#define REPLAYS 9       /* timed ones; the median counts */
#define LAUNCHES_MIN 16 /* in a graph */
#define LAUNCHES_MAX 256
#define COLD_BYTES ((int64_t)256 << 20)  /* that a graph reads at least, so that none is left in the L2 */
#define SPARE_BYTES ((int64_t)512 << 20) /* for offsets to move in */
#define ROUND_BYTES ((int64_t)32 << 10)  /* a multiple of every chunk */
#define OFFSET_BYTES ((int64_t)1 << 20)
#define RING_BYTES_MAX (220 << 10)

const char *const read_method_names[] = {"bulk copies", "16-byte loads"};

struct shape {
  enum read_method method;
  int threads;
  int loads;         /* READ_LOADS: in flight per thread */
  int chunk, stages; /* READ_BULK */
};

static const struct shape shapes[] = {
    {READ_BULK, 32, 0, 4 << 10, 32}, {READ_BULK, 32, 0, 8 << 10, 8},   {READ_BULK, 32, 0, 8 << 10, 24},
    {READ_BULK, 32, 0, 16 << 10, 6}, {READ_BULK, 32, 0, 16 << 10, 12}, {READ_BULK, 32, 0, 32 << 10, 6},
    {READ_LOADS, 256, 4, 4, 0},      {READ_LOADS, 256, 8, 4, 0},       {READ_LOADS, 512, 4, 4, 0},
    {READ_LOADS, 512, 8, 4, 0},      {READ_LOADS, 1024, 8, 4, 0},
};
#define SHAPES (int)(sizeof shapes / sizeof *shapes)

/* ---- The kernels ---- */

static moeflow_status compile(const struct arch *arch, struct read_kernels *kernels) {
  static const char text[] = "#include \"read_memory.cuh\"\n";
  struct toolchain *toolchain = malloc(sizeof *toolchain);
  struct templates templates = {.count = 0};
  struct compile_options options;
  struct compile_result result = {.cubin = NULL};
  int included[TEMPLATES_MAX], count;
  moeflow_status status = MOEFLOW_OK;
  if (!toolchain) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the toolchain's paths");
  CHECK(toolchain_find(toolchain));
  CHECK(templates_load(NULL, &templates));
  CHECK(templates_included(&templates, text, "read_memory.cu", included, &count));
  compile_options_for(arch->name, 0, &options);
  const struct compile_request request = {.name = "read_memory.cu",
                                          .symbol = "moeflow_read_loads_8",
                                          .text = text,
                                          .templates = &templates,
                                          .included = included,
                                          .included_count = count,
                                          .options = &options};
  status = compile_unit(toolchain, &request, &result);
  if (status == MOEFLOW_ERROR_FORMAT && result.log) status_set(status, "%s: %.1000s", moeflow_last_error(), result.log);
  CHECK(status);
  kernels->cubin = result.cubin;
  result.cubin = NULL;

cleanup:
  compile_free(&result);
  templates_free(&templates);
  free(toolchain);
  return status;
}

moeflow_status read_kernels_compile(int major, int minor, struct read_kernels *kernels) {
  const struct arch *candidates[ARCH_MAX];
  *kernels = (struct read_kernels){.bulk = major >= 9};
  if (arch_for_device(major, minor, candidates) > 0) return compile(candidates[0], kernels);
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "compute capability %d.%d: this version compiles nothing for it", major,
                    minor);
}

void read_kernels_free(struct read_kernels *kernels) {
  free(kernels->cubin);
  kernels->cubin = NULL;
}

/* ---- Opening ---- */

struct read_bench {
  struct timer timer;
  CUmodule module;
  CUfunction fill, check, loads_4, loads_8, bulk; /* bulk: NULL on older GPUs */
  CUdeviceptr data, digest;
  int64_t capacity;
  int multiprocessors;
};

static moeflow_status load(const struct read_kernels *kernels, struct read_bench *bench) {
  const struct {
    const char *symbol;
    CUfunction *function;
  } functions[] = {{"moeflow_read_fill", &bench->fill},
                   {"moeflow_read_check", &bench->check},
                   {"moeflow_read_loads_4", &bench->loads_4},
                   {"moeflow_read_loads_8", &bench->loads_8},
                   {"moeflow_read_bulk", &bench->bulk}};
  const size_t count = sizeof functions / sizeof *functions - !kernels->bulk;
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuModuleLoadData(&bench->module, kernels->cubin));
  for (size_t i = 0; i < count; i++)
    CHECK_CUDA(cuModuleGetFunction(functions[i].function, bench->module, functions[i].symbol));
  if (bench->bulk)
    CHECK_CUDA(cuFuncSetAttribute(bench->bulk, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, RING_BYTES_MAX));

cleanup:
  return status;
}

struct launching {
  struct read_bench *bench;
  CUfunction function;
  unsigned blocks, threads, shared;
  struct moeflow_read_memory_params params;
};

static moeflow_status launch(struct launching *launching) {
  void *arguments[] = {&launching->params};
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuLaunchKernel(launching->function, launching->blocks, 1, 1, launching->threads, 1, 1, launching->shared,
                            launching->bench->timer.stream, arguments, NULL));

cleanup:
  return status;
}

static struct moeflow_read_memory_params params_of(const struct read_bench *bench, int64_t bytes) {
  return (struct moeflow_read_memory_params){
      .data = (uint8_t *)(uintptr_t)bench->data, .bytes = bytes, .digest = (uint32_t *)(uintptr_t)bench->digest, .chunk = 4};
}

static moeflow_status fill(struct read_bench *bench) {
  struct launching launching = {.bench = bench,
                                .function = bench->fill,
                                .blocks = (unsigned)bench->multiprocessors * 4,
                                .threads = 512,
                                .params = params_of(bench, bench->capacity)};
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuMemsetD8Async(bench->digest, 0, sizeof(uint32_t), bench->timer.stream));
  CHECK(launch(&launching));
  CHECK_CUDA(cuStreamSynchronize(bench->timer.stream));

cleanup:
  return status;
}

moeflow_status read_bench_open(const struct read_kernels *kernels, int device, int64_t bytes_max, struct read_bench **made) {
  moeflow_status status = MOEFLOW_OK;
  CUdevice ordinal;
  struct read_bench *bench = calloc(1, sizeof *bench);
  *made = NULL;
  if (!bench) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a bench");
  bench->capacity = (bytes_max + ROUND_BYTES - 1) / ROUND_BYTES * ROUND_BYTES + SPARE_BYTES;
  CHECK_CUDA(cuDeviceGet(&ordinal, device));
  CHECK_CUDA(cuDeviceGetAttribute(&bench->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal));
  CHECK(timer_open(&bench->timer));
  CHECK(load(kernels, bench));
  CHECK_CUDA(cuMemAlloc(&bench->data, (size_t)bench->capacity));
  CHECK_CUDA(cuMemAlloc(&bench->digest, sizeof(uint32_t)));
  CHECK(fill(bench));
  *made = bench;
  return MOEFLOW_OK;

cleanup:
  read_bench_close(bench);
  return status;
}

void read_bench_close(struct read_bench *bench) {
  if (!bench) return;
  if (bench->data) driver.cuMemFree(bench->data);
  if (bench->digest) driver.cuMemFree(bench->digest);
  if (bench->module) driver.cuModuleUnload(bench->module);
  timer_close(&bench->timer);
  free(bench);
}

void *read_bench_memory(const struct read_bench *bench, int64_t *bytes) {
  *bytes = bench->capacity;
  return (void *)(uintptr_t)bench->data;
}

/* ---- One shape ---- */

static void name_shape(const struct shape *shape, char text[48]) {
  if (shape->method == READ_BULK) {
    snprintf(text, 48, "%d KiB x %d stages", shape->chunk >> 10, shape->stages);
  } else {
    snprintf(text, 48, "%d threads x %d loads", shape->threads, shape->loads);
  }
}

/* As many blocks as the device holds at a time. */
static moeflow_status prepare(struct read_bench *bench, const struct shape *shape, int64_t bytes,
                              struct launching *launching) {
  int resident = 1;
  moeflow_status status = MOEFLOW_OK;
  *launching = (struct launching){.bench = bench, .threads = (unsigned)shape->threads, .params = params_of(bench, bytes)};
  launching->function = shape->method == READ_BULK ? bench->bulk : shape->loads == 4 ? bench->loads_4 : bench->loads_8;
  launching->shared = (unsigned)(shape->chunk * shape->stages);
  launching->params.chunk = shape->chunk;
  launching->params.stages = shape->stages;
  if (driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)
    CHECK_CUDA(
        cuOccupancyMaxActiveBlocksPerMultiprocessor(&resident, launching->function, shape->threads, launching->shared));
  launching->blocks = (unsigned)(bench->multiprocessors * (resident > 0 ? resident : 1));

cleanup:
  return status;
}

/* The digest that a launch leaves; the next begins from zero. */
static moeflow_status digest_of(struct launching *launching, uint32_t *digest) {
  const struct read_bench *bench = launching->bench;
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuMemsetD8Async(bench->digest, 0, sizeof *digest, bench->timer.stream));
  CHECK(launch(launching));
  CHECK_CUDA(cuMemcpyDtoHAsync(digest, bench->digest, sizeof *digest, bench->timer.stream));
  CHECK_CUDA(cuStreamSynchronize(bench->timer.stream));

cleanup:
  return status;
}

static moeflow_status check(struct launching *launching, const struct shape *shape) {
  struct launching plain = *launching;
  uint32_t got = 0, want = 1;
  char name[48];
  moeflow_status status = MOEFLOW_OK;
  plain.function = launching->bench->check;
  plain.threads = 256;
  plain.shared = 0;
  CHECK(digest_of(launching, &got));
  CHECK(digest_of(&plain, &want));
  if (got == want) return MOEFLOW_OK;
  name_shape(shape, name);
  FAIL(MOEFLOW_ERROR_INTERNAL, "%s of %s read something else than the %lld bytes: digest %08x instead of %08x", name,
       read_method_names[shape->method], (long long)launching->params.bytes, got, want);

cleanup:
  return status;
}

/* Launches at offsets that move through the memory. */
static moeflow_status enqueue(struct launching *launching, int launches) {
  const struct read_bench *bench = launching->bench;
  const int64_t bytes = launching->params.bytes, step = (bytes + OFFSET_BYTES - 1) / OFFSET_BYTES;
  const int64_t places = (bench->capacity - bytes) / OFFSET_BYTES + 1;
  for (int i = 0; i < launches; i++) {
    launching->params.data = (uint8_t *)(uintptr_t)bench->data + i * step % places * OFFSET_BYTES;
    const moeflow_status status = launch(launching);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

static int launches_of(int64_t bytes) {
  const int64_t launches = (COLD_BYTES + bytes - 1) / bytes;
  return launches < LAUNCHES_MIN ? LAUNCHES_MIN : launches > LAUNCHES_MAX ? LAUNCHES_MAX : (int)launches;
}

static moeflow_status time_shape(struct launching *launching, double *microseconds) {
  struct timer *timer = &launching->bench->timer;
  const int launches = launches_of(launching->params.bytes);
  double samples[REPLAYS + 1]; /* the first warms up */
  CUgraphExec graph = NULL;
  moeflow_status status = MOEFLOW_OK;
  CHECK(timer_capture(timer));
  CHECK(timer_captured(timer, enqueue(launching, launches), &graph));
  for (int i = 0; i < REPLAYS + 1; i++) CHECK(timer_launch(timer, graph, &samples[i]));
  *microseconds = statistics_median(samples + 1, REPLAYS) / launches;

cleanup:
  if (graph) driver.cuGraphExecDestroy(graph);
  return status;
}

moeflow_status read_bench_measure(struct read_bench *bench, enum read_method method, int64_t bytes,
                                  struct read_result *result) {
  moeflow_status status = MOEFLOW_OK;
  *result = (struct read_result){.bytes = (bytes + ROUND_BYTES - 1) / ROUND_BYTES * ROUND_BYTES};
  if (method == READ_BULK && !bench->bulk)
    FAIL(MOEFLOW_ERROR_UNSUPPORTED, "this GPU has no bulk copies; compute capability 9.0 and newer have");
  if (bytes < 1 || result->bytes > bench->capacity - SPARE_BYTES)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "%lld bytes; the bench was opened for 1 to %lld", (long long)bytes,
         (long long)(bench->capacity - SPARE_BYTES));
  for (int i = 0; i < SHAPES; i++) {
    struct launching launching;
    double microseconds;
    if (shapes[i].method != method) continue;
    CHECK(prepare(bench, &shapes[i], result->bytes, &launching));
    CHECK(check(&launching, &shapes[i]));
    CHECK(time_shape(&launching, &microseconds));
    const double rate = (double)result->bytes / microseconds / 1e3;
    if (rate <= result->gigabytes_per_second) continue;
    result->gigabytes_per_second = rate;
    name_shape(&shapes[i], result->shape);
  }

cleanup:
  return status;
}
