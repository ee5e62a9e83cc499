/* pack: the bytes that every peer's buffer holds afterwards, all of them: what must not be written is still 0xff. */
#include "emulated.h"
#include "pack.cuh"

namespace {

template <int H, int K, int E>
struct Shape {
  static constexpr int hidden = H;
  static constexpr int top_k = K;
  static constexpr int experts = E;
};
struct Variant {
  static constexpr int threads = 256;
};

struct Setup {
  int ranks = 3;
  int rank = 1;
  int tokens = 5;
  int replicas = 1;
  bool int64 = false;
  bool one_sided = false; /* every peer has a buffer of its own */
  uint32_t flags = 0;
  uint32_t poison = 0;
  bool map_beyond_ranks = false;
  bool broadcast = false; /* one row, with everything, for all */
};

constexpr int rows = 6; /* per peer in a send buffer */
constexpr uint32_t epoch = 0xfffffffeu;

/* The replica rule as abi.h words it: the n-th of those before the first -1. */
int32_t place_of(const Setup &setup, Buffer<int32_t> &places, int experts, int64_t id, float weight, int token) {
  if (id < 0 || id >= experts || weight == 0) return -1;
  std::vector<int32_t> valid;
  for (int j = 0; j < setup.replicas; j++) {
    const int32_t place = places[static_cast<size_t>(id * setup.replicas + j)];
    if (place < 0) break;
    valid.push_back(place);
  }
  if (valid.empty()) return -1;
  const uint32_t count = static_cast<uint32_t>(valid.size());
  const int32_t place = valid[moeflow_replica(static_cast<uint32_t>(setup.rank), static_cast<uint32_t>(token), count)];
  return place / 65536 < setup.ranks ? place : -1;
}

template <class Model>
class Case {
 public:
  Case(const Setup &setup, uint64_t seed)
      : setup_(setup),
        layout_{Model::hidden, Model::top_k},
        hidden_(static_cast<size_t>(setup.tokens * Model::hidden)),
        ids32_(setup.int64 ? 0 : choices()),
        ids64_(setup.int64 ? choices() : 0),
        weights_(choices()),
        places_(static_cast<size_t>(Model::experts * setup.replicas)),
        token_places_(choices()),
        token_weights_(choices()),
        targets_(static_cast<size_t>(setup.ranks)) {
    Random random(seed);
    for (size_t i = 0; i < hidden_.size(); i++) hidden_[i] = static_cast<uint16_t>(random.next()); /* NaN and all */
    for (size_t i = 0; i < choices(); i++) draw_choice(i, random);
    for (size_t i = 0; i < places_.size(); i++) draw_place(i, random);
    for (int p = 0; p < setup.ranks; p++) {
      const size_t size = static_cast<size_t>(rows * layout_.bytes());
      if (setup.one_sided || p == 0)
        buffers_.emplace_back(
            new Buffer<uint8_t>(size * static_cast<size_t>(setup.one_sided || setup.broadcast ? 1 : setup.ranks)));
      targets_[static_cast<size_t>(p)] = buffers_.back()->data();
    }
  }

  void run(unsigned schedule) {
    lane_ = lane_at(epoch);
    lane_.poison = setup_.poison;
    moeflow_pack_params params = {};
    params.lane = &lane_;
    params.record = &record_;
    params.hidden = reinterpret_cast<const uint8_t *>(hidden_.data());
    params.ids = setup_.int64 ? static_cast<const void *>(ids64_.data()) : ids32_.data();
    params.weights = weights_.data();
    params.places = places_.data();
    params.token_places = token_places_.data();
    params.token_weights = token_weights_.data();
    params.out = {targets_.data(), setup_.one_sided ? 0 : rows * layout_.bytes()};
    params.tokens = setup_.tokens;
    params.tokens_max = rows;
    params.rank = setup_.rank;
    params.ranks = setup_.ranks;
    params.replicas = setup_.replicas;
    params.ids_int64 = setup_.int64;
    params.flags = setup_.flags;
    params.broadcast = setup_.broadcast;
    emulator::schedule = schedule;
    const unsigned blocks = static_cast<unsigned>(std::max(setup_.tokens, 1));
    emulator::launch(blocks, 256, 0, [&] { moeflow::pack<Model, Variant>(params); });
  }

  void check() {
    EXPECT_EQUAL(record_.started, epoch);
    const int live = setup_.poison ? 0 : setup_.tokens;
    for (int p = 0; p < (setup_.broadcast ? 1 : setup_.ranks); p++) {
      uint8_t *peer = setup_.one_sided ? targets_[static_cast<size_t>(p)] : targets_[0] + p * rows * layout_.bytes();
      for (int t = 0; t < rows; t++) {
        std::vector<uint8_t> want(static_cast<size_t>(layout_.bytes()), 0xff);
        const bool told_by_flags = setup_.poison && setup_.one_sided;
        if (t < live || (t == 0 && !told_by_flags)) write_expected(want.data(), p, t, live);
        const uint8_t *got = peer + t * layout_.bytes();
        size_t at = 0;
        while (at < want.size() && want[at] == got[at]) at++;
        EXPECT(at == want.size(), "peer %d row %d byte %zu: %02x, not %02x", p, t, at, got[at], want[at]);
      }
    }
    for (int t = 0; t < live; t++) {
      for (int k = 0; k < Model::top_k; k++) {
        const size_t i = static_cast<size_t>(t * Model::top_k + k);
        EXPECT_EQUAL(token_places_[i], place(t, k));
        EXPECT_EQUAL(bits_of(token_weights_[i]), bits_of(weights_[i]));
      }
    }
  }

