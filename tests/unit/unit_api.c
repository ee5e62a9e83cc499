/* The public interface on the CPU backend: arguments, states, messages, and ranks that do not play along. */
#include <sys/wait.h>
#include <unistd.h>

#include "internal.h"
#include "test.h"

#define EXPECT_STATUS(call, want, text)                                                       \
  do {                                                                                        \
    const moeflow_status got_ = (call);                                                       \
    EXPECT(got_ == (want), "%s: %s", moeflow_status_name(got_), moeflow_last_error());        \
    EXPECT(strstr(moeflow_last_error(), text), "no '%s' in: %s", text, moeflow_last_error()); \
  } while (0)

static struct spec small_spec(void) {
  return (struct spec){.name = "test",
                       .hidden = 64,
                       .intermediate = 32,
                       .experts = 8,
                       .top_k = 2,
                       .score = SPEC_SIGMOID,
                       .groups = 1,
                       .top_groups = 1,
                       .scale = 1};
}

static moeflow_status open_spec(const struct spec *spec, moeflow_context **context) {
  char text[SPEC_TEXT_MAX];
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  EXPECT(spec_write(spec, text) == MOEFLOW_OK, "%s", moeflow_last_error());
  config.backend = MOEFLOW_BACKEND_CPU;
  config.spec = text;
  return moeflow_open(&config, context);
}

/* Aligned, and one element more than asked for; all bytes 0xff. */
static uint16_t *values(size_t count) {
  const size_t bytes = (count * 2 / 64 + 1) * 64;
  uint16_t *memory = aligned_alloc(64, bytes);
  if (!memory) exit(1);
  return memset(memory, 0xff, bytes);
}

static void test_library(void) {
  EXPECT(moeflow_version() == MOEFLOW_VERSION_MAJOR * 10000 + MOEFLOW_VERSION_MINOR * 100 + MOEFLOW_VERSION_PATCH);
  EXPECT(!strcmp(moeflow_status_name(MOEFLOW_ERROR_CAPACITY), "MOEFLOW_ERROR_CAPACITY"));
  EXPECT(moeflow_status_name((moeflow_status)99) != NULL);
  const char *keys[] = {"\"version\"",   "\"sha\"",     "\"dirty\"", "\"trees\"",
                        "\"templates\"", "\"runtime\"", "\"gen\"",   "\"compiler\""};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    EXPECT(strstr(moeflow_build_info(), keys[i]), "%s in %s", keys[i], moeflow_build_info());
  }
}

/* ---- Context ---- */

static void test_open_arguments(void) {
  moeflow_context *context = (void *)1;
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  EXPECT_STATUS(moeflow_open(NULL, &context), MOEFLOW_ERROR_ARGUMENT, "moeflow_open_config is NULL");
  EXPECT(context == NULL);
  EXPECT_STATUS(moeflow_open(&config, NULL), MOEFLOW_ERROR_ARGUMENT, "NULL");
  config.size = 3;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "size is 3");
  config = (moeflow_open_config)MOEFLOW_OPEN_CONFIG_INIT;
  config.backend = MOEFLOW_BACKEND_CPU;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "give a model");
  config.model = "../secret";
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "is no model name");
  config.model = "tiny";
  config.dtype = "bf17";
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "bf17");
  config.backend = (moeflow_backend)7;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "backend 7");
  config.backend = MOEFLOW_BACKEND_CUDA;
  config.spec = "name x\n";
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "CPU backend");
  config.backend = MOEFLOW_BACKEND_CPU;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_FORMAT, "spec");
  config.spec = "moeflow: 1\nname: tiny\n"; /* the YAML itself */
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_FORMAT, "moeflow-gen explain MODEL.yaml --format spec");
}

