/* What goes wrong in a layer, on the CPU backend: bad arguments, ranks that disagree, silent and aborted ranks, and what
 * each rank is told. Then lanes and layers that share a group. */
#include <unistd.h>

#include "cpu_world.h"

static void open_filled(struct world *world, struct step *step, int seed) {
  world_open(world);
  step_fill(world, step, seed);
}

static void close_filled(struct world *world, struct step *step) {
  step_free(world, step);
  world_close(world);
}

static int all_nan(const struct step *step, int rank, int hidden) {
  for (int i = 0; i < step->tokens[rank] * hidden; i++) {
    if (step->out[rank][i] != 0x7fc0) return 0;
  }
  return 1;
}

static int says(const char *message, const char *what) {
  return strstr(message, what) != NULL;
}

/* ---- tokens and tokens_max ---- */

static void test_capacity(void) { /* refused alike on all ranks, without a step: the group goes on */
  struct world world = {.spec = world_spec(16, 8, 4, 2), .ranks = 2, .capacity = 4};
  struct step step = {.tokens = {4, 4}, .tokens_max = 5};
  open_filled(&world, &step, 1);
  world_step(&world, &step);
  for (int r = 0; r < 2; r++) {
    EXPECT(step.forward[r] == MOEFLOW_ERROR_CAPACITY && step.poll[r] == MOEFLOW_OK, "rank %d: %d", r, step.forward[r]);
    EXPECT(says(step.forward_message[r], "5") && says(step.forward_message[r], "4"), "%s", step.forward_message[r]);
    EXPECT(step.out[r][0] == 0xffff, "nothing written");
  }
  step.tokens_max = -1;
  world_step(&world, &step);
  EXPECT(step.forward[0] == MOEFLOW_ERROR_CAPACITY, "negative: %d", step.forward[0]);
  step.tokens_max = 0;
  world_step(&world, &step);
  step_expect(&world, &step, "after a refusal");
  close_filled(&world, &step);
}

/* Rank 1 makes the mistake that `spoil` does; it alone gets an error, the peers finish and learn who it was. */
struct spoiled {
  struct step *step;
  void (*spoil)(moeflow_forward_args *);
};

static void run_spoiled(struct world *world, int rank, void *argument) {
  struct spoiled *spoiled = argument;
  struct step *step = spoiled->step;
  if (rank != 1) {
    step_run_rank(world, rank, step);
    return;
  }
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = step->tokens[1];
  args.tokens_max = step->tokens_max;
  args.hidden = step->hidden[1];
  args.ids = step->ids[1];
  args.weights = step->weights[1];
  args.out = step->out[1];
  spoiled->spoil(&args);
  step->forward[1] = moeflow_forward(world->rank[1].layer, &args);
  snprintf(step->forward_message[1], 512, "%s", moeflow_last_error());
  step->poll[1] = moeflow_poll(world->rank[1].group, 60000);
}

static void expect_joined(void (*spoil)(moeflow_forward_args *), const char *what) {
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 3, .capacity = 4};
  struct step step = {.tokens = {4, 2, 3}};
  struct spoiled spoiled = {&step, spoil};
  open_filled(&world, &step, 2);
  world_each(&world, run_spoiled, &spoiled);
  EXPECT(step.forward[1] == MOEFLOW_ERROR_ARGUMENT, "%s: %d %s", what, step.forward[1], step.forward_message[1]);
  for (int r = 0; r < 3; r += 2) {
    EXPECT(step.forward[r] == MOEFLOW_OK, "%s: rank %d: %s", what, r, step.forward_message[r]);
    EXPECT(step.poll[r] == MOEFLOW_ERROR_PEER && says(step.poll_message[r], "rank 1"), "%s: rank %d: %s", what, r,
           step.poll_message[r]);
    step.poll[r] = MOEFLOW_OK;
  }
  step.forward[1] = MOEFLOW_OK;
  step.poll[1] = MOEFLOW_OK;
  EXPECT(step.out[1][0] == 0xffff, "%s: rank 1 has no output", what);
  memset(step.out[1], 0xff, 2 * 16 * 2);
  step.tokens[1] = 0;
  step_expect(&world, &step, what); /* the others' results are right */
  step.tokens[1] = 2;
  world_step(&world, &step);
  step_expect(&world, &step, "the step after");
  close_filled(&world, &step);
}

