/* exchange between ranks that are pthreads: data written before the flag is seen after it, epochs wrap, a silent peer and an
 * abort end the wait with the right record, and a poisoned rank tells its peers. */
#include <pthread.h>
#include <time.h>

#include "emulated.h"
#include "exchange.cuh"

namespace {

struct Model {};
struct Variant {
  static constexpr int threads = 128;
};

constexpr uint64_t second = 1000000000u;
constexpr int words = 5;

struct World {
  int ranks;
  std::vector<std::unique_ptr<Buffer<uint32_t>>> flags;
  std::vector<moeflow_lane> lanes;
  std::vector<moeflow_record> records;
  std::vector<std::vector<uint32_t>> mail; /* [rank][source]: plain memory that the flags guard */
  std::vector<std::vector<uint32_t>> read; /* what each rank read of it */
  Buffer<uint32_t *> peers;
  volatile uint32_t abort = 0;
  uint64_t timeout = 60 * second;
  int steps = 1;
  int absent = -1; /* a rank that never comes */

  World(int count, uint32_t epoch) : ranks(count), peers(static_cast<size_t>(count)) {
    const size_t n = static_cast<size_t>(count);
    for (size_t r = 0; r < n; r++) {
      flags.emplace_back(new Buffer<uint32_t>((2 * words + 1) * n));
      for (size_t i = 0; i < flags[r]->size(); i++) (*flags[r])[i] = i < 2 * words * n ? epoch - 1 : 0;
      lanes.push_back(lane_at(epoch));
      records.push_back({});
      peers[r] = flags[r]->data();
    }
    mail.assign(n, std::vector<uint32_t>(n));
    read = mail;
  }

  /* Word i of what rank `source` raises at `rank`, of the phase's block (0, 1); and its mark. */
  uint32_t &flag(size_t rank, size_t block, size_t source, size_t i) {
    return (*flags[rank])[(block * static_cast<size_t>(ranks) + source) * words + i];
  }
  uint32_t &mark(size_t rank, size_t source) {
    return (*flags[rank])[2 * static_cast<size_t>(ranks) * words + source];
  }

  void exchange(size_t rank, int phase) {
    const moeflow_peers all = {peers.data(), flags[rank]->data(),        &abort, timeout,
                               words,        static_cast<int32_t>(rank), ranks,  0};
    const moeflow_exchange_params params = {&lanes[rank], &records[rank], all, phase, 0};
    emulator::launch(1, 128, 0, [&] { moeflow::exchange<Model, Variant>(params); });
  }

  /* A step as the pipeline does it: mail out, dispatch, read, return, next epoch. */
  void step(size_t rank) {
    const size_t n = static_cast<size_t>(ranks);
    const uint32_t epoch = lanes[rank].epoch;
    for (size_t p = 0; p < n; p++) mail[p][rank] = epoch * 31 + static_cast<uint32_t>(rank * 7 + p);
    exchange(rank, MOEFLOW_PHASE_DISPATCH);
    if (!lanes[rank].poison) read[rank] = mail[rank];
    for (size_t s = 0; s < n && !lanes[rank].poison; s++) {
      if (read[rank][s] != epoch * 31 + static_cast<uint32_t>(s * 7 + rank)) records[rank].reserved[0]++;
    }
    exchange(rank, MOEFLOW_PHASE_RETURN);
    lanes[rank].epoch = epoch + 1;
  }

