/* CPU exchange: flags between threads, and what ends a wait: a poisoned peer, a silent one, an abort. */
#include "cpu.h"

#include <pthread.h>

#include "test.h"

#define RANKS 4
#define STEPS 200

static uint32_t flags[RANKS][3 * RANKS];
static uint32_t *peers[RANKS];
static struct moeflow_lane lanes[RANKS];
static struct moeflow_record records[RANKS];
static volatile uint32_t give_up;
static int values[RANKS][RANKS]; /* [receiver][source], plain stores that the flags must order */

static void reset(uint32_t epoch) {
  memset(flags, 0, sizeof flags);
  memset(lanes, 0, sizeof lanes);
  memset(records, 0, sizeof records);
  give_up = 0;
  for (int r = 0; r < RANKS; r++) {
    peers[r] = flags[r];
    lanes[r].epoch = epoch;
    for (int i = 0; i < 2 * RANKS; i++) flags[r][i] = epoch - 1;
  }
}

static void exchange(int rank, enum moeflow_phase phase, uint64_t timeout_ns) {
  const struct moeflow_exchange_params p = {
      &lanes[rank], &records[rank], {peers, flags[rank], &give_up, timeout_ns, 1, rank, RANKS, 0}, phase, 0};
  cpu_exchange(NULL, &p);
}

static void *run_steps(void *argument) {
  const int rank = (int)(intptr_t)argument;
  static int wrong;
  for (int step = 0; step < STEPS; step++) {
    for (int peer = 0; peer < RANKS; peer++) values[peer][rank] = step;
    exchange(rank, MOEFLOW_PHASE_DISPATCH, 60000000000u);
    for (int source = 0; source < RANKS; source++) {
      if (values[rank][source] != step) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    }
    exchange(rank, MOEFLOW_PHASE_RETURN, 60000000000u);
    lanes[rank].epoch++;
  }
  return &wrong;
}

static void test_steps(void) { /* across the wrap of epochs */
  pthread_t threads[RANKS];
  void *wrong = NULL;
  reset(0u - STEPS / 2);
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run_steps, (void *)(intptr_t)r);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], &wrong);
  EXPECT(*(int *)wrong == 0, "%d values were not there when the flag was", *(int *)wrong);
  for (int r = 0; r < RANKS; r++) EXPECT(lanes[r].poison == 0 && lanes[r].epoch == STEPS / 2, "rank %d", r);
}

static void raise_all_but(int rank, int silent, uint32_t epoch) {
  for (int r = 0; r < RANKS; r++) flags[rank][r] = r == silent ? epoch - 1 : epoch;
}

static void test_silent(void) {
  reset(10);
  raise_all_but(1, 2, 10);
  exchange(1, MOEFLOW_PHASE_DISPATCH, 20000000);
  EXPECT(lanes[1].poison == MOEFLOW_POISON_TIMEOUT && records[1].poison == MOEFLOW_POISON_TIMEOUT, "%u", lanes[1].poison);
  EXPECT(records[1].peer == 2 && records[1].phase == MOEFLOW_PHASE_DISPATCH && records[1].step == 10, "peer %u",
         records[1].peer);
  EXPECT(flags[3][1] == 10 && flags[3][RANKS + 1] == 9, "its own flag is up, in its phase only");
  exchange(1, MOEFLOW_PHASE_RETURN, 60000000000u); /* poisoned: raises and returns */
  EXPECT(flags[3][RANKS + 1] == 10 + MOEFLOW_FLAG_POISONED && flags[3][2 * RANKS + 1] == MOEFLOW_POISON_TIMEOUT,
         "peers learn of it");
}

static void test_poisoned_peer(void) {
  reset(10);
  raise_all_but(0, -1, 10);
  flags[0][2 * RANKS + 1] = MOEFLOW_POISON_PEER; /* caught it from rank 3 */
  flags[0][2 * RANKS + 3] = MOEFLOW_POISON_ABORT;
  exchange(0, MOEFLOW_PHASE_DISPATCH, 60000000000u);
  EXPECT(lanes[0].poison == MOEFLOW_POISON_PEER && records[0].peer == 3, "a raised flag does not hide the mark: %u",
         lanes[0].poison);
}

static void test_abort(void) {
  reset(10);
  raise_all_but(0, 2, 10);
  give_up = 1;
  exchange(0, MOEFLOW_PHASE_RETURN, 60000000000u);
  EXPECT(lanes[0].poison == MOEFLOW_POISON_ABORT && records[0].phase == MOEFLOW_PHASE_RETURN, "%u", lanes[0].poison);
}

/* ---- The pool of workers, which has no other test of its own ---- */

struct sums {
  int counts[1000];
};

static void count(void *argument, int64_t unit) {
  __atomic_fetch_add(&((struct sums *)argument)->counts[unit], 1, __ATOMIC_RELAXED);
}

static void *hand_in(void *pool) {
  for (int round = 0; round < 50; round++) {
    struct sums sums = {{0}};
    cpu_pool_run(pool, 3, 1000, count, &sums);
    for (int i = 0; i < 1000; i++) {
      if (sums.counts[i] != 1) return pool;
    }
  }
  return NULL;
}

static void test_pool(void) {
  struct cpu_pool *pool = NULL;
  pthread_t threads[RANKS];
  EXPECT(cpu_pool_create(3, &pool) == MOEFLOW_OK, "pool");
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, hand_in, pool);
  for (int r = 0; r < RANKS; r++) {
    void *wrong = NULL;
    pthread_join(threads[r], &wrong);
    EXPECT(!wrong, "each unit runs once, caller %d", r);
  }
  cpu_pool_destroy(pool);
  cpu_pool_destroy(NULL);
  EXPECT(hand_in(NULL) == NULL, "without a pool");
}

int main(void) {
  test_steps();
  test_silent();
  test_poisoned_peer();
  test_abort();
  test_pool();
  TEST_END;
}
