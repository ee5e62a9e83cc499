/* The CUDA backend: the device's primary context, the plan's cubins as modules, launches through the driver. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "entry.h"
#include "internal.h"

struct kernel {
  CUmodule module;
  CUfunction function;
  unsigned threads;
  unsigned shared_bytes;
};

struct cuda_state {
  CUdevice device;
  CUcontext context;
  CUstream stream; /* uploads, downloads, fills: never ordered with the caller's streams */
  int retained;
  int loaded;                /* prepare ran */
  int offsets[KERNEL_COUNT]; /* of a kernel's first variant in `kernels` */
  int counts[KERNEL_COUNT];
  struct kernel kernels[PLAN_VARIANTS_MAX];
};

static struct cuda_state *state_of(const struct moeflow_context *context) {
  return context->backend_state;
}

static moeflow_status cuda_enter(struct moeflow_context *context) {
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuCtxPushCurrent(state_of(context)->context));
cleanup:
  return status;
}

static void cuda_leave(struct moeflow_context *context) {
  CUcontext popped;
  (void)context;
  driver.cuCtxPopCurrent(&popped);
}

/* ---- The device and what it can run ---- */

static moeflow_status find_device(struct moeflow_context *context, CUdevice *device, int *major, int *minor) {
  moeflow_status status = MOEFLOW_OK;
  int devices = 0;
  status = driver_load();
  if (status == MOEFLOW_ERROR_ENVIRONMENT) FAIL(status, "%s; or open with the CPU backend", moeflow_last_error());
  CHECK(status);
  CHECK_CUDA(cuDeviceGetCount(&devices));
  if (context->device < 0 || context->device >= devices) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "device %d does not exist: this process sees %d GPU(s)", context->device, devices);
  }
  CHECK_CUDA(cuDeviceGet(device, context->device));
  CHECK_CUDA(cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, *device));
  CHECK_CUDA(cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, *device));
cleanup:
  return status;
}

/* A cubin runs on its own architecture and, without a suffix, on later minor ones of the same major (CUDA C++ Programming
 * Guide, "Binary Compatibility"); one with suffix `a` on its own only. */
static moeflow_status cuda_architectures(struct moeflow_context *context, char names[][PLAN_ARCH_MAX], int names_max,
                                         int *count) {
  moeflow_status status = MOEFLOW_OK;
  CUdevice device;
  int major = 0, minor = 0;
  *count = 0;
  CHECK(find_device(context, &device, &major, &minor));
  if (major >= 9) snprintf(names[(*count)++], PLAN_ARCH_MAX, "sm_%d%da", major % 100, minor % 10);
  for (; minor >= 0 && *count < names_max; minor--) {
    snprintf(names[(*count)++], PLAN_ARCH_MAX, "sm_%d%d", major % 100, minor % 10);
  }
cleanup:
  return status;
}

/* ---- Opening: every cubin is read, verified and loaded as a module ---- */

static moeflow_status check_driver(const struct plan *plan) {
  if (driver.version >= plan->minimum_driver) return MOEFLOW_OK;
  return status_set(
      MOEFLOW_ERROR_ENVIRONMENT,
      "the driver supports CUDA %d.%d and the cubins of %s need CUDA %d.%d: install a newer NVIDIA driver, or build "
      "the cubins with an older NVRTC",
      driver.version / 1000, driver.version % 1000 / 10, plan->spec.name, plan->minimum_driver / 1000,
      plan->minimum_driver % 1000 / 10);
}

static moeflow_status check_entry(const struct entry *entry, const struct plan *plan, const struct plan_variant *variant,
                                  const char *symbol) {
  if (strncmp(entry->header.symbol, symbol, sizeof entry->header.symbol)) {
    return status_set(MOEFLOW_ERROR_CACHE, "entry %.16s holds %.40s, and the plan means %s", variant->entry,
                      entry->header.symbol, symbol);
  }
  if (strncmp(entry->header.arch, plan->arch, sizeof entry->header.arch)) {
    return status_set(MOEFLOW_ERROR_CACHE, "entry %.16s was built for %.16s, and the plan is for %s", variant->entry,
                      entry->header.arch, plan->arch);
  }
  if (entry->header.threads && variant->threads > (int32_t)entry->header.threads) {
    return status_set(MOEFLOW_ERROR_CACHE, "entry %.16s is bound to %u threads a block, and the plan asks for %d",
                      variant->entry, entry->header.threads, variant->threads);
  }
  return MOEFLOW_OK;
}

