/* expert_index, expert_prepare, identity and owner_reduce on received rows that hold everything a peer or an old step may
 * have left there, against plain loops over rows and choices. */
#include <cmath>
#include <functional>

#include "emulated.h"
#include "expert_index.cuh"
#include "expert_prepare.cuh"
#include "identity.cuh"
#include "owner_reduce.cuh"

namespace {

constexpr uint32_t epoch = 41;

template <int H, int K, int Fp32 = 0, int Choices = 0>
struct Shape {
  static constexpr int hidden = H;
  static constexpr int top_k = K;
  static constexpr int return_fp32 = Fp32;
  static constexpr int reduce_choices = Choices;
};
struct Variant {
  static constexpr int threads = 256;
};

/* Received rows of all sources, and what the owner must make of them. */
struct Received {
  Layout layout;
  int ranks, rows, rank, local;
  int64_t block_bytes;
  std::unique_ptr<Buffer<uint8_t>> bytes;
  std::vector<int> slot;     /* by entry, -1 = not mine */
  std::vector<float> weight; /* by entry */

  uint8_t *row(int source, int token) {
    return bytes->data() + source * block_bytes + token * layout.bytes();
  }
  moeflow_rows_in in() {
    return {bytes->data(), block_bytes, rows, ranks, rank, rows};
  }
  int entries() const {
    return ranks * rows * layout.top_k;
  }
  int chunks() const {
    return (ranks * rows + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS;
  }

  /* Slots in range, duplicates, other owners, none, and places that only a broken or hostile peer sends. */
  int32_t draw_place(Random &random) const {
    static const int32_t odd[] = {-1, -2, INT32_MIN, INT32_MAX, 0x0000ffff, 0x7fff0000, -0x7fff0000};
    switch (random.below(8)) {
      case 0:
        return odd[random.below(7)];
      case 1:
        return random.below(ranks) << 16 | (local + random.below(3));
      case 2:
        return ((rank + 1) % std::max(ranks, 2)) << 16 | random.below(local + 1);
      case 3:
        return rank << 16; /* a favourite expert */
      default:
        return local ? rank << 16 | random.below(local) : -1;
    }
  }

  /* `sent` rows of the source are live; some of them are stale, and those beyond hold rubbish. */
  void fill_source(int source, uint32_t sent, Random &random) {
    for (int t = 0; t < rows; t++) {
      uint8_t *at = row(source, t);
      for (int64_t i = 0; i < layout.bytes(); i++) at[i] = static_cast<uint8_t>(random.next());
      const bool old = t > 0 && random.below(6) == 0;
      RowWriter writer(at, layout);
      writer.header(
          {old ? epoch - 1 : epoch, t == 0 || random.below(4) ? sent : 0x80000000u, static_cast<uint32_t>(rows), 0});
      Header header;
      memcpy(&header, at, sizeof header);
      for (int k = 0; k < layout.top_k; k++) {
        const int32_t place = draw_place(random);
        const float w = random.normal();
        writer.id(k, place);
        writer.weight(k, w);
        const bool counts = header.epoch == epoch && static_cast<uint32_t>(t) < header.rows_sent;
        const bool mine = place >= 0 && place / 65536 == rank && place % 65536 < local;
        slot.push_back(counts && mine ? place % 65536 : -1);
        weight.push_back(w);
      }
      for (int i = 0; i < layout.hidden; i++) writer.hidden(i, to_bf16(random.normal()));
    }
  }

  Received(const Layout &layout_, int ranks_, int rows_, int rank_, int local_, uint64_t seed)
      : layout(layout_), ranks(ranks_), rows(rows_), rank(rank_), local(local_) {
    block_bytes = (rows + 2) * layout.bytes();
    bytes.reset(new Buffer<uint8_t>(static_cast<size_t>((ranks - 1) * block_bytes + rows * layout.bytes())));
    Random random(seed);
    static const uint32_t sent[] = {0xffffffffu, 0, 1, 3, 1000};
    for (int s = 0; s < ranks; s++) fill_source(s, s == 0 ? static_cast<uint32_t>(rows) : sent[random.below(5)], random);
  }
};

/* The owner's work lists, made by the kernels. */
struct Lists {
  moeflow_lane lane = lane_at(epoch);
  moeflow_record record = {};
  int tile_tokens;
  Buffer<int32_t> chunk_counts, offsets, entries, positions, tile_count;
  Buffer<moeflow_tile> tiles;
  Buffer<int64_t> load;

