/* Runs the text of templates/ on the CPU: the CUDA words that it uses, block by block, each thread a fiber of the calling
 * pthread (launch) or of a pthread per block (launch_together). Included before any template, by the build's -include.
 *
 * What goes wrong silently on a GPU fails loudly here: a barrier that not all threads reach, or reach at different lines; a
 * warp function without its whole warp; shared memory read before a copy was waited for (it holds 0xff until then);
 * misaligned vectors and accesses out of bounds (sanitizers). `emulator::schedule` changes the order of blocks and threads:
 * results that differ between schedules show a missing barrier. */
#ifndef MOEFLOW_CUDA_EMULATOR_H
#define MOEFLOW_CUDA_EMULATOR_H

#define MOEFLOW_EMULATED 1

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static thread_local /* blocks that run at once have a pthread each */

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct emulated_index {
  unsigned x, y, z;
};
extern thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Site { /* where in the source a thread waits */
  const char *file;
  int line;
};
#define EMULATED_SITE (emulator::Site{__FILE__, __LINE__})

/* 0: blocks in order, warps and lanes in turns; 1: all in reverse; others seed a shuffle. Other than with 0, a warp runs as
 * far as it can before the next one starts. Used by the next launch of this pthread. */
extern thread_local unsigned schedule;

/* Called before each thread of a block begins, where set: what others do to memory meanwhile. */
extern thread_local std::function<void(unsigned thread)> before_thread;

/* Runs `kernel` once per thread of each block. Aborts the process with a message when the kernel breaks a rule. */
void launch(unsigned blocks, unsigned threads, size_t dynamic_shared_bytes, const std::function<void()> &kernel);

/* The same, with all blocks under way at once, each on a pthread of its own: for kernels whose blocks wait for others. */
void launch_together(unsigned blocks, unsigned threads, size_t dynamic_shared_bytes, const std::function<void()> &kernel);

void yield();
void block_barrier(Site site);
bool block_any(Site site, bool value);
int block_count(Site site, bool value);

constexpr size_t lane_bytes = 64;
/* Each lane of the warp gives `size` bytes; returns all lanes' bytes, lane_bytes apart, valid until the lane's next call. */
const unsigned char *warp_gather(Site site, const void *value, size_t size);
void warp_barrier(Site site);
void check_mask(Site site, unsigned mask);

unsigned char *dynamic_shared();
void load_16(uint32_t *registers, const void *from);
void copy_async(void *to, const void *from, int bytes);
void copy_commit();
void copy_wait(int pending);
void load_matrix(uint32_t *registers, int count, const void *row);
void mma_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
uint64_t global_timer();

template <class T>
T warp_read(Site site, unsigned mask, T value, int lane) {
  check_mask(site, mask);
  T result;
  memcpy(&result, warp_gather(site, &value, sizeof value) + lane * lane_bytes, sizeof result);
  return result;
}
inline int lane() {
  return static_cast<int>(threadIdx.x % 32);
}
template <class T>
T warp_read_below(Site site, unsigned mask, T value, int distance) {
  return warp_read(site, mask, value, lane() >= distance ? lane() - distance : lane());
}
unsigned warp_ballot(Site site, unsigned mask, bool value);
unsigned warp_match(Site site, unsigned mask, int value);
unsigned warp_max(Site site, unsigned mask, unsigned value);

template <class T>
T change(T *to, const std::function<T(T)> &next) {
  T old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(to, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

}  // namespace emulator

#define __syncthreads() emulator::block_barrier(EMULATED_SITE)
#define __syncthreads_or(value) emulator::block_any(EMULATED_SITE, value)
#define __syncthreads_count(value) emulator::block_count(EMULATED_SITE, value)
#define __syncwarp() emulator::warp_barrier(EMULATED_SITE)
#define __shfl_sync(mask, value, lane) emulator::warp_read(EMULATED_SITE, mask, value, lane)
#define __shfl_xor_sync(mask, value, bits) emulator::warp_read(EMULATED_SITE, mask, value, emulator::lane() ^ (bits))
#define __shfl_up_sync(mask, value, distance) emulator::warp_read_below(EMULATED_SITE, mask, value, distance)
#define __ballot_sync(mask, value) emulator::warp_ballot(EMULATED_SITE, mask, value)
#define __match_any_sync(mask, value) emulator::warp_match(EMULATED_SITE, mask, value)
#define __reduce_max_sync(mask, value) emulator::warp_max(EMULATED_SITE, mask, value)
#define __reduce_min_sync(mask, value) (~emulator::warp_max(EMULATED_SITE, mask, ~(value)))

inline int __ffs(unsigned value) {
  return __builtin_ffs(static_cast<int>(value));
}
inline int __popc(unsigned value) {
  return __builtin_popcount(value);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline int atomicAdd(int *to, int value) {
  return emulator::change<int>(to, [=](int old) { return old + value; });
}
inline unsigned atomicAdd(unsigned *to, unsigned value) {
  return emulator::change<unsigned>(to, [=](unsigned old) { return old + value; });
}
inline int atomicMin(int *to, int value) {
  return emulator::change<int>(to, [=](int old) { return value < old ? value : old; });
}
inline int atomicMax(int *to, int value) {
  return emulator::change<int>(to, [=](int old) { return value > old ? value : old; });
}
inline unsigned atomicCAS(unsigned *to, unsigned expected, unsigned value) {
  return emulator::change<unsigned>(to, [=](unsigned old) { return old == expected ? value : old; });
}
#endif