/* A caller with a newer header: fine while the fields that this library does not know are zero. */
static void test_newer_header(void) {
  struct {
    moeflow_open_config known;
    int64_t later[2];
  } config = {MOEFLOW_OPEN_CONFIG_INIT, {0, 0}};
  char text[SPEC_TEXT_MAX];
  struct spec spec = small_spec();
  moeflow_context *context;
  spec_write(&spec, text);
  config.known.size = sizeof config;
  config.known.backend = MOEFLOW_BACKEND_CPU;
  config.known.spec = text;
  EXPECT(moeflow_open(&config.known, &context) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(!strcmp(moeflow_context_spec(context), text));
  EXPECT(moeflow_close(context) == MOEFLOW_OK);
  config.later[1] = 1;
  EXPECT_STATUS(moeflow_open(&config.known, &context), MOEFLOW_ERROR_UNSUPPORTED, "older than your header");
}

static void test_stale_handles(void) {
  struct spec spec = small_spec();
  moeflow_context *context;
  EXPECT(open_spec(&spec, &context) == MOEFLOW_OK);
  EXPECT(moeflow_close(context) == MOEFLOW_OK);
  EXPECT_STATUS(moeflow_close(context), MOEFLOW_ERROR_STATE, "destroyed");
  EXPECT(moeflow_context_spec(context) == NULL);
  EXPECT(moeflow_close(NULL) == MOEFLOW_OK && moeflow_group_destroy(NULL) == MOEFLOW_OK);
  EXPECT(moeflow_layer_destroy(NULL) == MOEFLOW_OK);
  EXPECT_STATUS(moeflow_abort(NULL), MOEFLOW_ERROR_ARGUMENT, "group is NULL");
  EXPECT_STATUS(moeflow_poll(NULL, 0), MOEFLOW_ERROR_ARGUMENT, "group is NULL");
}

static void test_fork(void) {
  struct spec spec = small_spec();
  moeflow_context *context;
  EXPECT(open_spec(&spec, &context) == MOEFLOW_OK);
  pid_t child = fork();
  if (child == 0) _exit(moeflow_close(context) == MOEFLOW_ERROR_STATE && strstr(moeflow_last_error(), "fork") ? 0 : 1);
  int result = 1;
  waitpid(child, &result, 0);
  EXPECT(result == 0, "in a forked child");
  EXPECT(moeflow_close(context) == MOEFLOW_OK);
}

/* ---- Group ---- */

struct bad_group {
  const char *text;
  moeflow_status status;
  int rank, ranks, capacity, lanes;
  moeflow_transport transport;
  int timeout_ms, local_experts_max;
};

static void test_group_arguments(void) {
  const struct bad_group cases[] = {
      {"ranks is 0", MOEFLOW_ERROR_ARGUMENT, 0, 0, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"rank is 2", MOEFLOW_ERROR_ARGUMENT, 2, 2, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"rank is -1", MOEFLOW_ERROR_ARGUMENT, -1, 2, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"capacity is 0", MOEFLOW_ERROR_ARGUMENT, 0, 1, 0, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"lanes is 3", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 3, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"timeout_ms is -1", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, MOEFLOW_TRANSPORT_LOCAL, -1, 0},
      {"local_experts_max is -3", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, -3},
      {"9 ranks for the 8 experts", MOEFLOW_ERROR_ARGUMENT, 0, 9, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"2^31 - 1", MOEFLOW_ERROR_ARGUMENT, 0, 2, 1 << 29, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"unique_id", MOEFLOW_ERROR_ARGUMENT, 0, 2, 8, 1, MOEFLOW_TRANSPORT_LOCAL, 0, 0},
      {"CPU backend has local only", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, MOEFLOW_TRANSPORT_NCCL, 0, 0},
      {"window transport moves GPU memory", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, MOEFLOW_TRANSPORT_WINDOW, 0, 0},
      {"allgather transport moves GPU memory", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, MOEFLOW_TRANSPORT_ALLGATHER, 0, 0},
      {"transport 9", MOEFLOW_ERROR_ARGUMENT, 0, 1, 8, 1, (moeflow_transport)9, 0, 0},
  };
  struct spec spec = small_spec();
  moeflow_context *context;
  moeflow_group *group;
  EXPECT(open_spec(&spec, &context) == MOEFLOW_OK);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
    config.rank = cases[i].rank;
    config.ranks = cases[i].ranks;
    config.capacity = cases[i].capacity;
    config.lanes = cases[i].lanes;
    config.transport = cases[i].transport;
    config.timeout_ms = cases[i].timeout_ms;
    config.local_experts_max = cases[i].local_experts_max;
    EXPECT_STATUS(moeflow_group_create(&context, 1, &config, &group), cases[i].status, cases[i].text);
    EXPECT(group == NULL);
  }
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  EXPECT_STATUS(moeflow_group_create(&context, 0, &config, &group), MOEFLOW_ERROR_ARGUMENT, "0 contexts");
  EXPECT(moeflow_close(context) == MOEFLOW_OK, "failed groups hold no context: %s", moeflow_last_error());
}

