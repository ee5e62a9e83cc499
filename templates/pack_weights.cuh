/* Plain weights to the fragments that experts_stream reads (abi.h says how they lie): a warp makes one fragment at a time.
 * Sources are read in pieces of 32 bytes a row, whose neighbours the next warps want: the caches see to those. */
#ifndef MOEFLOW_PACK_WEIGHTS_CUH
#define MOEFLOW_PACK_WEIGHTS_CUH

#include "operand_bf16.cuh"

namespace moeflow {

/* The plain row that row `row` of a packed matrix comes from. */
__device__ __forceinline__ int64_t plain_row(const moeflow_pack_weights_params &params, int row) {
  if (params.down) return row;
  const int first = row % MOEFLOW_FRAGMENT_ROWS < 8 ? params.gate_row : params.up_row;
  return first + static_cast<int64_t>(row / MOEFLOW_FRAGMENT_ROWS * 8 + row % 8) * params.row_step;
}

template <class Model, class Variant>
__device__ __forceinline__ void pack_weights(const moeflow_pack_weights_params &params) {
  const int rows = params.down ? Model::hidden : 2 * Model::intermediate;
  const int depth = params.down ? Model::intermediate : Model::hidden;
  const int deep = static_cast<int>(moeflow_packed_steps(depth)) * 2; /* fragments along the depth */
  const int64_t of_expert = moeflow_packed_bytes(rows, depth) / MOEFLOW_FRAGMENT_BYTES;
  const int64_t fragments = of_expert * params.experts;
  constexpr int warps = Variant::threads / 32;
  const int lane = threadIdx.x % 32;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32; i < fragments;
       i += static_cast<int64_t>(gridDim.x) * warps) {
    const uint8_t *matrix = matrix_of(params.weights, params.first_expert + static_cast<int>(i / of_expert));
    const int within = static_cast<int>(i % of_expert);
    uint32_t pair[4];
    for (int p = 0; p < 4; p++) {
      const int row = within / deep * MOEFLOW_FRAGMENT_ROWS + lane / 4 + p % 2 * 8;
      const int at = within % deep * 16 + lane % 4 * 2 + p / 2 * 8;
      const bool inside = row < rows && at < depth; /* both multiples of 8 */
      const uint8_t *from = matrix + plain_row(params, inside ? row : 0) * params.weights.row_stride + (inside ? at * 2 : 0);
      pair[p] = inside ? *reinterpret_cast<const uint32_t *>(from) : 0;
    }
    *reinterpret_cast<uint4 *>(params.packed + i * MOEFLOW_FRAGMENT_BYTES + lane * 16) = {pair[0], pair[1], pair[2],
                                                                                          pair[3]};
  }
}

}  // namespace moeflow
#endif