static moeflow_status load_kernel(struct moeflow_context *context, const struct plan_variant *variant,
                                  struct kernel *kernel) {
  moeflow_status status = MOEFLOW_OK;
  struct entry entry = {.bytes = NULL};
  char symbol[40];
  snprintf(symbol, sizeof symbol, "moeflow_%s", kernel_names[variant->kernel]);
  CHECK(entry_read(context->cache_fd, context->cache_path, variant->entry, &entry, NULL));
  CHECK(check_entry(&entry, &context->plan, variant, symbol));
  CHECK_CUDA(cuModuleLoadData(&kernel->module, entry.cubin));
  CHECK_CUDA(cuModuleGetFunction(&kernel->function, kernel->module, symbol));
  kernel->threads = (unsigned)variant->threads;
  kernel->shared_bytes = (unsigned)variant->shared_bytes;
  if (variant->shared_bytes) {
    CHECK_CUDA(cuFuncSetAttribute(kernel->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, variant->shared_bytes));
  }
cleanup:
  entry_free(&entry);
  if (status != MOEFLOW_OK) status_prefix(status, "kernel %s", kernel_names[variant->kernel]);
  return status;
}

/* Variants of one kernel stand together, in the plan's order. */
static moeflow_status load_kernels(struct moeflow_context *context, struct cuda_state *state) {
  int next = 0;
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    const struct plan_variant *variant;
    state->offsets[kernel] = next;
    for (int n = 0; (variant = plan_variant(&context->plan, (enum kernel_id)kernel, n)); n++) {
      moeflow_status status = load_kernel(context, variant, &state->kernels[next++]);
      if (status != MOEFLOW_OK) return status;
      state->counts[kernel]++;
    }
  }
  return MOEFLOW_OK;
}

static void unload(struct cuda_state *state) {
  for (int i = 0; i < PLAN_VARIANTS_MAX; i++) {
    if (state->kernels[i].module) driver.cuModuleUnload(state->kernels[i].module);
  }
  if (state->stream) driver.cuStreamDestroy(state->stream);
}

static void cuda_close(struct moeflow_context *context) {
  struct cuda_state *state = state_of(context);
  if (!state) return;
  if (state->retained) {
    if (cuda_enter(context) == MOEFLOW_OK) {
      unload(state);
      cuda_leave(context);
    }
    driver.cuDevicePrimaryCtxRelease(state->device);
  }
  free(state);
  context->backend_state = NULL;
}

static moeflow_status cuda_open(struct moeflow_context *context) {
  moeflow_status status = MOEFLOW_OK;
  int major, minor, entered = 0;
  struct cuda_state *state = calloc(1, sizeof *state);
  if (!state) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the CUDA backend's state");
  context->backend_state = state;
  CHECK(find_device(context, &state->device, &major, &minor));
  CHECK(check_driver(&context->plan));
  if (context->cache_fd < 0) FAIL(MOEFLOW_ERROR_CACHE, "there is no cache at %s", context->cache_path);
  CHECK_CUDA(cuDeviceGetAttribute(&context->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, state->device));
  CHECK_CUDA(cuDevicePrimaryCtxRetain(&state->context, state->device));
  state->retained = 1;
  CHECK(cuda_enter(context));
  entered = 1;
  CHECK_CUDA(cuStreamCreate(&state->stream, CU_STREAM_NON_BLOCKING));
  CHECK(load_kernels(context, state));
cleanup:
  if (entered) cuda_leave(context);
  if (status != MOEFLOW_OK) cuda_close(context);
  return status;
}

