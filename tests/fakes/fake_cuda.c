#include "fake_cuda.h"

#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static struct fake_cuda fake = {.version = 13000, .devices = 1, .major = 9, .minor = 0, .multiprocessors = 132};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

EXPORT struct fake_cuda *fake_cuda(void);
struct fake_cuda *fake_cuda(void) {
  return &fake;
}

static struct fake_call *note(const char *name, void *stream) {
  static struct fake_call overflow;
  pthread_mutex_lock(&mutex);
  struct fake_call *call = fake.call_count < FAKE_LOG_MAX ? &fake.calls[fake.call_count++] : &overflow;
  pthread_mutex_unlock(&mutex);
  memset(call, 0, sizeof *call);
  strncpy(call->name, name, sizeof call->name - 1);
  call->stream = stream;
  return call;
}
#define NOTE(stream) note(__func__, stream)

/* Counts down; true for the call that has to fail. */
static int fails(int *count) {
  pthread_mutex_lock(&mutex);
  const int now = *count > 0 && --*count == 0;
  pthread_mutex_unlock(&mutex);
  return now;
}

static struct fake_stream *stream_of(CUstream stream) {
  return stream ? (struct fake_stream *)stream : &fake.legacy;
}

/* ---- Device ---- */

EXPORT CUresult cuInit(unsigned flags) {
  (void)flags;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = fake.version;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "made to fail";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  *count = fake.devices;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  (void)device;
  strncpy(name, "Fake GPU", (size_t)length);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = fake.major;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = fake.minor;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = fake.multiprocessors;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  (void)device;
  *context = (CUcontext)&fake;
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  (void)device;
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

static _Thread_local int depth;

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  (void)context;
  depth++;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context) {
  *context = (CUcontext)&fake;
  return depth-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* Everything below needs a current context, as the real one does. */
#define NEED_CONTEXT \
  if (depth <= 0) return CUDA_ERROR_INVALID_CONTEXT

/* ---- Modules ---- */

struct function {
  char name[48];
  struct function *next;
};

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  NEED_CONTEXT;
  if (memcmp(image, "fake cubin", 10)) return CUDA_ERROR_INVALID_IMAGE;
  *module = calloc(1, sizeof(struct function));
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  NEED_CONTEXT;
  free(module);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  struct function *made = (struct function *)module; /* one function a module */
  strncpy(made->name, name, sizeof made->name - 1);
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function, (void)attribute;
  return value <= 227 * 1024 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  (void)attribute, (void)function;
  *value = 32;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncLoad(CUfunction function) {
  NEED_CONTEXT;
  memcpy(NOTE(NULL)->kernel, ((struct function *)function)->name, sizeof(((struct function *)function)->name));
  return CUDA_SUCCESS;
}

static size_t params_bytes(const char *kernel) {
  static const struct {
    const char *name;
    size_t bytes;
  } kernels[] = {
      {"moeflow_router", sizeof(struct moeflow_router_params)},
      {"moeflow_pack", sizeof(struct moeflow_pack_params)},
      {"moeflow_exchange", sizeof(struct moeflow_exchange_params)},
      {"moeflow_dispatch", sizeof(struct moeflow_dispatch_params)},
      {"moeflow_return_combine", sizeof(struct moeflow_return_combine_params)},
      {"moeflow_expert_index", sizeof(struct moeflow_expert_index_params)},
      {"moeflow_expert_prepare", sizeof(struct moeflow_expert_prepare_params)},
      {"moeflow_gate_up", sizeof(struct moeflow_gate_up_params)},
      {"moeflow_down", sizeof(struct moeflow_down_params)},
      {"moeflow_experts", sizeof(struct moeflow_experts_params)},
      {"moeflow_experts_stream", sizeof(struct moeflow_experts_params)},
      {"moeflow_pack_weights", sizeof(struct moeflow_pack_weights_params)},
      {"moeflow_identity", sizeof(struct moeflow_identity_params)},
      {"moeflow_owner_reduce", sizeof(struct moeflow_owner_reduce_params)},
      {"moeflow_combine", sizeof(struct moeflow_combine_params)},
      {"moeflow_combine_ring", sizeof(struct moeflow_combine_params)},
  };
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
    if (!strcmp(kernels[i].name, kernel)) return kernels[i].bytes;
  }
  return 0;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty,
                               unsigned tz, unsigned shared_bytes, CUstream stream, void **params, void **extra) {
  NEED_CONTEXT;
  struct fake_call *call = NOTE(stream);
  memcpy(call->kernel, ((struct function *)function)->name, sizeof call->kernel);
  call->blocks = x;
  call->threads = threads;
  call->shared_bytes = shared_bytes;
  memcpy(call->params, params[0], params_bytes(call->kernel));
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || extra) return CUDA_ERROR_INVALID_VALUE;
  return fails(&fake.fail_launch) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  const int before = fake.call_count;
  const CUresult result =
      cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                     config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
  if (fake.call_count == before) return result;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return CUDA_ERROR_INVALID_VALUE;
    fake.calls[before].early = config->attrs[i].value.programmaticStreamSerializationAllowed;
  }
  return result;
}

