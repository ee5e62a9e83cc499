/* moeflow_group_config.workspace_of: a group that uses another one's activations and outputs. */
#pragma GCC diagnostic ignored "-Wunused-function" /* world_close */
#include "cpu_world.h"
#include "internal.h"

#define H 64
#define CAPACITY 16

static struct world world;

static moeflow_group_config config_of(int capacity, moeflow_group *lender, moeflow_unique_id *id) {
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  EXPECT(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, id) == MOEFLOW_OK, "%s", moeflow_last_error());
  config.capacity = capacity;
  config.transport = MOEFLOW_TRANSPORT_LOCAL;
  config.unique_id = id;
  config.workspace_of = lender;
  return config;
}

static void refused(int capacity, int lanes, moeflow_group *lender, moeflow_status want, const char *text) {
  moeflow_unique_id id;
  moeflow_group_config config = config_of(capacity, lender, &id);
  moeflow_group *group = NULL;
  config.lanes = lanes;
  const moeflow_status status = moeflow_group_create(&world.rank[0].context, 1, &config, &group);
  EXPECT(status == want && !group && strstr(moeflow_last_error(), text), "%s: %s", moeflow_status_name(status),
         moeflow_last_error());
}

static void step_of(struct step *step) {
  *step = (struct step){.tokens = {CAPACITY}, .tokens_max = CAPACITY};
  step_fill(&world, step, 5);
  world_step(&world, step);
  step_expect(&world, step, "step");
}

/* The borrower's layer in the world's place: the same weights, another group. */
static void test_same_results(void) {
  struct world_rank *mine = &world.rank[0], lender = *mine;
  moeflow_unique_id id;
  struct step own, borrowed;
  step_of(&own);
  moeflow_group_config config = config_of(CAPACITY, lender.group, &id);
  EXPECT(moeflow_group_create(&mine->context, 1, &config, &mine->group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_layer_create(mine->group, mine->context, NULL, &mine->layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int down = 0; down < 2; down++) { /* world_bind makes them anew */
    free(mine->matrices[down]);
    free(mine->pointers[down]);
  }
  EXPECT(world_bind(&world, 0) == MOEFLOW_OK && moeflow_prepare(&mine->layer, 1, 0) == MOEFLOW_OK, "%s",
         moeflow_last_error());
  const struct group_lane *lane = &mine->group->lanes[0], *lent = &lender.group->lanes[0];
  EXPECT(lane->outputs == lent->outputs && lane->activations == lent->activations && lane->entries != lent->entries);
  EXPECT(lane->arena_bytes + (size_t)lent->outputs_max * 4 <= lent->arena_bytes, "%zu of %zu bytes: its own are not needed",
         lane->arena_bytes, lent->arena_bytes);
  step_of(&borrowed);
  EXPECT(!memcmp(own.out[0], borrowed.out[0], CAPACITY * H * 2), "other results");
  EXPECT(moeflow_group_destroy(lender.group) == MOEFLOW_ERROR_STATE, "the lender goes first: %s", moeflow_last_error());
  EXPECT(moeflow_layer_destroy(lender.layer) == MOEFLOW_OK);
  EXPECT(moeflow_group_destroy(lender.group) == MOEFLOW_ERROR_STATE && strstr(moeflow_last_error(), "1 group(s) use"), "%s",
         moeflow_last_error());
  EXPECT(moeflow_layer_destroy(mine->layer) == MOEFLOW_OK && moeflow_group_destroy(mine->group) == MOEFLOW_OK);
  EXPECT(moeflow_group_destroy(lender.group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_close(mine->context) == MOEFLOW_OK, "%s", moeflow_last_error());
  step_free(&world, &own);
  step_free(&world, &borrowed);
}

static void test_refused(void) {
  struct world_rank *mine = &world.rank[0];
  refused(CAPACITY + 1, 1, mine->group, MOEFLOW_ERROR_ARGUMENT, "outputs a lane, and");
  refused(CAPACITY, 2, mine->group, MOEFLOW_ERROR_ARGUMENT, "1 lane(s), and this group on cpu device 0 with 2");
  refused(CAPACITY, 1, (moeflow_group *)mine->layer, MOEFLOW_ERROR_STATE, "workspace_of");
  EXPECT(atomic_load(&mine->group->borrowers) == 0, "a refused group counts");
}

int main(void) {
  world.spec = world_spec(H, 32, 6, 2);
  world.ranks = 1;
  world.capacity = CAPACITY;
  world_open(&world);
  test_refused();
  test_same_results(); /* closes what the world opened, in an order of its own */
  TEST_END;
}
