/* The order of work in an experts kernel: tickets, the unit that each stands for, and the control block that hands them out
 * and keeps itself clean from launch to launch, so that a replayed graph needs no kernel to reset it. */
#ifndef MOEFLOW_EXPERTS_SCHEDULE_CUH
#define MOEFLOW_EXPERTS_SCHEDULE_CUH

#include "ptx.cuh"

namespace moeflow {

struct Unit {
  int tile;  /* sum: number of its MOEFLOW_SUM_ROWS received rows; -1: no more work */
  int down;  /* 1: down; 0: gate_up or sum */
  int row;   /* first weight row: of gate and up together, or of down; sum: first column */
  int rows;  /* a multiple of MOEFLOW_UNIT_ROWS, some of the last one inside the matrix; 0: all of it lies beyond */
  int part;  /* of the depth; gate_up: 0 */
  int group; /* of columns; gate_up: 0 */
  int sum;   /* 1: the weighted sums of some rows and columns */
};

/* Whether two blocks of rows can be one unit: then half as many received rows are gathered, which wide tiles want. The blocks
 * come in a stage each, one after the other, of which the first one holds the received rows. (Two blocks' sums of 128 rows do
 * not fit into the registers.) */
template <class Variant>
__host__ __device__ constexpr bool can_pair() {
  return Variant::tile_tokens > MOEFLOW_DEEP_TILE && Variant::tile_tokens < 128 && Variant::tile_rows == 128;
}

/* Where the outputs of a group stand. */
struct GroupOutputs {
  float *base;
  int64_t part_stride;
  int pitch; /* floats from one position to the next */
  int first; /* column */
};

/* Order of tickets: all gate_up units tile by tile; then, for each group of columns, all its down units tile by tile. The sums of
 * a group follow behind the down units of the next one, so that nobody waits for them. The last group's sums have no tickets:
 * blocks share them out by their numbers, since whoever is through first would take them all, and nobody waits for them.
 *
 * Blocks end together when the last units are small, so the last rounds of down units are cut into pieces of MOEFLOW_UNIT_ROWS
 * rows, unless tiles are so full that the pieces' share of the received rows would cost more. */
template <class Model, class Variant>
struct Schedule {
  /* A matrix in blocks of a unit's rows. Known when compiling: a division by a known number takes a fraction of the time. */
  static __host__ __device__ constexpr int blocks_of(int matrix_rows, int rows) {
    return (matrix_rows + rows - 1) / rows;
  }
  static constexpr int gate_up_singles = blocks_of(2 * Model::intermediate, Variant::tile_rows);
  static constexpr int gate_up_pairs = blocks_of(2 * Model::intermediate, 2 * Variant::tile_rows);
  static constexpr int down_singles = blocks_of(Model::hidden, Variant::tile_rows);
  static constexpr int down_pairs = blocks_of(Model::hidden, 2 * Variant::tile_rows);
  static constexpr int pieces = Variant::tile_rows / MOEFLOW_UNIT_ROWS;
  static constexpr int wide_columns = (Model::hidden + MOEFLOW_GROUP_COLUMNS - 1) / MOEFLOW_GROUP_COLUMNS;
  static constexpr int cut_rounds = 2;
  static constexpr int cut_tile_tokens = 16; /* entries a tile, at most, for units to be cut: pieces halve what a stage holds */

  bool paired;         /* units are of two blocks of tile_rows */
  int groups;
  int group_columns;
  int gate_up_blocks;  /* units of one tile */
  int down_blocks;     /* of one tile in one group */
  int down_units;      /* of one group, before the cut */
  int sum_units;       /* of one group */
  int row_chunks;
  int cut;             /* down units of the last group that are cut */
  int gate_up_tickets;
  int last_down;       /* tickets of the last group's down units */
  int tickets;         /* not those of the last group's sums, which blocks share out by their numbers */

