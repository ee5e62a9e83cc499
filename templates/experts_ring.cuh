/* The experts kernel's ring in shared memory, and the two roles that fill it: a thread that takes tickets and starts the bulk
 * copies of weights, and three warps that gather received rows.
 *
 * A stage holds, for up to tile_depth / 64 columns of 64 bf16: the unit's weight rows, then the tile's received rows, each
 * 128 bytes a row with the 128-byte swizzle that the warpgroup MMA reads. Weights wait for nothing: those of down units
 * stream while gate_up units are still being computed. */
#ifndef MOEFLOW_EXPERTS_RING_CUH
#define MOEFLOW_EXPERTS_RING_CUH

#include "experts_schedule.cuh"
#include "operand_bf16.cuh"
#include "ptx_hopper.cuh"
#include "row.cuh"
#include "row_wait.cuh"

namespace moeflow {

constexpr int column_depth = MOEFLOW_COLUMN_DEPTH;

/* The smallest MMA width, 8, 16, 32, 64 or 128, that holds so many rows. */
__host__ __device__ constexpr int width_of(int rows) {
  return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
}

/* Columns that a stage holds beside the received rows of a tile of this width. */
template <class Variant>
__host__ __device__ constexpr int columns_per_stage(int width) {
  const int most = Variant::tile_depth / column_depth;
  const int fit = static_cast<int>(moeflow_experts_stage_bytes(Variant::tile_tokens, Variant::tile_rows, Variant::tile_depth)) /
                  ((Variant::tile_rows + width) * tile_row_bytes);
  return fit < most ? fit : most;
}

/* Which 64-wide columns of the depth a unit covers, and how many of them come at a time. */
template <class Model, class Variant>
struct Columns {
  static constexpr int gate_up = (Model::hidden + column_depth - 1) / column_depth;
  static constexpr int down = (Model::intermediate + column_depth - 1) / column_depth;
  int first;
  int end;
  int per_stage;

  __device__ __forceinline__ Columns(const Unit &unit, int width) {
    first = unit.down ? down * unit.part / Variant::parts : 0;
    end = unit.down ? down * (unit.part + 1) / Variant::parts : gate_up;
    per_stage = columns_per_stage<Variant>(width);
  }
  __device__ __forceinline__ int in_stage(int from) const {
    return end - from < per_stage ? end - from : per_stage;
  }
};

/* Counts stages or queue places round and round; the parity tells the rounds apart. */
template <int size>
struct Cursor {
  int place = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++place == size) {
      place = 0;
      parity ^= 1;
    }
  }
};

struct QueuedUnit { /* as the loader hands it to the other roles, which read it in place: registers are short */
  Unit unit;
  moeflow_tile tile;
};

template <class Model, class Variant>
struct Ring {
  static constexpr int consumer_groups = Variant::threads / 128 - 1;
  static constexpr int gather_warps = 3;
  static constexpr int queue_places = 8;
  static constexpr int stage_bytes =
      static_cast<int>(moeflow_experts_stage_bytes(Variant::tile_tokens, Variant::tile_rows, Variant::tile_depth));

  struct Shared {
    uint64_t full[Variant::stages];  /* the copies of weights have come, and those of each gathering thread */
    uint64_t empty[Variant::stages]; /* every consumer warp is through */
    uint64_t queue_full[queue_places];
    uint64_t queue_empty[queue_places];
    QueuedUnit queue[queue_places];
    const uint8_t *rows[Variant::tile_tokens];
  };

  Shared *shared;
  shared_address stages;

  __device__ __forceinline__ explicit Ring(Shared *shared_) : shared(shared_) {
    stages = (to_shared(dynamic_shared()) + 1023) & ~static_cast<shared_address>(1023);
  }

  __device__ __forceinline__ void init() const { /* one thread, before a __syncthreads */
    for (int i = 0; i < Variant::stages; i++) {
      barrier_init(to_shared(&shared->full[i]), 1 + gather_warps * 32);
      barrier_init(to_shared(&shared->empty[i]), consumer_groups * 4);
    }
    for (int i = 0; i < queue_places; i++) {
      barrier_init(to_shared(&shared->queue_full[i]), 1);
      barrier_init(to_shared(&shared->queue_empty[i]), gather_warps + consumer_groups * 4);
    }
    barrier_init_fence();
  }

