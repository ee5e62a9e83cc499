/* PTX instructions, each wrapped once, and nothing else of this kind anywhere in the templates. Spelled for sm_80 and newer.
 * The CPU emulator of the tests supplies the same functions by way of its own namespace. */
#ifndef MOEFLOW_PTX_CUH
#define MOEFLOW_PTX_CUH

#include "abi.h"

namespace moeflow {

constexpr unsigned full_warp = 0xffffffffu;

#ifdef MOEFLOW_EMULATED

#define MOEFLOW_CALL inline
typedef uint64_t shared_address;

__device__ inline unsigned char *dynamic_shared() {
  return emulator::dynamic_shared();
}
__device__ inline shared_address to_shared(const void *pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
__device__ inline void copy_async_16(shared_address to, const void *from, int bytes) {
  emulator::copy_async(reinterpret_cast<void *>(to), from, bytes);
}
__device__ inline void copy_commit() {
  emulator::copy_commit();
}
template <int pending>
__device__ inline void copy_wait() {
  emulator::copy_wait(pending);
}
__device__ inline void load_matrix_4(uint32_t (&registers)[4], shared_address row) {
  emulator::load_matrix(registers, 4, reinterpret_cast<const void *>(row));
}
__device__ inline void load_matrix_2(uint32_t (&registers)[2], shared_address row) {
  emulator::load_matrix(registers, 2, reinterpret_cast<const void *>(row));
}
__device__ inline void mma_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma_bf16(sum, a, b0, b1);
}
__device__ inline uint64_t policy_evict_first() {
  return 0;
}
__device__ inline void load_stream_16(uint32_t (&registers)[4], const void *from, uint64_t) {
  emulator::load_16(registers, from);
}
__device__ inline uint32_t load_acquire_system(const uint32_t *from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
__device__ inline uint32_t load_system(const volatile uint32_t *from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
__device__ inline void store_release_system(uint32_t *to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
__device__ inline void store_system(uint32_t *to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
__device__ inline void fence_system() {
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
}
__device__ inline uint32_t load_gpu(const uint32_t *from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
__device__ inline uint32_t load_acquire_gpu(const uint32_t *from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
__device__ inline void add_release_gpu(uint32_t *to, uint32_t value) {
  __atomic_fetch_add(to, value, __ATOMIC_RELEASE);
}
__device__ inline uint64_t policy_evict_last() {
  return 0;
}
__device__ inline void store_float(float *to, float value, uint64_t) {
  *to = value;
}
__device__ inline void store_word(void *to, uint32_t value, uint64_t) {
  *static_cast<uint32_t *>(to) = value;
}
__device__ inline float4 load_l2_if(const float *from, bool wanted) {
  return wanted ? *reinterpret_cast<const float4 *>(from) : float4{};
}
__device__ inline void prefetch_line(const void *) {}
__device__ inline void launch_dependents() {}
__device__ inline void await_dependencies() {}
__device__ inline uint64_t global_timer() {
  return emulator::global_timer();
}
__device__ inline void sleep_ns(unsigned) {
  emulator::yield();
}

#else

#define MOEFLOW_CALL __noinline__ /* a real call, with registers of its own */
typedef uint32_t shared_address;

__device__ __forceinline__ unsigned char *dynamic_shared() {
  extern __shared__ __align__(128) unsigned char moeflow_dynamic_shared[];
  return moeflow_dynamic_shared;
}
__device__ __forceinline__ shared_address to_shared(const void *pointer) {
  shared_address address;
  asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
  return address;
}

/* Copies `bytes` (0 or 16) of 16 to shared memory and fills the rest with zeros; both addresses are multiples of 16. */
__device__ __forceinline__ void copy_async_16(shared_address to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most `pending` of this thread's newest groups are under way. */
template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* For what is read once: first to leave the L2. */
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/* 16 bytes that nobody writes meanwhile, past the L1. Volatile: the load starts where it stands in the text. */
__device__ __forceinline__ void load_stream_16(uint32_t (&registers)[4], const void *from, uint64_t policy) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "l"(from), "l"(policy));
}

/* Loads 8x8 matrices of 16-bit values: lanes 8i .. 8i + 7 give the rows of matrix i. */
__device__ __forceinline__ void load_matrix_4(uint32_t (&registers)[4], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrix_2(uint32_t (&registers)[2], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(row)
               : "memory");
}
/* sum[16 x 8] += a[16 x 16] * b[16 x 8] */
__device__ __forceinline__ void mma_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t *from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_system(const volatile uint32_t *from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(uint32_t *to, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_system(uint32_t *to, uint32_t value) {
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ __forceinline__ uint32_t load_gpu(const uint32_t *from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t *from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void add_release_gpu(uint32_t *to, uint32_t value) {
  asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
/* For what is soon read again: leaves the L2 last. */
__device__ __forceinline__ uint64_t policy_evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void store_float(float *to, float value, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(to), "f"(value), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_word(void *to, uint32_t value, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(to), "r"(value), "l"(policy) : "memory");
}
/* Four values past this multiprocessor's own cache (other blocks of the kernel have written them), zeros if not wanted. No
 * branch: several such loads are under way at a time. */
__device__ __forceinline__ float4 load_l2_if(const float *from, bool wanted) {
  float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
               : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
               : "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
  return value;
}
/* The line at this address into this multiprocessor's own cache: only for what no other block writes meanwhile. */
__device__ __forceinline__ void prefetch_line(const void *at) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}
/* The next kernel of the stream, if it is launched for that (and awaits this one's end itself), may be set up where there is
 * room, as soon as all blocks of this one have come here or ended. */
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Until the kernel before has ended and all it wrote can be seen; nothing in a kernel that was launched without the attribute. */
__device__ __forceinline__ void await_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}
__device__ __forceinline__ void sleep_ns(unsigned nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

#endif
}  // namespace moeflow
#endif
