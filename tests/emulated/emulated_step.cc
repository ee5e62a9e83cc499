/* Whole steps through every kernel, as the runtime chains them, for several ranks and rows that travel as an all-to-all
 * moves them: against plain loops over tokens and choices; and what must be the same bits whatever the number of ranks.
 * Steps shrink and grow, so that rows of earlier steps lie around. */
#include "combine.cuh"
#include "down.cuh"
#include "emulated.h"
#include "expert_index.cuh"
#include "expert_prepare.cuh"
#include "gate_up.cuh"
#include "identity.cuh"
#include "owner_reduce.cuh"
#include "pack.cuh"

namespace {

template <int Choices>
struct Model {
  static constexpr int hidden = 72;
  static constexpr int intermediate = 40;
  static constexpr int experts = 7; /* not divisible by the number of ranks */
  static constexpr int top_k = 3;
  static constexpr int activation = 0;
  static constexpr float activation_limit = 0;
  static constexpr int return_fp32 = 0;
  static constexpr int reduce_choices = Choices;
  static constexpr float output_scale = 1.0f;
};
struct Rows {
  static constexpr int threads = 256;
};
struct Gemm {
  static constexpr int threads = 128;
  static constexpr int tile_tokens = 8;
  static constexpr int tile_rows = 64;
  static constexpr int tile_depth = 64;
  static constexpr int stages = 2;
};

constexpr int H = Model<0>::hidden, I = Model<0>::intermediate, E = Model<0>::experts, K = Model<0>::top_k;
constexpr int rows = 6;
const Layout layout = {H, K};

struct Weights {
  Buffer<uint16_t> gate_up{E * 2 * I * H}, down{E * H * I};
  Weights() {
    Random random(11);
    for (size_t i = 0; i < gate_up.size(); i++) gate_up[i] = to_bf16(random.normal() / 8);
    for (size_t i = 0; i < down.size(); i++) down[i] = to_bf16(random.normal() / 6);
  }
};

/* The tokens of one rank in one step. */
struct Batch {
  int tokens;
  Buffer<uint16_t> hidden, out;
  Buffer<int32_t> ids;
  Buffer<float> weights;
  Batch(int count, Random &random)
      : tokens(count),
        hidden(static_cast<size_t>(count * H)),
        out(hidden.size()),
        ids(static_cast<size_t>(count * K)),
        weights(ids.size()) {
    for (size_t i = 0; i < hidden.size(); i++) hidden[i] = to_bf16(random.normal());
    for (size_t i = 0; i < ids.size(); i++) {
      ids[i] = random.below(E + 2) - 1; /* -1 and E too */
      weights[i] = random.below(8) ? random.normal() : 0;
    }
  }
  bool counts(size_t choice) {
    return ids[choice] >= 0 && ids[choice] < E && weights[choice] != 0;
  }
};

template <class M>
struct Rank {
  static constexpr int per_token = M::reduce_choices ? K : 1;
  int rank, ranks, local;
  bool broadcast = false; /* rows go to all, and sums come home added */
  int64_t block = rows * layout.bytes(), return_block = rows * per_token * layout.return_bytes(false);
  moeflow_lane lane = lane_at(1);
  moeflow_record record = {};
  Buffer<uint8_t> send, received, return_send, returned;
  Buffer<uint8_t *> targets, return_targets;
  Buffer<int32_t> places{E}, token_places{rows * K}, chunk_counts, offsets, entries, positions, tile_count{1};
  Buffer<float> token_weights{rows * K}, outputs;
  Buffer<moeflow_tile> tiles;
  Buffer<uint16_t> activations;

  size_t all(int64_t each) const {
    return static_cast<size_t>(ranks * each);
  }

  Rank(int rank_, int ranks_)
      : rank(rank_),
        ranks(ranks_),
        local((rank_ + 1) * E / ranks_ - rank_ * E / ranks_),
        send(all(block)),
        received(all(block)),
        return_send(all(return_block)),
        returned(all(return_block)),
        targets(all(1)),
        return_targets(all(1)),
        chunk_counts(static_cast<size_t>(local)),
        offsets(static_cast<size_t>(local + 1)),
        entries(all(rows * K)),
        positions(all(rows * K)),
        outputs(all(rows * K * H)),
        tiles(static_cast<size_t>(moeflow_tiles_max(ranks_ * rows * K, local, Gemm::tile_tokens))),
        activations(all(rows * K * I)) {
    for (size_t p = 0; p < all(1); p++) targets[p] = send.data(), return_targets[p] = return_send.data();
    for (int r = 0; r < ranks; r++) {
      for (int e = r * E / ranks; e < (r + 1) * E / ranks; e++)
        places[static_cast<size_t>(e)] = r << 16 | (e - r * E / ranks);
    }
  }