  __device__ __forceinline__ shared_address full(int stage) const {
    return to_shared(&shared->full[stage]);
  }
  __device__ __forceinline__ shared_address empty(int stage) const {
    return to_shared(&shared->empty[stage]);
  }
  /* Column c, unit row r (a multiple of 64), and column c's received rows in tiles of `width`. */
  __device__ __forceinline__ shared_address weights(int stage, int column, int row) const {
    return stages + stage * stage_bytes + (column * Variant::tile_rows + row) * tile_row_bytes;
  }
  __device__ __forceinline__ shared_address tokens(int stage, int column, int width) const {
    const int weight_bytes = columns_per_stage<Variant>(width) * Variant::tile_rows * tile_row_bytes;
    return stages + stage * stage_bytes + weight_bytes + column * width * tile_row_bytes;
  }

  /* Other roles, by whole warps: the next unit, which holds its place until they say that they are through. */
  __device__ __forceinline__ const QueuedUnit &next(const Cursor<queue_places> &cursor) const {
    barrier_wait(to_shared(&shared->queue_full[cursor.place]), cursor.parity);
    return shared->queue[cursor.place];
  }
  __device__ __forceinline__ void through(Cursor<queue_places> &cursor) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(to_shared(&shared->queue_empty[cursor.place]));
    cursor.advance();
  }
};

/* One whole warp in step, whose first lane takes tickets and one of whose lanes starts the copies. */
template <class Model, class Variant>
struct Loader {
  using Ring = moeflow::Ring<Model, Variant>;
  using Schedule = moeflow::Schedule<Model, Variant>;
  const moeflow_experts_params &params;
  const Ring &ring;
  const Schedule &schedule;
  const Control &control;
  const moeflow_tile *near; /* shared: the first tiles, near_count of them */
  int near_count;
  bool acts; /* the first lane */
  uint64_t policy;

  __device__ __forceinline__ void publish(const QueuedUnit &unit, Cursor<Ring::queue_places> &cursor) const {
    if (acts) {
      barrier_wait(to_shared(&ring.shared->queue_empty[cursor.place]), cursor.parity ^ 1);
      ring.shared->queue[cursor.place] = unit;
      barrier_arrive(to_shared(&ring.shared->queue_full[cursor.place]));
    }
    __syncwarp();
    cursor.advance();
  }

  /* `count` columns of up to tile_rows rows of the matrix. Columns of one row are copied one after the other: neighbours in
   * memory. */
  template <bool down>
  __device__ __forceinline__ void load_stage(const moeflow_tensor_map *map, int column, int count, int first_row, int rows,
                                             const Cursor<Variant::stages> &cursor) const {
    const shared_address full = ring.full(cursor.place);
    barrier_wait(ring.empty(cursor.place), cursor.parity ^ 1);
    if (elect_lane()) {
      barrier_expect(full, count * (rows < Variant::tile_rows ? rows : Variant::tile_rows) * tile_row_bytes);
#pragma unroll
      for (int row = 0; row < Variant::tile_rows; row += MOEFLOW_UNIT_ROWS) {
#pragma unroll
        for (int i = 0; i < Variant::tile_depth / column_depth; i++) {
          if (row >= rows || i >= count) continue;
          const shared_address to = ring.weights(cursor.place, i, row);
          const int depth = (column + i) * column_depth;
          if constexpr (down) {
            copy_tensor_2(to, map, depth, first_row + row, full, policy);
          } else {
            copy_tensor_4(to, map, depth, 0, 0, (first_row + row) / (2 * MOEFLOW_GATE_ROWS), full, policy);
          }
        }
      }
    }
    __syncwarp();
  }

  /* A unit. */
  template <bool down>
  __device__ __forceinline__ void load(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    const moeflow_tensor_map *map = (down ? params.down : params.gate_up) + tile.expert;
    const Columns<Model, Variant> columns(unit, width_of(tile.end - tile.begin));
    for (int column = columns.first; column < columns.end; column += columns.per_stage) {
      for (int block = 0; block < unit.rows; block += Variant::tile_rows) {
        load_stage<down>(map, column, columns.in_stage(column), unit.row + block, unit.rows - block, cursor);
        cursor.advance();
      }
    }
  }

  __device__ __forceinline__ void run(int first_ticket) const {
    Cursor<Variant::stages> stage;
    Cursor<Ring::queue_places> place;
    int ticket = __shfl_sync(full_warp, first_ticket, 0);
    while (true) {
      QueuedUnit queued = {schedule.at(ticket), {}};
      const Unit &unit = queued.unit;
      if (unit.tile < 0) break;
      const int next = acts ? control.take() : 0; /* its answer comes while this unit is loaded */
      if (!unit.sum) queued.tile = unit.tile < near_count ? near[unit.tile] : params.tiles[unit.tile];
      publish(queued, place);
      if (unit.rows > 0) {
        if (unit.down) {
          load<true>(unit, queued.tile, stage);
        } else {
          load<false>(unit, queued.tile, stage);
        }
      }
      ticket = __shfl_sync(full_warp, next, 0);
    }
    launch_dependents();
    /* Nobody waits for the last sums, so they need no tickets: who is through first would take them all. */
    for (int unit = blockIdx.x; unit < schedule.sum_units; unit += gridDim.x) {
      publish({schedule.sum_at(schedule.groups - 1, unit), {}}, place);
    }
    publish({schedule.at(schedule.tickets), {}}, place);
    if (acts) control.leave();
  }
};

