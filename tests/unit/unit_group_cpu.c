/* Ranks that meet, or fail to, over the local transport on the CPU backend: each difference is named on all ranks, a missing
 * rank is named, and nobody hangs or keeps memory. */
#include <pthread.h>
#include <unistd.h>

#include "deadline.h"
#include "fingerprint.h"
#include "internal.h"
#include "test.h"

#define RANKS 3

struct rank {
  moeflow_group_config config;
  struct spec specs[2];
  int contexts;
  moeflow_context *context[2];
  moeflow_group *group;
  moeflow_layer *layer;
  moeflow_layer_config layer_config;
  int layers, tokens_max, bind;
  moeflow_status status;
  char message[1024];
};

static struct rank ranks[RANKS];
static moeflow_unique_id id;
static uint16_t weights_memory[1 << 18] __attribute__((aligned(64)));

static void note(struct rank *rank, moeflow_status status) {
  if (rank->status != MOEFLOW_OK || status == MOEFLOW_OK) return;
  rank->status = status;
  snprintf(rank->message, sizeof rank->message, "%s", moeflow_last_error());
}

static void each(void *(*run)(void *)) {
  pthread_t threads[RANKS];
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run, &ranks[r]);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
}

static void set_up(void) {
  memset(ranks, 0, sizeof ranks);
  EXPECT(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int r = 0; r < RANKS; r++) {
    moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
    moeflow_layer_config layer_config = MOEFLOW_LAYER_CONFIG_INIT;
    config.rank = r;
    config.ranks = RANKS;
    config.capacity = 8;
    config.unique_id = &id;
    config.timeout_ms = 5000;
    ranks[r].config = config;
    ranks[r].layer_config = layer_config;
    ranks[r].contexts = ranks[r].layers = ranks[r].bind = 1;
    for (int i = 0; i < 2; i++) {
      ranks[r].specs[i] = (struct spec){.name = "test",
                                        .hidden = 64,
                                        .intermediate = 32,
                                        .experts = 12,
                                        .top_k = 2,
                                        .score = SPEC_SIGMOID,
                                        .groups = 1,
                                        .top_groups = 1,
                                        .scale = 1};
    }
  }
}

static void *create(void *argument) {
  struct rank *rank = argument;
  for (int i = 0; i < rank->contexts; i++) {
    char text[SPEC_TEXT_MAX];
    moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
    note(rank, spec_write(&rank->specs[i], text));
    config.backend = MOEFLOW_BACKEND_CPU;
    config.spec = text;
    note(rank, moeflow_open(&config, &rank->context[i]));
  }
  if (rank->config.ranks) note(rank, moeflow_group_create(rank->context, rank->contexts, &rank->config, &rank->group));
  return NULL;
}

static void *prepare(void *argument) {
  struct rank *rank = argument;
  moeflow_layer *layers[2];
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = weights.down = weights_memory;
  note(rank, moeflow_layer_create(rank->group, rank->context[0], &rank->layer_config, &rank->layer));
  if (rank->status == MOEFLOW_OK && rank->bind) note(rank, moeflow_layer_bind(rank->layer, &weights));
  layers[0] = layers[1] = rank->layer;
  if (rank->status == MOEFLOW_OK) note(rank, moeflow_prepare(layers, rank->layers, rank->tokens_max));
  return NULL;
}

/* One thread destroys everything, rank by rank: leaving is no meeting. */
static void tear_down(void) {
  for (int r = 0; r < RANKS; r++) {
    EXPECT(moeflow_layer_destroy(ranks[r].layer) == MOEFLOW_OK, "%s", moeflow_last_error());
    EXPECT(moeflow_group_destroy(ranks[r].group) == MOEFLOW_OK, "%s", moeflow_last_error());
    for (int i = 0; i < 2; i++) EXPECT(moeflow_close(ranks[r].context[i]) == MOEFLOW_OK, "%s", moeflow_last_error());
  }
}

static void expect_all(moeflow_status status, const char *text) {
  for (int r = 0; r < RANKS; r++) {
    EXPECT(ranks[r].status == status, "rank %d: %s: %s", r, moeflow_status_name(ranks[r].status), ranks[r].message);
    EXPECT(strstr(ranks[r].message, text), "rank %d: no '%s' in: %s", r, text, ranks[r].message);
  }
}

/* ---- Differences at creation ---- */

#define DIFFERS(change, text)                                       \
  do {                                                              \
    set_up();                                                       \
    change;                                                         \
    each(create);                                                   \
    expect_all(MOEFLOW_ERROR_MISMATCH, text);                       \
    for (int r = 0; r < RANKS; r++) EXPECT(ranks[r].group == NULL); \
    tear_down();                                                    \
  } while (0)