static void too_many(moeflow_forward_args *args) {
  args->tokens = 5;
}
static void more_than_max(moeflow_forward_args *args) {
  args->tokens_max = 4;
  args->tokens = 6;
}
static void no_hidden(moeflow_forward_args *args) {
  args->hidden = NULL;
}
static void misaligned_hidden(moeflow_forward_args *args) {
  args->hidden = (const char *)args->hidden + 2;
}
static void misaligned_out(moeflow_forward_args *args) {
  args->out = (char *)args->out + 8;
}
static void misaligned_weights(moeflow_forward_args *args) {
  args->weights = (const float *)(const void *)((const char *)args->weights + 2);
}
static void bad_dtype(moeflow_forward_args *args) {
  args->ids_dtype = MOEFLOW_DTYPE_FLOAT32;
}
static void no_ids(moeflow_forward_args *args) {
  args->ids = NULL;
}
static void unknown_flag(moeflow_forward_args *args) {
  args->flags = 64;
}

static void test_joined(void) {
  expect_joined(too_many, "tokens above the capacity");
  expect_joined(more_than_max, "tokens above tokens_max");
  expect_joined(no_hidden, "hidden NULL");
  expect_joined(misaligned_hidden, "hidden misaligned");
  expect_joined(misaligned_out, "out misaligned");
  expect_joined(misaligned_weights, "weights misaligned");
  expect_joined(bad_dtype, "ids of floats");
  expect_joined(no_ids, "ids NULL");
  expect_joined(unknown_flag, "unknown flag");
}

static void run_tokens_max(struct world *world, int rank, void *argument) {
  struct step mine = *(struct step *)argument;
  mine.tokens_max = rank == 1 ? 3 : 4;
  step_run_rank(world, rank, &mine);
  struct step *step = argument;
  step->forward[rank] = mine.forward[rank];
  step->poll[rank] = mine.poll[rank];
  memcpy(step->poll_message[rank], mine.poll_message[rank], 512);
}

static void test_tokens_max_mismatch(void) {
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 3, .capacity = 4};
  struct step step = {.tokens = {3, 3, 3}};
  open_filled(&world, &step, 3);
  world_each(&world, run_tokens_max, &step);
  for (int r = 0; r < 3; r++) {
    EXPECT(step.poll[r] == MOEFLOW_ERROR_PEER, "rank %d: %d", r, step.poll[r]);
    const char *values = r == 1 ? "3 here, 4 there" : "4 here, 3 there";
    const char *culprit = r == 1 ? "rank 0" : "rank 1";
    const int heard = says(step.poll_message[r], "peer's group is poisoned"); /* from one that saw it first */
    EXPECT(heard || (says(step.poll_message[r], values) && says(step.poll_message[r], culprit)), "rank %d: %s", r,
           step.poll_message[r]);
    EXPECT(all_nan(&step, r, 16), "rank %d: the output of a poisoned step is NaN", r);
  }
  memset(step.out[0], 0, 3 * 16 * 2);
  world_step(&world, &step); /* a poisoned group stays so, and answers at once */
  for (int r = 0; r < 3; r++)
    EXPECT(step.poll[r] == MOEFLOW_ERROR_PEER && all_nan(&step, r, 16), "rank %d stays poisoned", r);
  close_filled(&world, &step);
}

/* ---- Silence and abort ---- */

static void run_silent(struct world *world, int rank, void *argument) {
  if (rank != 2) step_run_rank(world, rank, argument);
}

static void test_silent(void) { /* rank 2 never calls; once it does, it hears of it */
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 3, .capacity = 4, .timeout_ms = 200};
  struct step step = {.tokens = {2, 2, 2}};
  open_filled(&world, &step, 4);
  world_each(&world, run_silent, &step);
  for (int r = 0; r < 2; r++) {
    EXPECT(step.poll[r] == MOEFLOW_ERROR_TIMEOUT || step.poll[r] == MOEFLOW_ERROR_PEER, "rank %d: %d", r, step.poll[r]);
    EXPECT(all_nan(&step, r, 16), "rank %d", r);
  }
  EXPECT(says(step.poll_message[0], "rank 2") || says(step.poll_message[1], "rank 2"), "%s", step.poll_message[0]);
  EXPECT(says(step.poll_message[0], "dispatch"), "%s", step.poll_message[0]);
  step_run_rank(&world, 2, &step);
  EXPECT(step.poll[2] == MOEFLOW_ERROR_PEER && all_nan(&step, 2, 16), "rank 2: %d %s", step.poll[2], step.poll_message[2]);
  close_filled(&world, &step);
}

static void run_abort(struct world *world, int rank, void *argument) {
  if (rank == 0) {
    step_run_rank(world, 0, argument);
  } else {
    usleep(50000);
    EXPECT(moeflow_abort(world->rank[0].group) == MOEFLOW_OK, "%s", moeflow_last_error());
  }
}

static void *watch(void *argument) {
  struct world *world = argument;
  for (int i = 0; i < 20000; i++) {
    const moeflow_status status = moeflow_poll(world->rank[i % 2].group, 0);
    EXPECT(status == MOEFLOW_OK || status == MOEFLOW_ERROR_TIMEOUT, "look %d: %s", i, moeflow_last_error());
  }
  return NULL;
}