  /* `entries` of all tiles. 0 rows: no sums, one group. (No constructor: it stands in shared memory, where it costs no
   * registers.) */
  __device__ __forceinline__ void init(int tiles, int blocks, int rows, int64_t entries) {
    paired = can_pair<Variant>() && entries > static_cast<int64_t>(tiles) * MOEFLOW_DEEP_TILE;
    groups = 1;
    group_columns = wide_columns * MOEFLOW_GROUP_COLUMNS;
    if (rows > 0) choose_groups(tiles, blocks, entries);
    row_chunks = (rows + MOEFLOW_SUM_ROWS - 1) / MOEFLOW_SUM_ROWS;
    const int columns_inside = groups == 1 ? Model::hidden : group_columns;
    gate_up_blocks = paired ? gate_up_pairs : gate_up_singles;
    down_blocks = blocks_of(columns_inside, unit_rows());
    down_units = tiles * down_blocks * Variant::parts;
    sum_units = row_chunks * ((columns_inside + MOEFLOW_SUM_COLUMNS - 1) / MOEFLOW_SUM_COLUMNS);
    cut = pieces > 1 && entries <= static_cast<int64_t>(tiles) * cut_tile_tokens ? cut_rounds * blocks : 0;
    if (cut > down_units) cut = down_units;
    gate_up_tickets = tiles * gate_up_blocks;
    last_down = down_units - cut + cut * pieces;
    tickets = gate_up_tickets + (groups - 1) * (down_units + sum_units) + last_down;
  }

  __device__ __forceinline__ int unit_rows() const {
    return paired ? 2 * Variant::tile_rows : Variant::tile_rows;
  }

  __device__ __forceinline__ void choose_groups(int tiles, int blocks, int64_t entries) {
    const int64_t bytes = entries * Model::hidden * 4 * Variant::parts;
    if (bytes <= MOEFLOW_GROUP_BYTES) return;
    int wanted = static_cast<int>((bytes + MOEFLOW_GROUP_BYTES - 1) / MOEFLOW_GROUP_BYTES);
    if (wanted < MOEFLOW_GROUP_SLOTS + 1) wanted = MOEFLOW_GROUP_SLOTS + 1;
    if (wanted > MOEFLOW_GROUPS_MAX) wanted = MOEFLOW_GROUPS_MAX;
    /* each group must keep all blocks busy for a few units, or they would wait for its sums */
    const int most = tiles * (paired ? down_pairs : down_singles) * Variant::parts / (4 * blocks);
    if (wanted > most) wanted = most;
    const int columns = wanted < 1 ? wide_columns : (wide_columns + wanted - 1) / wanted;
    if (columns * MOEFLOW_GROUP_COLUMNS * MOEFLOW_GROUP_SLOTS > Model::hidden) return;
    group_columns = columns * MOEFLOW_GROUP_COLUMNS;
    groups = (wide_columns + columns - 1) / columns;
  }

  static __device__ __forceinline__ int rows_inside(int row, int rows, int matrix_rows) {
    const int left = (matrix_rows - row + MOEFLOW_UNIT_ROWS - 1) / MOEFLOW_UNIT_ROWS * MOEFLOW_UNIT_ROWS;
    return left < 0 ? 0 : left < rows ? left : rows;
  }

  __device__ __forceinline__ Unit gate_up_at(int ticket) const {
    const int tile = paired ? ticket / gate_up_pairs : ticket / gate_up_singles;
    const int row = (ticket - tile * gate_up_blocks) * unit_rows();
    return {tile, 0, row, rows_inside(row, unit_rows(), 2 * Model::intermediate), 0, 0, 0};
  }
  /* Down unit number `unit` of a group: all of it, or with piece >= 0 one piece. */
  __device__ __forceinline__ Unit down_at(int group, int unit, int piece) const {
    const int in_tile_all = down_blocks * Variant::parts;
    const int tile = groups > 1 ? unit / in_tile_all
                     : paired   ? unit / (down_pairs * Variant::parts)
                                : unit / (down_singles * Variant::parts);
    const int in_tile = unit - tile * in_tile_all;
    const int row = group * group_columns + in_tile / Variant::parts * unit_rows() + (piece < 0 ? 0 : piece * MOEFLOW_UNIT_ROWS);
    const int rows = rows_inside(row, piece < 0 ? unit_rows() : MOEFLOW_UNIT_ROWS, Model::hidden);
    return {tile, 1, row, rows, in_tile % Variant::parts, group, 0};
  }
  __device__ __forceinline__ Unit sum_at(int group, int unit) const {
    const int column = group * group_columns + unit / row_chunks * MOEFLOW_SUM_COLUMNS;
    return {unit % row_chunks, 0, column, 0, 0, group, 1};
  }

