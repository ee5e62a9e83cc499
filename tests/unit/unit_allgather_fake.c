/* The allgather transport on a fake GPU and a fake NCCL: what is enqueued in which order with which sizes, how rows and sums
 * come to lie, and what it refuses. */
#include <nccl.h>

#include "fakes/fake_ranks.h"

static struct fake_stream streams[RANKS]; /* one a rank, to tell the ranks' calls apart */
static int tokens, tokens_max;
static unsigned flags;
static int32_t places[16];

static void start(const struct spec *spec, int lanes) {
  set_up_spec(MOEFLOW_TRANSPORT_ALLGATHER, "fake_nccl", spec);
  for (int r = 0; r < RANKS; r++) {
    ranks[r].config.lanes = lanes;
    ranks[r].config.local_experts_max = 16;
  }
  each(create_group);
  expect_all(MOEFLOW_OK, "");
}

static void *forward(void *argument) {
  struct rank *rank = argument;
  moeflow_forward_args args = step_args(tokens, tokens_max);
  args.stream = &streams[rank - ranks];
  args.lane = rank->config.lanes - 1;
  args.flags = flags;
  note(rank, moeflow_forward(rank->layer, &args));
  return NULL;
}

/* ---- What rank 1 enqueued ---- */

#define STEP_MAX 16

struct item { /* a kernel or a collective */
  const struct fake_call *kernel;
  const struct fake_collective *collective;
};

static const char *name_of(const struct item *item) {
  return item->kernel ? item->kernel->kernel : item->collective->name;
}

/* Since the driver's call `from` and the collective number `first`, in order. */
static int items_of(int rank, int from, int first, struct item *items) {
  int count = 0, c = first;
  for (int i = from; i <= cuda->call_count && count < STEP_MAX; i++) {
    for (; c < nccl_fake->collective_count && nccl_fake->collectives[c].at <= i && count < STEP_MAX; c++) {
      if (nccl_fake->collectives[c].stream == &streams[rank])
        items[count++] = (struct item){.collective = &nccl_fake->collectives[c]};
    }
    if (i < cuda->call_count && cuda->calls[i].stream == &streams[rank] && count < STEP_MAX)
      items[count++] = (struct item){.kernel = &cuda->calls[i]};
  }
  return count;
}

static void expect_order(const struct item *items, int count, const char *const *names, int want) {
  EXPECT(count == want, "%d calls, want %d", count, want);
  for (int i = 0; i < count && i < want; i++) {
    EXPECT(!strcmp(name_of(&items[i]), names[i]), "call %d is %s, want %s", i, name_of(&items[i]), names[i]);
  }
}

#define PARAMS(type, item)                                    \
  ({                                                          \
    struct moeflow_##type##_params params_;                   \
    memcpy(&params_, (item)->kernel->params, sizeof params_); \
    params_;                                                  \
  })

/* R = 32 rows of 5 tokens, in the second lane; then R = 100, the capacity, and R = 1. */
static void step(int rows, int type, size_t return_bytes) {
  static const char *const names[] = {"moeflow_pack",           "ncclAllGather",     "moeflow_expert_index",
                                      "moeflow_expert_prepare", "moeflow_gate_up",   "moeflow_down",
                                      "moeflow_owner_reduce",   "ncclReduceScatter", "moeflow_combine"};
  struct item items[STEP_MAX];
  const int from = cuda->call_count, first = nccl_fake->collective_count;
  const int64_t row = spec_row_bytes(&plan.spec);
  const struct group_lane *lane = &ranks[1].group->lanes[ranks[1].config.lanes - 1];
  each(forward);
  expect_all(MOEFLOW_OK, "");
  const int count = items_of(1, from, first, items);
  expect_order(items, count, names, 9);
  if (count != 9) return;
  const struct moeflow_pack_params pack = PARAMS(pack, &items[0]);
  EXPECT(pack.broadcast == 1 && pack.out.targets[0] == lane->send && pack.out.block_bytes == rows * row);
  const struct fake_collective *out = items[1].collective, *back = items[7].collective;
  EXPECT(out->send == lane->send && out->receive == lane->received && out->type == ncclInt8);
  EXPECT(out->count == (size_t)(rows * row), "%zu bytes, want %d rows", out->count, rows);
  const struct moeflow_expert_index_params index = PARAMS(expert_index, &items[2]);
  EXPECT(index.in.base == lane->received && index.in.block_bytes == rows * row && index.in.rows == rows);
  const struct moeflow_owner_reduce_params reduce = PARAMS(owner_reduce, &items[6]);
  EXPECT(reduce.write_empty == MOEFLOW_EMPTY_ZERO && reduce.out.targets[0] == lane->return_send);
  EXPECT(reduce.out.targets[1] == lane->return_send && reduce.out.block_bytes == (int64_t)(rows * return_bytes));
  EXPECT(back->send == lane->return_send && back->receive == lane->returned && back->type == type);
  EXPECT(back->count == rows * return_bytes / (type == ncclFloat32 ? 4 : 2), "%zu values of %d rows", back->count, rows);
  const struct moeflow_combine_params combine = PARAMS(combine, &items[8]);
  EXPECT(combine.added == 1 && combine.returned == lane->returned && combine.tokens == tokens);
}

