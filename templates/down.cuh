/* Second expert GEMM: activations, which stand in position order, times the down matrix; FP32 per position. */
#ifndef MOEFLOW_DOWN_CUH
#define MOEFLOW_DOWN_CUH

#include "epilogue.cuh"
#include "grouped_gemm.cuh"
#include "lane.cuh"

namespace moeflow {

template <class Model>
struct ActivationRows {
  const uint16_t *activations;
  __device__ __forceinline__ const uint8_t *at(int position) const {
    return reinterpret_cast<const uint8_t *>(activations + static_cast<int64_t>(position) * Model::intermediate);
  }
};

template <class Model, class Variant>
__device__ __forceinline__ void down(const moeflow_down_params &params) {
  using Operand = OperandBf16<Variant, 1, Model::hidden, Model::intermediate>;
  constexpr int row_blocks = (Model::hidden + Variant::tile_rows - 1) / Variant::tile_rows;
  const int tile_number = blockIdx.x / row_blocks;
  const int row_block = blockIdx.x % row_blocks;
  if (block_poisoned(params.lane) || tile_number >= *params.tile_count) return;
  const moeflow_tile tile = params.tiles[tile_number];
  const uint8_t *const first[1] = {matrix_of(params.weights, tile.expert)};
  const Operand operand(first, params.weights.row_stride, row_block);
  const ActivationRows<Model> rows = {params.activations};
  const StoreFloat epilogue = {params.outputs, Model::hidden};
  grouped_gemm<Variant, Model::intermediate, Model::hidden>(operand, rows, RowsPresent(), epilogue, tile, row_block);
}

}  // namespace moeflow
#endif
