/* pack_weights against the definition of a fragment, and experts_stream on what it packs against plain loops that add in the
 * promised order, and against gate_up and down: order tag 32 is order tag 1 bit by bit. Launches follow each other on one
 * control block; blocks run one after the other and all at once. */
#include "experts_stream.cuh"
#include "grouped_problem.h"
#include "pack_weights.cuh"

namespace {

struct PackVariant {
  static constexpr int threads = 64;
};

template <int Tokens, int Rows, int Stages, int Parts>
struct Stream {
  static constexpr int threads = Rows * 2;
  static constexpr int tile_tokens = Tokens;
  static constexpr int tile_rows = Rows;
  static constexpr int tile_depth = Stages * 16;
  static constexpr int stages = Stages;
  static constexpr int parts = Parts;
  static constexpr int residency = 1;
};

/* One matrix of every expert, packed, each at a stride that leaves a gap or, with pointers, in memory of its own. */
struct Packed {
  int64_t bytes;
  int64_t stride;
  std::vector<std::unique_ptr<Buffer<uint8_t>>> memory;
  std::unique_ptr<Buffer<const uint8_t *>> table;

  Packed(int experts, int64_t bytes_, bool pointers) : bytes(bytes_), stride(bytes_ + 256) {
    const size_t count = static_cast<size_t>(experts);
    for (size_t i = 0; i < (pointers ? count : 1); i++) {
      memory.emplace_back(new Buffer<uint8_t>(static_cast<size_t>(pointers ? bytes : (experts - 1) * stride + bytes)));
    }
    table.reset(new Buffer<const uint8_t *>(count));
    for (int e = 0; pointers && e < experts; e++) (*table)[static_cast<size_t>(e)] = expert(e);
  }
  uint8_t *expert(int e) {
    return memory.size() > 1 ? memory[static_cast<size_t>(e)]->data() : memory[0]->data() + e * stride;
  }
  moeflow_matrix describe() {
    if (memory.size() > 1) return {nullptr, table->data(), 0, 0};
    return {memory[0]->data(), nullptr, stride, 0};
  }
};

/* Expert by expert in turns of one and two, into memory that the kernel must not leave. */
template <class Model>
void pack(Problem &problem, bool down, Packed &packed) {
  moeflow_pack_weights_params params = {};
  params.weights =
      down ? problem.describe(problem.down, *problem.down_pointers, Model::hidden, Model::intermediate)
           : problem.describe(problem.gate_up, *problem.gate_up_pointers, 2 * Model::intermediate, Model::hidden);
  params.down = down;
  params.gate_row = problem.gate_row(0);
  params.up_row = problem.up_row(0);
  params.row_step = problem.order == interleaved ? 2 : 1;
  for (int first = 0, count = 1; first < problem.experts(); first += count, count = 3 - count) {
    count = std::min(count, problem.experts() - first);
    Buffer<uint8_t> out(static_cast<size_t>(count * packed.bytes));
    params.packed = out.data();
    params.first_expert = first;
    params.experts = count;
    emulator::launch(3, PackVariant::threads, 0, [&] { moeflow::pack_weights<Model, PackVariant>(params); });
    for (int i = 0; i < count; i++) {
      memcpy(packed.expert(first + i), out.data() + i * packed.bytes, static_cast<size_t>(packed.bytes));
    }
  }
}

/* Where value `at` of row `row` stands in a packed matrix: PTX, "Matrix fragments for mma.m16n8k16". */
int64_t packed_at(int row, int at, int depth) {
  const int64_t fragment = static_cast<int64_t>(row / 16) * ((depth + 31) / 32 * 2) + at / 16;
  const int lane = row % 8 * 4 + at % 8 / 2;
  const int word = row % 16 / 8 + at % 16 / 8 * 2;
  return fragment * 512 + lane * 16 + word * 4 + at % 2 * 2;
}

template <class Model>
void check_packed(Problem &problem, bool down, Packed &packed) {
  const int depth = down ? Model::intermediate : Model::hidden;
  const int rows = down ? Model::hidden : 2 * Model::intermediate;
  for (int e = 0; e < problem.experts(); e++) {
    std::vector<uint8_t> want(static_cast<size_t>(packed.bytes));
    const uint16_t *matrix = problem.matrix(down ? problem.down : problem.gate_up, e, rows, depth);
    for (int row = 0; row < rows; row++) {
      const int i = row / 16 * 8 + row % 8;
      const int plain = down ? row : row % 16 < 8 ? problem.gate_row(i) : problem.up_row(i);
      for (int at = 0; at < depth; at++) {
        memcpy(&want[static_cast<size_t>(packed_at(row, at, depth))], matrix + plain * problem.stride(depth) + at, 2);
      }
    }
    EXPECT(!memcmp(want.data(), packed.expert(e), want.size()), "expert %d, down %d, H %d I %d", e, down, Model::hidden,
           Model::intermediate);
  }
}

/* Of a lane: lives through many launches, of variants with different tiles. */
struct ControlBlock {
  int64_t tiles_max;
  Buffer<uint8_t> memory;
  uint32_t launches = 0;

