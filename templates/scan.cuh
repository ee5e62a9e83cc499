/* Prefix sums within a block. */
#ifndef MOEFLOW_SCAN_CUH
#define MOEFLOW_SCAN_CUH

#include "ptx.cuh"

namespace moeflow {

/* The sum of all threads' values, and of those of the threads before this one. Begins with a barrier and has another. */
template <int threads>
__device__ __forceinline__ uint32_t sum_before(uint32_t mine, uint32_t *before) {
  __shared__ uint32_t warp_sums[threads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint32_t through = mine; /* of the warp's lanes up to this one */
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t below = __shfl_up_sync(full_warp, through, distance);
    if (lane >= distance) through += below;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  uint32_t all = 0;
  *before = through - mine;
  for (int i = 0; i < threads / 32; i++) {
    if (i < warp) *before += warp_sums[i];
    all += warp_sums[i];
  }
  return all;
}

/* In place: values[i], shared, becomes the sum of values[0 .. i). Returns the sum of all, to every thread. Each thread adds
 * up one run of consecutive values. Begins and ends with a barrier. */
template <int threads>
__device__ __forceinline__ int32_t exclusive_scan(int32_t *values, int count) {
  __shared__ int32_t warp_sums[threads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int run = (count + threads - 1) / threads;
  const int begin = threadIdx.x * run;
  __syncthreads();
  int32_t sum = 0;
  for (int i = begin; i < begin + run && i < count; i++) sum += values[i];
  int32_t through = sum; /* of the warp's lanes up to this one */
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t below = __shfl_up_sync(full_warp, through, distance);
    if (lane >= distance) through += below;
  }
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  int32_t before = through - sum;
  int32_t total = 0;
  for (int i = 0; i < threads / 32; i++) {
    if (i < warp) before += warp_sums[i];
    total += warp_sums[i];
  }
  for (int i = begin; i < begin + run && i < count; i++) {
    const int32_t value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
  return total;
}

}  // namespace moeflow
#endif
