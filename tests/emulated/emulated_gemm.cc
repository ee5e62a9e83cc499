/* gate_up and down against plain loops: sizes that are no multiple of a tile, experts with no and many entries, gathered
 * rows, strides, pointer arrays, gate/up orders; and the promise of order tag 1: every tile size gives the same bits. */
#include "down.cuh"
#include "emulated.h"
#include "gate_up.cuh"

namespace {

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

template <class Model, class Variant>
void run(Problem &problem, unsigned schedule, Results &results) {
  emulator::schedule = schedule;
  moeflow_lane lane = lane_at(1);
  const int64_t tiles_max = moeflow_tiles_max(problem.positions, problem.experts(), Variant::tile_tokens);
  Buffer<moeflow_tile> tiles(static_cast<size_t>(tiles_max));
  int32_t count = 0;
  int begin = 0;
  for (int e = 0; e < problem.experts(); e++) {
    const int end = begin + problem.load[static_cast<size_t>(e)];
    for (; begin < end; begin += Variant::tile_tokens) {
      tiles[static_cast<size_t>(count++)] = {e, begin, std::min(begin + Variant::tile_tokens, end), 0};
    }
    begin = end;
  }
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

double dot(const uint16_t *a, const uint16_t *b, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += static_cast<double>(from_bf16(a[i])) * static_cast<double>(from_bf16(b[i]));
  return sum;
}

double activated(double gate, double up, bool clamp, double limit) {
  if (clamp) {
    gate = std::min(gate, limit);
    up = std::max(-limit, std::min(up, limit));
  }
  return gate / (1 + std::exp(-gate)) * up;
}

/* Position by position, straight from the definition; down is checked on the activations that the kernel made. */
template <class Model>
void check(Problem &problem, Results &results) {
  int position = 0;
  for (int e = 0; e < problem.experts(); e++) {
    const uint16_t *gate_up = problem.matrix(problem.gate_up, e, 2 * Model::intermediate, Model::hidden);
    const uint16_t *down = problem.matrix(problem.down, e, Model::hidden, Model::intermediate);
    for (int n = 0; n < problem.load[static_cast<size_t>(e)]; n++, position++) {
      const int32_t entry = (*problem.entries)[static_cast<size_t>(position)];
      const uint16_t *hidden =
          reinterpret_cast<const uint16_t *>(problem.row(entry / Model::top_k) + problem.layout.hidden_at());
      const uint16_t *got = results.activations.data() + position * Model::intermediate;
      for (int i = 0; i < Model::intermediate; i++) {
        const double gate = dot(gate_up + problem.gate_row(i) * problem.stride(Model::hidden), hidden, Model::hidden);
        const double up = dot(gate_up + problem.up_row(i) * problem.stride(Model::hidden), hidden, Model::hidden);
        const double want = activated(gate, up, Model::activation == 1, Model::activation_limit);
        const double error = std::fabs(static_cast<double>(from_bf16(got[i])) - want);
        EXPECT(error <= std::fabs(want) * 0x1p-8 + 1e-5, "expert %d position %d column %d: %g, not %g", e, position, i,
               static_cast<double>(from_bf16(got[i])), want);
      }
      for (int i = 0; i < Model::hidden; i++) {
        const double want = dot(down + i * problem.stride(Model::intermediate), got, Model::intermediate);
        const double value = static_cast<double>(results.outputs[static_cast<size_t>(position * Model::hidden + i)]);
        EXPECT(std::fabs(value - want) <= 1e-5, "expert %d position %d column %d: %g, not %g", e, position, i, value, want);
      }
    }
  }
}

bool same(Results &a, Results &b) {
  return !memcmp(a.activations.data(), b.activations.data(), a.activations.size() * 2) &&
         !memcmp(a.outputs.data(), b.outputs.data(), a.outputs.size() * 4);
}

template <class Model>
void shape(Order order, bool pointers, int row_gap, const std::vector<int> &load) {
  Problem problem = {};
  problem.layout = {Model::hidden, Model::top_k};
  problem.intermediate = Model::intermediate;
  problem.order = order;
  problem.pointers = pointers;
  problem.row_gap = row_gap;
  problem.load = load;
  problem.make(static_cast<uint64_t>(Model::hidden * 1000 + Model::intermediate));
  const size_t positions = static_cast<size_t>(problem.positions);
  Results by_8(positions, Model::hidden, Model::intermediate), by_32(positions, Model::hidden, Model::intermediate),
      by_64(positions, Model::hidden, Model::intermediate), by_128(positions, Model::hidden, Model::intermediate);
  run<Model, Tile<8, 4>>(problem, 0, by_8);
  check<Model>(problem, by_8);
  run<Model, Tile<32, 3>>(problem, 1, by_32);
  run<Model, Tile<64, 4>>(problem, 12345, by_64);
  run<Model, Tile<128, 2>>(problem, 7, by_128);
  EXPECT(same(by_8, by_32), "tiles of 8 and 32 rows, H %d I %d", Model::hidden, Model::intermediate);
  EXPECT(same(by_8, by_64), "tiles of 8 and 64 rows, H %d I %d", Model::hidden, Model::intermediate);
  EXPECT(same(by_8, by_128), "tiles of 8 and 128 rows, H %d I %d", Model::hidden, Model::intermediate);
}

/* A row of NaN and infinities among the others changes none of their bits. */
void ill_row_stays_alone() {
  using Model = Shape<72, 40, 1>;
  Problem problem = {};
  problem.layout = {Model::hidden, Model::top_k};
  problem.intermediate = Model::intermediate;
  problem.load = {12, 30};
  problem.make(5);
  const size_t positions = static_cast<size_t>(problem.positions);
  Results good(positions, Model::hidden, Model::intermediate), ill(positions, Model::hidden, Model::intermediate);
  for (size_t i = 0; i < positions; i++) (*problem.entries)[i] = static_cast<int32_t>(i * 3);
  run<Model, Tile<32, 4>>(problem, 0, good);
  const int sick = 5;
  for (int i = 0; i < Model::hidden; i++) {
    RowWriter(problem.row(sick), problem.layout).hidden(i, i % 2 ? to_bf16(infinite) : to_bf16(not_a_number));
  }
  run<Model, Tile<32, 4>>(problem, 0, ill);
  for (int position = 0; position < problem.positions; position++) {
    const size_t at = static_cast<size_t>(position * Model::hidden);
    if (position == sick) {
      EXPECT(std::isnan(ill.outputs[at]), "NaN comes through the clamp");
    } else {
      EXPECT(!memcmp(&good.outputs[at], &ill.outputs[at], Model::hidden * 4), "position %d", position);
    }
  }
}

/* gate 0 and up large gives 0: the activation is on the gate. */
void activation_is_on_the_gate() {
  using Model = Shape<8, 8, 0>;
  EXPECT_EQUAL(moeflow::Activation<Model>::of(0.0f, 1000.0f), 0.0f);
  EXPECT(moeflow::Activation<Model>::of(1000.0f, 1.0f) == 1000.0f, "open gate");
  EXPECT(moeflow::Activation<Model>::of(-200.0f, 1e30f) == 0.0f, "shut gate");
  using Clamped = Shape<8, 8, 1>;
  EXPECT(moeflow::Activation<Clamped>::of(100.0f, 100.0f) == moeflow::Activation<Clamped>::of(0.75f, 0.75f), "upper limits");
  EXPECT(moeflow::Activation<Clamped>::of(0.5f, -100.0f) == moeflow::Activation<Clamped>::of(0.5f, -0.75f), "lower limit");
  EXPECT(moeflow::Activation<Clamped>::of(-4.0f, 0.5f) == moeflow::Activation<Model>::of(-4.0f, 0.5f), "gate has one limit");
  EXPECT(std::isnan(moeflow::Activation<Clamped>::of(not_a_number, 1.0f)), "NaN gate");
  EXPECT(std::isnan(moeflow::Activation<Clamped>::of(1.0f, not_a_number)), "NaN up");
}

/* A poisoned lane: nothing is read or written. */
void poisoned_lane() {
  using Model = Shape<64, 64, 0>;
  moeflow_lane lane = lane_at(1);
  lane.poison = MOEFLOW_POISON_PEER;
  moeflow_gate_up_params up = {};
  up.lane = &lane;
  emulator::launch(3, 128, 65536, [&] { moeflow::gate_up<Model, Tile<8, 4>>(up); });
  moeflow_down_params down = {};
  down.lane = &lane;
  emulator::launch(3, 128, 65536, [&] { moeflow::down<Model, Tile<8, 4>>(down); });
}

}  // namespace

int main() {
  shape<Shape<136, 72, 0>>(gate_then_up, false, 0, {9, 0, 1, 33, 8});
  shape<Shape<136, 72, 1>>(up_then_gate, true, 8, {0, 17, 0, 3});
  shape<Shape<64, 64, 0>>(interleaved, false, 16, {5});
  shape<Shape<40, 200, 1>>(interleaved, true, 0, {1, 1, 140, 1});
  shape<Shape<328, 24, 0>>(gate_then_up, false, 8, {7, 129});
  shape<Shape<8, 8, 0>>(up_then_gate, false, 0, {2, 0, 0, 16});
  ill_row_stays_alone();
  activation_is_on_the_gate();
  poisoned_lane();
  TEST_END;
}