  explicit ControlBlock(Problem &problem)
      : tiles_max(moeflow_tiles_max(problem.positions, problem.experts(), 8)),
        memory(sizeof(moeflow_experts_control) + static_cast<size_t>(tiles_max) * 8) {
    memory.fill(0);
  }
  moeflow_experts_control *control() {
    return reinterpret_cast<moeflow_experts_control *>(memory.data());
  }
  /* Between launches, the half that comes next is clean. */
  void check() {
    launches++;
    const uint32_t half = launches % 2;
    EXPECT(control()->launches == launches && control()->left == 0, "%u launches, %u left", control()->launches,
           control()->left);
    EXPECT(control()->tickets == 0, "ticket %u", control()->tickets);
    const uint32_t *done = reinterpret_cast<const uint32_t *>(control() + 1) + half * tiles_max;
    for (int64_t i = 0; i < tiles_max; i++) EXPECT(done[i] == 0, "tile %d: %u", static_cast<int>(i), done[i]);
  }
};

struct StreamResults : Results {
  StreamResults(size_t positions, size_t hidden, size_t intermediate, int parts)
      : Results(positions, hidden * static_cast<size_t>(parts), intermediate) {}
};

struct Launch {
  unsigned blocks;
  bool together;
  unsigned schedule;
};

template <class Model, class Variant>
void run_stream(Problem &problem, Packed &gate_up, Packed &down, ControlBlock &control, const Launch &launch,
                Results &results) {
  moeflow_lane lane = lane_at(1);
  Buffer<moeflow_tile> tiles(static_cast<size_t>(control.tiles_max));
  int32_t count = list_tiles(problem, Variant::tile_tokens, tiles);
  int32_t entry_count = problem.positions;
  moeflow_experts_params params = {};
  params.lane = &lane;
  params.in = {problem.received->data(), problem.block_bytes, problem.rows, problem.ranks, 0, problem.rows};
  params.entries = problem.entries->data();
  params.tiles = tiles.data();
  params.tile_count = &count;
  params.entry_count = &entry_count;
  params.gate_up_packed = gate_up.describe();
  params.down_packed = down.describe();
  params.control = control.control();
  params.activations = results.activations.data();
  params.outputs = results.outputs.data();
  params.part_stride = static_cast<int64_t>(problem.positions) * Model::hidden;
  params.tiles_max = static_cast<int32_t>(control.tiles_max);
  results.activations.fill(0xff);
  results.outputs.fill(0xff);
  emulator::schedule = launch.schedule;
  const size_t shared = static_cast<size_t>(moeflow_experts_stream_shared_bytes(Variant::tile_tokens, Variant::tile_depth));
  const auto kernel = [&] { moeflow::experts_stream<Model, Variant>(params); };
  (launch.together ? emulator::launch_together : emulator::launch)(launch.blocks, Variant::threads, shared, kernel);
  control.check();
}

/* One part of a down sum as order tags 32 and up say it: steps of 32 from zero, products one by one, then added. */
float sum_of_part(const uint16_t *weights, const uint16_t *values, int depth, int part, int parts) {
  const int steps = (depth + 31) / 32;
  float sum = 0;
  for (int step = steps * part / parts; step < steps * (part + 1) / parts; step++) {
    float products = 0;
    for (int i = step * 32; i < std::min(step * 32 + 32, depth); i++)
      products += from_bf16(weights[i]) * from_bf16(values[i]);
    sum += products;
  }
  return sum;
}

template <class Model>
void check_outputs(Problem &problem, Results &results, int parts) {
  int position = 0;
  for (int e = 0; e < problem.experts(); e++) {
    const uint16_t *down = problem.matrix(problem.down, e, Model::hidden, Model::intermediate);
    for (int n = 0; n < problem.load[static_cast<size_t>(e)]; n++, position++) {
      const uint16_t *values = results.activations.data() + position * Model::intermediate;
      for (int row = 0; row < Model::hidden; row++) {
        for (int part = 0; part < parts; part++) {
          const int64_t at = (static_cast<int64_t>(part) * problem.positions + position) * Model::hidden + row;
          const float got = results.outputs[static_cast<size_t>(at)];
          const float want =
              sum_of_part(down + row * problem.stride(Model::intermediate), values, Model::intermediate, part, parts);
          EXPECT(got == want, "expert %d position %d row %d part %d of %d: %g, not %g", e, position, row, part, parts,
                 static_cast<double>(got), static_cast<double>(want));
        }
      }
    }
  }
}

template <class Model>
struct Case {
  Problem problem = {};
  std::unique_ptr<Results> portable;
  std::unique_ptr<Packed> gate_up, down;
  std::unique_ptr<ControlBlock> control;

