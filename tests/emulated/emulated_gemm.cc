/* gate_up and down against plain loops: sizes that are no multiple of a tile, experts with no and many entries, gathered
 * rows, strides, pointer arrays, gate/up orders; and the promise of order tag 1: every tile size gives the same bits. */
#include "grouped_problem.h"

namespace {

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
  run_portable<Model, Tile<8, 4>>(problem, 0, by_8);
  check<Model>(problem, by_8);
  run_portable<Model, Tile<32, 3>>(problem, 1, by_32);
  run_portable<Model, Tile<64, 4>>(problem, 12345, by_64);
  run_portable<Model, Tile<128, 2>>(problem, 7, by_128);
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
  run_portable<Model, Tile<32, 4>>(problem, 0, good);
  const int sick = 5;
  for (int i = 0; i < Model::hidden; i++) {
    RowWriter(problem.row(sick), problem.layout).hidden(i, i % 2 ? to_bf16(infinite) : to_bf16(not_a_number));
  }
  run_portable<Model, Tile<32, 4>>(problem, 0, ill);
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