/* Three warps. Rows beyond the tile's end stay what they are: their sums are never stored. Depths beyond the row's end become
 * zeros, for the weights there are. */
template <class Model, class Variant>
struct Gatherer {
  using Ring = moeflow::Ring<Model, Variant>;
  using Schedule = moeflow::Schedule<Model, Variant>;
  static constexpr int threads = Ring::gather_warps * 32;
  static constexpr int barrier = 1;
  const moeflow_experts_params &params;
  const Ring &ring;
  const Schedule &schedule;
  const Control &control;
  int thread; /* 0 .. threads - 1 */

  /* Where the tile's rows begin: received rows by entry, or activations in position order. */
  __device__ __forceinline__ void find_rows(const Unit &unit, const moeflow_tile &tile) const {
    named_barrier(barrier, threads); /* all are through with the last unit's rows */
    if (unit.down && thread == 0) await_count(control.done + unit.tile, static_cast<uint32_t>(schedule.gate_up_blocks));
    for (int i = thread; i < tile.end - tile.begin; i += threads) {
      const int position = tile.begin + i;
      ring.shared->rows[i] =
          unit.down ? reinterpret_cast<const uint8_t *>(params.activations + static_cast<int64_t>(position) * Model::intermediate)
                    : entry_hidden<Model>(params.in, params.entries[position]);
    }
    named_barrier(barrier, threads);
  }

  __device__ __forceinline__ void gather(const Unit &unit, const moeflow_tile &tile, Cursor<Variant::stages> &cursor) const {
    const int rows = tile.end - tile.begin;
    const int width = width_of(rows);
    const Columns<Model, Variant> columns(unit, width);
    const int depth = unit.down ? Model::intermediate : Model::hidden;
    const int chunk = thread % tile_row_chunks;
    for (int column = columns.first; column < columns.end; column += columns.per_stage) {
      const int count = columns.in_stage(column);
      barrier_wait(ring.empty(cursor.place), cursor.parity ^ 1);
      for (int i = 0; i < count; i++) {
        const int from = (column + i) * column_depth + chunk * 8;
        const bool inside = from < depth;
        const shared_address to = ring.tokens(cursor.place, i, width);
#pragma unroll 4
        for (int row = thread / tile_row_chunks; row < rows; row += threads / tile_row_chunks) {
          copy_async_16(to + tile_offset(row, chunk), ring.shared->rows[row] + (inside ? from * 2 : 0), inside ? 16 : 0);
        }
      }
      barrier_arrive_copies(ring.full(cursor.place));
      cursor.advance();
      if (unit.rows <= Variant::tile_rows) continue;
      barrier_wait(ring.empty(cursor.place), cursor.parity ^ 1);
      barrier_arrive(ring.full(cursor.place)); /* the pair's other block has these rows too */
      cursor.advance();
    }
  }

  /* What the sums of these rows will want first. Thread i fetches for row i. */
  __device__ __forceinline__ void prefetch_sum(const Unit &unit) const {
    const int number = unit.tile * MOEFLOW_SUM_ROWS + thread;
    if (thread >= MOEFLOW_SUM_ROWS || number >= params.in.ranks * params.in.rows) return;
    prefetch_line(params.positions + static_cast<int64_t>(number) * Model::top_k);
    prefetch_line(row_in(params.in, number / params.in.rows, number % params.in.rows, Row<Model>::bytes) + Row<Model>::weights);
  }

  template <class RowWait>
  __device__ __forceinline__ void run(const RowWait &wait) const {
    Cursor<Variant::stages> stage;
    Cursor<Ring::queue_places> place;
    while (true) {
      const QueuedUnit &queued = ring.next(place);
      const Unit &unit = queued.unit;
      if (unit.tile < 0) return;
      if (unit.rows > 0) {
        if (!unit.down) wait.before(queued.tile);
        find_rows(unit, queued.tile);
        gather(unit, queued.tile, stage);
      }
      if (unit.sum) prefetch_sum(unit);
      ring.through(place);
    }
  }
};

}  // namespace moeflow
#endif
