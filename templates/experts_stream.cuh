/* The decode experts on packed weights, from sm_80: gate_up, activation and down of all tiles in one persistent kernel.
 * Weights come from memory as MMA fragments, straight into registers (experts_stream_ring.cuh); only received rows and
 * activations pass through shared memory. The order of work is in experts_schedule.cuh. A block's warps own 16 rows of a
 * unit each.
 *
 * Order tags 32 .. 35: each sum runs over its part of the depth in ascending steps of 32, each summed from zero in two
 * slices of 16 and then added in FP32. With one part that is order tag 1 bit by bit. Part p of down's S steps (I / 32,
 * rounded up) is steps S p / parts up to S (p + 1) / parts, both rounded down. */
#ifndef MOEFLOW_EXPERTS_STREAM_CUH
#define MOEFLOW_EXPERTS_STREAM_CUH

#include "epilogue.cuh"
#include "experts_schedule.cuh"
#include "experts_stream_ring.cuh"
#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

template <class Model, class Variant>
struct StreamBlock {
  using Schedule = moeflow::Schedule<Model, Variant>;
  using Ring = FragmentRing<Variant>;
  static constexpr int threads = Variant::threads;
  static constexpr int chunk_bytes = Variant::tile_tokens * Variant::tile_depth * 2;
  static_assert(threads == Variant::tile_rows / MOEFLOW_FRAGMENT_ROWS * 32, "a warp for each 16 rows of a unit");

  struct Shared {
    int ticket; /* of the unit after this one */
    const uint8_t *rows[Variant::tile_tokens];
  };

  struct Work {
    Unit unit;
    moeflow_tile tile;
    int first_step; /* of the depth */
    int steps;
    int row;             /* this warp's first of 16, -1: it has none in this unit */
    Fragments fragments; /* of those rows */
  };

  const moeflow_experts_params &params;
  const Schedule &schedule;
  const Control &control;
  Shared &shared;

  __device__ __forceinline__ Work work_of(int ticket) const {
    Work work = {};
    work.unit = schedule.at(ticket);
    const Unit &unit = work.unit;
    if (unit.tile < 0) return work;
    const int rows = unit.down ? Model::hidden : 2 * Model::intermediate;
    const int all_steps = static_cast<int>(moeflow_packed_steps(unit.down ? Model::intermediate : Model::hidden));
    work.tile = params.tiles[unit.tile];
    work.first_step = unit.down ? all_steps * unit.part / Variant::parts : 0;
    work.steps = unit.down ? all_steps * (unit.part + 1) / Variant::parts - work.first_step : all_steps;
    const int within = static_cast<int>(threadIdx.x) / 32 * MOEFLOW_FRAGMENT_ROWS;
    const bool inside = within < unit.rows && unit.row + within < rows;
    work.row = inside ? unit.row + within : -1;
    const int64_t first = (inside ? work.row : 0) / MOEFLOW_FRAGMENT_ROWS * all_steps + work.first_step;
    work.fragments.at = matrix_of(unit.down ? params.down_packed : params.gate_up_packed, work.tile.expert) +
                        first * 2 * MOEFLOW_FRAGMENT_BYTES + threadIdx.x % 32 * 16;
    work.fragments.steps = inside ? work.steps : 0;
    return work;
  }

  /* Where the tile's rows begin: received rows by entry, or activations in position order, once they are all there. */
  __device__ __forceinline__ void find_rows(const Work &work) const {
    const Unit &unit = work.unit;
    const moeflow_tile &tile = work.tile;
    if (threadIdx.x == 0) {
      shared.ticket = control.take();
      while (unit.down && load_acquire_gpu(control.done + unit.tile) < static_cast<uint32_t>(schedule.gate_up_blocks)) {
        sleep_ns(20);
      }
    }
    for (int i = threadIdx.x; i < tile.end - tile.begin; i += threads) {
      const int position = tile.begin + i;
      shared.rows[i] =
          unit.down
              ? reinterpret_cast<const uint8_t *>(params.activations + static_cast<int64_t>(position) * Model::intermediate)
              : entry_hidden<Model>(params.in, params.entries[position]);
    }
    __syncthreads();
  }