  Lists(Received &received, int tile)
      : tile_tokens(tile),
        chunk_counts(static_cast<size_t>(received.chunks() * received.local)),
        offsets(static_cast<size_t>(received.local + 1)),
        entries(static_cast<size_t>(received.entries())),
        positions(static_cast<size_t>(received.entries())),
        tile_count(1),
        tiles(static_cast<size_t>(moeflow_tiles_max(received.entries(), received.local, tile))),
        load(static_cast<size_t>(received.local)) {
    for (size_t e = 0; e < load.size(); e++) load[e] = 100 + static_cast<int64_t>(e);
  }

  template <class Model>
  void index(Received &received) {
    moeflow_expert_index_params params = {&lane, &record, received.in(), chunk_counts.data(), received.local, 0};
    emulator::launch(static_cast<unsigned>(received.chunks()), 256, 0,
                     [&] { moeflow::expert_index<Model, Variant>(params); });
  }
  template <class Model>
  void prepare(Received &received, bool with_load) {
    moeflow_expert_prepare_params params = {};
    params.lane = &lane;
    params.in = received.in();
    params.chunk_counts = chunk_counts.data();
    params.expert_offsets = offsets.data();
    params.entries = entries.data();
    params.positions = positions.data();
    params.tiles = tiles.data();
    params.tile_count = tile_count.data();
    params.expert_load = with_load ? load.data() : nullptr;
    params.local_experts = received.local;
    params.tile_tokens = tile_tokens;
    emulator::launch(static_cast<unsigned>(received.chunks()), 256, 0,
                     [&] { moeflow::expert_prepare<Model, Variant>(params); });
  }
};

void check_lists(Received &received, Lists &lists, bool with_load) {
  std::vector<int32_t> position(received.slot.size(), -1);
  int32_t next = 0, tile = 0;
  for (int e = 0; e < received.local; e++) {
    EXPECT_EQUAL(lists.offsets[static_cast<size_t>(e)], next);
    const int32_t begin = next;
    for (size_t i = 0; i < received.slot.size(); i++) {
      if (received.slot[i] != e) continue;
      EXPECT_EQUAL(lists.entries[static_cast<size_t>(next)], static_cast<int32_t>(i));
      position[i] = next++;
    }
    EXPECT_EQUAL(lists.load[static_cast<size_t>(e)], 100 + e + (with_load ? next - begin : 0));
    for (int32_t at = begin; at < next; at += lists.tile_tokens, tile++) {
      const moeflow_tile &got = lists.tiles[static_cast<size_t>(tile)];
      EXPECT(got.expert == e && got.begin == at && got.end == std::min(at + lists.tile_tokens, next),
             "tile %d: expert %d [%d, %d)", tile, got.expert, got.begin, got.end);
    }
  }
  EXPECT_EQUAL(lists.offsets[static_cast<size_t>(received.local)], next);
  EXPECT_EQUAL(lists.tile_count[0], tile);
  for (size_t i = 0; i < position.size(); i++) EXPECT_EQUAL(lists.positions[i], position[i]);
  for (size_t i = static_cast<size_t>(next); i < lists.entries.size(); i++)
    EXPECT_EQUAL(lists.entries[i], -1); /* untouched */
  for (size_t i = static_cast<size_t>(tile); i < lists.tiles.size(); i++) EXPECT_EQUAL(lists.tiles[i].expert, -1);
}

/* What owner_reduce makes of row r's outputs, of which `parts` stand `stride` floats apart: one sum, or K rows. */
template <class Model>
void reduce_row(Received &received, Lists &lists, const float *outputs, int parts, int64_t stride, int r,
                const std::function<void(int, const std::vector<float> &)> &put) {
  std::vector<float> sum(Model::hidden);
  bool any = false;
  for (int k = 0; k < Model::top_k; k++) {
    const size_t entry = static_cast<size_t>(r * Model::top_k + k);
    if (received.slot[entry] < 0) continue;
    const float *values = outputs + lists.positions[entry] * Model::hidden;
    for (int i = 0; i < Model::hidden; i++) {
      float value = values[i];
      for (int part = 1; part < parts; part++) value += values[part * stride + i];
      const float product = received.weight[entry] * value;
      float &s = sum[static_cast<size_t>(i)];
      s = Model::reduce_choices ? value : any ? s + product : product;
    }
    any = true;
    if (Model::reduce_choices) put(k, sum);
  }
  if (!Model::reduce_choices) put(any ? 0 : -1, sum);
}

void store_row(uint8_t *to, const std::vector<float> &values, bool fp32) {
  for (size_t i = 0; i < values.size(); i++) {
    const uint16_t narrow = to_bf16(values[i]);
    if (fp32) {
      memcpy(to + i * 4, &values[i], 4);
    } else {
      memcpy(to + i * 2, &narrow, 2);
    }
  }
}

/* Every counting entry's output, by entry number, so that owner_reduce can be checked without the lists. `splits` blocks
 * share a row. */
template <class Model>
void check_reduce(Received &received, Lists &lists, Buffer<float> &outputs, int parts, int splits, int write_empty) {
  const bool plain = write_empty == MOEFLOW_EMPTY_PLAIN;
  constexpr bool fp32 = Model::return_fp32;
  const int rows = received.ranks * received.rows;
  const int per_token = Model::reduce_choices ? Model::top_k : 1;
  const int64_t row_bytes = plain ? Model::hidden * 2 : received.layout.return_bytes(fp32);
  const int64_t block = received.rows * per_token * row_bytes;
  const int64_t stride = static_cast<int64_t>(outputs.size()) / parts;
  Buffer<uint8_t> returned(static_cast<size_t>(received.ranks * block));
  Buffer<uint8_t *> targets(static_cast<size_t>(received.ranks));
  for (size_t p = 0; p < targets.size(); p++) targets[p] = returned.data();
  uint8_t *const *out = plain ? reinterpret_cast<uint8_t *const *>(returned.data()) : targets.data();
  moeflow_owner_reduce_params params = {&lists.lane,    received.in(), lists.positions.data(),
                                        outputs.data(), stride,        {out, plain ? 0 : block},
                                        parts,          write_empty};
  emulator::launch(static_cast<unsigned>(rows * splits), 256, 0, [&] { moeflow::owner_reduce<Model, Variant>(params); });
  std::vector<uint8_t> want(returned.size(), 0xff);
  for (int r = 0; r < rows; r++) {
    reduce_row<Model>(received, lists, outputs.data(), parts, stride, r, [&](int choice, const std::vector<float> &values) {
      if (choice < 0 && !write_empty) return;
      const int row = r % received.rows * per_token + std::max(choice, 0);
      store_row(want.data() + r / received.rows * block + row * row_bytes, values, fp32 && !plain);
    });
  }
  EXPECT(!memcmp(want.data(), returned.data(), want.size()),
         "H %d K %d fp32 %d choices %d parts %d splits %d write_empty %d", Model::hidden, Model::top_k, fp32,
         Model::reduce_choices, parts, splits, write_empty);
}

template <class Model>
void check_reduces(Received &received, Lists &lists, int positions) {
  Random random(static_cast<uint64_t>(positions) + 7);
  for (int parts : {1, 2, 4}) {
    /* a gap between the parts, and exponents far apart, so that another order of sums has other bits */
    Buffer<float> outputs(static_cast<size_t>(parts * (positions * Model::hidden + 8)));
    for (size_t i = 0; i < outputs.size(); i++) outputs[i] = std::ldexp(random.normal(), random.below(12));
    for (int write_empty = 0; write_empty <= (Model::reduce_choices ? 0 : MOEFLOW_EMPTY_ZERO); write_empty++) {
      check_reduce<Model>(received, lists, outputs, parts, parts == 2 ? 3 : 1, write_empty);
    }
  }
}

template <class Model>
void run(int ranks, int rows, int rank, int local, int tile, bool with_load) {
  static unsigned turn;
  emulator::schedule = schedules[++turn % 3];
  Received received({Model::hidden, Model::top_k}, ranks, rows, rank, local, turn);
  Lists lists(received, tile);
  lists.index<Model>(received);
  EXPECT_EQUAL(lists.lane.poison, 0u);
  EXPECT_EQUAL(lists.record.received, epoch);
  lists.prepare<Model>(received, with_load);
  check_lists(received, lists, with_load);

  const int positions = lists.offsets[static_cast<size_t>(local)];
  Buffer<float> outputs(static_cast<size_t>(positions * Model::hidden));
  moeflow_identity_params params = {
      &lists.lane, received.in(), lists.entries.data(), lists.offsets.data(), outputs.data(), local, 0};
  emulator::launch(5, 256, 0, [&] { moeflow::identity<Model, Variant>(params); });
  for (size_t entry = 0; entry < received.slot.size(); entry++) {
    if (received.slot[entry] < 0) continue;
    const int r = static_cast<int>(entry) / Model::top_k;
    const uint8_t *hidden = received.row(r / rows, r % rows) + received.layout.hidden_at();
    for (int i = 0; i < Model::hidden; i++) {
      uint16_t bits;
      memcpy(&bits, hidden + 2 * i, 2);
      EXPECT_EQUAL(bits_of(outputs[static_cast<size_t>(lists.positions[entry] * Model::hidden + i)]), uint32_t{bits} << 16);
    }
  }
  check_reduces<Model>(received, lists, positions);
}

/* Header faults: which mark, whose, and the values of both sides. */
void faults() {
  using Model = Shape<64, 2>;
  struct {
    Header header;
    uint32_t poison, mine, theirs, failed;
  } const cases[] = {
      {{epoch - 1, 0, 4, 0}, MOEFLOW_POISON_EPOCH, epoch, epoch - 1, 0},
      {{epoch + 1, 0, 9, 2}, MOEFLOW_POISON_EPOCH, epoch, epoch + 1, 0},
      {{epoch, 0, 5, 0}, MOEFLOW_POISON_TOKENS_MAX, 4, 5, 0},
      {{epoch, 0, 4, MOEFLOW_ROW_POISONED}, MOEFLOW_POISON_PEER, 0, 0, 0},
      {{epoch, 0, 4, MOEFLOW_ROW_FAILED}, 0, 0, 0, 3},
      {{epoch, 0, 4, 0}, 0, 0, 0, 0},
  };
  for (const auto &test : cases) {
    Received received({64, 2}, 4, 4, 0, 3, 1);
    Lists lists(received, 8);
    RowWriter(received.row(2, 0), received.layout).header(test.header);
    lists.index<Model>(received);
    EXPECT_EQUAL(lists.lane.poison, test.poison);
    EXPECT_EQUAL(lists.record.poison, test.poison);
    EXPECT_EQUAL(lists.record.failed_peer, test.failed);
    EXPECT_EQUAL(lists.record.failed_step, test.failed ? epoch : 0);
    if (!test.poison) continue;
    EXPECT_EQUAL(lists.record.peer, 2u);
    EXPECT_EQUAL(lists.record.phase, static_cast<uint32_t>(MOEFLOW_PHASE_DISPATCH));
    EXPECT_EQUAL(lists.record.step, epoch);
    EXPECT_EQUAL(lists.record.mine, test.mine);
    EXPECT_EQUAL(lists.record.theirs, test.theirs);
  }
}

/* Of several peers at fault the lowest is named, whatever the order of threads; a first cause is not replaced. */
void first_fault_stays() {
  using Model = Shape<64, 2>;
  for (unsigned schedule : schedules) {
    emulator::schedule = schedule;
    Received received({64, 2}, 5, 4, 0, 3, 1);
    Lists lists(received, 8);
    for (int s = 1; s < 5; s++) RowWriter(received.row(s, 0), received.layout).header({epoch, 0, 4, s == 1 ? 1u : 2u});
    lists.index<Model>(received);
    EXPECT_EQUAL(lists.record.peer, 2u);
    EXPECT_EQUAL(lists.record.failed_peer, 2u);
  }
}

/* A poisoned lane: no kernel reads or writes anything else. */
void poisoned_lane() {
  using Model = Shape<64, 2>;
  moeflow_lane lane = lane_at(epoch);
  lane.poison = MOEFLOW_POISON_ABORT;
  moeflow_expert_index_params index = {};
  moeflow_expert_prepare_params prepare = {};
  moeflow_identity_params identity = {};
  moeflow_owner_reduce_params reduce = {};
  index.lane = prepare.lane = identity.lane = reduce.lane = &lane;
  emulator::launch(2, 256, 0, [&] { moeflow::expert_index<Model, Variant>(index); });
  emulator::launch(2, 256, 0, [&] { moeflow::expert_prepare<Model, Variant>(prepare); });
  emulator::launch(2, 256, 0, [&] { moeflow::identity<Model, Variant>(identity); });
  emulator::launch(2, 256, 0, [&] { moeflow::owner_reduce<Model, Variant>(reduce); });
}

}  // namespace

int main() {
  run<Shape<64, 8>>(1, 1, 0, 1, 8, true);
  run<Shape<64, 8, 1>>(2, 1, 1, 144, 8, false);
  run<Shape<8, 1, 0, 1>>(3, 50, 2, 3, 8, true);
  run<Shape<136, 3>>(2, 70, 0, 5, 32, false);
  run<Shape<64, 7, 1, 1>>(4, 33, 3, 33, 8, true);
  run<Shape<72, 8>>(8, 40, 5, 36, 32, false);
  run<Shape<8, 32, 1>>(2, 40, 1, 257, 128, true);
  run<Shape<8, 2>>(2, 100, 0, 4096, 8, true);
  run<Shape<8, 8>>(2, 64, 1, 0, 8, false);
  run<Shape<8, 8>>(1, 300, 0, 1, 128, true);
  run<Shape<2880, 6>>(2, 3, 0, 9, 8, false);
  faults();
  first_fault_stays();
  poisoned_lane();
  TEST_END;
}
