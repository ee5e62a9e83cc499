/* A grouped GEMM problem for the emulated tests, experts with no and many entries and all ways to lend weights, and the
 * portable kernels run on it. */
#ifndef MOEFLOW_GROUPED_PROBLEM_H
#define MOEFLOW_GROUPED_PROBLEM_H

#include "down.cuh"
#include "emulated.h"
#include "gate_up.cuh"

template <int H, int I, int Clamp>
struct Shape {
  static constexpr int hidden = H;
  static constexpr int intermediate = I;
  static constexpr int top_k = 3;
  static constexpr int activation = Clamp;
  static constexpr float activation_limit = 0.75f;
};

template <int Tokens, int Stages>
struct Tile {
  static constexpr int threads = 128;
  static constexpr int tile_tokens = Tokens;
  static constexpr int tile_rows = 64;
  static constexpr int tile_depth = 64;
  static constexpr int stages = Stages;
};

enum Order { gate_then_up, up_then_gate, interleaved };

/* One expert-major problem: `load[e]` entries for expert e, drawn from the received rows at random. */
struct Problem {
  Layout layout;
  int intermediate;
  Order order;
  bool pointers;         /* per-expert pointers instead of base and stride */
  int row_gap;           /* bf16 values between weight rows */
  std::vector<int> load; /* per local expert */

  static constexpr int ranks = 2;
  static constexpr int rows = 70;
  int64_t block_bytes;
  int positions = 0;
  std::unique_ptr<Buffer<uint8_t>> received;
  std::unique_ptr<Buffer<int32_t>> entries;
  std::vector<std::unique_ptr<Buffer<uint16_t>>> gate_up, down; /* one per expert, or one for all */
  std::unique_ptr<Buffer<const uint8_t *>> gate_up_pointers, down_pointers;

  int experts() const {
    return static_cast<int>(load.size());
  }
  int gate_row(int i) const {
    return order == interleaved ? 2 * i : order == up_then_gate ? intermediate + i : i;
  }
  int up_row(int i) const {
    return order == interleaved ? 2 * i + 1 : order == up_then_gate ? i : intermediate + i;
  }
  int64_t stride(int columns) const {
    return columns + row_gap;
  }

  uint16_t *matrix(std::vector<std::unique_ptr<Buffer<uint16_t>>> &all, int expert, int matrix_rows, int columns) {
    if (pointers) return all[static_cast<size_t>(expert)]->data();
    return all[0]->data() + expert * expert_stride(matrix_rows, columns);
  }
  int64_t expert_stride(int matrix_rows, int columns) const {
    return matrix_rows * stride(columns) + 24;
  }
  /* The last row of the last matrix ends with the buffer: reading further is caught. */
  int64_t matrix_size(int matrix_rows, int columns) const {
    return (matrix_rows - 1) * stride(columns) + columns;
  }

  void make_matrices(std::vector<std::unique_ptr<Buffer<uint16_t>>> &all, int matrix_rows, int columns, Random &random) {
    const int64_t one = matrix_size(matrix_rows, columns);
    if (!pointers) {
      const int64_t size = (experts() - 1) * expert_stride(matrix_rows, columns) + one;
      all.emplace_back(new Buffer<uint16_t>(static_cast<size_t>(size)));
    }
    for (int expert = 0; expert < experts(); expert++) {
      if (pointers) all.emplace_back(new Buffer<uint16_t>(static_cast<size_t>(one)));
      uint16_t *values = matrix(all, expert, matrix_rows, columns);
      for (int row = 0; row < matrix_rows; row++) {
        for (int i = 0; i < columns; i++) {
          values[row * stride(columns) + i] = to_bf16(random.normal() / std::sqrt(static_cast<float>(columns)));
        }
      }
    }
  }

  uint8_t *row(int number) {
    return received->data() + number / rows * block_bytes + number % rows * layout.bytes();
  }

  void make_rows(Random &random) {
    block_bytes = (rows + 5) * layout.bytes();
    received.reset(new Buffer<uint8_t>(static_cast<size_t>((ranks - 1) * block_bytes + rows * layout.bytes())));
    for (int number = 0; number < ranks * rows; number++) {
      RowWriter writer(row(number), layout);
      for (int i = 0; i < layout.hidden; i++) writer.hidden(i, to_bf16(random.normal()));
    }
    for (int n : load) positions += n;
    entries.reset(new Buffer<int32_t>(static_cast<size_t>(positions)));
    for (int i = 0; i < positions; i++) (*entries)[static_cast<size_t>(i)] = random.below(ranks * rows * layout.top_k);
  }

