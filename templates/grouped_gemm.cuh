/* The grouped GEMM: rows of a tile (one expert, at most tile_tokens consecutive positions) times tile_rows rows of that
 * expert's weights. One body for all operands, epilogues, row sources and waits.
 *
 * Weights are the row operand of the MMA (16 rows a warp), received rows its column operand (8 at a time), so that a tile of
 * few rows wastes little. Four warps own 16 weight rows each, of every matrix: gate and up sums of one element meet in one
 * thread. Weights and rows stream through a ring of `stages` depth steps by cp.async.
 *
 * Order tag 1: each sum runs over the depth in ascending steps of 32, each summed from zero in two slices of 16, whatever
 * the tile sizes; so a row's results do not depend on the variant or on the other rows. */
#ifndef MOEFLOW_GROUPED_GEMM_CUH
#define MOEFLOW_GROUPED_GEMM_CUH

#include "numeric.cuh"
#include "operand_bf16.cuh"
#include "row_wait.cuh"

namespace moeflow {

/* The received-row side of the ring: bf16 rows of `depth` values, whose addresses stand in a shared table. */
template <class Variant, int depth>
struct TokenTile {
  static constexpr int stage_bytes = Variant::tile_tokens * tile_row_bytes;
  static constexpr int rows_per_pass = Variant::threads / tile_row_chunks;

  const uint8_t *const *rows; /* shared [tile_tokens], any legal address at `count` and up */
  int count;

  /* Starts the copies of one depth step; what lies beyond the tile's end or the row's becomes zeros. */
  __device__ __forceinline__ void copy(shared_address stage, int step) const {
    const int chunk = threadIdx.x % tile_row_chunks;
    const int at = step * Variant::tile_depth + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < Variant::tile_tokens; pass += rows_per_pass) {
      const int row = pass + threadIdx.x / tile_row_chunks;
      if (rows_per_pass > Variant::tile_tokens && row >= Variant::tile_tokens) break;
      const bool inside = row < count && at < depth;
      copy_async_16(stage + tile_offset(row, chunk), rows[row] + (inside ? at * 2 : 0), inside ? 16 : 0);
    }
  }

  /* Column fragments of rows 8 * n .. 8 * n + 15 (n + 1 needs tile_tokens of at least 16): b[0..1], then b[2..3]. */
  static __device__ __forceinline__ void fragment(shared_address stage, int n, int slice, uint32_t (&b)[4]) {
    const int lane = threadIdx.x % 32;
    load_matrix_4(b, slice_of(stage + tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2), slice) + n * 8 * tile_row_bytes);
  }
  static __device__ __forceinline__ void fragment(shared_address stage, int n, int slice, uint32_t (&b)[2]) {
    const int lane = threadIdx.x % 32;
    load_matrix_2(b, slice_of(stage + tile_offset(lane % 8, lane / 8 % 2), slice) + n * 8 * tile_row_bytes);
  }
};

template <class Variant, int matrices>
struct Sums {
  static constexpr int column_tiles = Variant::tile_tokens / 8;
  static constexpr int slices_at_once = column_tiles < 8 ? 4 : 1; /* with many sums, more would spill */
  static constexpr int together = column_tiles == 1 ? 1 : 2;      /* column tiles that one fragment load serves */
  float sum[matrices][column_tiles][4];

  template <class Tokens, int chain>
  __device__ __forceinline__ void add_step(const uint32_t (&a)[chain][matrices][4], shared_address tokens, int n,
                                           int slice) {
    float step[matrices][together][4] = {};
#pragma unroll
    for (int i = 0; i < chain; i++) {
      uint32_t b[2 * together];
      Tokens::fragment(tokens, n, slice + i, b);
#pragma unroll
      for (int m = 0; m < matrices; m++) {
#pragma unroll
        for (int j = 0; j < together; j++) mma_bf16(step[m][j], a[i][m], b[2 * j], b[2 * j + 1]);
      }
    }
#pragma unroll
    for (int m = 0; m < matrices; m++) {
#pragma unroll
      for (int j = 0; j < together; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[m][n + j][i] += step[m][j][i];
      }
    }
  }

  /* One stage of the ring, in steps of `chain` slices. The tensor cores sum a step's products from zero, and the step is
   * then added to the running sum in FP32: tensor cores cut bits off where an FP32 addition rounds, and a chain over the
   * whole depth would pile that up to errors that flip bf16 roundings. */
  template <class Operand, class Tokens>
  __device__ __forceinline__ void add(const Operand &operand, shared_address weights, shared_address tokens) {
    constexpr int chain = 2;
#pragma unroll slices_at_once
    for (int slice = 0; slice < Variant::tile_depth / 16; slice += chain) {
      uint32_t a[chain][matrices][4];
#pragma unroll
      for (int i = 0; i < chain; i++) {
#pragma unroll
        for (int m = 0; m < matrices; m++) operand.fragment(weights, m, slice + i, a[i][m]);
      }
#pragma unroll
      for (int n = 0; n < column_tiles; n += together) add_step<Tokens>(a, tokens, n, slice);
    }
  }