 private:
  size_t choices() const {
    return static_cast<size_t>(setup_.tokens * Model::top_k);
  }

  void draw_choice(size_t i, Random &random) {
    static const int64_t bad[] = {-1, -2, Model::experts, Model::experts + 1, INT32_MAX, INT32_MIN};
    int64_t id = random.below(5) ? random.below(Model::experts) : bad[random.below(6)];
    if (setup_.int64 && random.below(7) == 0) id = (int64_t{1} << 32) + id; /* its low half looks good */
    if (setup_.int64) {
      ids64_[i] = id;
    } else {
      ids32_[i] = static_cast<int32_t>(id);
    }
    static const float odd[] = {0.0f, -0.0f, not_a_number, 1e-45f};
    weights_[i] = random.below(5) ? random.normal() : odd[random.below(4)];
  }

  void draw_place(size_t i, Random &random) {
    const int owners = setup_.map_beyond_ranks ? setup_.ranks + 2 : setup_.ranks;
    const bool first = i % static_cast<size_t>(setup_.replicas) == 0;
    places_[i] = random.below(first ? 9 : 3) ? random.below(owners) << 16 | random.below(200) : -1;
  }

  int32_t place(int t, int k) {
    const size_t i = static_cast<size_t>(t * Model::top_k + k);
    return place_of(setup_, places_, Model::experts, setup_.int64 ? ids64_[i] : ids32_[i], weights_[i], t);
  }

  void write_expected(uint8_t *row, int peer, int t, int live) {
    RowWriter writer(row, layout_);
    const uint32_t poison_flag = setup_.poison ? 2 : 0;
    writer.header({epoch, static_cast<uint32_t>(live), rows, setup_.flags | poison_flag});
    bool hit = setup_.broadcast && t < live; /* also where nobody owns a choice */
    for (int k = 0; k < Model::top_k; k++) {
      writer.id(k, t < live ? place(t, k) : -1);
      writer.weight(k, t < live ? weights_[static_cast<size_t>(t * Model::top_k + k)] : 0);
      hit = hit || (t < live && place(t, k) >= 0 && place(t, k) / 65536 == peer);
    }
    for (int i = 16 + 8 * Model::top_k; i % 16; i++) row[i] = 0; /* whole vectors, inside the header's own padding */
    for (int i = 0; hit && i < Model::hidden; i++) writer.hidden(i, hidden_[static_cast<size_t>(t * Model::hidden + i)]);
  }

  Setup setup_;
  Layout layout_;
  moeflow_lane lane_;
  moeflow_record record_ = {};
  Buffer<uint16_t> hidden_;
  Buffer<int32_t> ids32_;
  Buffer<int64_t> ids64_;
  Buffer<float> weights_;
  Buffer<int32_t> places_;
  Buffer<int32_t> token_places_;
  Buffer<float> token_weights_;
  Buffer<uint8_t *> targets_;
  std::vector<std::unique_ptr<Buffer<uint8_t>>> buffers_;
};

template <class Model>
void run(const Setup &setup) {
  static uint64_t seed;
  Case<Model> test(setup, ++seed);
  test.run(schedules[seed % 3]);
  test.check();
}

template <class Model>
void model() {
  Setup setup;
  run<Model>(setup);
  setup.one_sided = true;
  run<Model>(setup);
  setup.int64 = true;
  setup.replicas = 3;
  run<Model>(setup);
  setup.one_sided = false;
  setup.tokens = rows;
  setup.ranks = 8;
  setup.rank = 7;
  run<Model>(setup);
  setup.ranks = 1;
  setup.rank = 0;
  run<Model>(setup);
  setup.map_beyond_ranks = true;
  run<Model>(setup);
  setup.tokens = 0;
  run<Model>(setup);
  setup.flags = MOEFLOW_ROW_FAILED;
  setup.ranks = 4;
  run<Model>(setup);
  setup.flags = 0;
  setup.tokens = 5;
  setup.poison = MOEFLOW_POISON_TIMEOUT;
  run<Model>(setup);
  setup.broadcast = true;
  run<Model>(setup);
  setup.poison = 0;
  for (int tokens : {0, 1, rows}) {
    setup.tokens = tokens;
    run<Model>(setup);
  }
}

/* With no tokens nothing of the arguments is read. */
void no_arguments() {
  using Model = Shape<64, 3, 5>;
  moeflow_lane lane = lane_at(9);
  moeflow_record record = {};
  Buffer<uint8_t> row(static_cast<size_t>(Layout{64, 3}.bytes()));
  uint8_t *target = row.data();
  moeflow_pack_params params = {};
  params.lane = &lane;
  params.record = &record;
  params.out = {&target, 0};
  params.ranks = 1;
  emulator::launch(1, 256, 0, [&] { moeflow::pack<Model, Variant>(params); });
  EXPECT_EQUAL(row[0], 9);
  EXPECT_EQUAL(row[4], 0);
}

}  // namespace

int main() {
  model<Shape<64, 1, 4>>();
  model<Shape<136, 3, 5>>();
  model<Shape<2880, 7, 288>>();
  model<Shape<4096, 8, 288>>();
  model<Shape<8, 32, 33>>();
  no_arguments();
  TEST_END;
}
