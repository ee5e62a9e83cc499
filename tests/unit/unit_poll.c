/* moeflow_poll against a record that changes while it reads: a step that is poisoned and then ends never passes for good. */
#include <pthread.h>
#include <sched.h>

#include "internal.h"
#include "spec.h"
#include "test.h"

#define RACES 200000

static atomic_int race_round;

/* As the device does: poison before the end of the step. */
static void *end_poisoned(void *argument) {
  struct moeflow_record *record = argument;
  for (int round = 1; round <= RACES; round++) {
    while (atomic_load(&race_round) < round) sched_yield();
    for (volatile int wait = 0; wait < round % 512; wait++) continue;
    __atomic_store_n(&record->poison, (uint32_t)MOEFLOW_POISON_PEER, __ATOMIC_RELEASE);
    __atomic_store_n(&record->finished, 1u, __ATOMIC_RELEASE);
  }
  return NULL;
}

static void start_step(struct moeflow_record *record) {
  __atomic_store_n(&record->finished, 0u, __ATOMIC_RELEASE);
  __atomic_store_n(&record->started, 1u, __ATOMIC_RELEASE);
  __atomic_store_n(&record->poison, 0u, __ATOMIC_RELEASE);
}

int main(void) {
  const struct spec spec = {.name = "test",
                            .hidden = 128,
                            .intermediate = 128,
                            .experts = 4,
                            .top_k = 2,
                            .groups = 1,
                            .top_groups = 1,
                            .scale = 1};
  char text[SPEC_TEXT_MAX];
  moeflow_open_config open = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_context *context;
  moeflow_group *group;
  pthread_t thread;
  int good = 0;
  open.backend = MOEFLOW_BACKEND_CPU;
  open.spec = text;
  EXPECT(spec_write(&spec, text) == MOEFLOW_OK && moeflow_open(&open, &context) == MOEFLOW_OK, "%s", moeflow_last_error());
  if (test_failures) return EXIT_FAILURE;
  EXPECT(moeflow_group_create(&context, 1, &config, &group) == MOEFLOW_OK, "%s", moeflow_last_error());
  if (test_failures) return EXIT_FAILURE;
  struct moeflow_record *record = group->lanes[0].record;
  EXPECT(pthread_create(&thread, NULL, end_poisoned, record) == 0);
  for (int round = 1; round <= RACES; round++) {
    moeflow_status status;
    start_step(record);
    atomic_store(&race_round, round);
    while ((status = moeflow_poll(group, 0)) == MOEFLOW_ERROR_TIMEOUT) continue;
    good += status == MOEFLOW_OK;
    while (!__atomic_load_n(&record->finished, __ATOMIC_ACQUIRE)) sched_yield(); /* the round's last store */
  }
  pthread_join(thread, NULL);
  EXPECT(good == 0, "%d of %d poisoned steps passed for good ones", good, RACES);
  EXPECT(moeflow_group_destroy(group) == MOEFLOW_OK && moeflow_close(context) == MOEFLOW_OK, "%s", moeflow_last_error());
  TEST_END;
}