  moeflow_rows_in in() {
    return {received.data(), block, rows, ranks, rank, rows};
  }
  void launch(int64_t blocks, unsigned threads, const std::function<void()> &kernel) {
    const size_t shared =
        threads == 128 ? static_cast<size_t>(moeflow_gemm_shared_bytes(2, Gemm::tile_tokens, 64, 64, Gemm::stages)) : 0;
    emulator::launch(static_cast<unsigned>(blocks), threads, shared, kernel);
  }

  void pack(Batch &batch) {
    moeflow_pack_params p = {};
    p.lane = &lane;
    p.record = &record;
    p.hidden = reinterpret_cast<const uint8_t *>(batch.hidden.data());
    p.ids = batch.ids.data();
    p.weights = batch.weights.data();
    p.places = places.data();
    p.token_places = token_places.data();
    p.token_weights = token_weights.data();
    p.out = {targets.data(), block};
    p.tokens = batch.tokens;
    p.tokens_max = rows;
    p.rank = rank;
    p.ranks = ranks;
    p.replicas = 1;
    p.broadcast = broadcast;
    launch(std::max(batch.tokens, 1), 256, [&] { moeflow::pack<M, Rows>(p); });
  }

  void lists() {
    const int64_t chunks = (ranks * rows + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS;
    const moeflow_expert_index_params index = {&lane, &record, in(), chunk_counts.data(), local, 0};
    launch(chunks, 256, [&] { moeflow::expert_index<M, Rows>(index); });
    const moeflow_expert_prepare_params prepare = {&lane,
                                                   in(),
                                                   chunk_counts.data(),
                                                   offsets.data(),
                                                   entries.data(),
                                                   positions.data(),
                                                   tiles.data(),
                                                   tile_count.data(),
                                                   nullptr,
                                                   local,
                                                   Gemm::tile_tokens};
    launch(chunks, 256, [&] { moeflow::expert_prepare<M, Rows>(prepare); });
  }

  void experts(Weights &weights, bool identity) {
    if (identity) {
      const moeflow_identity_params p = {&lane, in(), entries.data(), offsets.data(), outputs.data(), local, 0};
      launch(4, 256, [&] { moeflow::identity<M, Rows>(p); });
      return;
    }
    const int first = rank * E / ranks;
    const uint16_t *gate_up = weights.gate_up.data() + first * 2 * I * H;
    const uint16_t *down = weights.down.data() + first * H * I;
    const moeflow_gate_up_params up = {&lane,
                                       in(),
                                       entries.data(),
                                       tiles.data(),
                                       tile_count.data(),
                                       {reinterpret_cast<const uint8_t *>(gate_up), nullptr, 2 * I * H * 2, H * 2},
                                       0,
                                       I,
                                       1,
                                       0,
                                       activations.data()};
    launch(static_cast<int64_t>(tiles.size()) * ((I + 63) / 64), 128, [&] { moeflow::gate_up<M, Gemm>(up); });
    const moeflow_down_params p = {&lane,
                                   activations.data(),
                                   tiles.data(),
                                   tile_count.data(),
                                   {reinterpret_cast<const uint8_t *>(down), nullptr, H * I * 2, I * 2},
                                   outputs.data()};
    launch(static_cast<int64_t>(tiles.size()) * ((H + 63) / 64), 128, [&] { moeflow::down<M, Gemm>(p); });
  }

  void reduce() {
    const moeflow_owner_reduce_params p = {&lane,
                                           in(),
                                           positions.data(),
                                           outputs.data(),
                                           0,
                                           {return_targets.data(), return_block},
                                           1,
                                           broadcast ? MOEFLOW_EMPTY_ZERO : 0};
    launch(ranks * rows, 256, [&] { moeflow::owner_reduce<M, Rows>(p); });
  }

  void combine(Batch &batch) {
    const moeflow_combine_params p = {&lane,
                                      &record,
                                      token_places.data(),
                                      token_weights.data(),
                                      returned.data(),
                                      return_block,
                                      reinterpret_cast<uint8_t *>(batch.out.data()),
                                      batch.tokens,
                                      rank,
                                      ranks,
                                      0,
                                      broadcast,
                                      0};
    launch(std::max(batch.tokens, 1), 256, [&] { moeflow::combine<M, Rows>(p); });
  }
};

template <class M>
struct World {
  std::vector<std::unique_ptr<Rank<M>>> ranks;
  explicit World(int count) {
    for (int r = 0; r < count; r++) ranks.emplace_back(new Rank<M>(r, count));
  }

