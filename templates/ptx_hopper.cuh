/* Hopper's own instructions, sm_90a: barriers in shared memory, bulk tensor copies, the warpgroup MMA. Each wrapped once. */
#ifndef MOEFLOW_PTX_HOPPER_CUH
#define MOEFLOW_PTX_HOPPER_CUH

#include "ptx.cuh"

namespace moeflow {

/* ---- mbarrier: a phase ends when `count` arrivals and all announced bytes have come ---- */

__device__ __forceinline__ void barrier_init(shared_address barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(shared_address barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives and announces bytes that bulk copies will bring. */
__device__ __forceinline__ void barrier_expect(shared_address barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Arrives once this thread's earlier copy_async_16 are in shared memory. */
__device__ __forceinline__ void barrier_arrive_copies(shared_address barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/* Waits for the end of the phase with this parity; one that has not begun counts as ended for parity 1 at the start. */
__device__ __forceinline__ void barrier_wait(shared_address barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/* Makes barriers that were just made visible to the copy engine; a __syncthreads follows. */
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* What threads stored to shared memory, as far as this thread may see it, becomes visible to the MMA. */
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* __syncthreads for `threads` threads, numbered 1 .. 15. */
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* ---- Bulk tensor copies ---- */

/* True in one lane of a whole warp, which the compiler knows: a copy that some other condition guards is wrapped in a loop over
 * lanes. */
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile("{ .reg .pred elected; elect.sync _|elected, 0xffffffff; selp.u32 %0, 1, 0, elected; }" : "=r"(elected));
  return elected != 0;
}

/* The map into the cache of those: its first use waits for memory otherwise. */
__device__ __forceinline__ void prefetch_map(const moeflow_tensor_map *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_tensor_2(shared_address to, const moeflow_tensor_map *map, int x, int y,
                                              shared_address barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_tensor_4(shared_address to, const moeflow_tensor_map *map, int x, int y, int z, int w,
                                              shared_address barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, "
      "%5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}

/* ---- Warpgroup MMA ---- */

__device__ __forceinline__ void mma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/* Keeps the compiler from moving a read of the sums before the wait. */
template <int count>
__device__ __forceinline__ void pin(float (&sum)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

/* A matrix in shared memory with rows of 128 bytes and the 128-byte swizzle, 8 rows an atom of 1024 bytes: PTX ISA, "Matrix
 * descriptor". 32 bytes on along a row are 2 in the descriptor. */
__device__ __forceinline__ uint64_t matrix_descriptor(shared_address at) {
  return static_cast<uint64_t>((at & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Transposes an 8 x 8 matrix of 16-bit values held by a warp, two of a row a lane. */
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t value) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

/* sum[64 x n] = (first) or += (next) a[64 x 16] * b[n x 16]^T, both bf16 in shared memory. */
template <int n>
struct WarpgroupMma;
template <>
struct WarpgroupMma<8> {
  static __device__ __forceinline__ void first(float (&sum)[4], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, add, 1, 1, 0, 0; }"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void next(float (&sum)[4], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(a), "l"(b));
  }
};
template <>
struct WarpgroupMma<16> {
  static __device__ __forceinline__ void first(float (&sum)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, add, 1, 1, 0, 0; }"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7])
        : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void next(float (&sum)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "l"(a), "l"(b));
  }
};
template <>
struct WarpgroupMma<32> {
  static __device__ __forceinline__ void first(float (&sum)[16], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, add, 1, 1, 0, 0; }"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7]),
        "=f"(sum[8]), "=f"(sum[9]), "=f"(sum[10]), "=f"(sum[11]), "=f"(sum[12]), "=f"(sum[13]), "=f"(sum[14]),
        "=f"(sum[15])
        : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void next(float (&sum)[16], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
        "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]),
        "+f"(sum[15])
        : "l"(a), "l"(b));
  }
};
template <>
struct WarpgroupMma<64> {
  static __device__ __forceinline__ void first(float (&sum)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, add, 1, 1, 0, 0; }"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7]),
        "=f"(sum[8]), "=f"(sum[9]), "=f"(sum[10]), "=f"(sum[11]), "=f"(sum[12]), "=f"(sum[13]), "=f"(sum[14]),
        "=f"(sum[15]), "=f"(sum[16]), "=f"(sum[17]), "=f"(sum[18]), "=f"(sum[19]), "=f"(sum[20]), "=f"(sum[21]),
        "=f"(sum[22]), "=f"(sum[23]), "=f"(sum[24]), "=f"(sum[25]), "=f"(sum[26]), "=f"(sum[27]), "=f"(sum[28]),
        "=f"(sum[29]), "=f"(sum[30]), "=f"(sum[31])
        : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void next(float (&sum)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
        "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]),
        "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]),
        "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]),
        "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "l"(a), "l"(b));
  }
};
template <>
struct WarpgroupMma<128> {
  static __device__ __forceinline__ void first(float (&sum)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, add, 1, 1, 0, 0; }"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7]),
        "=f"(sum[8]), "=f"(sum[9]), "=f"(sum[10]), "=f"(sum[11]), "=f"(sum[12]), "=f"(sum[13]), "=f"(sum[14]),
        "=f"(sum[15]), "=f"(sum[16]), "=f"(sum[17]), "=f"(sum[18]), "=f"(sum[19]), "=f"(sum[20]), "=f"(sum[21]),
        "=f"(sum[22]), "=f"(sum[23]), "=f"(sum[24]), "=f"(sum[25]), "=f"(sum[26]), "=f"(sum[27]), "=f"(sum[28]),
        "=f"(sum[29]), "=f"(sum[30]), "=f"(sum[31]), "=f"(sum[32]), "=f"(sum[33]), "=f"(sum[34]), "=f"(sum[35]),
        "=f"(sum[36]), "=f"(sum[37]), "=f"(sum[38]), "=f"(sum[39]), "=f"(sum[40]), "=f"(sum[41]), "=f"(sum[42]),
        "=f"(sum[43]), "=f"(sum[44]), "=f"(sum[45]), "=f"(sum[46]), "=f"(sum[47]), "=f"(sum[48]), "=f"(sum[49]),
        "=f"(sum[50]), "=f"(sum[51]), "=f"(sum[52]), "=f"(sum[53]), "=f"(sum[54]), "=f"(sum[55]), "=f"(sum[56]),
        "=f"(sum[57]), "=f"(sum[58]), "=f"(sum[59]), "=f"(sum[60]), "=f"(sum[61]), "=f"(sum[62]), "=f"(sum[63])
        : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void next(float (&sum)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, add, 1, 1, 0, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
        "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]),
        "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]),
        "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]),
        "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]), "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]),
        "+f"(sum[36]), "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]), "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]),
        "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]), "+f"(sum[46]), "+f"(sum[47]), "+f"(sum[48]), "+f"(sum[49]),
        "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]), "+f"(sum[54]), "+f"(sum[55]), "+f"(sum[56]),
        "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]), "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
        : "l"(a), "l"(b));
  }
};

}  // namespace moeflow
#endif