static void test_create_differs(void) {
  DIFFERS(ranks[2].config.capacity = 9, "capacity: rank 0 has 8, rank 2 has 9");
  DIFFERS(ranks[1].config.lanes = 2, "lanes: rank 0 has 1, rank 1 has 2");
  DIFFERS(ranks[0].config.local_experts_max = 7, "local_experts_max: rank 0 has 7, rank 1 has 4");
  DIFFERS(ranks[1].specs[0].hidden = 128, "row bytes: rank 0 has 256, rank 1 has 384");
  DIFFERS(ranks[1].specs[0].returned = SPEC_WIRE_FP32, "return row bytes: rank 0 has 128, rank 1 has 256");
  DIFFERS(ranks[2].specs[0].intermediate = 64, "models (hash of their specs)");
  DIFFERS(ranks[1].contexts = 2, "number of models: rank 0 has 1, rank 1 has 2");
  DIFFERS(ranks[1].config.ranks = 4, "ranks disagree on ranks");
  /* The first of several differences is named. */
  DIFFERS((ranks[1].config.lanes = 2, ranks[1].config.capacity = 3), "capacity: rank 0 has 8, rank 1 has 3");
}

/* What cannot differ within one process. */
static void test_compare(void) {
  struct {
    int64_t number;
    char hash[65];
  } all[3];
  const struct fingerprint_field fields[] = {{"NCCL version", 0, 0}, {"cubins", sizeof(int64_t), 1}};
  memset(all, 0, sizeof all);
  for (int r = 0; r < 3; r++) {
    all[r].number = 22809;
    memset(all[r].hash, 'a', 64);
  }
  EXPECT(fingerprint_compare(all, sizeof *all, 3, fields, 2) == MOEFLOW_OK);
  all[2].hash[63] = 'b'; /* the last digit counts, though only the first are shown */
  EXPECT(fingerprint_compare(all, sizeof *all, 3, fields, 2) == MOEFLOW_ERROR_MISMATCH);
  EXPECT(strstr(moeflow_last_error(), "cubins: rank 0 has aaaa"), "%s", moeflow_last_error());
  all[1].number = 22703;
  EXPECT(fingerprint_compare(all, sizeof *all, 3, fields, 2) == MOEFLOW_ERROR_MISMATCH);
  EXPECT(strstr(moeflow_last_error(), "NCCL version: rank 0 has 22809, rank 1 has 22703"), "%s", moeflow_last_error());
  EXPECT(fingerprint_compare(all, sizeof *all, 1, fields, 2) == MOEFLOW_OK, "one rank agrees with itself");
}

/* ---- Differences at preparation: the group stays usable ---- */

#define PREPARE_DIFFERS(change, status, text) \
  do {                                        \
    set_up();                                 \
    each(create);                             \
    change;                                   \
    each(prepare);                            \
    expect_all(status, text);                 \
    tear_down();                              \
  } while (0)

static void test_prepare_differs(void) {
  static int32_t places[12];
  for (int e = 0; e < 12; e++) places[e] = (e % 3) << 16 | e / 3;
  PREPARE_DIFFERS(ranks[1].layer_config.places = places, MOEFLOW_ERROR_MISMATCH,
                  "layer 0: ranks disagree on the layer's places");
  PREPARE_DIFFERS(ranks[2].layer_config.combine = MOEFLOW_COMBINE_RING, MOEFLOW_ERROR_MISMATCH,
                  "combine: rank 0 has 0, rank 2 has 1");
  PREPARE_DIFFERS(ranks[2].layers = 2, MOEFLOW_ERROR_MISMATCH, "number of layers to prepare: rank 0 has 1, rank 2 has 2");
  PREPARE_DIFFERS(ranks[2].tokens_max = 4, MOEFLOW_ERROR_MISMATCH, "tokens_max to prepare: rank 0 has 8, rank 2 has 4");
}

/* One rank's own failure is told to all. */
static void test_prepare_fails_on_one(void) {
  set_up();
  each(create);
  ranks[1].bind = 0;
  each(prepare);
  for (int r = 0; r < RANKS; r++) {
    EXPECT(ranks[r].status == (r == 1 ? MOEFLOW_ERROR_STATE : MOEFLOW_ERROR_PEER), "%s", ranks[r].message);
    EXPECT(strstr(ranks[r].message, "moeflow_layer_bind"), "rank %d: %s", r, ranks[r].message);
    EXPECT(r == 1 || strstr(ranks[r].message, "rank 1 failed"), "rank %d: %s", r, ranks[r].message);
  }
  tear_down();
}