  /* Block p of rank r's buffer becomes block r of rank p's. */
  void exchange(Buffer<uint8_t> Rank<M>::*from, Buffer<uint8_t> Rank<M>::*to, int64_t block) {
    for (size_t r = 0; r < ranks.size(); r++) {
      for (size_t p = 0; p < ranks.size(); p++) {
        memcpy(((*ranks[p]).*to).data() + static_cast<int64_t>(r) * block,
               ((*ranks[r]).*from).data() + static_cast<int64_t>(p) * block, static_cast<size_t>(block));
      }
    }
  }

  /* Every rank's first block becomes its block everywhere. */
  void gather() {
    for (size_t r = 0; r < ranks.size(); r++) {
      for (auto &to : ranks) {
        memcpy(to->received.data() + static_cast<int64_t>(r) * to->block, ranks[r]->send.data(),
               static_cast<size_t>(to->block));
      }
    }
  }

  /* The sum of all ranks' blocks p becomes rank p's first one, rounded each time. */
  void add() {
    for (size_t p = 0; p < ranks.size(); p++) {
      const int64_t block = ranks[p]->return_block;
      for (int64_t i = 0; i < block / 2; i++) {
        uint16_t sum = 0, next;
        for (size_t r = 0; r < ranks.size(); r++) {
          memcpy(&next, ranks[r]->return_send.data() + static_cast<int64_t>(p) * block + 2 * i, 2);
          sum = r == 0 ? next : to_bf16(from_bf16(sum) + from_bf16(next));
        }
        memcpy(ranks[p]->returned.data() + 2 * i, &sum, 2);
      }
    }
  }

  void step(std::vector<std::unique_ptr<Batch>> &batches, Weights &weights, bool identity) {
    const bool broadcast = ranks[0]->broadcast;
    for (size_t r = 0; r < ranks.size(); r++) ranks[r]->pack(*batches[r]);
    if (broadcast) {
      gather();
    } else {
      exchange(&Rank<M>::send, &Rank<M>::received, ranks[0]->block);
    }
    for (auto &rank : ranks) {
      rank->lists();
      rank->experts(weights, identity);
      rank->reduce();
    }
    if (broadcast) {
      add();
    } else {
      exchange(&Rank<M>::return_send, &Rank<M>::returned, ranks[0]->return_block);
    }
    for (size_t r = 0; r < ranks.size(); r++) {
      ranks[r]->combine(*batches[r]);
      EXPECT_EQUAL(ranks[r]->lane.poison, 0u);
    }
  }
};

double expert(Weights &weights, int e, const uint16_t *hidden, int column) {
  double sum = 0;
  for (int i = 0; i < I; i++) {
    double gate = 0, up = 0;
    for (int j = 0; j < H; j++) {
      const double x = static_cast<double>(from_bf16(hidden[j]));
      gate += x * static_cast<double>(from_bf16(weights.gate_up[static_cast<size_t>((e * 2 * I + i) * H + j)]));
      up += x * static_cast<double>(from_bf16(weights.gate_up[static_cast<size_t>((e * 2 * I + I + i) * H + j)]));
    }
    const double activation = static_cast<double>(from_bf16(to_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up))));
    sum += activation * static_cast<double>(from_bf16(weights.down[static_cast<size_t>((e * H + column) * I + i)]));
  }
  return sum;
}

/* Every rounding between is at most 2^-8 of a term, and there are a few terms. */
void check(Batch &batch, Weights &weights) {
  for (int t = 0; t < batch.tokens; t++) {
    for (int column = 0; column < H; column += 5) {
      double want = 0, terms = 0;
      for (int k = 0; k < K; k++) {
        const size_t choice = static_cast<size_t>(t * K + k);
        if (!batch.counts(choice)) continue;
        const double term = static_cast<double>(batch.weights[choice]) *
                            expert(weights, batch.ids[choice], batch.hidden.data() + t * H, column);
        want += term;
        terms += std::fabs(term);
      }
      const double got = static_cast<double>(from_bf16(batch.out[static_cast<size_t>(t * H + column)]));
      EXPECT(std::fabs(got - want) <= terms * 0x1p-7 + 1e-4, "token %d column %d: %g, not %g", t, column, got, want);
    }
  }
}