static void test_watched(void) { /* another thread looks all the while; under ThreadSanitizer nothing is to be said */
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 2, .capacity = 4};
  struct step step = {.tokens = {2, 2}};
  pthread_t watcher;
  open_filled(&world, &step, 7);
  pthread_create(&watcher, NULL, watch, &world);
  for (int i = 0; i < 30; i++) world_step(&world, &step);
  pthread_join(watcher, NULL);
  step_expect_ok(&world, &step, "the last step");
  close_filled(&world, &step);
}

static void test_abort(void) { /* another thread ends a wait that would take a minute */
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 2, .capacity = 4};
  struct step step = {.tokens = {2, 2}};
  open_filled(&world, &step, 5);
  world_each(&world, run_abort, &step);
  EXPECT(step.forward[0] == MOEFLOW_ERROR_PEER && step.poll[0] == MOEFLOW_ERROR_PEER, "%d %d", step.forward[0],
         step.poll[0]);
  EXPECT(all_nan(&step, 0, 16), "NaN");
  step_run_rank(&world, 1, &step);
  EXPECT(step.poll[1] == MOEFLOW_ERROR_PEER && all_nan(&step, 1, 16), "the peer learns of it: %d", step.poll[1]);
  close_filled(&world, &step);
}

static const void *lend_nothing(void *user, int local_expert, int down) {
  (void)user;
  (void)local_expert;
  (void)down;
  return NULL;
}

static void test_lend_nothing(void) {
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 2, .capacity = 4};
  struct step step = {.tokens = {2, 2}};
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  open_filled(&world, &step, 6);
  weights.lend = lend_nothing;
  EXPECT(moeflow_layer_bind(world.rank[1].layer, &weights) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int r = 0; r < 2; r++) {
    for (int i = 0; i < 4; i++) step.ids[r][i] = i % 2 ? 5 : 0;
  }
  world_step(&world, &step);
  EXPECT(step.forward[1] == MOEFLOW_ERROR_ARGUMENT && says(step.forward_message[1], "lend"), "%s", step.forward_message[1]);
  EXPECT(step.poll[0] == MOEFLOW_ERROR_PEER && says(step.poll_message[0], "rank 1"), "%s", step.poll_message[0]);
  EXPECT(step.poll[1] == MOEFLOW_ERROR_ARGUMENT && says(step.poll_message[1], "`lend` returned NULL"), "%s",
         step.poll_message[1]);
  EXPECT(all_nan(&step, 0, 16) && all_nan(&step, 1, 16), "NaN on both");
  close_filled(&world, &step);
}

/* ---- Wrong moment, wrong weights ---- */

static void test_states(void) {
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 1, .capacity = 4};
  struct step step = {.tokens = {2}};
  struct world_rank *rank = &world.rank[0];
  moeflow_layer *layer = NULL;
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  open_filled(&world, &step, 7);
  EXPECT(moeflow_layer_create(rank->group, rank->context, NULL, &layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_forward(layer, &args) == MOEFLOW_ERROR_STATE && says(moeflow_last_error(), "bind"), "%s",
         moeflow_last_error());
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_ERROR_ARGUMENT, "no weights");
  weights.gate_up = (const char *)rank->matrices[0] + 2;
  weights.down = rank->matrices[1];
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_ERROR_ARGUMENT, "misaligned weights");
  weights.gate_up = rank->matrices[0];
  weights.down_row_stride = 8;
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_ERROR_ARGUMENT, "a stride below the row");
  weights.down_row_stride = 0;
  weights.down_bias = rank->matrices[1];
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_ERROR_UNSUPPORTED, "biases");
  weights.down_bias = NULL;
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_forward(layer, &args) == MOEFLOW_ERROR_STATE && says(moeflow_last_error(), "prepare"), "%s",
         moeflow_last_error());
  EXPECT(moeflow_prepare(&layer, 1, 2) == MOEFLOW_OK, "%s", moeflow_last_error());
  args.tokens_max = 3;
  EXPECT(moeflow_forward(layer, &args) == MOEFLOW_ERROR_STATE, "beyond what was prepared");
  args.lane = 1;
  EXPECT(moeflow_forward(layer, &args) == MOEFLOW_ERROR_ARGUMENT && says(moeflow_last_error(), "lane"), "%s",
         moeflow_last_error());
  EXPECT(moeflow_group_destroy(rank->group) == MOEFLOW_ERROR_STATE, "layers live");
  EXPECT(moeflow_layer_destroy(layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_forward(layer, &args) == MOEFLOW_ERROR_STATE, "destroyed");
  close_filled(&world, &step);
}