/* ---- Ranks that do not come, or come twice ---- */

static void test_missing_rank(void) {
  set_up();
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 200;
  ranks[1].config.ranks = 0; /* stays away */
  const int64_t begin = deadline_now_ms();
  each(create);
  EXPECT(deadline_now_ms() - begin < 3000, "bounded");
  EXPECT(ranks[0].status == MOEFLOW_ERROR_TIMEOUT && ranks[2].status == MOEFLOW_ERROR_TIMEOUT);
  EXPECT(strstr(ranks[0].message, "rank 1 of 3 did not join"), "%s", ranks[0].message);
  EXPECT(strstr(ranks[2].message, "rank 1 of 3 did not join"), "%s", ranks[2].message);
  tear_down();
  set_up(); /* and to preparation */
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 200;
  each(create);
  expect_all(MOEFLOW_OK, "");
  prepare(&ranks[2]);
  EXPECT(ranks[2].status == MOEFLOW_ERROR_TIMEOUT && strstr(ranks[2].message, "rank 0, 1 of 3 did not come"), "%s",
         ranks[2].message);
  prepare(&ranks[0]); /* the group is of no use any more, and says so at once */
  EXPECT(ranks[0].status == MOEFLOW_ERROR_TIMEOUT && strstr(ranks[0].message, "did not come"), "%s", ranks[0].message);
  tear_down();
}

static void test_same_rank_twice(void) {
  set_up();
  ranks[2].config.rank = 1;
  each(create);
  expect_all(MOEFLOW_ERROR_ARGUMENT, "two ranks of the group say they are rank 1");
  tear_down();
}

static void test_id_used_again(void) {
  set_up();
  each(create);
  expect_all(MOEFLOW_OK, "");
  moeflow_group *again = NULL;
  EXPECT(moeflow_group_create(ranks[0].context, 1, &ranks[0].config, &again) != MOEFLOW_OK, "an id serves one group");
  EXPECT(strstr(moeflow_last_error(), "unique_id is used a second time"), "%s", moeflow_last_error());
  each(prepare); /* the group is none the worse for it */
  expect_all(MOEFLOW_OK, "");
  tear_down();
}

/* A rank that leaves is missed at the next meeting, not waited for. */
static void test_leaving(void) {
  set_up();
  each(create);
  expect_all(MOEFLOW_OK, "");
  EXPECT(moeflow_group_destroy(ranks[1].group) == MOEFLOW_OK, "%s", moeflow_last_error());
  ranks[1].group = NULL;
  prepare(&ranks[0]);
  EXPECT(ranks[0].status == MOEFLOW_ERROR_STATE && strstr(ranks[0].message, "left"), "%s", ranks[0].message);
  tear_down();
}

/* ---- Memory from the caller ---- */

static atomic_long lent_bytes;
static atomic_int lent_fail; /* the n-th allocation fails */

static void *lend(void *user, size_t bytes, size_t alignment) {
  (void)user;
  if (atomic_fetch_sub(&lent_fail, 1) == 1) return NULL;
  atomic_fetch_add(&lent_bytes, (long)bytes);
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void take_back(void *user, void *memory, size_t bytes) {
  (void)user;
  atomic_fetch_sub(&lent_bytes, (long)bytes);
  free(memory);
}

static void test_allocator_fails(void) {
  const moeflow_allocator allocator = {lend, take_back, NULL};
  int failures = 0;
  for (int n = 1; n < 30; n++) {
    set_up();
    for (int r = 0; r < RANKS; r++) {
      ranks[r].config.allocator = &allocator;
      ranks[r].config.lanes = 2;
    }
    atomic_store(&lent_fail, n);
    each(create);
    const int enough = atomic_load(&lent_fail) > 0;
    for (int r = 0; r < RANKS; r++) EXPECT((ranks[r].status == MOEFLOW_OK) == enough, "n %d: %s", n, ranks[r].message);
    failures += !enough;
    tear_down();
    EXPECT(atomic_load(&lent_bytes) == 0, "n %d: %ld bytes not given back", n, atomic_load(&lent_bytes));
    if (enough) break;
  }
  EXPECT(failures == 4 * RANKS, "%d: a lane is two allocations, window and arena", failures);
}

int main(void) {
  test_create_differs();
  test_compare();
  test_prepare_differs();
  test_prepare_fails_on_one();
  test_missing_rank();
  test_same_rank_twice();
  test_id_used_again();
  test_leaving();
  test_allocator_fails();
  TEST_END;
}
