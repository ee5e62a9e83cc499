/* The order of work in the experts kernel, without its tensor cores: every unit is dealt out once, what waits for others waits
 * for earlier tickets, groups of columns do not write into each other's outputs; and the sums that follow are those of plain
 * loops, bit by bit. */
#include <map>

#include "emulated.h"
#include "experts_rows.cuh"

namespace {

template <int H, int I, int K>
struct Shape {
  static constexpr int hidden = H;
  static constexpr int intermediate = I;
  static constexpr int top_k = K;
  static constexpr int return_fp32 = 0;
  static constexpr int reduce_choices = 0;
};
template <int Rows, int Parts>
struct Form {
  static constexpr int tile_rows = Rows;
  static constexpr int parts = Parts;
};

using moeflow::Unit;

/* What tickets cover, in blocks of 64 weight rows and of the columns of a sum. */
struct Covered {
  std::map<std::vector<int>, int> gate_up, down, sums;
  std::vector<int> last_down, first_sum, last_sum, first_down, downs, summed; /* tickets and counts by group */
};

template <class Model, class Variant>
Covered deal(const moeflow::Schedule<Model, Variant> &schedule) {
  Covered covered;
  const size_t groups = static_cast<size_t>(schedule.groups);
  covered.last_down.assign(groups, -1);
  covered.last_sum.assign(groups, -1);
  covered.first_sum.assign(groups, INT32_MAX);
  covered.first_down.assign(groups, INT32_MAX);
  covered.downs.assign(groups, 0);
  covered.summed.assign(groups, 0);
  for (int ticket = 0; ticket < schedule.tickets; ticket++) {
    const Unit unit = schedule.at(ticket);
    const size_t group = static_cast<size_t>(unit.group);
    EXPECT(unit.tile >= 0 && unit.group < schedule.groups, "ticket %d is no unit", ticket);
    if (unit.sum) {
      covered.sums[{unit.tile, unit.row}]++;
      covered.summed[group]++;
      covered.first_sum[group] = std::min(covered.first_sum[group], ticket);
      covered.last_sum[group] = ticket;
      continue;
    }
    for (int row = 0; row < unit.rows; row += MOEFLOW_UNIT_ROWS) {
      if (unit.down) {
        covered.down[{unit.tile, unit.row + row, unit.part}]++;
        EXPECT(schedule.groups == 1 || (unit.row + row) / schedule.group_columns == unit.group, "ticket %d: group", ticket);
      } else {
        covered.gate_up[{unit.tile, unit.row + row}]++;
      }
    }
    EXPECT(unit.down == (ticket >= schedule.gate_up_tickets), "ticket %d: gate_up units come first", ticket);
    if (!unit.down) continue;
    covered.downs[group]++;
    covered.last_down[group] = ticket;
    covered.first_down[group] = std::min(covered.first_down[group], ticket);
  }
  EXPECT(schedule.at(schedule.tickets).tile < 0 && schedule.at(INT32_MAX).tile < 0, "there is more");
  return covered;
}

int blocks_of(int size, int of) {
  return (size + of - 1) / of;
}

void expect_once(const std::map<std::vector<int>, int> &covered, int64_t count, const char *what) {
  EXPECT(static_cast<int64_t>(covered.size()) == count, "%zu of %lld %s", covered.size(), static_cast<long long>(count), what);
  for (const auto &entry : covered) EXPECT(entry.second == 1, "%s: tile %d, row %d: %d times", what, entry.first[0],
                                           entry.first[1], entry.second);
}

/* tiles, blocks, rows (0: no sums), entries: what a launch knows. Returns the number of groups. */
template <class Model, class Variant>
int check(int tiles, int blocks, int rows, int64_t entries) {
  moeflow::Schedule<Model, Variant> schedule;
  schedule.init(tiles, blocks, rows, entries);
  const Covered covered = deal(schedule);
  const int64_t chunks = blocks_of(rows, MOEFLOW_SUM_ROWS);
  expect_once(covered.gate_up, int64_t{tiles} * blocks_of(2 * Model::intermediate, MOEFLOW_UNIT_ROWS), "gate_up");
  expect_once(covered.down, int64_t{tiles} * blocks_of(Model::hidden, MOEFLOW_UNIT_ROWS) * Variant::parts, "down");
  int64_t inside = 0; /* a last group may hold sums of columns beyond the row, which do nothing */
  for (const auto &entry : covered.sums) inside += entry.first[1] < Model::hidden;
  EXPECT(inside == chunks * blocks_of(Model::hidden, MOEFLOW_SUM_COLUMNS), "%lld sums", static_cast<long long>(inside));
  for (const auto &entry : covered.sums) EXPECT(entry.second == 1, "a sum is made %d times", entry.second);
  for (int g = 0; g < schedule.groups; g++) {
    const size_t i = static_cast<size_t>(g);
    EXPECT(static_cast<uint32_t>(covered.downs[i]) == schedule.down_tickets(g), "group %d awaits %u down units and has %d", g,
           schedule.down_tickets(g), covered.downs[i]);
    if (rows == 0) continue;
    EXPECT(covered.summed[i] == schedule.sum_units, "group %d has %d sums", g, covered.summed[i]);
    EXPECT(covered.last_down[i] < covered.first_sum[i], "group %d is summed before it is there", g);
    if (g < MOEFLOW_GROUP_SLOTS) continue;
    EXPECT(covered.last_sum[i - MOEFLOW_GROUP_SLOTS] < covered.first_down[i], "group %d awaits a later sum", g);
  }
  return schedule.groups;
}

template <class Model, int Rows, int Parts>
int every_size() {
  static const int blocks[] = {1, 4, 132};
  int most = 0;
  for (int b : blocks) {
    for (int tiles : {0, 1, 3, 40, 200}) {
      for (int rows : {0, 1, 12, 13, 128, 1024}) {
        most = std::max(most, check<Model, Form<Rows, Parts>>(tiles, b, rows, int64_t{rows} * Model::top_k));
      }
    }
  }
  return most;
}

/* Outputs in their groups' places, then the sums of a group as its tickets say, before the next group takes the place. */
template <class Model, class Variant>
void check_sums(int tiles, int blocks, int rows, bool write_empty, uint64_t seed) {
  using Row = moeflow::Row<Model>;
  const Layout layout = {Model::hidden, Model::top_k};
  const int64_t pitch = write_empty ? Model::hidden : layout.return_bytes(false) / 2; /* plain rows, or return rows */
  const int64_t entries = int64_t{rows} * Model::top_k, stride = entries * Model::hidden;
  Random random(seed);
  Buffer<uint8_t> received(static_cast<size_t>(rows * layout.bytes()));
  Buffer<int32_t> positions(static_cast<size_t>(entries));
  std::vector<float> all(static_cast<size_t>(Variant::parts * stride)); /* [parts][positions][H] */
  for (float &value : all) value = random.normal();
  int next = 0;
  for (int64_t e = 0; e < entries; e++) {
    const bool mine = random.below(3) != 0 && e / Model::top_k % 7 != 3; /* some rows have no entry here */
    positions[static_cast<size_t>(e)] = mine ? next++ : -1;
    const float weight = random.normal();
    memcpy(received.data() + e / Model::top_k * layout.bytes() + Row::weights + e % Model::top_k * 4, &weight, 4);
  }
  Buffer<float> outputs(static_cast<size_t>(Variant::parts * stride));
  Buffer<uint16_t> out(static_cast<size_t>(rows * pitch));
  std::vector<uint16_t> expected(out.size(), 0x1234);
  uint8_t *target = reinterpret_cast<uint8_t *>(out.data());
  for (size_t i = 0; i < out.size(); i++) out[i] = 0x1234;
  moeflow_experts_params params = {};
  params.in = {received.data(), 0, rows, 1, 0, rows};
  params.positions = positions.data();
  params.write_empty = write_empty;
  params.out.targets = write_empty ? reinterpret_cast<uint8_t *const *>(target) : &target;

  moeflow::Schedule<Model, Variant> schedule;
  schedule.init(tiles, blocks, rows, entries);
  for (int g = 0; g < schedule.groups; g++) {
    const moeflow::GroupOutputs place = schedule.outputs_of(g, outputs.data(), stride);
    const int end = std::min(place.first + (schedule.groups == 1 ? Model::hidden : schedule.group_columns), Model::hidden);
    for (int part = 0; part < Variant::parts; part++) {
      for (int p = 0; p < next; p++) {
        for (int c = place.first; c < end; c++) {
          place.base[part * place.part_stride + int64_t{p} * place.pitch + c - place.first] =
              all[static_cast<size_t>(part * stride + int64_t{p} * Model::hidden + c)];
        }
      }
    }
    for (int ticket = 0; ticket < schedule.tickets; ticket++) {
      const Unit unit = schedule.at(ticket);
      if (!unit.sum || unit.group != g) continue;
      emulator::launch(1, 96, 0, [&] {
        const moeflow::RowSums<Model, Variant> sums = {params, place};
        sums.template run<96>(unit, static_cast<int>(threadIdx.x));
      });
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < Model::hidden; c++) {
      float sum = 0;
      bool any = false;
      for (int k = 0; k < Model::top_k; k++) {
        const int32_t position = positions[static_cast<size_t>(r * Model::top_k + k)];
        if (position < 0) continue;
        float value = 0, weight;
        for (int part = 0; part < Variant::parts; part++) {
          const float piece = all[static_cast<size_t>(part * stride + int64_t{position} * Model::hidden + c)];
          value = part == 0 ? piece : value + piece;
        }
        memcpy(&weight, received.data() + r * layout.bytes() + Row::weights + k * 4, 4);
        const float product = weight * value;
        sum = any ? sum + product : product;
        any = true;
      }
      if (any || write_empty) expected[static_cast<size_t>(r * pitch + c)] = to_bf16(sum);
    }
  }
  size_t wrong = 0;
  for (size_t i = 0; i < out.size(); i++) wrong += out[i] != expected[i];
  EXPECT(wrong == 0, "%zu of %zu sums, %d groups, %d parts", wrong, out.size(), schedule.groups, Variant::parts);
}

}  // namespace

int main() {
  using Main = Shape<4096, 2048, 8>;
  using Odd = Shape<1032, 264, 3>;
  using Tiny = Shape<72, 40, 2>;
  EXPECT((every_size<Main, 128, 1>()) > MOEFLOW_GROUP_SLOTS, "no case has groups that share a place");
  every_size<Main, 64, 4>();
  every_size<Main, 256, 2>();
  every_size<Odd, 128, 1>();
  every_size<Odd, 64, 8>();
  every_size<Tiny, 128, 2>();
  check_sums<Odd, Form<128, 1>>(4, 132, 30, false, 1);
  check_sums<Odd, Form<128, 4>>(4, 132, 13, true, 2);
  check_sums<Tiny, Form<64, 2>>(1, 4, 25, true, 3);
  check_sums<Shape<4096, 64, 8>, Form<128, 1>>(40, 1, 40, false, 4); /* groups */
  check_sums<Shape<4096, 64, 8>, Form<128, 2>>(40, 1, 40, true, 5);
  TEST_END;
}