  Case(Order order, bool pointers, int row_gap, const std::vector<int> &load) {
    problem.layout = {Model::hidden, Model::top_k};
    problem.intermediate = Model::intermediate;
    problem.order = order;
    problem.pointers = pointers;
    problem.row_gap = row_gap;
    problem.load = load;
    problem.make(static_cast<uint64_t>(Model::hidden * 1000 + Model::intermediate));
    if (problem.positions > 1) (*problem.entries)[1] = (*problem.entries)[0]; /* an expert twice in one row */
    portable.reset(new Results(static_cast<size_t>(problem.positions), Model::hidden, Model::intermediate));
    run_portable<Model, Tile<8, 4>>(problem, 0, *portable);
    gate_up.reset(new Packed(problem.experts(), moeflow_packed_gate_up_bytes(Model::hidden, Model::intermediate), pointers));
    down.reset(new Packed(problem.experts(), moeflow_packed_down_bytes(Model::hidden, Model::intermediate), pointers));
    pack<Model>(problem, false, *gate_up);
    pack<Model>(problem, true, *down);
    check_packed<Model>(problem, false, *gate_up);
    check_packed<Model>(problem, true, *down);
    control.reset(new ControlBlock(problem));
  }

  template <class Variant>
  void serve(const Launch &launch) {
    StreamResults results(static_cast<size_t>(problem.positions), Model::hidden, Model::intermediate, Variant::parts);
    run_stream<Model, Variant>(problem, *gate_up, *down, *control, launch, results);
    EXPECT(!memcmp(results.activations.data(), portable->activations.data(), results.activations.size() * 2),
           "activations, H %d I %d, tiles of %d", Model::hidden, Model::intermediate, Variant::tile_tokens);
    check_outputs<Model>(problem, results, Variant::parts);
    if (Variant::parts > 1) return;
    EXPECT(!memcmp(results.outputs.data(), portable->outputs.data(), results.outputs.size() * 4),
           "outputs, H %d I %d, tiles of %d", Model::hidden, Model::intermediate, Variant::tile_tokens);
  }

