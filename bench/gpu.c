#include "gpu.h"

moeflow_status bench_gpu_find(const struct bench_options *options, struct bench_gpu *gpu) {
  *gpu = (struct bench_gpu){.taken = 0};
  gpus_probe(&gpu->all);
  if (!gpu->all.count) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "a GPU is needed, and there is none: %s", gpu->all.why);
  if (options->device >= gpu->all.count) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "--device %d does not exist: this machine shows %d GPU(s)",
                      (int)options->device, gpu->all.count);
  }
  gpu->gpu = &gpu->all.gpu[options->device];
  return read_kernels_compile(gpu->gpu->major, gpu->gpu->minor, &gpu->read);
}

moeflow_status bench_gpu_take(const struct bench_options *options, struct bench_gpu *gpu) {
  moeflow_status status = MOEFLOW_OK;
  CUcontext context;
  CHECK(driver_load());
  CHECK_CUDA(cuDeviceGet(&gpu->device, (int)options->device));
  CHECK_CUDA(cuDevicePrimaryCtxRetain(&context, gpu->device));
  gpu->taken = 1;
  CHECK_CUDA(cuCtxPushCurrent(context));
  gpu->taken = 2;

cleanup:
  return status;
}

void bench_gpu_leave(struct bench_gpu *gpu) {
  CUcontext context;
  if (gpu->taken > 1) driver.cuCtxPopCurrent(&context);
  if (gpu->taken > 0) driver.cuDevicePrimaryCtxRelease(gpu->device);
  gpu->taken = 0;
  read_kernels_free(&gpu->read);
}

int bench_exit_code(const struct bench_options *options, moeflow_status status) {
  if (status != MOEFLOW_OK) fprintf(stderr, "moeflow-bench %s: %s\n", options->command->name, moeflow_last_error());
  return status_exit_code(status);
}