  void make(uint64_t seed) {
    Random random(seed);
    make_rows(random);
    make_matrices(gate_up, 2 * intermediate, layout.hidden, random);
    make_matrices(down, layout.hidden, intermediate, random);
    gate_up_pointers.reset(new Buffer<const uint8_t *>(load.size()));
    down_pointers.reset(new Buffer<const uint8_t *>(load.size()));
    for (size_t e = 0; pointers && e < load.size(); e++) {
      (*gate_up_pointers)[e] = reinterpret_cast<const uint8_t *>(gate_up[e]->data());
      (*down_pointers)[e] = reinterpret_cast<const uint8_t *>(down[e]->data());
    }
  }

  moeflow_matrix describe(std::vector<std::unique_ptr<Buffer<uint16_t>>> &all, Buffer<const uint8_t *> &table,
                          int matrix_rows, int columns) {
    if (pointers) return {nullptr, table.data(), 0, stride(columns) * 2};
    return {reinterpret_cast<const uint8_t *>(all[0]->data()), nullptr, expert_stride(matrix_rows, columns) * 2,
            stride(columns) * 2};
  }
};

struct Results {
  Buffer<uint16_t> activations;
  Buffer<float> outputs;
  Results(size_t positions, size_t hidden, size_t intermediate)
      : activations(positions * intermediate), outputs(positions * hidden) {}
};

/* Tiles of at most tile_tokens positions, as expert_prepare lists them. Returns their number. */
inline int32_t list_tiles(const Problem &problem, int tile_tokens, Buffer<moeflow_tile> &tiles) {
  int32_t count = 0;
  int begin = 0;
  for (int e = 0; e < problem.experts(); e++) {
    const int end = begin + problem.load[static_cast<size_t>(e)];
    for (; begin < end; begin += tile_tokens) {
      tiles[static_cast<size_t>(count++)] = {e, begin, std::min(begin + tile_tokens, end), 0};
    }
    begin = end;
  }
  return count;
}

template <class Model, class Variant>
void run_portable(Problem &problem, unsigned schedule, Results &results) {
  emulator::schedule = schedule;
  moeflow_lane lane = lane_at(1);
  const int64_t tiles_max = moeflow_tiles_max(problem.positions, problem.experts(), Variant::tile_tokens);
  Buffer<moeflow_tile> tiles(static_cast<size_t>(tiles_max));
  const int32_t count = list_tiles(problem, Variant::tile_tokens, tiles);
  moeflow_gate_up_params up = {};
  up.lane = &lane;
  up.in = {problem.received->data(), problem.block_bytes, problem.rows, problem.ranks, 0, problem.rows};
  up.entries = problem.entries->data();
  up.tiles = tiles.data();
  up.tile_count = &count;
  up.weights = problem.describe(problem.gate_up, *problem.gate_up_pointers, 2 * Model::intermediate, Model::hidden);
  up.gate_row = problem.gate_row(0);
  up.up_row = problem.up_row(0);
  up.row_step = problem.order == interleaved ? 2 : 1;
  up.activations = results.activations.data();
  const unsigned up_blocks = static_cast<unsigned>(tiles_max * ((Model::intermediate + 63) / 64));
  emulator::launch(up_blocks, 128,
                   static_cast<size_t>(moeflow_gemm_shared_bytes(2, Variant::tile_tokens, 64, 64, Variant::stages)),
                   [&] { moeflow::gate_up<Model, Variant>(up); });

  moeflow_down_params down = {};
  down.lane = &lane;
  down.activations = results.activations.data();
  down.tiles = tiles.data();
  down.tile_count = &count;
  down.weights = problem.describe(problem.down, *problem.down_pointers, Model::hidden, Model::intermediate);
  down.outputs = results.outputs.data();
  const unsigned down_blocks = static_cast<unsigned>(tiles_max * ((Model::hidden + 63) / 64));
  emulator::launch(down_blocks, 128,
                   static_cast<size_t>(moeflow_gemm_shared_bytes(1, Variant::tile_tokens, 64, 64, Variant::stages)),
                   [&] { moeflow::down<Model, Variant>(down); });
}
#endif
