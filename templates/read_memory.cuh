/* How fast memory can only be read: the limit that the experts are measured by. Not part of any plan. A digest proves that
 * every byte, or every bulk copy, arrived. */
#ifndef MOEFLOW_READ_MEMORY_CUH
#define MOEFLOW_READ_MEMORY_CUH

#include "ptx_hopper.cuh"
#include "random.h"
#include "read_memory.h"

namespace moeflow {

__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ void add_to_digest(uint32_t value, uint32_t *digest) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value ^= __shfl_xor_sync(full_warp, value, lanes);
  if (threadIdx.x % 32 == 0) atomicXor(digest, value);
}

__device__ __forceinline__ uint16_t random_value(uint32_t high, uint32_t number) {
  return moeflow_random_bf16(moeflow_random_bits(high, number), MOEFLOW_READ_FILL_SHIFT);
}

/* `count` independent 16-byte loads in flight per thread. */
template <int count>
__device__ __forceinline__ void read_loads(const moeflow_read_memory_params &params) {
  const uint4 *data = reinterpret_cast<const uint4 *>(params.data);
  const int64_t end = params.bytes / 16, stride = thread_count();
  int64_t at = thread_number();
  uint32_t value = 0;
  for (; at + (count - 1) * stride < end; at += count * stride) {
    uint4 part[count];
#pragma unroll
    for (int i = 0; i < count; i++) part[i] = __ldcs(data + at + i * stride);
#pragma unroll
    for (int i = 0; i < count; i++) value ^= part[i].x ^ part[i].y ^ part[i].z ^ part[i].w;
  }
  for (; at < end; at += stride) {
    const uint4 part = __ldcs(data + at);
    value ^= part.x ^ part.y ^ part.z ^ part.w;
  }
  add_to_digest(value, params.digest);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy_bulk(shared_address to, const uint8_t *from, int bytes, shared_address barrier) {
  barrier_expect(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/* One thread keeps a ring of `stages` copies going and looks at the first word of each. */
__device__ __forceinline__ void read_bulk(const moeflow_read_memory_params &params) {
  __shared__ alignas(8) uint64_t barriers[MOEFLOW_READ_STAGES_MAX];
  if (threadIdx.x != 0) return;
  unsigned char *ring = dynamic_shared();
  const shared_address ring_at = to_shared(ring), barriers_at = to_shared(barriers);
  const int64_t chunks = params.bytes / params.chunk;
  for (int s = 0; s < params.stages; s++) barrier_init(barriers_at + 8 * s, 1);
  barrier_init_fence();
  int64_t next = blockIdx.x; /* to request */
  for (int s = 0; s < params.stages && next < chunks; s++, next += gridDim.x)
    copy_bulk(ring_at + s * params.chunk, params.data + next * params.chunk, params.chunk, barriers_at + 8 * s);
  uint32_t value = 0, parity = 0;
  int stage = 0;
  for (int64_t current = blockIdx.x; current < chunks; current += gridDim.x) {
    barrier_wait(barriers_at + 8 * stage, parity);
    value ^= *reinterpret_cast<volatile uint32_t *>(ring + stage * params.chunk);
    if (next < chunks) {
      copy_bulk(ring_at + stage * params.chunk, params.data + next * params.chunk, params.chunk, barriers_at + 8 * stage);
      next += gridDim.x;
    }
    if (++stage == params.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  atomicXor(params.digest, value);
}
#endif

}  // namespace moeflow

extern "C" __global__ void moeflow_read_fill(const __grid_constant__ moeflow_read_memory_params params) {
  uint32_t *words = reinterpret_cast<uint32_t *>(params.data);
  for (int64_t at = moeflow::thread_number(); at * 4 < params.bytes; at += moeflow::thread_count()) {
    const uint32_t high = moeflow_random_mix(static_cast<uint32_t>(at >> 31)), low = static_cast<uint32_t>(at * 2);
    words[at] = moeflow::random_value(high, low) | static_cast<uint32_t>(moeflow::random_value(high, low + 1)) << 16;
  }
}

/* The plain reading that the fast ones are compared with. */
extern "C" __global__ void moeflow_read_check(const __grid_constant__ moeflow_read_memory_params params) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(params.data);
  const int64_t step = params.chunk / 4;
  uint32_t value = 0;
  for (int64_t at = moeflow::thread_number() * step; at * 4 < params.bytes; at += moeflow::thread_count() * step)
    value ^= words[at];
  moeflow::add_to_digest(value, params.digest);
}

extern "C" __global__ void moeflow_read_loads_4(const __grid_constant__ moeflow_read_memory_params params) {
  moeflow::read_loads<4>(params);
}

extern "C" __global__ void moeflow_read_loads_8(const __grid_constant__ moeflow_read_memory_params params) {
  moeflow::read_loads<8>(params);
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(32)
moeflow_read_bulk(const __grid_constant__ moeflow_read_memory_params params) {
  moeflow::read_bulk(params);
}
#endif
#endif