  /* Down ticket number `number` of a group. */
  __device__ __forceinline__ Unit down_ticket(int group, int number) const {
    const int whole = group == groups - 1 ? down_units - cut : down_units;
    if (number < whole) return down_at(group, number, -1);
    return down_at(group, whole + (number - whole) / pieces, (number - whole) % pieces);
  }

  __device__ __forceinline__ Unit at(int ticket) const {
    if (ticket >= tickets) return {-1, 0, 0, 0, 0, 0, 0};
    if (ticket < gate_up_tickets) return gate_up_at(ticket);
    int group = 0;
    int number = ticket - gate_up_tickets;
    if (groups > 1 && number >= down_units) { /* in each group but the first, the sums of the one before come last */
      group = 1 + (number - down_units) / (down_units + sum_units);
      if (group >= groups) group = groups - 1;
      number -= group * (down_units + sum_units) - sum_units;
    }
    const int downs = static_cast<int>(down_tickets(group));
    return number < downs ? down_ticket(group, number) : sum_at(group - 1, number - downs);
  }

  /* Down tickets of a group: what its sums wait for. */
  __device__ __forceinline__ uint32_t down_tickets(int group) const {
    return static_cast<uint32_t>(group == groups - 1 ? last_down : down_units);
  }

  __device__ __forceinline__ GroupOutputs outputs_of(int group, float *outputs, int64_t part_stride) const {
    if (groups == 1) return {outputs, part_stride, Model::hidden, 0};
    const int64_t stride = part_stride / Model::hidden * group_columns;
    return {outputs + group % MOEFLOW_GROUP_SLOTS * Variant::parts * stride, stride, group_columns, group * group_columns};
  }
};

/* A block's view of the control block. */
struct Control {
  moeflow_experts_control *control;
  uint32_t *done; /* gate_up units per tile, of this launch */
  int half;

  __device__ __forceinline__ Control(moeflow_experts_control *control_, int tiles_max) : control(control_) {
    half = static_cast<int>(load_gpu(&control->launches) % 2);
    done = reinterpret_cast<uint32_t *>(control + 1) + static_cast<int64_t>(half) * tiles_max;
  }

  __device__ __forceinline__ int take() const { /* one thread */
    return static_cast<int>(atomicAdd(&control->tickets, 1u));
  }
  __device__ __forceinline__ uint32_t *down_done(int group) const {
    return &control->down_done[half][group];
  }
  __device__ __forceinline__ uint32_t *sums_done(int group) const {
    return &control->sums_done[half][group];
  }

  /* `threads` threads of every block, once, at any time: the next launch's counters become zero. */
  template <int threads>
  __device__ __forceinline__ void clear_next(int tiles_max) const {
    uint32_t *next = reinterpret_cast<uint32_t *>(control + 1) + static_cast<int64_t>(1 - half) * tiles_max;
    const int stride = static_cast<int>(gridDim.x) * threads;
    for (int i = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x); i < tiles_max; i += stride) next[i] = 0;
    if (blockIdx.x == 0 && threadIdx.x < MOEFLOW_GROUPS_MAX) {
      control->down_done[1 - half][threadIdx.x] = 0;
      control->sums_done[1 - half][threadIdx.x] = 0;
    }
  }

  /* One thread of each block, when the block has taken its last ticket: the last one ends the launch. */
  __device__ __forceinline__ void leave() const {
    if (atomicAdd(&control->left, 1u) != gridDim.x - 1) return;
    control->left = 0;
    control->tickets = 0;
    control->launches += 1;
  }
};

/* One thread waits until a counter has come so far. */
__device__ __forceinline__ void await_count(const uint32_t *counter, uint32_t count) {
  while (load_acquire_gpu(counter) < count) continue;
}

}  // namespace moeflow
#endif