  void run() {
    struct Argument {
      World *world;
      size_t rank;
    };
    std::vector<Argument> arguments;
    std::vector<pthread_t> threads(static_cast<size_t>(ranks));
    for (size_t r = 0; r < threads.size(); r++) arguments.push_back({this, r});
    for (size_t r = 0; r < threads.size(); r++) {
      pthread_create(
          &threads[r], nullptr,
          [](void *given) -> void * {
            const Argument *mine = static_cast<Argument *>(given);
            emulator::schedule = static_cast<unsigned>(mine->rank);
            const bool here = static_cast<int>(mine->rank) != mine->world->absent;
            for (int i = 0; here && i < mine->world->steps; i++) mine->world->step(mine->rank);
            return nullptr;
          },
          &arguments[r]);
    }
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
  }
};

void all_arrive(int ranks, uint32_t epoch) {
  World world(ranks, epoch);
  world.steps = 5;
  world.run();
  for (size_t r = 0; r < world.lanes.size(); r++) {
    EXPECT_EQUAL(world.lanes[r].poison, 0u);
    EXPECT_EQUAL(world.records[r].poison, 0u);
    EXPECT_EQUAL(world.records[r].reserved[0], 0u);
    for (size_t s = 0; s < static_cast<size_t>(ranks); s++) {
      for (size_t i = 0; i < words; i++) EXPECT_EQUAL(world.flag(r, 0, s, i), epoch + 4);
      for (size_t i = 0; i < words; i++) EXPECT_EQUAL(world.flag(r, 1, s, i), epoch + 4);
      EXPECT_EQUAL(world.mark(r, s), 0u);
    }
  }
}

void check_cause(const World &world, size_t rank, uint32_t poison, uint32_t peer, uint32_t phase, uint32_t step) {
  EXPECT_EQUAL(world.lanes[rank].poison, poison);
  EXPECT_EQUAL(world.records[rank].poison, poison);
  EXPECT_EQUAL(world.records[rank].peer, peer);
  EXPECT_EQUAL(world.records[rank].phase, phase);
  EXPECT_EQUAL(world.records[rank].step, step);
}

/* The silent peer is named, in the phase in which it is missed. */
void timeout() {
  World world(4, 10);
  world.timeout = second / 20;
  for (size_t r = 0; r < 4; r++) { /* one after another: no rank is late by chance, none hears of another's timeout first */
    for (size_t p = 0; p < 4; p++) {
      for (size_t i = 0; i < words; i++) world.flag(r, 0, p, i) = p == 2 && i == 3 ? 9 : 10; /* one block of its grid is missing */
    }
  }
  for (size_t r = 0; r < 4; r++) {
    if (r == 2) continue;
    world.exchange(r, MOEFLOW_PHASE_DISPATCH);
    check_cause(world, r, MOEFLOW_POISON_TIMEOUT, 2, MOEFLOW_PHASE_DISPATCH, 10);
  }
  World back(2, 10);
  back.timeout = second / 20;
  emulator::schedule = 0;
  for (size_t i = 0; i < words; i++) back.flag(0, 0, 1, i) = 10; /* rank 1 dispatched, then fell silent */
  back.step(0);
  check_cause(back, 0, MOEFLOW_POISON_TIMEOUT, 1, MOEFLOW_PHASE_RETURN, 10);
  EXPECT_EQUAL(back.flag(1, 1, 0, words - 1), 10u); /* it raised its own flag first */
}

void aborted() {
  World world(3, 4);
  world.absent = 0;
  world.abort = 1;
  world.run();
  check_cause(world, 1, MOEFLOW_POISON_ABORT, 0, MOEFLOW_PHASE_DISPATCH, 4);
  check_cause(world, 2, MOEFLOW_POISON_ABORT, 0, MOEFLOW_PHASE_DISPATCH, 4);
}

/* A poisoned rank waits for nobody, and everybody learns of it without waiting. */
void poison_spreads() {
  World world(3, 4);
  world.lanes[1].poison = MOEFLOW_POISON_EPOCH;
  world.run();
  check_cause(world, 0, MOEFLOW_POISON_PEER, 1, MOEFLOW_PHASE_DISPATCH, 4);
  check_cause(world, 2, MOEFLOW_POISON_PEER, 1, MOEFLOW_PHASE_DISPATCH, 4);
  EXPECT_EQUAL(world.lanes[1].poison, static_cast<uint32_t>(MOEFLOW_POISON_EPOCH));
  EXPECT_EQUAL(world.mark(0, 1), static_cast<uint32_t>(MOEFLOW_POISON_EPOCH));

  World second_hand(3, 4); /* rank 0 caught it from rank 1, which is the one to name */
  second_hand.lanes[0].poison = MOEFLOW_POISON_PEER;
  second_hand.lanes[1].poison = MOEFLOW_POISON_EPOCH;
  second_hand.run();
  check_cause(second_hand, 2, MOEFLOW_POISON_PEER, 1, MOEFLOW_PHASE_DISPATCH, 4);

  World alone(2, 9); /* the peer is not there at all */
  alone.lanes[0].poison = MOEFLOW_POISON_TIMEOUT;
  alone.step(0);
  EXPECT_EQUAL(alone.flag(1, 0, 0, 0), 9u + MOEFLOW_FLAG_POISONED);
  EXPECT_EQUAL(alone.flag(1, 1, 0, words - 1), 9u + MOEFLOW_FLAG_POISONED);
  EXPECT_EQUAL(alone.mark(1, 0), static_cast<uint32_t>(MOEFLOW_POISON_TIMEOUT));
}

}  // namespace

int main() {
  for (int ranks = 1; ranks <= 8; ranks++) all_arrive(ranks, 1);
  all_arrive(2, 0xfffffffeu);
  all_arrive(3, 0x7ffffffeu);
  timeout();
  aborted();
  poison_spreads();
  TEST_END;
}