/* Three steps with changing numbers of tokens, none on some rank each time. */
template <class M>
void steps(int count, Weights &weights) {
  World<M> world(count);
  Random random(static_cast<uint64_t>(count));
  static const int tokens[3][4] = {{rows, 3, 0, 5}, {2, 0, rows, 1}, {0, 4, 1, rows}};
  for (int step = 0; step < 3; step++) {
    emulator::schedule = schedules[step];
    std::vector<std::unique_ptr<Batch>> batches;
    for (int r = 0; r < count; r++) batches.emplace_back(new Batch(tokens[step][r], random));
    world.step(batches, weights, false);
    for (auto &batch : batches) check(*batch, weights);
  }
}

/* The same steps with rows that go to all and sums that come home added: with one or two ranks, where each sum is rounded
 * once, the same bits. */
void steps_broadcast(int count, Weights &weights) {
  World<Model<0>> world(count), other(count);
  Random random(static_cast<uint64_t>(count) + 20);
  for (auto &rank : world.ranks) rank->broadcast = true;
  static const int tokens[3][4] = {{rows, 3, 0, 5}, {2, 0, rows, 1}, {0, 4, 1, rows}};
  for (int step = 0; step < 3; step++) {
    std::vector<std::unique_ptr<Batch>> batches;
    for (int r = 0; r < count; r++) batches.emplace_back(new Batch(tokens[step][r], random));
    world.step(batches, weights, false);
    std::vector<std::vector<uint16_t>> added;
    for (auto &batch : batches) {
      check(*batch, weights);
      added.emplace_back(batch->out.data(), batch->out.data() + batch->out.size());
    }
    other.step(batches, weights, false);
    for (size_t r = 0; r < batches.size() && count <= 2; r++) {
      EXPECT(std::equal(added[r].begin(), added[r].end(), batches[r]->out.data()), "%d ranks, step %d", count, step);
    }
  }
}

/* One set of tokens, dealt to 1, 2, 3 and 4 ranks: with `reduce: choices` the same bits come out. */
void same_bits_for_any_ranks(Weights &weights) {
  Random random(99);
  Batch whole(rows, random);
  std::vector<uint16_t> first;
  for (int count = 1; count <= 4; count++) {
    World<Model<1>> world(count);
    std::vector<std::unique_ptr<Batch>> batches;
    for (int r = 0; r < count; r++) {
      const int begin = r * rows / count;
      const int end = (r + 1) * rows / count;
      batches.emplace_back(new Batch(end - begin, random));
      memcpy(batches.back()->hidden.data(), &whole.hidden[static_cast<size_t>(begin * H)],
             static_cast<size_t>((end - begin) * H * 2));
      memcpy(batches.back()->ids.data(), &whole.ids[static_cast<size_t>(begin * K)],
             static_cast<size_t>((end - begin) * K * 4));
      memcpy(batches.back()->weights.data(), &whole.weights[static_cast<size_t>(begin * K)],
             static_cast<size_t>((end - begin) * K * 4));
    }
    world.step(batches, weights, false);
    std::vector<uint16_t> out;
    for (auto &batch : batches) out.insert(out.end(), batch->out.data(), batch->out.data() + batch->out.size());
    if (count == 1) first = out;
    EXPECT(out == first, "%d ranks", count);
  }
}

/* Identity experts, one choice of weight 1 a token: every token comes home bit for bit. */
void identity_is_exact(Weights &weights) {
  Random random(3);
  World<Model<0>> world(3);
  std::vector<std::unique_ptr<Batch>> batches;
  for (int r = 0; r < 3; r++) {
    batches.emplace_back(new Batch(rows, random));
    for (size_t i = 0; i < batches.back()->ids.size(); i++) {
      batches.back()->ids[i] = i % K == 1 ? static_cast<int>(i + static_cast<size_t>(r)) % E : -1;
      batches.back()->weights[i] = i % K == 1 ? 1.0f : not_a_number;
    }
    batches.back()->hidden[0] = 0x8000;
  }
  world.step(batches, weights, true);
  for (auto &batch : batches) {
    EXPECT(!memcmp(batch->out.data(), batch->hidden.data(), batch->out.size() * 2), "identity");
  }
}

}  // namespace

int main() {
  Weights weights;
  for (int ranks = 1; ranks <= 4; ranks++) {
    steps<Model<0>>(ranks, weights);
    steps<Model<1>>(ranks, weights);
    steps_broadcast(ranks, weights);
  }
  same_bits_for_any_ranks(weights);
  identity_is_exact(weights);
  TEST_END;
}