/* Modules may load lazily at the first launch; inside a capture that is not allowed. */
static moeflow_status cuda_prepare(struct moeflow_context *context) {
  moeflow_status status = MOEFLOW_OK;
  struct cuda_state *state = state_of(context);
  for (int i = 0; i < PLAN_VARIANTS_MAX && !state->loaded; i++) {
    int registers;
    if (!state->kernels[i].function) continue;
    if (driver.cuFuncLoad) {
      CHECK_CUDA(cuFuncLoad(state->kernels[i].function));
    } else { /* older drivers: asking for an attribute loads it */
      CHECK_CUDA(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, state->kernels[i].function));
    }
  }
  state->loaded = 1;
cleanup:
  return status;
}

/* ---- Memory ---- */

static moeflow_status cuda_zero(struct moeflow_context *context, void *memory, size_t bytes) {
  moeflow_status status = MOEFLOW_OK;
  CUstream stream = state_of(context)->stream;
  CHECK_CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, 0, bytes, stream));
  CHECK_CUDA(cuStreamSynchronize(stream));
cleanup:
  return status;
}

static void cuda_release(struct moeflow_context *context, void *memory) {
  (void)context;
  if (memory) driver.cuMemFree((CUdeviceptr)(uintptr_t)memory);
}

static moeflow_status cuda_allocate(struct moeflow_context *context, size_t bytes, void **memory) {
  moeflow_status status = MOEFLOW_OK;
  CUdeviceptr pointer = 0;
  *memory = NULL;
  CHECK_CUDA(cuMemAlloc(&pointer, bytes));
  CHECK(cuda_zero(context, (void *)(uintptr_t)pointer, bytes));
  *memory = (void *)(uintptr_t)pointer;
  return MOEFLOW_OK;
cleanup:
  if (pointer) cuda_release(context, (void *)(uintptr_t)pointer);
  if (status == MOEFLOW_ERROR_MEMORY) {
    size_t available = 0, total = 0;
    driver.cuMemGetInfo(&available, &total);
    status_set(status, "device %d has %zu of %zu bytes free, and %zu are needed", context->device, available, total, bytes);
  }
  return status;
}

static moeflow_status cuda_allocate_record(struct moeflow_context *context, size_t bytes, void **host, void **device) {
  moeflow_status status = MOEFLOW_OK;
  CUdeviceptr pointer;
  (void)context;
  *host = NULL;
  CHECK_CUDA(cuMemHostAlloc(host, bytes, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
  memset(*host, 0, bytes);
  CHECK_CUDA(cuMemHostGetDevicePointer(&pointer, *host, 0));
  *device = (void *)(uintptr_t)pointer;
  return MOEFLOW_OK;
cleanup:
  if (*host) driver.cuMemFreeHost(*host);
  *host = NULL;
  return status;
}

static void cuda_release_record(struct moeflow_context *context, void *host) {
  (void)context;
  if (host) driver.cuMemFreeHost(host);
}

static moeflow_status cuda_upload(struct moeflow_context *context, void *to, const void *from, size_t bytes) {
  moeflow_status status = MOEFLOW_OK;
  CUstream stream = state_of(context)->stream;
  CHECK_CUDA(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, bytes, stream));
  CHECK_CUDA(cuStreamSynchronize(stream));
cleanup:
  return status;
}

static moeflow_status cuda_download(struct moeflow_context *context, void *to, const void *from, size_t bytes) {
  moeflow_status status = MOEFLOW_OK;
  CUstream stream = state_of(context)->stream;
  CHECK_CUDA(cuMemcpyDtoHAsync(to, (CUdeviceptr)(uintptr_t)from, bytes, stream));
  CHECK_CUDA(cuStreamSynchronize(stream));
cleanup:
  return status;
}

/* ---- Tensor maps ---- */

_Static_assert(sizeof(CUtensorMap) == sizeof(struct moeflow_tensor_map), "templates/abi.h and cuda.h differ on tensor maps");

static moeflow_status cuda_encode(struct moeflow_context *context, const struct tensor_view *view,
                                  struct moeflow_tensor_map *map) {
  moeflow_status status = MOEFLOW_OK;
  cuuint64_t size[TENSOR_DIMENSIONS_MAX], stride[TENSOR_DIMENSIONS_MAX];
  cuuint32_t box[TENSOR_DIMENSIONS_MAX], step[TENSOR_DIMENSIONS_MAX];
  (void)context;
  if (!driver.cuTensorMapEncodeTiled) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT,
         "the driver (CUDA %d.%d) has no cuTensorMapEncodeTiled, which the experts kernel needs: install a newer NVIDIA "
         "driver",
         driver.version / 1000, driver.version % 1000 / 10);
  }
  for (int i = 0; i < view->dimensions; i++) {
    size[i] = view->size[i];
    box[i] = view->box[i];
    step[i] = 1;
    if (i + 1 < view->dimensions) stride[i] = view->stride[i];
  }
  /* Fetching 256 bytes for the 128 that a row's copy wants costs a tenth of the bandwidth: on an H200, copies of 64 rows
   * read at 4.21 TB/s with it and 4.65 without (docs/findings.md). */
  CHECK_CUDA(cuTensorMapEncodeTiled((CUtensorMap *)map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)view->dimensions,
                                    (void *)(uintptr_t)view->base, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
cleanup:
  return status;
}

