/* combine and combine_ring: sums in the stated order, bit for bit; what no owner returned is never read; a step ends once.
 */
#include "combine.cuh"
#include "combine_ring.cuh"
#include "emulated.h"

namespace {

template <int H, int K, int Fp32, int Choices, bool Scaled>
struct Shape {
  static constexpr int hidden = H;
  static constexpr int top_k = K;
  static constexpr int return_fp32 = Fp32;
  static constexpr int reduce_choices = Choices;
  static constexpr float output_scale = Scaled ? 2.5f : 1.0f;
};
struct Variant {
  static constexpr int threads = 256;
};

constexpr uint32_t epoch = 0xffffffffu; /* wraps to 0 when the step ends */

template <class Model>
struct Case {
  static constexpr int element = Model::return_fp32 ? 4 : 2;
  static constexpr int per_token = Model::reduce_choices ? Model::top_k : 1;
  int tokens, rank, ranks, eager;
  int64_t row_bytes, block_bytes;
  Buffer<int32_t> places;
  Buffer<float> weights;
  Buffer<uint8_t> returned; /* 0xff, NaN, where no owner has a share */
  Buffer<uint16_t> out;
  moeflow_lane lane = lane_at(epoch);
  moeflow_record record = {};

  Case(int tokens_, int rank_, int ranks_, uint64_t seed)
      : tokens(tokens_),
        rank(rank_),
        ranks(ranks_),
        row_bytes(Layout{Model::hidden, Model::top_k}.return_bytes(Model::return_fp32)),
        block_bytes((tokens + 3) * per_token * row_bytes),
        places(static_cast<size_t>(tokens * Model::top_k)),
        weights(places.size()),
        returned(static_cast<size_t>(ranks * block_bytes)),
        out(static_cast<size_t>(tokens * Model::hidden)) {
    Random random(seed);
    lane.steps = 6;
    eager = seed % 2;
    for (int t = 0; t < tokens; t++) {
      for (int k = 0; k < Model::top_k; k++) {
        const bool none = t == 1 || random.below(4) == 0; /* token 1 has no owner at all */
        const int owner = random.below(ranks);
        place(t, k) = none ? -1 : owner << 16 | random.below(100);
        weights[static_cast<size_t>(t * Model::top_k + k)] = none ? not_a_number : random.normal();
        if (none) continue;
        uint8_t *row = returned_row(owner, t, k);
        for (int i = 0; i < Model::hidden; i++) write(row, i, random.normal());
      }
    }
  }

  int32_t &place(int t, int k) {
    return places[static_cast<size_t>(t * Model::top_k + k)];
  }
  uint8_t *returned_row(int owner, int t, int k) {
    return returned.data() + owner * block_bytes + (Model::reduce_choices ? t * Model::top_k + k : t) * row_bytes;
  }
  static void write(uint8_t *row, int i, float value) {
    const uint16_t narrow = to_bf16(value);
    memcpy(row + i * element, Model::return_fp32 ? static_cast<const void *>(&value) : &narrow, element);
  }
  static float read(const uint8_t *row, int i) {
    float wide;
    uint16_t narrow;
    memcpy(&wide, row + i * element, element);
    memcpy(&narrow, row + i * element, 2);
    return Model::return_fp32 ? wide : from_bf16(narrow);
  }

  moeflow_combine_params params() {
    return {&lane,
            &record,
            places.data(),
            weights.data(),
            returned.data(),
            block_bytes,
            reinterpret_cast<uint8_t *>(out.data()),
            tokens,
            rank,
            ranks,
            eager,
            0,
            0};
  }
  unsigned blocks() const {
    return static_cast<unsigned>(std::max(tokens, 1));
  }

  bool owns(int owner, int t) {
    for (int k = 0; k < Model::top_k; k++) {
      if (place(t, k) >= 0 && place(t, k) / 65536 == owner) return true;
    }
    return false;
  }

  /* Owners in ascending rank, choices in order, or around the ring with every sum rounded. */
  float want(int t, int i, bool ring) {
    float sum = 0;
    bool any = false;
    if (Model::reduce_choices) {
      for (int k = 0; k < Model::top_k; k++) {
        if (place(t, k) < 0) continue;
        const float product =
            weights[static_cast<size_t>(t * Model::top_k + k)] * read(returned_row(place(t, k) / 65536, t, k), i);
        sum = any ? sum + product : product;
        any = true;
      }
    } else {
      for (int n = 0; n < ranks; n++) {
        const int owner = ring ? (rank + 1 + n) % ranks : n;
        if (!owns(owner, t)) continue;
        const float value = read(returned_row(owner, t, 0), i);
        sum = any ? sum + value : value;
        if (ring && any) sum = from_bf16(to_bf16(sum)); /* the first is taken as it is */
        any = true;
      }
    }
    return sum * Model::output_scale;
  }