static void steps(int type, size_t return_bytes) {
  tokens = 5, tokens_max = 20;
  step(32, type, return_bytes);
  tokens = 100, tokens_max = 0;
  step(100, type, return_bytes);
  tokens = 1, tokens_max = 1;
  step(1, type, return_bytes);
  tokens = 0;
  step(1, type, return_bytes);
}

static void test_steps(void) {
  const struct spec spec = fake_spec();
  start(&spec, 2);
  EXPECT(nccl_fake->live == 3 * RANKS, "a communicator for the host and one a lane: %d", nccl_fake->live);
  const int first = nccl_fake->collective_count;
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  int kinds[2] = {0, 0};
  for (int i = first; i < nccl_fake->collective_count; i++) {
    kinds[0] += !strcmp(nccl_fake->collectives[i].name, "ncclReduceScatter");
    kinds[1] += !strcmp(nccl_fake->collectives[i].name, "ncclAlltoAll");
  }
  EXPECT(kinds[0] == 2 * RANKS && kinds[1] == 0, "each lane connects: %d", kinds[0]);
  steps(ncclBfloat16, 512 * 2);
  tear_down();
  EXPECT(nccl_fake->destroyed == 2 * RANKS && nccl_fake->aborted == RANKS, "lanes destroyed, the idle control aborted");
}

static void test_fp32(void) {
  struct spec spec = fake_spec();
  spec.returned = SPEC_WIRE_FP32;
  start(&spec, 1);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  steps(ncclFloat32, 512 * 4);
  tear_down();
}

/* Rank s's rows become block s everywhere, and each rank gets the sum of what all have for it. */
static void test_movement(void) {
  const struct spec spec = fake_spec();
  start(&spec, 1);
  each(make_layer);
  const int64_t block = 4 * spec_row_bytes(&plan.spec), home = 4 * spec_return_row_bytes(&plan.spec);
  for (int r = 0; r < RANKS; r++) {
    const struct group_lane *lane = &ranks[r].group->lanes[0];
    memset(lane->send, 0x50 + r, (size_t)block);
    for (int p = 0; p < RANKS; p++) {
      uint16_t *sums = (uint16_t *)(lane->return_send + p * home);
      for (int i = 0; i < home / 2; i++) sums[i] = p ? 0x4000 : 0x3f80; /* 2, 1 */
    }
  }
  tokens = 3, tokens_max = 4;
  each(forward);
  expect_all(MOEFLOW_OK, "");
  for (int r = 0; r < RANKS; r++) {
    const struct group_lane *lane = &ranks[r].group->lanes[0];
    const uint16_t *sums = (const uint16_t *)lane->returned;
    EXPECT(lane->received[0] == 0x50 && lane->received[block - 1] == 0x50 && lane->received[block] == 0x51 &&
           lane->received[2 * block - 1] == 0x51);
    EXPECT(sums[0] == (r ? 0x4080 : 0x4000) && sums[home / 2 - 1] == sums[0], "rank %d: %04x", r, sums[0]); /* 4, 2 */
  }
  tear_down();
}

