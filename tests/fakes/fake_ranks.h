/* A world of RANKS threads on the fakes: each rank's group, layer and last status, for tests of the runtime's host logic. */
#ifndef MOEFLOW_FAKE_RANKS_H
#define MOEFLOW_FAKE_RANKS_H

#include "fakes/fake_world.h"

#define RANKS 2

/* ---- A world of RANKS threads ---- */

struct rank {
  moeflow_group_config config;
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  moeflow_status status;
  char message[1024];
};

static struct rank ranks[RANKS];
static struct plan plan;
static void (*make_plan)(const struct spec *spec, const char *arch, struct plan *plan) = fake_plan;
static const int32_t *layer_places; /* NULL: linear */

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

static void *create_group(void *argument) {
  struct rank *rank = argument;
  if (rank->config.ranks) note(rank, moeflow_group_create(&rank->context, 1, &rank->config, &rank->group));
  return NULL;
}

UNUSED static void *make_layer(void *argument) {
  struct rank *rank = argument;
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = (void *)0x100000;
  weights.down = (void *)0x200000;
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  config.places = layer_places;
  note(rank, moeflow_layer_create(rank->group, rank->context, &config, &rank->layer));
  if (rank->status == MOEFLOW_OK) note(rank, moeflow_layer_bind(rank->layer, &weights));
  if (rank->status == MOEFLOW_OK) note(rank, moeflow_prepare(&rank->layer, 1, 0));
  return NULL;
}

static void *destroy(void *argument) {
  struct rank *rank = argument;
  note(rank, moeflow_layer_destroy(rank->layer));
  note(rank, moeflow_group_destroy(rank->group));
  rank->layer = NULL;
  rank->group = NULL;
  return NULL;
}

static void open_contexts(void) {
  moeflow_open_config config = fake_open_config();
  for (int r = 0; r < RANKS; r++) EXPECT_OK(moeflow_open(&config, &ranks[r].context));
}

static void set_up_spec(moeflow_transport transport, const char *nccl_name, const struct spec *spec) {
  static moeflow_unique_id id;
  fake_load(nccl_name);
  make_plan(spec, "sm_90a", &plan);
  open_contexts();
  EXPECT_OK(moeflow_get_unique_id(transport, &id));
  for (int r = 0; r < RANKS; r++) {
    moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
    config.rank = r;
    config.ranks = RANKS;
    config.capacity = 100;
    config.transport = transport;
    config.unique_id = &id;
    config.timeout_ms = 2000;
    ranks[r].config = config;
    ranks[r].status = MOEFLOW_OK;
  }
}

UNUSED static void set_up(moeflow_transport transport, const char *nccl_name) {
  const struct spec spec = fake_spec();
  set_up_spec(transport, nccl_name, &spec);
}

static void expect_all(moeflow_status status, const char *text) {
  for (int r = 0; r < RANKS; r++) {
    EXPECT(ranks[r].status == status, "rank %d: %s: %s", r, moeflow_status_name(ranks[r].status), ranks[r].message);
    EXPECT(strstr(ranks[r].message, text), "rank %d: no '%s' in: %s", r, text, ranks[r].message);
    ranks[r].status = MOEFLOW_OK;
    ranks[r].message[0] = 0;
  }
}

static void tear_down(void) {
  each(destroy);
  expect_all(MOEFLOW_OK, "");
  for (int r = 0; r < RANKS; r++) EXPECT_OK(moeflow_close(ranks[r].context));
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
  EXPECT(nccl_fake->live == 0, "%d communicators are not given back", nccl_fake->live);
}

/* ---- A step ---- */

UNUSED static moeflow_forward_args step_args(int tokens, int tokens_max) {
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = tokens;
  args.tokens_max = tokens_max;
  args.hidden = args.out = (void *)0x10000;
  args.ids = (void *)0x20000;
  args.weights = (void *)0x30000;
  args.stream = &cuda->legacy;
  return args;
}

UNUSED static struct moeflow_lane read_lane(const struct moeflow_group *group, int lane) {
  return *group->lanes[lane].state; /* fake device memory is the host's */
}

/* The log from call `from` on: exactly these kernels, with nothing else between them. */
UNUSED static void expect_kernels(int from, const char *const *names, const unsigned *blocks, int count) {
  EXPECT(cuda->call_count - from == count, "%d calls, want %d", cuda->call_count - from, count);
  for (int i = 0; i < count && from + i < cuda->call_count; i++) {
    const struct fake_call *call = &cuda->calls[from + i];
    EXPECT(!strcmp(call->name, "cuLaunchKernel"), "call %d is %s", i, call->name);
    EXPECT(!strcmp(call->kernel, names[i]), "call %d launches %s, want %s", i, call->kernel, names[i]);
    EXPECT(call->blocks == blocks[i], "%s: %u blocks, want %u", call->kernel, call->blocks, blocks[i]);
    EXPECT(call->stream == &cuda->legacy, "%s: another stream", call->kernel);
  }
}
#endif