static void test_lifetimes(void) {
  struct spec spec = small_spec(), other = small_spec();
  moeflow_context *context, *stranger;
  moeflow_group *group;
  moeflow_layer *layer;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  other.hidden = 128;
  EXPECT(open_spec(&spec, &context) == MOEFLOW_OK && open_spec(&other, &stranger) == MOEFLOW_OK);
  EXPECT(moeflow_group_create(&context, 1, &config, &group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT_STATUS(moeflow_close(context), MOEFLOW_ERROR_STATE, "1 group(s)");
  EXPECT_STATUS(moeflow_layer_create(group, stranger, NULL, &layer), MOEFLOW_ERROR_ARGUMENT, "none of those");
  EXPECT(moeflow_layer_create(group, context, NULL, &layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_layer_local_experts(layer) == 8);
  EXPECT_STATUS(moeflow_group_destroy(group), MOEFLOW_ERROR_STATE, "1 layer(s)");
  EXPECT(moeflow_layer_destroy(layer) == MOEFLOW_OK);
  EXPECT_STATUS(moeflow_layer_destroy(layer), MOEFLOW_ERROR_STATE, "destroyed");
  EXPECT(moeflow_group_destroy(group) == MOEFLOW_OK);
  EXPECT_STATUS(moeflow_poll(group, 0), MOEFLOW_ERROR_STATE, "destroyed");
  EXPECT(moeflow_close(context) == MOEFLOW_OK && moeflow_close(stranger) == MOEFLOW_OK);
}

/* ---- One rank, for layers and forward ---- */

struct solo {
  struct spec spec;
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  uint16_t *gate_up, *down;
};

static void solo_open(struct solo *solo, int capacity) {
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  config.capacity = capacity;
  if (!solo->spec.hidden) solo->spec = small_spec();
  EXPECT(open_spec(&solo->spec, &solo->context) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_group_create(&solo->context, 1, &config, &solo->group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_layer_create(solo->group, solo->context, NULL, &solo->layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  solo->gate_up = values((size_t)solo->spec.experts * 2 * solo->spec.intermediate * solo->spec.hidden);
  solo->down = values((size_t)solo->spec.experts * solo->spec.intermediate * solo->spec.hidden);
  memset(solo->gate_up, 0, (size_t)solo->spec.experts * 4 * solo->spec.intermediate * solo->spec.hidden);
  memset(solo->down, 0, (size_t)solo->spec.experts * 2 * solo->spec.intermediate * solo->spec.hidden);
}

static moeflow_weights solo_weights(const struct solo *solo) {
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = solo->gate_up;
  weights.down = solo->down;
  return weights;
}

static void solo_close(struct solo *solo) {
  EXPECT(moeflow_layer_destroy(solo->layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_group_destroy(solo->group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_close(solo->context) == MOEFLOW_OK, "%s", moeflow_last_error());
  free(solo->gate_up);
  free(solo->down);
}

static void test_bind_arguments(void) {
  struct solo solo = {.context = NULL};
  moeflow_weights weights;
  solo_open(&solo, 8);
#define BAD(change, status, text) \
  weights = solo_weights(&solo);  \
  change;                         \
  EXPECT_STATUS(moeflow_layer_bind(solo.layer, &weights), status, text)
  BAD(weights.gate_up = NULL, MOEFLOW_ERROR_ARGUMENT, "gate_up: neither");
  BAD(weights.down = NULL, MOEFLOW_ERROR_ARGUMENT, "down: neither");
  BAD(weights.gate_up = solo.gate_up + 1, MOEFLOW_ERROR_ARGUMENT, "multiples of 16");
  BAD(weights.gate_up_row_stride = 64 * 2 + 8, MOEFLOW_ERROR_ARGUMENT, "multiples of 16");
  BAD(weights.gate_up_row_stride = 64, MOEFLOW_ERROR_ARGUMENT, "do not hold");
  BAD(weights.down_expert_stride = 32, MOEFLOW_ERROR_ARGUMENT, "do not hold");
  BAD(weights.down_expert_stride = -4096, MOEFLOW_ERROR_ARGUMENT, "do not hold");
  BAD(weights.down_row_stride = INT64_MAX / 32 * 16, MOEFLOW_ERROR_ARGUMENT, "beyond any memory");
  BAD(weights.down_row_stride = INT64_MIN, MOEFLOW_ERROR_ARGUMENT, "beyond any memory");
  BAD(weights.gate_up_expert_stride = INT64_MAX / 32 * 16, MOEFLOW_ERROR_ARGUMENT, "beyond any memory");
  BAD(weights.order = (moeflow_gate_up_order)3, MOEFLOW_ERROR_ARGUMENT, "order 3");
  BAD(weights.gate_up_bias = solo.gate_up, MOEFLOW_ERROR_UNSUPPORTED, "biases");
#undef BAD
  EXPECT_STATUS(moeflow_prepare(&solo.layer, 1, 0), MOEFLOW_ERROR_STATE, "moeflow_layer_bind");
  weights = solo_weights(&solo);
  EXPECT(moeflow_layer_bind(solo.layer, &weights) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT_STATUS(moeflow_prepare(&solo.layer, 1, 9), MOEFLOW_ERROR_CAPACITY, "tokens_max is 9");
  EXPECT_STATUS(moeflow_prepare(NULL, 1, 0), MOEFLOW_ERROR_ARGUMENT, "no layers");
  EXPECT(moeflow_prepare(&solo.layer, 1, 0) == MOEFLOW_OK, "%s", moeflow_last_error());
  solo_close(&solo);
}

static void test_forward_refused(void) {
  struct solo solo = {.context = NULL};
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  solo_open(&solo, 8);
  moeflow_weights weights = solo_weights(&solo);
  EXPECT_STATUS(moeflow_forward(NULL, &args), MOEFLOW_ERROR_ARGUMENT, "layer is NULL");
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_STATE, "moeflow_layer_bind");
  EXPECT(moeflow_layer_bind(solo.layer, &weights) == MOEFLOW_OK);
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_STATE, "moeflow_prepare");
  EXPECT(moeflow_prepare(&solo.layer, 1, 4) == MOEFLOW_OK);
  args.tokens_max = 9;
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_CAPACITY, "tokens_max is 9 and the group's capacity 8");
  args.tokens_max = -1;
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_CAPACITY, "-1");
  args.tokens_max = 5;
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_STATE, "prepared for 4");
  args.tokens_max = 4;
  args.lane = 1;
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_ARGUMENT, "lane 1");
  EXPECT(solo.group->lanes[0].record->started == 0, "a refused call makes no step");
  EXPECT(moeflow_poll(solo.group, 0) == MOEFLOW_OK, "%s", moeflow_last_error());
  solo_close(&solo);
}

/* Bad arguments that join with 0 rows: the step runs, the error mark arrives (here at the rank itself). */
static void test_forward_joins(void) {
  struct solo solo = {.context = NULL};
  solo_open(&solo, 4);
  moeflow_weights weights = solo_weights(&solo);
  EXPECT(moeflow_layer_bind(solo.layer, &weights) == MOEFLOW_OK && moeflow_prepare(&solo.layer, 1, 0) == MOEFLOW_OK);
  uint16_t *hidden = values(4 * 64), *out = values(4 * 64);
  int32_t ids[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  float choice_weights[8] = {1, 1, 1, 1, 1, 1, 1, 1}, logits[32] = {0};
  unsigned steps = 0;
  memset(hidden, 0, 4 * 64 * 2);
#define JOINS(change, text)                                                                                \
  do {                                                                                                     \
    moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;                                                 \
    args.tokens = 4, args.hidden = hidden, args.out = out, args.ids = ids, args.weights = choice_weights;  \
    change;                                                                                                \
    EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_ARGUMENT, text);                       \
    EXPECT_STATUS(moeflow_poll(solo.group, 1000), MOEFLOW_ERROR_PEER, "rank 0 joined step");               \
    EXPECT(moeflow_poll(solo.group, 1000) == MOEFLOW_OK, "told once: %s", moeflow_last_error());           \
    EXPECT(solo.group->lanes[0].record->steps == ++steps, "%u steps", solo.group->lanes[0].record->steps); \
  } while (0)
  JOINS(args.tokens = 5, "tokens is 5, more than tokens_max 4 (0 means the group's capacity, 4); bring fewer");
  JOINS(args.tokens = 4; args.tokens_max = 2, "tokens is 4, more than tokens_max 2 (0 means the group's capacity, 4)");
  JOINS(args.tokens = -1, "tokens is -1");
  JOINS(args.hidden = NULL, "hidden is NULL");
  JOINS(args.hidden = hidden + 1, "hidden is at");
  JOINS(args.out = out + 4, "out is at");
  JOINS(args.ids = NULL, "give both");
  JOINS(args.weights = NULL, "give both");
  JOINS(args.logits = logits, "not both");
  JOINS(args.ids_dtype = MOEFLOW_DTYPE_FLOAT32, "ids_dtype");
  JOINS(args.ids = (char *)ids + 2, "ids is at");
  JOINS(args.flags = 8, "flags");
#undef JOINS
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = 4, args.hidden = hidden, args.out = out, args.ids = ids, args.weights = choice_weights;
  EXPECT(moeflow_forward(solo.layer, &args) == MOEFLOW_OK, "a good step after bad ones: %s", moeflow_last_error());
  EXPECT(moeflow_poll(solo.group, 1000) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(out[0] == 0 && out[4 * 64 - 1] == 0 && out[4 * 64] == 0xffff);
  free(hidden);
  free(out);
  solo_close(&solo);
}

static void test_bias_needed(void) {
  struct solo solo = {.spec = small_spec()};
  solo.spec.correction_bias = 1;
  solo_open(&solo, 4);
  moeflow_weights weights = solo_weights(&solo);
  EXPECT(moeflow_layer_bind(solo.layer, &weights) == MOEFLOW_OK && moeflow_prepare(&solo.layer, 1, 0) == MOEFLOW_OK);
  uint16_t *hidden = values(64), *out = values(64);
  float logits[8] = {0};
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = 1, args.hidden = hidden, args.out = out, args.logits = logits;
  EXPECT_STATUS(moeflow_forward(solo.layer, &args), MOEFLOW_ERROR_ARGUMENT, "correction bias");
  free(hidden);
  free(out);
  solo_close(&solo);
}

/* ---- Places ---- */

static void test_places(void) {
  const struct {
    const char *text;
    int replicas;
    int32_t places[16];
  } cases[] = {
      {"two experts", 1, {0, 1, 2, 3, 4, 5, 6, 6}},
      {"expert 3, replica 0", 1, {0, 1, 2, 1 << 16, 4, 5, 6, 7}},
      {"rank 0 uses slots up to 7 and only 7", 1, {-1, 1, 2, 3, 4, 5, 6, 7}},
      {"expert 7, replica 0", 1, {0, 1, 2, 3, 4, 5, 6, 8}},
      {"rank 0, slot 6 is given", 2, {0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, 6}},
      {"-1 only stands", 3, {0, -1, 1}},
      {"replicas is 0", 0, {0}},
  };
  struct solo solo = {.context = NULL};
  moeflow_layer *layer;
  solo_open(&solo, 4);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
    config.places = cases[i].places;
    config.replicas = cases[i].replicas;
    moeflow_status status = moeflow_layer_create(solo.group, solo.context, &config, &layer);
    EXPECT(status == MOEFLOW_ERROR_ARGUMENT, "case %zu: %s", i, moeflow_last_error());
    EXPECT(strstr(moeflow_last_error(), cases[i].text), "case %zu: %s", i, moeflow_last_error());
  }
  moeflow_layer_config ring = MOEFLOW_LAYER_CONFIG_INIT;
  ring.combine = (moeflow_combine)4;
  EXPECT_STATUS(moeflow_layer_create(solo.group, solo.context, &ring, &layer), MOEFLOW_ERROR_ARGUMENT, "combine 4");
  solo_close(&solo);
}

static void test_ring_needs_owner_reduce(void) {
  struct solo solo = {.spec = small_spec()};
  moeflow_layer *layer;
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  solo.spec.reduce = SPEC_REDUCE_CHOICES;
  config.combine = MOEFLOW_COMBINE_RING;
  solo_open(&solo, 4);
  EXPECT_STATUS(moeflow_layer_create(solo.group, solo.context, &config, &layer), MOEFLOW_ERROR_ARGUMENT, "ring");
  solo_close(&solo);
}

int main(void) {
  test_library();
  test_open_arguments();
  test_newer_header();
  test_stale_handles();
  test_fork();
  test_group_arguments();
  test_lifetimes();
  test_bind_arguments();
  test_forward_refused();
  test_forward_joins();
  test_bias_needed();
  test_places();
  test_ring_needs_owner_reduce();
  TEST_END;
}