/* One block to send and one that comes home, whatever the ranks. */
static void test_memory(void) {
  const struct spec spec = fake_spec();
  start(&spec, 1);
  const struct group_lane *lane = &ranks[0].group->lanes[0];
  const int64_t row = 100 * spec_row_bytes(&plan.spec), home = 100 * spec_return_row_bytes(&plan.spec);
  EXPECT(lane->return_send - lane->send == (row + 255) / 256 * 256, "%td", lane->return_send - lane->send);
  EXPECT((uint8_t *)lane->ids - lane->return_send == (RANKS * home + 255) / 256 * 256);
  EXPECT(lane->returned - lane->received == (RANKS * row + 255) / 256 * 256);
  EXPECT((uint8_t *)lane->window + lane->window_bytes - lane->returned == (home + 255) / 256 * 256);
  tear_down();
}

/* The sums of identity experts need every row as well. */
static void test_identity(void) {
  static const char *const names[] = {"moeflow_pack",           "ncclAllGather",    "moeflow_expert_index",
                                      "moeflow_expert_prepare", "moeflow_identity", "moeflow_owner_reduce",
                                      "ncclReduceScatter",      "moeflow_combine"};
  const struct spec spec = fake_spec();
  struct item items[STEP_MAX];
  start(&spec, 1);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  tokens = 5, tokens_max = 20, flags = MOEFLOW_FORWARD_IDENTITY;
  const int from = cuda->call_count, first = nccl_fake->collective_count;
  each(forward);
  expect_all(MOEFLOW_OK, "");
  flags = 0;
  const int count = items_of(0, from, first, items);
  expect_order(items, count, names, 8);
  if (count == 8) EXPECT(PARAMS(owner_reduce, &items[5]).write_empty == MOEFLOW_EMPTY_ZERO);
  tear_down();
}

/* With the experts kernel, which adds the sums itself; a rank that owns no expert still sends zeros, by owner_reduce. */
static void test_experts(void) {
  static const char *const some[] = {"moeflow_pack",           "ncclAllGather",   "moeflow_expert_index",
                                     "moeflow_expert_prepare", "moeflow_experts", "ncclReduceScatter",
                                     "moeflow_combine"};
  static const char *const none[] = {"moeflow_pack",           "ncclAllGather",        "moeflow_expert_index",
                                     "moeflow_expert_prepare", "moeflow_owner_reduce", "ncclReduceScatter",
                                     "moeflow_combine"};
  const struct spec spec = fake_spec();
  struct item items[STEP_MAX];
  make_plan = fake_plan_experts;
  start(&spec, 1);
  for (int e = 0; e < 16; e++) places[e] = e; /* all on rank 0 */
  layer_places = places;
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  tokens = 3, tokens_max = 4;
  const int from = cuda->call_count, first = nccl_fake->collective_count;
  each(forward);
  expect_all(MOEFLOW_OK, "");
  expect_order(items, items_of(0, from, first, items), some, 7);
  const struct moeflow_experts_params experts = PARAMS(experts, &items[4]);
  EXPECT(experts.sum && experts.write_empty == MOEFLOW_EMPTY_ZERO && !experts.fused);
  expect_order(items, items_of(1, from, first, items), none, 7);
  tear_down();
}

/* ---- Failures ---- */

static void expect_given_up(struct rank *rank, moeflow_status status, const char *text) {
  EXPECT(rank->status == status && strstr(rank->message, text), "%d: %s", rank->status, rank->message);
  EXPECT(read_lane(rank->group, 0).poison == MOEFLOW_POISON_ABORT);
  EXPECT_STATUS(moeflow_poll(rank->group, 0), MOEFLOW_ERROR_PEER, "aborted");
  rank->status = MOEFLOW_OK;
  rank->message[0] = 0;
}

static void begin_failure(void) {
  const struct spec spec = fake_spec();
  start(&spec, 1);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  tokens = 5, tokens_max = 20;
}

static void test_gather_fails(void) {
  begin_failure();
  const int before = cuda->call_count;
  nccl_fake->fail_collective = "ncclAllGather";
  forward(&ranks[0]);
  expect_given_up(&ranks[0], MOEFLOW_ERROR_NCCL, "ncclAllGather: made to fail");
  EXPECT(!strcmp(cuda->calls[before].kernel, "moeflow_pack"));
  for (int i = before + 1; i < cuda->call_count; i++) EXPECT(!*cuda->calls[i].kernel, "%s after it", cuda->calls[i].kernel);
  tear_down();
}

