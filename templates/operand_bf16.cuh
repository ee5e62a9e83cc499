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

  const uint8_t *source[matrices][passes]; /* this thread's chunk in its rows, at the first depth step */
  bool inside[passes];                     /* the row exists */
  int to;                                  /* where the chunk of the first row goes */
  int depth_of_chunk;

  /* `first[m]`: row 0 of matrix m; rows follow at row_bytes. The block has rows row_block * tile_rows and up. */
  __device__ __forceinline__ OperandBf16(const uint8_t *const (&first)[matrices], int64_t row_bytes, int row_block) {
    const int chunk = threadIdx.x % tile_row_chunks;
    const int tile_row = threadIdx.x / tile_row_chunks;
    to = tile_offset(tile_row, chunk); /* rows_per_pass is a multiple of 8: the same swizzle in every pass */
    depth_of_chunk = chunk * 8;
    for (int i = 0; i < passes; i++) {
      const int row = row_block * Variant::tile_rows + tile_row + i * rows_per_pass;
      inside[i] = row < rows;
      const int64_t offset = inside[i] && depth_of_chunk < depth ? row * row_bytes + chunk * 16 : 0;
      for (int m = 0; m < matrices; m++) source[m][i] = first[m] + offset;
    }
  }

  /* Starts the copies of depth step `step`. Rows and depths beyond the matrix become zeros, from an address that is legal.
   */
  __device__ __forceinline__ void copy(shared_address stage, int step) const {
    const bool deep_enough = step * Variant::tile_depth + depth_of_chunk < depth;
    const int64_t offset = deep_enough ? step * (Variant::tile_depth * 2) : 0;
    for (int m = 0; m < matrices; m++) {
      for (int i = 0; i < passes; i++) {
        copy_async_16(stage + m * matrix_bytes + to + i * rows_per_pass * tile_row_bytes, source[m][i] + offset,
                      inside[i] && deep_enough ? 16 : 0);
      }
    }
  }

  /* The 16 x 16 fragment of matrix m: this warp's rows, values 16 * slice and up of the stage. */
  __device__ __forceinline__ void fragment(shared_address stage, int m, int slice, uint32_t (&a)[4]) const {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 16 + lane % 16;
    load_matrix_4(a, stage + m * matrix_bytes + tile_offset(row, slice * 2 + lane / 16));
  }
};

}  // namespace moeflow
#endif
