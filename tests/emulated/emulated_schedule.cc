/* The order of work in the experts kernel, without its tensor cores: every unit is dealt out once, what waits for others
 * waits for earlier tickets, groups of columns do not write into each other's outputs; and the sums that follow are those of
 * plain loops, bit by bit. */
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
template <int Rows, int Parts, int Tokens = 8>
struct Form {
  static constexpr int tile_tokens = Tokens;
  static constexpr int tile_rows = Rows;
  static constexpr int parts = Parts;
  static constexpr int threads = 384;
  static constexpr int residency = 1;
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
  for (int ticket = 0; ticket < schedule.tickets + schedule.sum_units; ticket++) { /* the last sums have no tickets */
    const bool dealt = ticket < schedule.tickets;
    const Unit unit = dealt ? schedule.at(ticket) : schedule.sum_at(schedule.groups - 1, ticket - schedule.tickets);
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
  EXPECT(static_cast<int64_t>(covered.size()) == count, "%zu of %lld %s", covered.size(), static_cast<long long>(count),
         what);
  for (const auto &entry : covered)
    EXPECT(entry.second == 1, "%s: tile %d, row %d: %d times", what, entry.first[0], entry.first[1], entry.second);
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
    EXPECT(static_cast<uint32_t>(covered.downs[i]) == schedule.down_tickets(g), "group %d awaits %u down units and has %d",
           g, schedule.down_tickets(g), covered.downs[i]);
    if (rows == 0) continue;
    EXPECT(covered.summed[i] == schedule.sum_units, "group %d has %d sums", g, covered.summed[i]);
    EXPECT(covered.last_down[i] < covered.first_sum[i], "group %d is summed before it is there", g);
    if (g < MOEFLOW_GROUP_SLOTS) continue;
    EXPECT(covered.last_sum[i - MOEFLOW_GROUP_SLOTS] < covered.first_down[i], "group %d awaits a later sum", g);
  }
  return schedule.groups;
}

template <class Model, int Rows, int Parts, int Tokens = 8>
int every_size() {
  static const int blocks[] = {1, 4, 132};
  int most = 0;
  for (int b : blocks) {
    for (int tiles : {0, 1, 3, 40, 200}) {
      for (int rows : {0, 1, 12, 13, 128, 1024}) {
        for (int64_t each : {1, 20, 100}) { /* entries a tile: few are cut, many make pairs */
          most = std::max(most, check<Model, Form<Rows, Parts, Tokens>>(tiles, b, rows, tiles * each));
        }
      }
    }
  }
  return most;
}

/* Down units and sums of a launch, one by one: a down unit writes its part of the outputs as it comes, a sum is made as late
 * as the kernel's waits allow. */
template <class Model, class Variant>
class Launch {
 public:
  Launch(int tiles, int blocks, int rows, int write_empty, uint64_t seed)
      : rows_(rows),
        tiles_(tiles),
        pitch_(write_empty == MOEFLOW_EMPTY_PLAIN ? Model::hidden
                                                  : layout_.return_bytes(false) / 2), /* plain rows, or return rows */
        received_(static_cast<size_t>(rows * layout_.bytes())),
        positions_(static_cast<size_t>(rows * Model::top_k)),
        stride_(int64_t{rows} * Model::top_k * Model::hidden),
        all_(static_cast<size_t>(Variant::parts * stride_)),
        outputs_(static_cast<size_t>(Variant::parts * stride_)),
        out_(static_cast<size_t>(rows * pitch_)) {
    Random random(seed);
    for (float &value : all_) value = random.normal();
    for (size_t i = 0; i < out_.size(); i++) out_[i] = untouched;
    for (int e = 0; e < rows * Model::top_k; e++) {
      const bool mine = random.below(3) != 0 && e / Model::top_k % 7 != 3; /* some rows have no entry here */
      positions_[static_cast<size_t>(e)] = mine ? entries_++ : -1;
      const float weight = random.normal();
      memcpy(weight_at(e / Model::top_k, e % Model::top_k), &weight, 4);
    }
    target_ = reinterpret_cast<uint8_t *>(out_.data());
    params_.in = {received_.data(), 0, rows, 1, 0, rows};
    params_.positions = positions_.data();
    params_.write_empty = write_empty;
    params_.out.targets = write_empty == MOEFLOW_EMPTY_PLAIN ? reinterpret_cast<uint8_t *const *>(target_) : &target_;
    schedule_.init(tiles, blocks, rows, entries_);
  }

  /* Tickets in their order. The last group's sums have none. */
  void play() {
    std::vector<std::vector<Unit>> waiting(static_cast<size_t>(schedule_.groups)); /* sums that nobody has asked for */
    for (int ticket = 0; ticket < schedule_.tickets; ticket++) {
      const Unit unit = schedule_.at(ticket);
      if (unit.sum) waiting[static_cast<size_t>(unit.group)].push_back(unit);
      if (!unit.down) continue;
      if (unit.group >= MOEFLOW_GROUP_SLOTS) add(waiting[static_cast<size_t>(unit.group - MOEFLOW_GROUP_SLOTS)]);
      write(unit);
    }
    for (int i = 0; i < schedule_.sum_units; i++) waiting.back().push_back(schedule_.sum_at(schedule_.groups - 1, i));
    for (std::vector<Unit> &sums : waiting) add(sums);
  }

