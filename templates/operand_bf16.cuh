/* Operand policy bf16: how weight tiles come into shared memory and out of it as MMA fragments.
 *
 * A tile row is tile_depth = 64 values, 128 bytes, in eight 16-byte chunks. Chunk c of row r stands at chunk c ^ (r % 8), so
 * that eight rows of one chunk column, which ldmatrix reads at once, and eight chunks of one row, which the copies write at
 * once, touch all 32 banks. Each thread copies one chunk column of every 16th row. */
#ifndef MOEFLOW_OPERAND_BF16_CUH
#define MOEFLOW_OPERAND_BF16_CUH

#include "ptx.cuh"

namespace moeflow {

constexpr int tile_row_bytes = 128;
constexpr int tile_row_chunks = 8;

__device__ __forceinline__ int tile_offset(int row, int chunk) {
  return row * tile_row_bytes + ((chunk ^ (row % tile_row_chunks)) << 4);
}

/* From a chunk of slice 0 to the same chunk of another slice, two chunks on each. Tiles begin at multiples of 128 bytes, so
 * that only the swizzle's bits change: one instruction, where addresses held ready would cost registers. */
__device__ __forceinline__ shared_address slice_of(shared_address chunk_of_slice_0, int slice) {
  return chunk_of_slice_0 ^ static_cast<shared_address>(slice * 32);
}

/* First byte of an expert's matrix. */
__device__ __forceinline__ const uint8_t *matrix_of(const moeflow_matrix &matrix, int expert) {
  return matrix.experts ? matrix.experts[expert] : matrix.base + expert * matrix.expert_stride;
}

/* tile_rows rows each of `matrices` matrices that have `rows` rows of `depth` values; depth is a multiple of 8. */
template <class Variant, int matrices, int rows, int depth>
struct OperandBf16 {
  static constexpr int rows_per_pass = Variant::threads / tile_row_chunks;
  static constexpr int passes = Variant::tile_rows / rows_per_pass;
  static constexpr int matrix_bytes = Variant::tile_rows * tile_row_bytes;
  static constexpr int stage_bytes = matrices * matrix_bytes;

  const uint8_t **row_table; /* shared, by tile row: in registers the addresses would be too many beside the sums */
  int rows_left;             /* of the matrix, from the block's first row */

  /* `first[m]`: row 0 of matrix m; rows follow at row_bytes. The block has rows row_block * tile_rows and up. The table is
   * ready after the next barrier. */
  __device__ __forceinline__ OperandBf16(const uint8_t *const (&first)[matrices], int64_t row_bytes, int row_block) {
    __shared__ const uint8_t *table[matrices * Variant::tile_rows];
    row_table = table;
    rows_left = rows - row_block * Variant::tile_rows;
    for (int i = threadIdx.x; i < Variant::tile_rows; i += Variant::threads) {
      const int64_t offset = (row_block * Variant::tile_rows + (i < rows_left ? i : 0)) * row_bytes;
      for (int m = 0; m < matrices; m++) table[m * Variant::tile_rows + i] = first[m] + offset;
    }
  }

  /* Starts the copies of depth step `step`. Rows and depths beyond the matrix become zeros, from a legal address. */
  __device__ __forceinline__ void copy(shared_address stage, int step) const {
    const int chunk = threadIdx.x % tile_row_chunks;
    const int at = step * Variant::tile_depth + chunk * 8;
#pragma unroll
    for (int i = 0; i < matrices * passes; i++) {
      const int row = i * rows_per_pass + threadIdx.x / tile_row_chunks;
      const bool inside = row % Variant::tile_rows < rows_left && at < depth;
      copy_async_16(stage + tile_offset(row, chunk), row_table[row] + (inside ? at * 2 : 0), inside ? 16 : 0);
    }
  }

  /* The 16 x 16 fragment of matrix m: this warp's rows, values 16 * slice and up of the stage. */
  __device__ __forceinline__ void fragment(shared_address stage, int m, int slice, uint32_t (&a)[4]) const {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 16 + lane % 16;
    load_matrix_4(a, slice_of(stage + tile_offset(row, lane / 16), slice) + m * matrix_bytes);
  }
};

}  // namespace moeflow
#endif