  void serve_all() {
    serve<Stream<8, 64, 4, 1>>({1, false, 0});
    serve<Stream<8, 64, 8, 2>>({3, true, 1});
    serve<Stream<16, 64, 4, 4>>({2, true, 12345});
    serve<Stream<16, 128, 4, 1>>({3, true, 0});
    serve<Stream<32, 64, 8, 4>>({3, false, 1});
    serve<Stream<32, 128, 4, 2>>({2, true, 7});
    serve<Stream<64, 64, 8, 1>>({3, true, 99});
    serve<Stream<64, 256, 4, 8>>({2, true, 1});
  }
};

/* What the rest relies on: blocks of one launch can wait for each other. */
void blocks_run_at_once() {
  uint32_t turn = 0;
  emulator::schedule = 0;
  emulator::launch_together(3, 32, 0, [&] {
    if (threadIdx.x) return;
    for (uint32_t round = 0; round < 4; round++) {
      while (moeflow::load_acquire_gpu(&turn) != round * 3 + blockIdx.x) moeflow::sleep_ns(1);
      moeflow::add_release_gpu(&turn, 1);
    }
  });
  EXPECT_EQUAL(turn, 12);
}

/* Activations arrive late: a down unit that did not wait for its tile would read NaN. */
void down_units_wait() {
  Case<Shape<72, 200, 0>> waiting(gate_then_up, false, 0, {20, 3, 11});
  for (unsigned i = 0; i < 6; i++) waiting.serve<Stream<8, 64, 4, 4>>({4, true, i});
}

/* No tile at all: the control block goes on all the same. */
void nothing_to_do() {
  using Model = Shape<64, 64, 0>;
  Case<Model> some(gate_then_up, false, 0, {2});
  moeflow_lane lane = lane_at(1);
  int32_t count = 0;
  moeflow_experts_params params = {};
  params.lane = &lane;
  params.tile_count = params.entry_count = &count;
  params.control = some.control->control();
  params.tiles_max = static_cast<int32_t>(some.control->tiles_max);
  using Variant = Stream<8, 64, 4, 2>;
  emulator::launch(3, Variant::threads, 2048, [&] { moeflow::experts_stream<Model, Variant>(params); });
  some.control->check();
  some.serve<Variant>({2, true, 0});
}

/* A poisoned lane: nothing is read or written. */
void poisoned_lane() {
  using Model = Shape<64, 64, 0>;
  moeflow_lane lane = lane_at(1);
  lane.poison = MOEFLOW_POISON_PEER;
  moeflow_experts_params params = {};
  params.lane = &lane;
  using Variant = Stream<8, 64, 4, 1>;
  emulator::launch(3, Variant::threads, 2048, [&] { moeflow::experts_stream<Model, Variant>(params); });
}

}  // namespace

int main() {
  blocks_run_at_once();
  Case<Shape<136, 72, 0>>(gate_then_up, false, 0, {9, 0, 1, 33, 8}).serve_all();
  Case<Shape<136, 72, 1>>(up_then_gate, true, 8, {0, 17, 0, 3}).serve_all();
  Case<Shape<64, 64, 0>>(interleaved, false, 16, {5}).serve_all();
  Case<Shape<40, 200, 1>>(interleaved, true, 0, {1, 1, 70, 1}).serve_all();
  Case<Shape<328, 24, 0>>(gate_then_up, false, 8, {7, 65}).serve_all();
  Case<Shape<8, 8, 0>>(up_then_gate, false, 0, {2, 0, 0, 16}).serve_all();
  down_units_wait();
  nothing_to_do();
  poisoned_lane();
  TEST_END;
}
