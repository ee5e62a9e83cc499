/* The CUDA driver, found with dlopen: libmoeflow links no CUDA library. Functions are called through the table `driver`,
 * whose members carry cuda.h's own names (its macros map them to the versioned symbols, in the table as in the calls). */
#ifndef MOEFLOW_DRIVER_H
#define MOEFLOW_DRIVER_H

#include <cuda.h>

#include "status.h"

#define DRIVER_FUNCTIONS(X)    \
  X(cuInit)                    \
  X(cuDriverGetVersion)        \
  X(cuGetErrorName)            \
  X(cuGetErrorString)          \
  X(cuDeviceGetCount)          \
  X(cuDeviceGet)               \
  X(cuDeviceGetName)           \
  X(cuDeviceGetAttribute)      \
  X(cuDevicePrimaryCtxRetain)  \
  X(cuDevicePrimaryCtxRelease) \
  X(cuCtxPushCurrent)          \
  X(cuCtxPopCurrent)           \
  X(cuModuleLoadData)          \
  X(cuModuleUnload)            \
  X(cuModuleGetFunction)       \
  X(cuFuncSetAttribute)        \
  X(cuFuncGetAttribute)        \
  X(cuLaunchKernel)            \
  X(cuMemAlloc)                \
  X(cuMemFree)                 \
  X(cuMemHostAlloc)            \
  X(cuMemHostGetDevicePointer) \
  X(cuMemFreeHost)             \
  X(cuMemGetInfo)              \
  X(cuMemsetD8Async)           \
  X(cuMemcpyHtoDAsync)         \
  X(cuMemcpyDtoHAsync)         \
  X(cuStreamCreate)            \
  X(cuStreamDestroy)           \
  X(cuStreamQuery)             \
  X(cuStreamSynchronize)       \
  X(cuStreamIsCapturing)

/* Absent from older drivers, or called by the tools alone; NULL when absent. */
#define DRIVER_OPTIONAL(X)                        \
  X(cuFuncLoad)                                   \
  X(cuLaunchKernelEx)                             \
  X(cuTensorMapEncodeTiled)                       \
  X(cuDeviceTotalMem)                             \
  X(cuDeviceCanAccessPeer)                        \
  X(cuStreamBeginCapture)                         \
  X(cuStreamEndCapture)                           \
  X(cuGraphInstantiate)                           \
  X(cuGraphLaunch)                                \
  X(cuGraphUpload)                                \
  X(cuGraphDestroy)                               \
  X(cuGraphExecDestroy)                           \
  X(cuEventCreate)                                \
  X(cuEventDestroy)                               \
  X(cuEventRecord)                                \
  X(cuEventElapsedTime)                           \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor)  \
  X(cuStreamWaitValue32)                          \
  X(cuMemGetAllocationGranularity)                \
  X(cuMemCreate)                                  \
  X(cuMemRelease)                                 \
  X(cuMemAddressReserve)                          \
  X(cuMemAddressFree)                             \
  X(cuMemMap)                                     \
  X(cuMemUnmap)                                   \
  X(cuMemSetAccess)                               \
  X(cuMemExportToShareableHandle)                 \
  X(cuMemImportFromShareableHandle)               \
  X(cuIpcGetMemHandle)                            \
  X(cuIpcOpenMemHandle)                           \
  X(cuIpcCloseMemHandle)

struct driver {
#define DRIVER_MEMBER(name) __typeof__(name) *name;
  DRIVER_FUNCTIONS(DRIVER_MEMBER)
  DRIVER_OPTIONAL(DRIVER_MEMBER)
#undef DRIVER_MEMBER
  int version; /* what cuDriverGetVersion says: 13000 */
};
extern struct driver driver; /* valid once driver_load has returned MOEFLOW_OK */

/* Loads libcuda.so.1 (or the file that MOEFLOW_CUDA_LIB names) and initialises it, once a process; any thread.
 * MOEFLOW_ERROR_ENVIRONMENT when there is no driver, no GPU, or a function is missing. */
moeflow_status driver_load(void);

/* MOEFLOW_ERROR_CUDA with the function's name and the driver's own words. */
moeflow_status driver_status(CUresult result, const char *call);

#define CHECK_CUDA(call)                            \
  do {                                              \
    CUresult driver_result = driver.call;           \
    if (driver_result != CUDA_SUCCESS) {            \
      status = driver_status(driver_result, #call); \
      goto cleanup;                                 \
    }                                               \
  } while (0)
#endif
