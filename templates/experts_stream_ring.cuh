/* The fragment stream of experts_stream: a warp's weights on their way from memory, `stages` fragments of 16 x 16 in
 * registers.
 *
 * The ring is unrolled: a pass multiplies all of its fragments, two a step, and each place is loaded anew as soon as it is
 * through, with what the next pass wants. The last pass of a unit loads the first fragments of the next unit, so that memory
 * never waits for rows, activations or tickets. */
#ifndef MOEFLOW_EXPERTS_STREAM_RING_CUH
#define MOEFLOW_EXPERTS_STREAM_RING_CUH

#include "operand_bf16.cuh"

namespace moeflow {

struct Fragments {   /* what a warp has yet to load of a unit */
  const uint8_t *at; /* this lane's piece of the first one */
  int steps;         /* two fragments each */

  __device__ __forceinline__ Fragments behind(int passed) const {
    return {at + passed * 2 * MOEFLOW_FRAGMENT_BYTES, steps - passed};
  }
};

template <class Variant>
struct FragmentRing {
  static constexpr int steps = Variant::stages / 2; /* of a pass */
  static constexpr int columns = Variant::tile_depth / 64;
  static_assert(Variant::stages % 4 == 0 && Variant::tile_depth == Variant::stages * 16,
                "a pass is whole columns of 64 values");

  uint32_t fragment[Variant::stages][4];
  uint64_t policy;

  __device__ __forceinline__ void load(int step, const Fragments &from) {
    if (step >= from.steps) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      load_stream_16(fragment[step * 2 + i], from.at + (step * 2 + i) * MOEFLOW_FRAGMENT_BYTES, policy);
    }
  }

  __device__ __forceinline__ void fill(const Fragments &from) {
#pragma unroll
    for (int step = 0; step < steps; step++) load(step, from);
  }

  /* Received rows stand in columns of 64 values, `width` rows of 128 bytes each, swizzled as tile_offset says. One load
   * serves 8 rows and both fragments of a step. */
  template <int width>
  __device__ __forceinline__ void add_step(float (&sum)[width / 8][4], int step, shared_address rows) const {
    const shared_address column = slice_of(rows, step % 2 * 2) + step / 2 * width * tile_row_bytes;
#pragma unroll
    for (int n = 0; n < width / 8; n++) {
      uint32_t b[4];
      float products[4] = {};
      load_matrix_4(b, column + n * 8 * tile_row_bytes);
      mma_bf16(products, fragment[step * 2], b[0], b[1]);
      mma_bf16(products, fragment[step * 2 + 1], b[2], b[3]);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += products[i];
    }
  }

  /* Multiplies the first `count` steps and loads the places anew. */
  template <int width>
  __device__ __forceinline__ void pass(float (&sum)[width / 8][4], int count, shared_address tokens, const Fragments &next) {
    const int lane = threadIdx.x % 32;
    const shared_address rows = tokens + tile_offset(lane % 8, lane / 8);
#pragma unroll
    for (int step = 0; step < steps; step++) {
      if (step < count) add_step<width>(sum, step, rows);
      load(step, next);
    }
  }
};

}  // namespace moeflow
#endif
