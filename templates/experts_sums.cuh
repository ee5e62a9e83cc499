/* The experts kernel's consumers: warpgroups that multiply what the ring holds and store activations or outputs.
 *
 * Weights are the row operand of the MMA, 64 rows a warpgroup at a time, received rows its column operand, in the smallest
 * width that holds the tile. 8 gate rows and their 8 up rows alternate, so that both sums of one element meet in a thread.
 *
 * Order tags 16 .. 19: each sum runs over its part of the depth in ascending steps of 32, each summed from zero by the tensor
 * cores in two slices of 16 and then added in FP32, whatever the width and the tile sizes. (Tensor cores cut bits off where
 * an FP32 addition rounds: docs/findings.md.) */
#ifndef MOEFLOW_EXPERTS_SUMS_CUH
#define MOEFLOW_EXPERTS_SUMS_CUH

#include "epilogue.cuh"
#include "experts_ring.cuh"

namespace moeflow {

constexpr int step_depth = 32; /* steps of 64 broke the error bar of layers with few intermediate values */

template <class Model, class Variant>
struct Consumer {
  using Ring = moeflow::Ring<Model, Variant>;
  using Schedule = moeflow::Schedule<Model, Variant>;
  static constexpr int groups = Ring::consumer_groups;
  static constexpr int threads = groups * 128;
  static constexpr int barrier = 2;
  static constexpr int blocks = Variant::tile_rows / MOEFLOW_UNIT_ROWS / groups; /* of 64 rows, of one warpgroup */
  const moeflow_experts_params &params;
  const Ring &ring;
  const Schedule &schedule;
  const Control &control;
  int group; /* this warpgroup's number */

  __device__ __forceinline__ void await(const uint32_t *counter, uint32_t count) const {
    if (threadIdx.x == 128) await_count(counter, count);
    named_barrier(barrier, threads);
  }

  /* One column of 64 from the ring, on top of the sums: two steps of 32. Narrow ones are under way together; wide ones have
   * one step's registers only. */
  template <int width>
  static __device__ __forceinline__ void add_column(float (&sum)[width / 2], shared_address weights, shared_address tokens) {
    constexpr int steps = column_depth / step_depth;
    constexpr int together = width > 32 ? 1 : steps;
    const uint64_t a = matrix_descriptor(weights), b = matrix_descriptor(tokens);
#pragma unroll
    for (int first = 0; first < steps; first += together) {
      float step[together][width / 2];
      mma_fence();
#pragma unroll
      for (int i = 0; i < together; i++) {
        const int at = (first + i) * step_depth * 2 / 16; /* of a descriptor's units */
        WarpgroupMma<width>::first(step[i], a + at, b + at);
        WarpgroupMma<width>::next(step[i], a + at + 2, b + at + 2);
      }
      mma_commit();
      mma_wait<0>();
#pragma unroll
      for (int i = 0; i < together; i++) {
        pin(step[i]);
#pragma unroll
        for (int j = 0; j < width / 2; j++) sum[j] += step[i][j];
      }
      if constexpr (width > 32) pin(sum); /* before the next step's sums take registers */
    }
  }

  /* A thread holds, of positions 8 j + 2 q and the next, unit rows 16 w + g (two sums) and 16 w + g + 8 (two more), for its
   * warp w, g = lane / 4, q = lane % 4. */
  template <int width>
  __device__ __forceinline__ void store_activations(const float (&sum)[width / 2], const Unit &unit, int block,
                                                    const moeflow_tile &tile) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int first = (unit.row + block * MOEFLOW_UNIT_ROWS) / 2 + warp * 8; /* of 8 values of the activation */
    const uint64_t policy = policy_evict_last();
    const int left = first < Model::intermediate ? tile.end - tile.begin - lane / 4 : 0;
    uint16_t *to = params.activations + static_cast<int64_t>(tile.begin + lane / 4) * Model::intermediate + first + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < width / 8; j++) {
      float value[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float early = sum[j * 4 + i], late = sum[j * 4 + 2 + i];
        value[i] = Activation<Model>::of(params.up_first ? late : early, params.up_first ? early : late);
      }
      const uint32_t pair = transpose_8x8(pack_bf16(value[0], value[1])); /* two neighbouring values of position lane / 4 */
      if (j * 8 < left) store_word(to, pair, policy);
      to += 8 * Model::intermediate;
    }
  }

  template <int width>
  __device__ __forceinline__ void store_outputs(const float (&sum)[width / 2], const Unit &unit, int block,
                                                const moeflow_tile &tile, const GroupOutputs &outputs) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = unit.row + block * MOEFLOW_UNIT_ROWS + warp * 16 + lane / 4;
    const uint64_t policy = policy_evict_last();
    const int left = tile.end - tile.begin - lane % 4 * 2;
    float *to = outputs.base + unit.part * outputs.part_stride +
                static_cast<int64_t>(tile.begin + lane % 4 * 2) * outputs.pitch + (row - outputs.first);