static void test_launch_fails(void) {
  begin_failure();
  const int first = nccl_fake->collective_count;
  cuda->fail_launch = 5;
  forward(&ranks[0]);
  expect_given_up(&ranks[0], MOEFLOW_ERROR_CUDA, "kernel down");
  EXPECT(nccl_fake->collective_count == first + 1, "no sums of a step that cannot end");
  tear_down();
}

/* One rank's part goes well and is left waiting, the other's does not. */
static void test_scatter_fails(void) {
  begin_failure();
  nccl_fake->fail_collective = "ncclReduceScatter";
  each(forward);
  const int failed = ranks[0].status == MOEFLOW_OK;
  expect_given_up(&ranks[failed], MOEFLOW_ERROR_NCCL, "ncclReduceScatter: made to fail");
  expect_all(MOEFLOW_OK, "");
  tear_down();
}

/* ---- Refusals ---- */

static void test_refused(void) {
  struct spec spec = fake_spec();
  moeflow_layer_config ring = MOEFLOW_LAYER_CONFIG_INIT;
  moeflow_layer *layer;
  start(&spec, 1);
  ring.combine = MOEFLOW_COMBINE_RING;
  EXPECT_STATUS(moeflow_layer_create(ranks[0].group, ranks[0].context, &ring, &layer), MOEFLOW_ERROR_UNSUPPORTED,
                "ring combine is not for the allgather transport");
  tear_down();
  moeflow_unique_id local;
  moeflow_group_config config = ranks[0].config;
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &local));
  open_contexts();
  config.unique_id = NULL;
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &config, &ranks[0].group), MOEFLOW_ERROR_ARGUMENT,
                "the allgather transport needs either a unique_id or a communicator");
  config.unique_id = &local;
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &config, &ranks[0].group), MOEFLOW_ERROR_ARGUMENT,
                "made for the local transport; the allgather transport");
  for (int r = 0; r < RANKS; r++) EXPECT_OK(moeflow_close(ranks[r].context));
}

static void test_choices(void) {
  struct spec spec = fake_spec();
  spec.reduce = SPEC_REDUCE_CHOICES;
  set_up_spec(MOEFLOW_TRANSPORT_ALLGATHER, "fake_nccl", &spec);
  each(create_group);
  expect_all(MOEFLOW_ERROR_UNSUPPORTED, "tiny returns choices");
  tear_down();
}

/* Two models of one group: the transport does not know whose sums it adds. */
static void test_dtypes_differ(void) {
  struct spec spec = fake_spec();
  moeflow_context *both[2];
  moeflow_open_config open = fake_open_config();
  set_up_spec(MOEFLOW_TRANSPORT_ALLGATHER, "fake_nccl", &spec);
  both[0] = ranks[0].context;
  snprintf(spec.name, sizeof spec.name, "wide");
  spec.returned = SPEC_WIRE_FP32;
  fake_plan(&spec, "sm_90a", &plan);
  open.model = "wide";
  EXPECT_OK(moeflow_open(&open, &both[1]));
  EXPECT_STATUS(moeflow_group_create(both, 2, &ranks[0].config, &ranks[0].group), MOEFLOW_ERROR_UNSUPPORTED,
                "tiny and wide return different dtypes");
  EXPECT_OK(moeflow_close(both[1]));
  tear_down();
}

/* One rank moves rows in another way: all are told. */
static void test_transports_differ(void) {
  const struct spec spec = fake_spec();
  set_up_spec(MOEFLOW_TRANSPORT_ALLGATHER, "fake_nccl", &spec);
  ranks[1].config.transport = MOEFLOW_TRANSPORT_NCCL;
  each(create_group);
  expect_all(MOEFLOW_ERROR_MISMATCH, "transport: rank 0 has 3, rank 1 has 1");
  tear_down();
}

int main(void) {
  in_child("steps", test_steps);
  in_child("fp32", test_fp32);
  in_child("movement", test_movement);
  in_child("memory", test_memory);
  in_child("identity", test_identity);
  in_child("experts", test_experts);
  in_child("all-gather fails", test_gather_fails);
  in_child("a launch fails", test_launch_fails);
  in_child("reduce-scatter fails", test_scatter_fails);
  in_child("refused", test_refused);
  in_child("choices", test_choices);
  in_child("dtypes differ", test_dtypes_differ);
  in_child("transports differ", test_transports_differ);
  TEST_END;
}
