/* The fused pipeline without its GEMMs: the lists that `await_rows` makes are those of expert_index and expert_prepare; whole steps
 * of ranks that are pthreads, from dispatch to return_combine with identity experts between, give what plain loops give, bit for
 * bit; and a rank that is poisoned, silent or at odds with the others is noticed by all. */
#include <pthread.h>

#include "dispatch.cuh"
#include "emulated.h"
#include "expert_index.cuh"
#include "expert_prepare.cuh"
#include "experts_arrival.cuh"
#include "identity.cuh"
#include "owner_reduce.cuh"
#include "return_combine.cuh"

namespace {

template <int K>
struct Model {
  static constexpr int hidden = 72;
  static constexpr int experts = 13; /* divisible by none of the numbers of ranks but 1 */
  static constexpr int top_k = K;
  static constexpr int score = 1;
  static constexpr int correction_bias = 0;
  static constexpr int groups = 1;
  static constexpr int top_groups = 1;
  static constexpr int group_score = 0;
  static constexpr int renormalize = 0;
  static constexpr float scale = 1.0f;
  static constexpr int return_fp32 = 0;
  static constexpr int reduce_choices = 0;
  static constexpr float output_scale = 1.0f;
};
struct Threads {
  static constexpr int threads = 256;
};
constexpr int list_threads = 128;
constexpr uint64_t second = 1000000000u;

struct Tickets { /* in place of an experts kernel's control block */
  int *taken;
  int take() const {
    return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
  }
};

/* `blocks` blocks make the lists side by side. Returns what they report; all the same. */
template <class M, int tile_tokens>
moeflow::Lists arrive(const moeflow_experts_params &params, unsigned blocks, int *taken) {
  std::vector<moeflow::Lists> seen(blocks);
  const int64_t entries = int64_t{params.in.ranks} * params.in.rows * M::top_k;
  const size_t shared = static_cast<size_t>(moeflow_fused_shared_bytes(entries, params.local_experts));
  emulator::launch_together(blocks, list_threads, shared, [&] {
    __shared__ moeflow_tile near[moeflow::near_tiles];
    const moeflow::Lists lists =
        moeflow::await_rows<M, list_threads, tile_tokens>(params, emulator::dynamic_shared(), near, Tickets{taken});
    for (int i = threadIdx.x; i < lists.tiles && i < moeflow::near_tiles; i += list_threads) {
      EXPECT(!memcmp(&near[i], &params.tiles[i], sizeof near[i]), "near tile %d", i);
    }
    if (threadIdx.x == 0) seen[blockIdx.x] = lists;
  });
  for (const moeflow::Lists &lists : seen) {
    EXPECT_EQUAL(lists.tiles, seen[0].tiles);
    EXPECT_EQUAL(lists.entries, seen[0].entries);
  }
  return seen[0];
}

/* ---- Lists ---- */

template <class M, int tile_tokens>
void lists(int ranks, int rows, int local, uint64_t seed) {
  constexpr int K = M::top_k;
  constexpr uint32_t epoch = 7;
  constexpr int words = 3;
  const Layout layout = {M::hidden, K};
  const size_t n = static_cast<size_t>(ranks * rows * K), chunks = static_cast<size_t>(ranks * rows + 63) / 64;
  Random random(seed);
  Buffer<uint8_t> received(static_cast<size_t>(ranks * rows * layout.bytes()));
  for (int s = 0; s < ranks; s++) {
    const uint32_t sent = static_cast<uint32_t>(random.below(rows + 1));
    for (int t = 0; t < rows; t++) {
      RowWriter row(received.data() + (s * rows + t) * layout.bytes(), layout);
      const bool stale = t > 0 && random.below(8) == 0;
      row.header({stale ? epoch - 1 : epoch, stale ? static_cast<uint32_t>(rows) : sent, static_cast<uint32_t>(rows), 0});
      for (int k = 0; k < K; k++) {
        const int owner = random.below(3), slot = random.below(local + 2); /* mine is rank 1 */
        row.id(k, random.below(9) == 0 ? -1 : owner << 16 | slot);
      }
    }
  }
  moeflow_lane lane = lane_at(epoch);
  moeflow_record record = {};
  const moeflow_rows_in in = {received.data(), rows * layout.bytes(), rows, ranks, 1, rows};
  Buffer<int32_t> counts(chunks * static_cast<size_t>(local)), offsets(static_cast<size_t>(local) + 1), entries(n + 1),
      positions(n), tile_count(1), entry_count(1), other_entries(n + 1), other_positions(n), other_count(1);
  Buffer<moeflow_tile> tiles(n + 1), other_tiles(n + 1);
  Buffer<int64_t> load(static_cast<size_t>(local)), other_load(load.size());
  load.fill(0), other_load.fill(0);
  const moeflow_expert_index_params index = {&lane, &record, in, counts.data(), local, 0};
  emulator::launch(static_cast<unsigned>(chunks), 256, 0, [&] { moeflow::expert_index<M, Threads>(index); });
  const moeflow_expert_prepare_params prepare = {&lane,
                                                 in,
                                                 counts.data(),
                                                 offsets.data(),
                                                 entries.data(),
                                                 positions.data(),
                                                 tiles.data(),
                                                 tile_count.data(),
                                                 load.data(),
                                                 local,
                                                 tile_tokens};
  emulator::launch(static_cast<unsigned>(chunks), 256, 0, [&] { moeflow::expert_prepare<M, Threads>(prepare); });

  Buffer<uint32_t> flags(static_cast<size_t>(moeflow_flag_block(ranks, words)));
  for (size_t i = 0; i < flags.size(); i++) flags[i] = i < flags.size() - static_cast<size_t>(ranks) ? epoch : 0;
  moeflow_experts_params params = {};
  params.lane = &lane;
  params.record = &record;
  params.in = in;
  params.entries = other_entries.data();
  params.positions = other_positions.data();
  params.tiles = other_tiles.data();
  params.tile_count = other_count.data();
  params.entry_count = entry_count.data();
  params.expert_load = other_load.data();
  params.local_experts = local;
  params.peers = {nullptr, flags.data(), nullptr, second, words, 1, ranks, 0};
  int taken = 0;
  const moeflow::Lists made = arrive<M, tile_tokens>(params, 3, &taken);
  EXPECT_EQUAL(taken, 3);
  EXPECT_EQUAL(made.tiles, tile_count[0]);
  EXPECT_EQUAL(made.entries, offsets[static_cast<size_t>(local)]);
  EXPECT_EQUAL(other_count[0], tile_count[0]);
  EXPECT_EQUAL(entry_count[0], made.entries);
  for (size_t i = 0; i < n; i++) EXPECT_EQUAL(other_positions[i], positions[i]);
  for (size_t i = 0; i < static_cast<size_t>(made.entries); i++) EXPECT_EQUAL(other_entries[i], entries[i]);
  for (size_t i = 0; i < static_cast<size_t>(made.tiles); i++) {
    EXPECT(!memcmp(&other_tiles[i], &tiles[i], sizeof tiles[i]), "tile %d", static_cast<int>(i));
  }
  for (size_t e = 0; e < load.size(); e++) EXPECT_EQUAL(other_load[e], load[e]);
}

void all_lists() {
  for (unsigned i = 0; i < 3; i++) {
    emulator::schedule = schedules[i];
    lists<Model<3>, 8>(1, 1, 1, 1 + i);
    lists<Model<3>, 8>(2, 16, 9, 10 + i);
    lists<Model<8>, 16>(3, 40, 30, 20 + i);  /* more than a round of threads */
    lists<Model<8>, 8>(5, 64, 300, 30 + i);  /* more experts than threads */
    lists<Model<1>, 64>(4, 100, 2, 40 + i);  /* tiles of one expert, one after the other */
  }
}

/* ---- Whole steps ---- */

constexpr int K = 3, H = Model<K>::hidden, E = Model<K>::experts, capacity = 6;
const Layout layout = {H, K};

struct Batch { /* of one rank in one step */
  int tokens;
  Buffer<uint16_t> hidden, out;
  Buffer<int32_t> ids;
  Buffer<float> weights;
  Batch(int count, Random &random)
      : tokens(count),
        hidden(static_cast<size_t>(capacity * H)),
        out(hidden.size()),
        ids(static_cast<size_t>(capacity * K)),
        weights(ids.size()) {
    for (size_t i = 0; i < hidden.size(); i++) hidden[i] = to_bf16(random.normal());
    for (size_t i = 0; i < ids.size(); i++) {
      ids[i] = random.below(E + 2) - 1; /* -1 and E too, and now and then the same twice */
      weights[i] = random.below(8) ? random.normal() : 0;
    }
  }
};

struct World;

struct Rank {
  World *world;
  int rank, ranks, local;
  moeflow_lane lane;
  moeflow_record record = {};
  Buffer<uint8_t> received, returned;
  Buffer<uint32_t> flags;
  Buffer<uint8_t *> targets, return_targets;
  Buffer<int32_t> places{E}, token_places{capacity * K}, entries, positions, tile_count{1}, entry_count{1}, offsets;
  Buffer<float> token_weights{capacity * K}, outputs;
  Buffer<moeflow_tile> tiles;
  Batch *batch = nullptr;
  int tokens_max = capacity;