  /* Sums of position p and weight row r of the tile stand at float p * tile_rows + r, with the eights of a position's rows
   * swapped by its number, so that a warp's writes touch all banks. */
  static __device__ __forceinline__ int staged(int position, int row) {
    return position * Variant::tile_rows + (row ^ (position / 2 % 4 * 8));
  }

  /* From registers through shared memory, which the ring no longer needs, to the epilogue: eight weight rows of one position
   * at a time, for wide stores and few registers. Each warp has 16 rows of all positions; a thread has rows g and g + 8 of
   * positions 2q and 2q + 1. */
  template <class Epilogue>
  __device__ __forceinline__ void store(const Epilogue &epilogue, const moeflow_tile &tile, int first_row, int rows) const {
    constexpr int eights = Variant::tile_rows / 8;
    float *stage = reinterpret_cast<float *>(dynamic_shared());
    const int lane = threadIdx.x % 32;
    __syncthreads(); /* all warps are done with the ring */
#pragma unroll
    for (int n = 0; n < column_tiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = staged(n * 8 + lane % 4 * 2 + i % 2, threadIdx.x / 32 * 16 + lane / 4 + i / 2 * 8);
#pragma unroll
        for (int m = 0; m < matrices; m++) stage[m * Variant::tile_tokens * Variant::tile_rows + at] = sum[m][n][i];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < (tile.end - tile.begin) * eights; i += Variant::threads) {
      const int row = i % eights * 8;
      if (first_row + row >= rows) continue; /* a multiple of 8: all eight rows exist or none */
      Eight sums[matrices];
#pragma unroll
      for (int m = 0; m < matrices; m++) {
        sums[m] = load_eight_float(stage + m * Variant::tile_tokens * Variant::tile_rows + staged(i / eights, row));
      }
      epilogue.store(tile.begin + i / eights, first_row + row, sums);
    }
  }
};

/* `rows` gives the address of the row at a position; the operand was set up for this block's weight rows, of which the
 * epilogue stores those below `row_count`. */
template <class Variant, int depth, int row_count, class Operand, class Rows, class Wait, class Epilogue>
__device__ __forceinline__ void grouped_gemm(const Operand &operand, const Rows &rows, const Wait &wait,
                                             const Epilogue &epilogue, const moeflow_tile &tile, int row_block) {
  using Tokens = TokenTile<Variant, depth>;
  static_assert(Variant::threads == 128 && Variant::tile_rows == 64 && Variant::tile_depth == 64, "four warps of 16 rows");
  static_assert(Variant::tile_tokens == 8 || Variant::tile_tokens % 16 == 0, "column fragments come in pairs");
  static_assert(depth % 8 == 0 && row_count % 8 == 0, "16-byte chunks and whole eights of rows");
  static_assert(Variant::stages >= 2, "a ring, in which all sums have room afterwards");
  constexpr int steps = (depth + Variant::tile_depth - 1) / Variant::tile_depth;
  constexpr int stage_bytes = Operand::stage_bytes + Tokens::stage_bytes;
  __shared__ const uint8_t *row_table[Variant::tile_tokens];

  const int count = tile.end - tile.begin;
  wait.before(tile);
  for (int i = threadIdx.x; i < Variant::tile_tokens; i += Variant::threads) {
    row_table[i] = rows.at(tile.begin + (i < count ? i : 0));
  }
  __syncthreads();

  const Tokens tokens = {row_table, count};
  const shared_address ring = to_shared(dynamic_shared());
  for (int step = 0; step < Variant::stages - 1; step++) {
    if (step < steps) {
      operand.copy(ring + step * stage_bytes, step);
      tokens.copy(ring + step * stage_bytes + Operand::stage_bytes, step);
    }
    copy_commit();
  }
  Sums<Variant, Epilogue::matrices> sums = {};
  int read = 0;
  int write = Variant::stages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    copy_wait<Variant::stages - 2>();
    __syncthreads(); /* the step has arrived for all, and all are done with the stage that is written next */
    if (step + Variant::stages - 1 < steps) {
      operand.copy(ring + write * stage_bytes, step + Variant::stages - 1);
      tokens.copy(ring + write * stage_bytes + Operand::stage_bytes, step + Variant::stages - 1);
    }
    copy_commit();
    sums.template add<Operand, Tokens>(operand, ring + read * stage_bytes, ring + read * stage_bytes + Operand::stage_bytes);
    read = read + 1 == Variant::stages ? 0 : read + 1;
    write = write + 1 == Variant::stages ? 0 : write + 1;
  }
  sums.store(epilogue, tile, row_block * Variant::tile_rows, row_count);
}

}  // namespace moeflow
#endif
