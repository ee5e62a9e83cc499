#include "window_memory.h"

#include <string.h>

#include "driver.h"

/* ---- vmm: the driver's virtual memory management, with a file descriptor for each allocation ---- */

/* What is called below: all or none of it is there. */
static moeflow_status check_vmm(void) {
  if (driver.cuMemGetAllocationGranularity && driver.cuMemCreate && driver.cuMemRelease && driver.cuMemAddressReserve &&
      driver.cuMemAddressFree && driver.cuMemMap && driver.cuMemUnmap && driver.cuMemSetAccess &&
      driver.cuMemExportToShareableHandle && driver.cuMemImportFromShareableHandle) {
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the driver has no virtual memory management");
}

static size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/* The span's memory at an address of this process, for this device alone. */
static moeflow_status map(struct moeflow_context *context, struct window_span *span) {
  moeflow_status status = MOEFLOW_OK;
  CUdeviceptr address = 0;
  CUmemAccessDesc access = {.location.type = CU_MEM_LOCATION_TYPE_DEVICE, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CHECK_CUDA(cuDeviceGet(&access.location.id, context->device));
  CHECK_CUDA(cuMemAddressReserve(&address, span->bytes, 0, 0, 0));
  span->memory = (uint8_t *)(uintptr_t)address;
  CHECK_CUDA(cuMemMap(address, span->bytes, 0, span->handle, 0));
  span->mapped = 1;
  CHECK_CUDA(cuMemSetAccess(address, span->bytes, &access, 1));
cleanup:
  return status;
}

static moeflow_status vmm_allocate(struct moeflow_context *context, size_t bytes, struct window_span *span) {
  moeflow_status status = MOEFLOW_OK;
  size_t granularity = 0;
  CUmemAllocationProp how = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                             .location.type = CU_MEM_LOCATION_TYPE_DEVICE};
  CHECK(check_vmm());
  CHECK_CUDA(cuDeviceGet(&how.location.id, context->device));
  CHECK_CUDA(cuMemGetAllocationGranularity(&granularity, &how, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  span->bytes = round_up(bytes, granularity);
  CHECK_CUDA(cuMemCreate(&span->handle, span->bytes, &how, 0));
  CHECK(map(context, span));
  CHECK(context->backend->zero(context, span->memory, span->bytes));
cleanup:
  return status;
}

static moeflow_status vmm_share(const struct window_span *span, struct window_ticket *ticket, int *fd) {
  moeflow_status status = MOEFLOW_OK;
  ticket->bytes = span->bytes;
  CHECK_CUDA(cuMemExportToShareableHandle(fd, span->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
cleanup:
  return status;
}

static moeflow_status vmm_open(struct moeflow_context *context, const struct window_ticket *ticket, int fd,
                               struct window_span *span) {
  moeflow_status status = MOEFLOW_OK;
  span->opened = 1;
  span->bytes = ticket->bytes;
  CHECK_CUDA(cuMemImportFromShareableHandle(&span->handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CHECK(map(context, span));
cleanup:
  return status;
}

/* The memory goes when the last process has let go of it. */
static void vmm_release(struct moeflow_context *context, struct window_span *span) {
  const CUdeviceptr address = (CUdeviceptr)(uintptr_t)span->memory;
  (void)context;
  if (span->mapped) driver.cuMemUnmap(address, span->bytes);
  if (address) driver.cuMemAddressFree(address, span->bytes);
  if (span->handle) driver.cuMemRelease(span->handle);
  memset(span, 0, sizeof *span);
}

/* ---- cuda_ipc: plain memory and a handle of 64 bytes ---- */

#define IPC_UNIT (2u << 20) /* what shares a block of the driver's with others would be shared with it */

_Static_assert(sizeof(CUipcMemHandle) == sizeof((struct window_ticket *)0)->handle, "a handle fits a ticket");

static moeflow_status ipc_allocate(struct moeflow_context *context, size_t bytes, struct window_span *span) {
  void *memory = NULL;
  if (!driver.cuIpcGetMemHandle || !driver.cuIpcOpenMemHandle || !driver.cuIpcCloseMemHandle) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the driver has no handles for other processes");
  }
  span->bytes = round_up(bytes, IPC_UNIT);
  moeflow_status status = context->backend->allocate(context, span->bytes, &memory);
  span->memory = memory;
  return status;
}

static moeflow_status ipc_share(const struct window_span *span, struct window_ticket *ticket, int *fd) {
  moeflow_status status = MOEFLOW_OK;
  CUipcMemHandle handle;
  (void)fd;
  CHECK_CUDA(cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)span->memory));
  ticket->bytes = span->bytes;
  memcpy(ticket->handle, &handle, sizeof handle);
cleanup:
  return status;
}

static moeflow_status ipc_open(struct moeflow_context *context, const struct window_ticket *ticket, int fd,
                               struct window_span *span) {
  moeflow_status status = MOEFLOW_OK;
  CUipcMemHandle handle;
  CUdeviceptr address = 0;
  (void)context, (void)fd;
  memcpy(&handle, ticket->handle, sizeof handle);
  span->opened = 1;
  span->bytes = ticket->bytes;
  CHECK_CUDA(cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  span->memory = (uint8_t *)(uintptr_t)address;
cleanup:
  return status;
}

static void ipc_release(struct moeflow_context *context, struct window_span *span) {
  if (span->opened && span->memory) driver.cuIpcCloseMemHandle((CUdeviceptr)(uintptr_t)span->memory);
  if (!span->opened) context->backend->release(context, span->memory);
  memset(span, 0, sizeof *span);
}

const struct window_source window_sources[WINDOW_SOURCES] = {
    {"vmm", 1, vmm_allocate, vmm_share, vmm_open, vmm_release},
    {"cuda_ipc", 0, ipc_allocate, ipc_share, ipc_open, ipc_release},
};