  /* Starts the copies of a chunk, tile_depth values of each row from value `from`. Rows beyond the tile's end stay what they
   * are: their sums are never stored. Depths beyond the row's end become zeros, for the weights there are. */
  template <int width>
  __device__ __forceinline__ void copy_rows(const Work &work, shared_address to, int from) const {
    const int depth = work.unit.down ? Model::intermediate : Model::hidden;
    const int chunk = threadIdx.x % tile_row_chunks;
#pragma unroll 1 /* registers are the ring's */
    for (int i = threadIdx.x / tile_row_chunks; i < Ring::columns * width; i += threads / tile_row_chunks) {
      const int row = i % width;
      const int at = from + i / width * 64 + chunk * 8;
      const bool inside = at < depth;
      if (row >= work.tile.end - work.tile.begin) continue;
      copy_async_16(to + i * tile_row_bytes + (tile_offset(row, chunk) - row * tile_row_bytes),
                    shared.rows[row] + (inside ? at * 2 : 0), inside ? 16 : 0);
    }
    copy_commit();
  }

  /* A thread holds, of positions 8 n + 2 q and the next, rows g (two sums) and g + 8 (two more) of its warp's 16. */
  template <int width>
  __device__ __forceinline__ void store(const Work &work, const float (&sum)[width / 8][4]) const {
    const int lane = threadIdx.x % 32;
    if (work.row < 0) return;
#pragma unroll
    for (int n = 0; n < width / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int64_t position = work.tile.begin + n * 8 + lane % 4 * 2 + i;
        if (position >= work.tile.end) continue;
        if (work.unit.down) {
          float *out = params.outputs + work.unit.part * params.part_stride + position * Model::hidden + work.row + lane / 4;
          out[0] = sum[n][i];
          if (work.row + 8 < Model::hidden) out[8] = sum[n][i + 2];
        } else { /* row g is gate's, row g + 8 up's */
          params.activations[position * Model::intermediate + work.row / 2 + lane / 4] =
              float_to_bf16(Activation<Model>::of(sum[n][i], sum[n][i + 2]));
        }
      }
    }
  }

  /* One unit. Returns the next one, whose first fragments are then on their way. */
  template <int width>
  __device__ __forceinline__ Work compute(const Work &work, Ring &ring) const {
    const shared_address tokens = to_shared(dynamic_shared());
    const int first = work.first_step * MOEFLOW_STEP_DEPTH;
    copy_rows<width>(work, tokens, first);
    const Work next = work_of(shared.ticket);
    float sum[width / 8][4] = {};
    int step = 0;
    int chunk = 0;
    do { /* once even for a part without steps */
      const int behind = step + Ring::steps;
      copy_wait<0>();
      __syncthreads(); /* the chunk has arrived for all, and all are through with the other one */
      if (behind < work.steps) {
        copy_rows<width>(work, tokens + (chunk ^ 1) * chunk_bytes, first + behind * MOEFLOW_STEP_DEPTH);
      }
      ring.template pass<width>(sum, work.fragments.steps - step, tokens + chunk * chunk_bytes,
                                behind < work.steps ? work.fragments.behind(behind) : next.fragments);
      step = behind;
      chunk ^= 1;
    } while (step < work.steps);
    store<width>(work, sum);
    return next;
  }

  /* In the smallest width that holds the tile. */
  template <int width>
  __device__ __forceinline__ Work dispatch(const Work &work, Ring &ring) const {
    if constexpr (width < Variant::tile_tokens) {
      if (work.tile.end - work.tile.begin > width) return dispatch<width * 2>(work, ring);
    }
    return compute<width>(work, ring);
  }

  __device__ __forceinline__ void run() const {
    Ring ring;
    ring.policy = policy_evict_first();
    if (threadIdx.x == 0) shared.ticket = control.take();
    __syncthreads();
    Work work = work_of(shared.ticket);
    ring.fill(work.fragments);
    __syncthreads(); /* all have read the ticket */
    while (work.unit.tile >= 0) {
      find_rows(work);
      const Work next = dispatch<8>(work, ring);
      __syncthreads(); /* all activations of the unit are stored, and all are through with `shared` */
      if (threadIdx.x == 0 && !work.unit.down) add_release_gpu(control.done + work.unit.tile, 1);
      work = next;
    }
  }
};

template <class Model, class Variant>
__device__ __forceinline__ void experts_stream(const moeflow_experts_params &params) {
  using Block = StreamBlock<Model, Variant>;
  __shared__ typename Block::Shared shared;
  if (block_poisoned(params.lane)) return;
  Schedule<Model, Variant> schedule;
  schedule.init(*params.tile_count, static_cast<int>(gridDim.x), 0, *params.entry_count);
  const Control control(params.control, params.tiles_max);
  Block{params, schedule, control, shared}.run();
  control.template clear_next<Variant::threads>(params.tiles_max);
  if (threadIdx.x == 0) control.leave();
}

}  // namespace moeflow
#endif