/* ---- Tensor maps ---- */

_Static_assert(sizeof(struct fake_tensor_map) <= sizeof(CUtensorMap), "a fake map is no larger than a real one");

/* The driver's rules for the only form that is made here: bf16, nothing interleaved, the 128-byte swizzle. */
static int map_is_legal(const struct fake_tensor_map *map, const void *at, const cuuint32_t *steps) {
  if ((size_t)at % 64 || (size_t)map->base % 16 || !map->base) return 0;
  if (map->box[0] * 2 % 16 || map->box[0] * 2 > 128) return 0;
  for (int i = 0; i < map->dimensions; i++) {
    if (map->size[i] < 1 || map->size[i] > 1ull << 32 || map->box[i] < 1 || map->box[i] > 256 || steps[i] != 1) return 0;
  }
  for (int i = 0; i + 1 < map->dimensions; i++) {
    if (map->stride[i] % 16 || map->stride[i] >= 1ull << 40) return 0;
  }
  return 1;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t dimensions, void *base,
                                       const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  struct fake_tensor_map map = {.magic = FAKE_TENSOR_MAP, .base = base, .swizzle = swizzle, .promotion = promotion};
  if (fails(&fake.fail_encode)) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || dimensions < 1 || dimensions > 4) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  map.dimensions = (unsigned short)dimensions;
  map.fill = (unsigned short)fill;
  for (cuuint32_t i = 0; i < dimensions; i++) {
    map.size[i] = size[i];
    map.box[i] = box[i];
    if (i + 1 < dimensions) map.stride[i] = stride[i];
  }
  if (!map_is_legal(&map, to, steps)) return CUDA_ERROR_INVALID_VALUE;
  memset(to, 0, sizeof *to);
  memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}

/* ---- Memory ---- */