  void check(bool ring) {
    for (int t = 0; t < tokens; t++) {
      for (int i = 0; i < Model::hidden; i++) {
        const uint16_t expected = lane.poison ? 0x7fc0 : to_bf16(want(t, i, ring));
        const uint16_t got = out[static_cast<size_t>(t * Model::hidden + i)];
        EXPECT(got == expected, "token %d column %d: %04x, not %04x", t, i, got, expected);
      }
    }
    EXPECT_EQUAL(lane.epoch, 0u);
    EXPECT_EQUAL(record.finished, epoch);
    EXPECT_EQUAL(lane.steps, eager ? 7u : 6u);
    EXPECT_EQUAL(record.steps, lane.steps);
  }
};

template <class Model>
void run(int tokens, int rank, int ranks, uint32_t poison) {
  static unsigned turn;
  emulator::schedule = schedules[++turn % 3];
  Case<Model> test(tokens, rank, ranks, turn);
  test.lane.poison = poison;
  const moeflow_combine_params params = test.params();
  emulator::launch(test.blocks(), 256, 0, [&] { moeflow::combine<Model, Variant>(params); });
  test.check(false);
  if constexpr (!Model::reduce_choices) {
    Case<Model> around(tokens, rank, ranks, turn);
    around.lane.poison = poison;
    const moeflow_combine_params ring = around.params();
    emulator::launch(around.blocks(), 256, 0, [&] { moeflow::combine_ring<Model, Variant>(ring); });
    around.check(true);
  }
}

template <class Model>
void model() {
  run<Model>(5, 0, 1, 0);
  run<Model>(7, 1, 3, 0);
  run<Model>(4, 7, 8, 0);
  run<Model>(0, 2, 4, 0);
  run<Model>(3, 0, 2, MOEFLOW_POISON_TOKENS_MAX);
}

/* The transport's sum is the output, rounded and scaled once; a token that nobody has a share in is zero all the same. */
template <class Model>
void added() {
  Case<Model> test(5, 1, 3, 17);
  test.returned.fill(0xff);
  Random random(5);
  for (int t = 0; t < test.tokens; t++) {
    for (int i = 0; i < Model::hidden && t != 1; i++) Case<Model>::write(test.returned_row(0, t, 0), i, random.normal());
  }
  moeflow_combine_params params = test.params();
  params.added = 1;
  emulator::launch(test.blocks(), 256, 0, [&] { moeflow::combine<Model, Variant>(params); });
  for (int t = 0; t < test.tokens; t++) {
    for (int i = 0; i < Model::hidden; i++) {
      bool owned = false;
      for (int owner = 0; owner < test.ranks; owner++) owned = owned || test.owns(owner, t);
      const float want = owned ? Case<Model>::read(test.returned_row(0, t, 0), i) * Model::output_scale : 0.0f;
      const uint16_t got = test.out[static_cast<size_t>(t * Model::hidden + i)];
      EXPECT(got == to_bf16(want), "token %d column %d: %04x, not %04x", t, i, got, to_bf16(want));
    }
  }
  EXPECT_EQUAL(test.lane.epoch, 0u);
}

/* A single owner's values come home bit for bit, negative zero and NaN payloads too. */
void single_owner_is_exact() {
  using Model = Shape<8, 2, 0, 0, false>;
  Case<Model> test(1, 0, 2, 1);
  test.place(0, 0) = 1 << 16;
  test.place(0, 1) = -1;
  static const uint16_t bits[8] = {0x8000, 0x0000, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x0001, 0x8001};
  memcpy(test.returned_row(1, 0, 0), bits, sizeof bits);
  const moeflow_combine_params params = test.params();
  emulator::launch(1, 256, 0, [&] { moeflow::combine<Model, Variant>(params); });
  for (size_t i = 0; i < 8; i++) EXPECT_EQUAL(test.out[i], bits[i]);
}

}  // namespace

int main() {
  model<Shape<136, 3, 0, 0, false>>();
  model<Shape<64, 8, 1, 0, true>>();
  model<Shape<72, 1, 0, 0, true>>();
  model<Shape<8, 32, 0, 0, false>>();
  model<Shape<136, 3, 0, 1, false>>();
  model<Shape<2880, 8, 1, 1, true>>();
  added<Shape<136, 3, 0, 0, false>>();
  added<Shape<64, 8, 1, 0, true>>();
  added<Shape<8, 2, 0, 0, true>>();
  single_owner_is_exact();
  TEST_END;
}
