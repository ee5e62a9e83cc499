/* The experts kernel's consumers: warpgroups that multiply what the ring holds, store activations or outputs, and add the rows'
 * weighted sums.
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
#include "experts_rows.cuh"

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

  /* sum[64 x width] of one step, from zero. */
  template <int width>
  static __device__ __forceinline__ void start_step(float (&sum)[width / 2], uint64_t a, uint64_t b) {
    mma_fence();
    WarpgroupMma<width>::first(sum, a, b);
    WarpgroupMma<width>::next(sum, a + 2, b + 2); /* 32 bytes on */
    mma_commit();
  }

  /* One column of 64 from the ring, on top of the sums: two steps of 32. Both are under way together, and the first one's sums
   * are added while the second one's are made, but for the widest, which have one step's registers only. */
  template <int width>
  static __device__ __forceinline__ void add_column(float (&sum)[width / 2], shared_address weights, shared_address tokens) {
    constexpr int step_bytes = step_depth * 2;
    constexpr bool together = width <= 64;
    static_assert(column_depth == 2 * step_depth, "two steps");
    const uint64_t a = matrix_descriptor(weights), b = matrix_descriptor(tokens);
    float step[together ? 2 : 1][width / 2];
    start_step<width>(step[0], a, b);
    if constexpr (together) {
      start_step<width>(step[1], a + step_bytes / 16, b + step_bytes / 16);
      mma_wait<1>();
    } else {
      mma_wait<0>();
    }
    add_step<width>(sum, step[0]);
    if constexpr (!together) start_step<width>(step[0], a + step_bytes / 16, b + step_bytes / 16);
    mma_wait<0>();
    add_step<width>(sum, step[together ? 1 : 0]);
  }

  template <int width>
  static __device__ __forceinline__ void add_step(float (&sum)[width / 2], float (&step)[width / 2]) {
    pin(step);
#pragma unroll
    for (int j = 0; j < width / 2; j++) sum[j] += step[j];
    if constexpr (width > 32) pin(sum); /* before the next step's sums take registers */
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

  /* The warpgroup's blocks of one unit, or with `halves` 2 of both blocks of a pair. All warps pass every stage, those without
   * rows too. */
  template <int width, int halves>
  __device__ __forceinline__ void compute(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    float sum[halves * blocks][width / 2] = {};
    const Columns<Model, Variant> columns(unit, width);
    for (int column = columns.first; column < columns.end; column += columns.per_stage) {
      const int count = columns.in_stage(column);
      const int first_stage = cursor.place; /* which has the received rows */
#pragma unroll
      for (int half = 0; half < halves; half++) {
        barrier_wait(ring.full(cursor.place), cursor.parity);
        fence_async_shared(); /* the gathered rows came by ordinary copies */
#pragma unroll
        for (int k = 0; k < blocks; k++) {
          const int row = (group * blocks + k) * MOEFLOW_UNIT_ROWS;
          if (half * Variant::tile_rows + row >= unit.rows) continue;
#pragma unroll
          for (int i = 0; i < columns_per_stage<Variant>(width); i++) {
            if (i < count) {
              add_column<width>(sum[half * blocks + k], ring.weights(cursor.place, i, row), ring.tokens(first_stage, i, width));
            }
          }
        }
        if (half > 0) release(cursor.place);
        cursor.advance();
      }
      release(first_stage);
    }
    const GroupOutputs outputs = schedule.outputs_of(unit.group, params.outputs, params.part_stride);
    if (unit.down && unit.group >= MOEFLOW_GROUP_SLOTS) { /* the group before in this slot must have been summed */
      await(control.sums_done(unit.group - MOEFLOW_GROUP_SLOTS), static_cast<uint32_t>(schedule.sum_units));
    }
#pragma unroll
    for (int i = 0; i < halves * blocks; i++) {
      const int block = i / blocks * (Variant::tile_rows / MOEFLOW_UNIT_ROWS) + group * blocks + i % blocks;
      if (block * MOEFLOW_UNIT_ROWS >= unit.rows) continue;
      if (unit.down) {
        store_outputs<width>(sum[i], unit, block, tile, outputs);
      } else {
        store_activations<width>(sum[i], unit, block, tile);
      }
    }
  }

  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(stage));
  }

  /* In the smallest width that holds the tile. */
  template <int width>
  __device__ __forceinline__ void dispatch(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    if constexpr (width < Variant::tile_tokens) {
      if (tile.end - tile.begin > width) return dispatch<width * 2>(unit, tile, cursor);
    }
    if constexpr (can_pair<Variant>()) {
      if (unit.rows > Variant::tile_rows) return compute<width, 2>(unit, tile, cursor);
    }
    compute<width, 1>(unit, tile, cursor);
  }

  /* The weighted sums of a group's columns, for some rows. */
  __device__ __forceinline__ void add_rows(const Unit &unit) const {
    if constexpr (!Model::reduce_choices) {
      const RowSums<Model, Variant, threads / 32> sums(params, unit, static_cast<int>(threadIdx.x) - 128);
      await(control.down_done(unit.group), schedule.down_tickets(unit.group));
      sums.run(schedule.outputs_of(unit.group, params.outputs, params.part_stride));
      const bool slot_is_wanted = unit.group + MOEFLOW_GROUP_SLOTS < schedule.groups;
      if (slot_is_wanted) tell(control.sums_done(unit.group), 1);
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
      if (unit.rows > 0) dispatch<8>(unit, queued.tile, stage);
      if (unit.sum) add_rows(unit);
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