static void *allocate(size_t bytes) {
  atomic_fetch_add(&fake.allocations, 1);
  if (fails(&fake.fail_allocation)) return NULL;
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory) return NULL;
  memset(memory, 0xa5, bytes); /* nobody may rely on zeros */
  atomic_fetch_add(&fake.live, 1);
  return memory;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes) {
  NEED_CONTEXT;
  NOTE(NULL);
  void *memory = allocate(bytes);
  *pointer = (CUdeviceptr)(size_t)memory;
  return memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemFree(CUdeviceptr pointer) {
  NEED_CONTEXT;
  NOTE(NULL);
  free((void *)(size_t)pointer);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
  NEED_CONTEXT;
  (void)flags;
  NOTE(NULL);
  *host = allocate(bytes);
  return *host ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr *pointer, void *host, unsigned flags) {
  (void)flags;
  *pointer = (CUdeviceptr)(size_t)host;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *host) {
  NEED_CONTEXT;
  NOTE(NULL);
  free(host);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo(size_t *available, size_t *total) {
  NEED_CONTEXT;
  *available = 1000;
  *total = 2000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t bytes, CUstream stream) {
  NEED_CONTEXT;
  NOTE(stream);
  memset((void *)(size_t)pointer, value, bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  NEED_CONTEXT;
  NOTE(stream);
  memcpy((void *)(size_t)to, from, bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NEED_CONTEXT;
  NOTE(stream);
  memcpy(to, (void *)(size_t)from, bytes);
  return CUDA_SUCCESS;
}

/* ---- Memory that processes share: a file that is mapped ---- */

#define GRANULARITY 4096

struct shared {
  int file;
  size_t bytes;
};

/* Notes the call; returns what it is to fail with. */
#define SHARE_CALL \
  NEED_CONTEXT;    \
  NOTE(NULL);      \
  if (!strcmp(fake.fail_share, __func__)) return CUDA_ERROR_NOT_SUPPORTED

static int legal(const CUmemAllocationProp *how) {
  return how->type == CU_MEM_ALLOCATION_TYPE_PINNED && how->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         how->location.id < fake.devices && how->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

static CUresult new_shared(CUmemGenericAllocationHandle *handle, int file, size_t bytes) {
  struct shared *made = malloc(sizeof *made);
  if (!made || file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = (struct shared){file, bytes};
  *handle = (CUmemGenericAllocationHandle)(size_t)made;
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *how,
                                              CUmemAllocationGranularity_flags option) {
  SHARE_CALL;
  (void)option;
  *granularity = GRANULARITY;
  return legal(how) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *how,
                            unsigned long long flags) {
  SHARE_CALL;
  if (!legal(how) || flags || bytes % GRANULARITY || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (fails(&fake.fail_allocation)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("fake memory", MFD_CLOEXEC);
  char page[GRANULARITY];
  memset(page, 0xa5, sizeof page); /* nobody may rely on zeros */
  for (size_t at = 0; at < bytes; at += sizeof page) {
    if (write(file, page, sizeof page) != (ssize_t)sizeof page) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return new_shared(handle, file, bytes);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct shared *shared = (struct shared *)(size_t)handle;
  NEED_CONTEXT;
  NOTE(NULL);
  close(shared->file);
  free(shared);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr at,
                                    unsigned long long flags) {
  SHARE_CALL;
  if (alignment || at || flags || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  *pointer = (CUdeviceptr)(size_t)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  NEED_CONTEXT;
  NOTE(NULL);
  munmap((void *)(size_t)pointer, bytes);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  const struct shared *shared = (const struct shared *)(size_t)handle;
  SHARE_CALL;
  if (bytes != shared->bytes || offset || flags) return CUDA_ERROR_INVALID_VALUE;
  if (mmap((void *)(size_t)pointer, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, shared->file, 0) == MAP_FAILED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  NEED_CONTEXT;
  NOTE(NULL);
  mmap((void *)(size_t)pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  SHARE_CALL;
  if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id >= fake.devices ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return mprotect((void *)(size_t)pointer, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                             unsigned long long flags) {
  const struct shared *shared = (const struct shared *)(size_t)handle;
  SHARE_CALL;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_INVALID_VALUE;
  *(int *)to = fcntl(shared->file, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                               CUmemAllocationHandleType type) {
  SHARE_CALL;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const off_t bytes = lseek((int)(size_t)from, 0, SEEK_END);
  int file = fcntl((int)(size_t)from, F_DUPFD_CLOEXEC, 0);
  if (fake.share_wrong) {
    close(file);
    file = memfd_create("other memory", MFD_CLOEXEC);
    if (ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return new_shared(handle, file, (size_t)bytes);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
  SHARE_CALL;
  memcpy(handle, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

/* Between threads alone. */
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
  SHARE_CALL;
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  memcpy(pointer, &handle, sizeof *pointer);
  atomic_fetch_add(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  NEED_CONTEXT;
  NOTE(NULL);
  (void)pointer;
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

/* ---- Streams ---- */

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  NEED_CONTEXT;
  (void)flags;
  *stream = (CUstream)allocate(sizeof(struct fake_stream));
  if (!*stream) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(*stream, 0, sizeof(struct fake_stream));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
  NEED_CONTEXT;
  free(stream);
  atomic_fetch_sub(&fake.live, 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
  NEED_CONTEXT;
  return atomic_load(&stream_of(stream)->pending) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  NEED_CONTEXT;
  NOTE(stream);
  const struct timespec nap = {0, 1000000};
  for (int i = 0; i < 20000 && atomic_load(&stream_of(stream)->pending); i++) nanosleep(&nap, NULL);
  return atomic_load(&stream_of(stream)->pending) ? CUDA_ERROR_LAUNCH_TIMEOUT : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  (void)stream;
  *status = fake.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