#pragma unroll
    for (int j = 0; j < width / 8; j++) { /* one position after the other: all addresses at once would take many registers */
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (j * 8 + i < left && row < Model::hidden) store_float(to, sum[j * 4 + i], policy);
        if (j * 8 + i < left && row + 8 < Model::hidden) store_float(to + 8, sum[j * 4 + 2 + i], policy);
        to += i == 0 ? outputs.pitch : 7 * outputs.pitch;
      }
    }
  }

  /* The warpgroup's blocks of one unit. All warps pass every stage, those without rows too. */
  template <int width>
  __device__ __forceinline__ void compute(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    float sum[blocks][width / 2] = {};
    const Columns<Model, Variant> columns(unit, width);
    for (int column = columns.first; column < columns.end; column += columns.per_stage) {
      const int count = columns.in_stage(column);
      barrier_wait(ring.full(cursor.place), cursor.parity);
      fence_async_shared(); /* the gathered rows came by ordinary copies */
#pragma unroll
      for (int k = 0; k < blocks; k++) {
        const int row = (group * blocks + k) * MOEFLOW_UNIT_ROWS;
        if (row >= unit.rows) continue;
#pragma unroll
        for (int i = 0; i < columns_per_stage<Variant>(width); i++) {
          if (i < count) add_column<width>(sum[k], ring.weights(cursor.place, i, row), ring.tokens(cursor.place, i, width));
        }
      }
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(cursor.place));
      cursor.advance();
    }
    const GroupOutputs outputs = schedule.outputs_of(unit.group, params.outputs, params.part_stride);
    if (unit.down && unit.group >= MOEFLOW_GROUP_SLOTS) { /* the group before in this slot must have been summed */
      await(control.sums_done(unit.group - MOEFLOW_GROUP_SLOTS), static_cast<uint32_t>(schedule.sum_units));
    }
#pragma unroll
    for (int k = 0; k < blocks; k++) {
      const int block = group * blocks + k;
      if (block * MOEFLOW_UNIT_ROWS >= unit.rows) continue;
      if (unit.down) {
        store_outputs<width>(sum[k], unit, block, tile, outputs);
      } else {
        store_activations<width>(sum[k], unit, block, tile);
      }
    }
  }

  __device__ __forceinline__ void dispatch(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    const int width = width_of(tile.end - tile.begin);
    if (width == 8) {
      compute<8>(unit, tile, cursor);
    } else if (Variant::tile_tokens >= 16 && width == 16) {
      compute<16>(unit, tile, cursor);
    } else if (Variant::tile_tokens >= 32 && width == 32) {
      compute<Variant::tile_tokens >= 32 ? 32 : 8>(unit, tile, cursor);
    } else if (Variant::tile_tokens >= 64 && width == 64) {
      compute<Variant::tile_tokens >= 64 ? 64 : 8>(unit, tile, cursor);
    } else if (Variant::tile_tokens >= 128 && width == 128) {
      compute<Variant::tile_tokens >= 128 ? 128 : 8>(unit, tile, cursor);
    }
  }

  /* Everybody's stores, then the count: whoever sees it sees them. */
  __device__ __forceinline__ void tell(uint32_t *counter, uint32_t units) const {
    named_barrier(barrier, threads);
    if (threadIdx.x == 128) add_release_gpu(counter, units);
  }

  /* gate_up units are told of one by one, since down units wait for them; down units of a group together, when the block's
   * next unit is another one. */
  __device__ __forceinline__ void run() const {
    Cursor<Variant::stages> stage;
    Cursor<Ring::queue_places> place;
    uint32_t untold = 0; /* down units */
    int untold_group = 0;
    while (true) {
      const QueuedUnit &queued = ring.next(place);
      const Unit &unit = queued.unit;
      if (untold > 0 && (!unit.down || unit.group != untold_group)) {
        tell(control.down_done(untold_group), untold);
        untold = 0;
      }
      if (unit.tile < 0) return;
      if (unit.rows > 0) dispatch(unit, queued.tile, stage);
      if (unit.down) {
        untold += params.sum ? 1 : 0;
        untold_group = unit.group;
      } else if (!unit.sum) {
        tell(control.done + unit.tile, 1);
      }
      ring.through(place);
    }
  }
};

}  // namespace moeflow
#endif