static void test_bad_places(void) {
  static const struct {
    int32_t places[3];
    const char *what;
  } bad[] = {{{0, 1, 1}, "a slot twice"},
             {{0, 2 << 16, 1}, "a rank that is none"},
             {{0, -2, 1}, "a negative place"},
             {{0, 2, 3}, "a hole"}};
  struct world world = {.spec = world_spec(16, 8, 3, 2), .ranks = 1, .capacity = 4};
  struct step step = {.tokens = {2}};
  moeflow_layer *layer;
  open_filled(&world, &step, 8);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
    config.places = bad[i].places;
    const moeflow_status status = moeflow_layer_create(world.rank[0].group, world.rank[0].context, &config, &layer);
    EXPECT(status == MOEFLOW_ERROR_ARGUMENT, "%s: %d", bad[i].what, status);
  }
  close_filled(&world, &step);
}

/* ---- Lanes and layers ---- */

static void test_lanes(void) { /* two micro-batches take turns, with steps of their own */
  struct world world = {.spec = world_spec(24, 16, 9, 3), .ranks = 3, .capacity = 8, .lanes = 2};
  struct step first = {.tokens = {8, 0, 5}, .lane = 0}, second = {.tokens = {1, 8, 2}, .lane = 1};
  open_filled(&world, &first, 9);
  step_fill(&world, &second, 10);
  for (int round = 0; round < 3; round++) {
    world_step(&world, &first);
    step_expect(&world, &first, "lane 0");
    for (int i = 0; i <= round; i++) world_step(&world, &second);
    step_expect(&world, &second, "lane 1");
  }
  step_free(&world, &second);
  close_filled(&world, &first);
}

/* Two models of different width, experts and K in one group: contexts[0] of each world is the other's second. */
struct pair {
  struct world *large, *small;
};

static void open_pair(struct world *unused, int rank, void *argument) {
  struct pair *pair = argument;
  struct world_rank *large = &pair->large->rank[rank], *small = &pair->small->rank[rank];
  moeflow_context *contexts[2];
  moeflow_layer *layers[2];
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  (void)unused;
  config.rank = rank;
  config.ranks = 2;
  config.capacity = 8;
  config.transport = MOEFLOW_TRANSPORT_LOCAL;
  config.unique_id = &pair->large->id;
  world_note(pair->large, rank, world_context(&pair->large->spec, &contexts[0]));
  world_note(pair->large, rank, world_context(&pair->small->spec, &contexts[1]));
  world_note(pair->large, rank, moeflow_group_create(contexts, 2, &config, &large->group));
  large->context = contexts[0];
  small->context = contexts[1];
  small->group = large->group;
  world_note(pair->large, rank, world_make_layer(pair->large, rank));
  world_note(pair->large, rank, world_make_layer(pair->small, rank));
  layers[0] = large->layer;
  layers[1] = small->layer;
  world_note(pair->large, rank, moeflow_prepare(layers, 2, 0));
}

static void test_two_layers(void) {
  struct world large = {.spec = world_spec(64, 40, 18, 5), .ranks = 2, .capacity = 8, .replicas = 1};
  struct world small = {.spec = world_spec(16, 24, 4, 2), .ranks = 2, .capacity = 8, .replicas = 1};
  struct step wide = {.tokens = {8, 3}}, narrow = {.tokens = {5, 8}};
  struct pair pair = {&large, &small};
  small.spec.reduce = SPEC_REDUCE_CHOICES;
  EXPECT(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &large.id) == MOEFLOW_OK, "id");
  world_each(&large, open_pair, &pair);
  for (int r = 0; r < 2; r++) EXPECT(large.rank[r].status == MOEFLOW_OK, "rank %d: %s", r, large.rank[r].message);
  step_fill(&large, &wide, 11);
  step_fill(&small, &narrow, 12);
  for (int round = 0; round < 3; round++) {
    world_step(&large, &wide);
    step_expect(&large, &wide, "the large layer");
    world_step(&small, &narrow);
    step_expect(&small, &narrow, "the small layer");
  }
  step_free(&large, &wide);
  step_free(&small, &narrow);
  for (int r = 0; r < 2; r++) { /* each world closes what is its own; the group goes with the large one's layers */
    EXPECT(moeflow_layer_destroy(large.rank[r].layer) == MOEFLOW_OK, "%s", moeflow_last_error());
    large.rank[r].layer = NULL;
  }
  struct world last = small;
  for (int r = 0; r < 2; r++) large.rank[r].group = NULL;
  world_close(&last);
  world_close(&large);
}

int main(void) {
  test_capacity();
  test_joined();
  test_tokens_max_mismatch();
  test_silent();
  test_abort();
  test_watched();
  test_lend_nothing();
  test_states();
  test_bad_places();
  test_lanes();
  test_two_layers();
  TEST_END;
}