/* ---- Launch ---- */

static int cuda_capturing(struct moeflow_context *context, void *stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  (void)context;
  return driver.cuStreamIsCapturing((CUstream)stream, &capture) == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* These may be set up while the kernel before them ends: they wait for that one themselves. */
static int launches_early(enum kernel_id kernel) {
  return kernel == KERNEL_EXPERTS || kernel == KERNEL_DISPATCH || kernel == KERNEL_RETURN_COMBINE;
}

static CUresult launch_kernel(const struct kernel *kernel, const struct launch *launch) {
  void *arguments[] = {launch->params};
  CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                             .value.programmaticStreamSerializationAllowed = 1};
  CUlaunchConfig config = {.gridDimX = (unsigned)launch->blocks,
                           .gridDimY = 1,
                           .gridDimZ = 1,
                           .blockDimX = kernel->threads,
                           .blockDimY = 1,
                           .blockDimZ = 1,
                           .sharedMemBytes = kernel->shared_bytes,
                           .hStream = (CUstream)launch->stream,
                           .attrs = &early,
                           .numAttrs = 1};
  if (launches_early(launch->kernel) && driver.cuLaunchKernelEx) {
    return driver.cuLaunchKernelEx(&config, kernel->function, arguments, NULL);
  }
  return driver.cuLaunchKernel(kernel->function, (unsigned)launch->blocks, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes,
                               (CUstream)launch->stream, arguments, NULL);
}

static moeflow_status cuda_launch(struct moeflow_context *context, const struct launch *launch) {
  moeflow_status status = MOEFLOW_OK;
  const struct cuda_state *state = state_of(context);
  if (launch->variant < 0 || launch->variant >= state->counts[launch->kernel] || launch->blocks < 1 ||
      launch->blocks > INT32_MAX) {
    FAIL(MOEFLOW_ERROR_INTERNAL, "kernel %s: variant %d of %d, %lld blocks", kernel_names[launch->kernel], launch->variant,
         state->counts[launch->kernel], (long long)launch->blocks);
  }
  const struct kernel *kernel = &state->kernels[state->offsets[launch->kernel] + launch->variant];
  CUresult result = launch_kernel(kernel, launch);
  if (result != CUDA_SUCCESS) {
    status = status_prefix(driver_status(result, "cuLaunchKernel"),
                           "kernel %s, %lld blocks of %u threads with %u bytes of shared memory",
                           kernel_names[launch->kernel], (long long)launch->blocks, kernel->threads, kernel->shared_bytes);
  }
cleanup:
  return status;
}

const struct backend backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .allocate_record = cuda_allocate_record,
    .release_record = cuda_release_record,
    .upload = cuda_upload,
    .download = cuda_download,
    .prepare = cuda_prepare,
    .launch = cuda_launch,
    .architectures = cuda_architectures,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .zero = cuda_zero,
    .capturing = cuda_capturing,
    .encode = cuda_encode,
};
