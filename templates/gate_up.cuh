/* First expert GEMM: received rows, gathered by entry, times gate and up rows; the activation leaves in bf16. */
#ifndef MOEFLOW_GATE_UP_CUH
#define MOEFLOW_GATE_UP_CUH

#include "epilogue.cuh"
#include "grouped_gemm.cuh"
#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

template <class Model>
struct ReceivedRows {
  const moeflow_rows_in &in;
  const int32_t *entries;
  __device__ __forceinline__ const uint8_t *at(int position) const {
    return entry_hidden<Model>(in, entries[position]);
  }
};

template <class Model, class Variant>
__device__ __forceinline__ void gate_up(const moeflow_gate_up_params &params) {
  using Operand = OperandBf16<Variant, 2, Model::intermediate, Model::hidden>;
  constexpr int row_blocks = (Model::intermediate + Variant::tile_rows - 1) / Variant::tile_rows;
  const int tile_number = blockIdx.x / row_blocks;
  const int row_block = blockIdx.x % row_blocks;
  if (block_poisoned(params.lane) || tile_number >= *params.tile_count) return;
  const moeflow_tile tile = params.tiles[tile_number];
  const uint8_t *matrix = matrix_of(params.weights, tile.expert);
  const int64_t stride = params.weights.row_stride;
  const uint8_t *const first[2] = {matrix + params.gate_row * stride, matrix + params.up_row * stride};
  const Operand operand(first, params.row_step * stride, row_block);
  const ReceivedRows<Model> rows = {params.in, params.entries};
  const StoreActivated<Model> epilogue = {params.activations, Model::intermediate};
  grouped_gemm<Variant, Model::hidden, Model::intermediate>(operand, rows, RowsPresent(), epilogue, tile, row_block);
}

}  // namespace moeflow
#endif