  Rank(World *world_, int rank_, int ranks_, uint32_t epoch, int words);
  moeflow_peers peers() const;
  void step(unsigned grid);
};

struct World {
  int ranks, words;
  uint64_t timeout = 60 * second;
  volatile uint32_t abort = 0;
  unsigned grid = 1;
  int absent = -1;
  std::vector<std::unique_ptr<Rank>> rank;
  Buffer<uint32_t *> peer_flags;

  World(int count, uint32_t epoch, int words_) : ranks(count), words(words_), peer_flags(static_cast<size_t>(count)) {
    for (int r = 0; r < count; r++) rank.emplace_back(new Rank(this, r, count, epoch, words));
    for (size_t r = 0; r < rank.size(); r++) peer_flags[r] = rank[r]->flags.data();
    for (auto &mine : rank) {
      for (size_t p = 0; p < rank.size(); p++) {
        mine->targets[p] = rank[p]->received.data() + mine->rank * capacity * layout.bytes();
        mine->return_targets[p] = rank[p]->returned.data() + mine->rank * capacity * layout.return_bytes(false);
      }
    }
  }

  void step() {
    std::vector<pthread_t> threads(rank.size());
    for (size_t r = 0; r < rank.size(); r++) {
      pthread_create(
          &threads[r], nullptr,
          [](void *given) -> void * {
            Rank *mine = static_cast<Rank *>(given);
            emulator::schedule = static_cast<unsigned>(mine->rank);
            if (mine->rank != mine->world->absent) mine->step(mine->world->grid);
            return nullptr;
          },
          rank[r].get());
    }
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
  }
};

Rank::Rank(World *world_, int rank_, int ranks_, uint32_t epoch, int words)
    : world(world_),
      rank(rank_),
      ranks(ranks_),
      local((rank_ + 1) * E / ranks_ - rank_ * E / ranks_),
      lane(lane_at(epoch)),
      received(static_cast<size_t>(ranks_ * capacity * layout.bytes())),
      returned(static_cast<size_t>(ranks_ * capacity * layout.return_bytes(false))),
      flags(static_cast<size_t>(moeflow_flag_block(ranks_, words))),
      targets(static_cast<size_t>(ranks_)),
      return_targets(static_cast<size_t>(ranks_)),
      entries(static_cast<size_t>(ranks_ * capacity * K)),
      positions(entries.size()),
      offsets(static_cast<size_t>(local) + 1),
      outputs(entries.size() * H),
      tiles(entries.size() + 1) {
  received.fill(0);
  for (size_t i = 0; i < flags.size(); i++) flags[i] = i < flags.size() - static_cast<size_t>(ranks_) ? epoch - 1 : 0;
  for (int e = 0; e < E; e++) {
    int owner = 0;
    while (e >= (owner + 1) * E / ranks_) owner++;
    places[static_cast<size_t>(e)] = owner << 16 | (e - owner * E / ranks_);
  }
}

moeflow_peers Rank::peers() const {
  return {world->peer_flags.data(), const_cast<Rank *>(this)->flags.data(), &world->abort, world->timeout, world->words, rank,
          ranks, 0};
}

/* dispatch; the lists, identity experts and sums in place of the experts kernel; return_combine. */
void Rank::step(unsigned grid) {
  using M = Model<K>;
  const unsigned blocks = std::max(1u, std::min(grid, static_cast<unsigned>(batch->tokens)));
  moeflow_dispatch_params out = {};
  out.pack.lane = &lane;
  out.pack.record = &record;
  out.pack.hidden = reinterpret_cast<const uint8_t *>(batch->hidden.data());
  out.pack.ids = batch->ids.data();
  out.pack.weights = batch->weights.data();
  out.pack.places = places.data();
  out.pack.token_places = token_places.data();
  out.pack.token_weights = token_weights.data();
  out.pack.out = {targets.data(), 0};
  out.pack.tokens = batch->tokens;
  out.pack.tokens_max = tokens_max;
  out.pack.rank = rank;
  out.pack.ranks = ranks;
  out.pack.replicas = 1;
  out.peers = peers();
  emulator::launch(blocks, 256, 0, [&] { moeflow::dispatch<M, Threads>(out); });

  moeflow_experts_params experts = {};
  experts.lane = &lane;
  experts.record = &record;
  experts.in = {received.data(), capacity * layout.bytes(), capacity, ranks, rank, tokens_max};
  experts.entries = entries.data();
  experts.positions = positions.data();
  experts.tiles = tiles.data();
  experts.tile_count = tile_count.data();
  experts.entry_count = entry_count.data();
  experts.local_experts = local;
  experts.peers = peers();
  int taken = 0;
  const moeflow::Lists lists = arrive<M, 8>(experts, grid, &taken);
  EXPECT_EQUAL(taken, lists.tiles < 0 ? 0 : static_cast<int>(grid));
  if (lists.tiles >= 0) {
    for (size_t e = 0; e <= static_cast<size_t>(local); e++) offsets[e] = lists.entries;
    const moeflow_identity_params same = {&lane, experts.in, entries.data(), offsets.data(), outputs.data(), local, 0};
    emulator::launch(2, 256, 0, [&] { moeflow::identity<M, Threads>(same); });
    const moeflow_owner_reduce_params sums = {&lane, experts.in, positions.data(), outputs.data(), 0, {return_targets.data(), 0},
                                              1,     0};
    emulator::launch(static_cast<unsigned>(ranks * capacity), 256, 0, [&] { moeflow::owner_reduce<M, Threads>(sums); });
  }
  emulator::launch(grid, 32, 0, [&] {
    moeflow::raise_flags(experts.peers, MOEFLOW_PHASE_RETURN, lists.epoch, lists.tiles < 0 ? lane.poison : 0);
  });

  moeflow_return_combine_params home = {};
  home.combine.lane = &lane;
  home.combine.record = &record;
  home.combine.token_places = token_places.data();
  home.combine.token_weights = token_weights.data();
  home.combine.returned = returned.data();
  home.combine.block_bytes = capacity * layout.return_bytes(false);
  home.combine.out = reinterpret_cast<uint8_t *>(batch->out.data());
  home.combine.tokens = batch->tokens;
  home.combine.rank = rank;
  home.combine.ranks = ranks;
  home.peers = peers();
  emulator::launch_together(blocks, 256, 0, [&] { moeflow::return_combine<M, Threads>(home); });
}

/* Each owner's choices in order, rounded; the owners in ascending rank. */
uint16_t expected(const World &world, Batch &batch, int token, int column) {
  float sum = 0;
  bool any = false;
  for (int owner = 0; owner < world.ranks; owner++) {
    float partial = 0;
    bool mine = false;
    for (int k = 0; k < K; k++) {
      const size_t at = static_cast<size_t>(token * K + k);
      const int id = batch.ids[at];
      if (id < 0 || id >= E || batch.weights[at] == 0) continue;
      if (id < owner * E / world.ranks || id >= (owner + 1) * E / world.ranks) continue;
      const float product = batch.weights[at] * from_bf16(batch.hidden[static_cast<size_t>(token * H + column)]);
      partial = mine ? partial + product : product;
      mine = true;
    }
    if (!mine) continue;
    const float rounded = from_bf16(to_bf16(partial));
    sum = any ? sum + rounded : rounded;
    any = true;
  }
  return to_bf16(sum);
}

/* Steps that shrink and grow, with grids that change, and ranks without tokens. */
void steps(int ranks, uint32_t epoch, int words) {
  World world(ranks, epoch, words);
  Random random(static_cast<uint64_t>(ranks) + epoch);
  static const int tokens[5][6] = {
      {capacity, 3, 0, 5, 1, 2}, {2, 0, capacity, 1, 0, 4}, {0, 0, 0, 0, 0, 0}, {1, 1, 1, 1, 1, 1}, {0, 4, 1, capacity, 3, 0}};
  for (int n = 0; n < 5; n++) {
    std::vector<std::unique_ptr<Batch>> batches;
    world.grid = static_cast<unsigned>(n % words) + 1;
    for (size_t r = 0; r < world.rank.size(); r++) {
      batches.emplace_back(new Batch(tokens[n][r], random));
      world.rank[r]->batch = batches.back().get();
    }
    world.step();
    for (size_t r = 0; r < world.rank.size(); r++) {
      EXPECT_EQUAL(world.rank[r]->lane.poison, 0u);
      EXPECT_EQUAL(world.rank[r]->lane.epoch, epoch + static_cast<uint32_t>(n) + 1);
      EXPECT_EQUAL(world.rank[r]->record.received, epoch + static_cast<uint32_t>(n));
      for (int i = 0; i < batches[r]->tokens * H; i++) {
        EXPECT_EQUAL(batches[r]->out[static_cast<size_t>(i)], expected(world, *batches[r], i / H, i % H));
      }
    }
  }
}

/* ---- What goes wrong ---- */

struct Faulty : World {
  std::vector<std::unique_ptr<Batch>> batches;
  Faulty() : World(3, 10, 4) {
    Random random(5);
    for (auto &mine : rank) {
      batches.emplace_back(new Batch(2, random));
      mine->batch = batches.back().get();
    }
    grid = 2;
  }
  void expect(size_t r, uint32_t poison, int peer, uint32_t phase) {
    const moeflow_record &record = rank[r]->record;
    EXPECT_EQUAL(rank[r]->lane.poison, poison);
    for (int i = 0; i < 2 * H; i++) EXPECT_EQUAL(batches[r]->out[static_cast<size_t>(i)], uint16_t{0x7fc0});
    if (peer < 0) return;
    EXPECT_EQUAL(record.poison, poison);
    EXPECT_EQUAL(record.peer, static_cast<uint32_t>(peer));
    EXPECT_EQUAL(record.phase, phase);
    EXPECT_EQUAL(record.step, 10u);
  }
};

void faults() {
  Faulty poisoned; /* waits for nobody, stores no rows, and all hear of it */
  poisoned.rank[1]->lane.poison = MOEFLOW_POISON_EPOCH;
  Buffer<uint8_t> before(poisoned.rank[0]->received.size());
  memcpy(before.data(), poisoned.rank[0]->received.data(), before.size());
  poisoned.step();
  poisoned.expect(0, MOEFLOW_POISON_PEER, 1, MOEFLOW_PHASE_DISPATCH);
  poisoned.expect(1, MOEFLOW_POISON_EPOCH, -1, 0);
  poisoned.expect(2, MOEFLOW_POISON_PEER, 1, MOEFLOW_PHASE_DISPATCH);
  const size_t block = static_cast<size_t>(capacity * layout.bytes());
  EXPECT(!memcmp(before.data() + block, poisoned.rank[0]->received.data() + block, block), "a poisoned rank stored rows");

  Faulty disagreeing;
  disagreeing.rank[2]->tokens_max = 5;
  disagreeing.step();
  disagreeing.expect(0, MOEFLOW_POISON_TOKENS_MAX, 2, MOEFLOW_PHASE_DISPATCH);
  EXPECT_EQUAL(disagreeing.rank[0]->record.mine, static_cast<uint32_t>(capacity));
  EXPECT_EQUAL(disagreeing.rank[0]->record.theirs, 5u);
  disagreeing.expect(2, MOEFLOW_POISON_TOKENS_MAX, 0, MOEFLOW_PHASE_DISPATCH);

  Faulty silent;
  silent.timeout = second / 5;
  silent.absent = 1;
  silent.step();
  silent.expect(0, MOEFLOW_POISON_TIMEOUT, 1, MOEFLOW_PHASE_DISPATCH);
  silent.expect(2, MOEFLOW_POISON_TIMEOUT, 1, MOEFLOW_PHASE_DISPATCH);

  Faulty given_up;
  given_up.absent = 0;
  given_up.abort = 1;
  given_up.step();
  given_up.expect(1, MOEFLOW_POISON_ABORT, 0, MOEFLOW_PHASE_DISPATCH);
  given_up.expect(2, MOEFLOW_POISON_ABORT, 0, MOEFLOW_PHASE_DISPATCH);
}

}  // namespace

int main() {
  all_lists();
  for (int ranks = 1; ranks <= 6; ranks++) steps(ranks, 1, 2 + ranks % 3);
  steps(3, 0xfffffffdu, 4);
  steps(2, 0x7ffffffeu, 1);
  faults();
  TEST_END;
}