  void expect() {
    size_t wrong = 0;
    for (int r = 0; r < rows_; r++) {
      for (int c = 0; c < pitch_; c++) wrong += out_[static_cast<size_t>(r * pitch_ + c)] != wanted(r, c);
    }
    EXPECT(wrong == 0, "%zu of %zu sums, %d groups, %d parts, %s", wrong, out_.size(), schedule_.groups, Variant::parts,
           schedule_.paired ? "paired" : "single");
  }

  const moeflow::Schedule<Model, Variant> &schedule() const {
    return schedule_;
  }

 private:
  static constexpr uint16_t untouched = 0x1234;

  uint8_t *weight_at(int row, int choice) {
    return received_.data() + row * layout_.bytes() + moeflow::Row<Model>::weights + choice * 4;
  }
  float output(int part, int position, int column) const { /* what the down units compute */
    return all_[static_cast<size_t>(part * stride_ + int64_t{position} * Model::hidden + column)];
  }

  /* What a down unit stores: its rows of the matrix inside, for the positions of its tile. */
  void write(const Unit &unit) {
    const moeflow::GroupOutputs place = schedule_.outputs_of(unit.group, outputs_.data(), stride_);
    const int end = std::min(unit.row + unit.rows, Model::hidden);
    for (int p = entries_ * unit.tile / tiles_; p < entries_ * (unit.tile + 1) / tiles_; p++) {
      float *to = place.base + unit.part * place.part_stride + int64_t{p} * place.pitch - place.first;
      for (int c = unit.row; c < end; c++) to[c] = output(unit.part, p, c);
    }
  }

  void add(std::vector<Unit> &sums) {
    for (const Unit &unit : sums) {
      emulator::launch(1, 256, 0, [&] {
        const moeflow::RowSums<Model, Variant, 8> rows(params_, unit, static_cast<int>(threadIdx.x));
        rows.run(schedule_.outputs_of(unit.group, outputs_.data(), stride_));
      });
    }
    sums.clear();
  }

  uint16_t wanted(int row, int column) {
    float sum = 0;
    bool any = false;
    for (int k = 0; column < Model::hidden && k < Model::top_k; k++) {
      const int32_t position = positions_[static_cast<size_t>(row * Model::top_k + k)];
      if (position < 0) continue;
      float value = output(0, position, column), weight;
      for (int part = 1; part < Variant::parts; part++) value += output(part, position, column);
      memcpy(&weight, weight_at(row, k), 4);
      const float product = weight * value;
      sum = any ? sum + product : product;
      any = true;
    }
    return any || (params_.write_empty && column < Model::hidden) ? to_bf16(sum) : untouched;
  }

  const Layout layout_ = {Model::hidden, Model::top_k};
  int rows_;
  int tiles_;
  int entries_ = 0; /* of this rank; each tile has an equal share of their positions */
  int64_t pitch_;
  Buffer<uint8_t> received_;
  Buffer<int32_t> positions_;
  int64_t stride_;
  std::vector<float> all_; /* [parts][positions][H] */
  Buffer<float> outputs_;
  Buffer<uint16_t> out_;
  uint8_t *target_;
  moeflow_experts_params params_ = {};
  moeflow::Schedule<Model, Variant> schedule_;
};

/* The least number of groups that the case is for. */
template <class Model, class Variant>
void check_sums(int tiles, int blocks, int rows, int write_empty, bool paired, int groups, uint64_t seed) {
  Launch<Model, Variant> launch(tiles, blocks, rows, write_empty, seed);
  EXPECT(launch.schedule().groups >= groups && launch.schedule().paired == paired, "case %d: %d groups, %s",
         static_cast<int>(seed), launch.schedule().groups, launch.schedule().paired ? "paired" : "single");
  launch.play();
  launch.expect();
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
  every_size<Main, 128, 1, 64>();
  every_size<Main, 128, 1, 128>();
  every_size<Odd, 128, 2, 64>();
  every_size<Tiny, 128, 1, 64>();
  every_size<Odd, 64, 8>();
  every_size<Tiny, 128, 2>();
  check_sums<Odd, Form<128, 1>>(4, 132, 30, MOEFLOW_EMPTY_SKIPPED, false, 1, 1);
  check_sums<Odd, Form<128, 4>>(4, 132, 13, MOEFLOW_EMPTY_PLAIN, false, 1, 2);
  check_sums<Tiny, Form<64, 2>>(1, 4, 25, MOEFLOW_EMPTY_PLAIN, false, 1, 3);
  check_sums<Tiny, Form<64, 2>>(1, 4, 25, MOEFLOW_EMPTY_ZERO, false, 1, 8);
  check_sums<Odd, Form<128, 2, 64>>(1, 132, 30, MOEFLOW_EMPTY_ZERO, true, 1, 9);
  check_sums<Odd, Form<128, 2, 64>>(1, 132, 30, MOEFLOW_EMPTY_SKIPPED, true, 1, 4);
  using Wide = Shape<4096, 64, 8>;
  check_sums<Wide, Form<128, 1>>(40, 1, 40, MOEFLOW_EMPTY_SKIPPED, false, MOEFLOW_GROUP_SLOTS + 1, 5);
  check_sums<Wide, Form<128, 2>>(40, 1, 40, MOEFLOW_EMPTY_PLAIN, false, 2 * MOEFLOW_GROUP_SLOTS, 6);
  check_sums<Wide, Form<128, 1, 64>>(4, 1, 40, MOEFLOW_EMPTY_SKIPPED, true, MOEFLOW_GROUP_SLOTS + 1, 7);
  TEST_END;
}
