/* Groups, layers and steps on a fake GPU: what is called in which order, and that everything unwinds. */
#include <nccl.h>

#include "deadline.h"
#include "fakes/fake_ranks.h"

/* 5 tokens of at most 20 on 2 ranks: R = 32, 64 received rows, 256 entries, tiles of 8 for 8 experts: 8 + 32 = 40. */
static void test_step_local(void) {
  const char *const names[] = {"moeflow_pack",           "moeflow_exchange", "moeflow_expert_index",
                               "moeflow_expert_prepare", "moeflow_gate_up",  "moeflow_down",
                               "moeflow_owner_reduce",   "moeflow_exchange", "moeflow_combine"};
  const unsigned blocks[] = {5, 1, 1, 1, 40 * 4, 40 * 8, 64, 1, 5};
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  moeflow_forward_args args = step_args(5, 20);
  int from = cuda->call_count;
  EXPECT_OK(moeflow_forward(ranks[1].layer, &args));
  expect_kernels(from, names, blocks, 9);
  const struct group_lane *lane = &ranks[1].group->lanes[0], *peer = &ranks[0].group->lanes[0];
  const int64_t block = 100 * spec_row_bytes(&plan.spec), home = 100 * spec_return_row_bytes(&plan.spec);
  struct moeflow_pack_params pack;
  memcpy(&pack, cuda->calls[from].params, sizeof pack);
  EXPECT(pack.tokens == 5 && pack.tokens_max == 20 && pack.rank == 1 && pack.flags == 0 && pack.out.block_bytes == 0);
  EXPECT(pack.out.targets[0] == peer->received + block, "rank 1's rows for rank 0 go to its block 1");
  EXPECT(pack.out.targets[1] == lane->received + block);
  struct moeflow_exchange_params exchange;
  memcpy(&exchange, cuda->calls[from + 1].params, sizeof exchange);
  EXPECT(exchange.phase == MOEFLOW_PHASE_DISPATCH && exchange.peers.peer_flags[0] == peer->flags &&
         exchange.peers.flags == lane->flags);
  EXPECT(exchange.peers.timeout_ns == 2000000000u && *exchange.peers.abort == 0);
  struct moeflow_expert_index_params index;
  memcpy(&index, cuda->calls[from + 2].params, sizeof index);
  EXPECT(index.in.base == lane->received && index.in.block_bytes == block && index.in.rows == 32 &&
         index.in.tokens_max == 20);
  EXPECT(index.local_experts == 8);
  struct moeflow_expert_prepare_params prepare;
  memcpy(&prepare, cuda->calls[from + 3].params, sizeof prepare);
  EXPECT(prepare.tile_tokens == 8);
  EXPECT(cuda->calls[from + 4].shared_bytes == 65536 && cuda->calls[from + 4].threads == 128);
  struct moeflow_owner_reduce_params reduce;
  memcpy(&reduce, cuda->calls[from + 6].params, sizeof reduce);
  EXPECT(reduce.out.targets[0] == peer->returned + home && reduce.out.block_bytes == 0);
  struct moeflow_combine_params combine;
  memcpy(&combine, cuda->calls[from + 8].params, sizeof combine);
  EXPECT(combine.returned == lane->returned && combine.block_bytes == home && combine.tokens == 5);
  EXPECT(read_lane(ranks[1].group, 0).epoch == 1 && read_lane(ranks[1].group, 0).poison == 0);
  tear_down();
}

/* A step of all 100 tokens takes the second variants; logits run the router; identity replaces the GEMMs. */
static void test_step_variants(void) {
  const char *const names[] = {"moeflow_router",       "moeflow_pack",           "moeflow_exchange",
                               "moeflow_expert_index", "moeflow_expert_prepare", "moeflow_identity",
                               "moeflow_owner_reduce", "moeflow_exchange",       "moeflow_combine"};
  const unsigned blocks[] = {25, 100, 1, 4, 4, 800, 200, 1, 100};
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  moeflow_forward_args args = step_args(100, 0);
  args.ids = args.weights = NULL;
  args.logits = (void *)0x20000;
  args.flags = MOEFLOW_FORWARD_IDENTITY;
  int from = cuda->call_count;
  EXPECT_OK(moeflow_forward(ranks[0].layer, &args));
  expect_kernels(from, names, blocks, 9);
  struct moeflow_pack_params pack;
  memcpy(&pack, cuda->calls[from + 1].params, sizeof pack);
  EXPECT(pack.ids == ranks[0].group->lanes[0].ids && pack.ids_int64 == 0, "pack takes the router's choice");
  struct moeflow_expert_prepare_params prepare;
  memcpy(&prepare, cuda->calls[from + 4].params, sizeof prepare);
  EXPECT(prepare.tile_tokens == 32, "the second bucket's tiles");
  args = step_args(0, 1);
  args.hidden = args.out = NULL;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(ranks[0].layer, &args)); /* no tokens still takes part: one block packs the headers */
  EXPECT(cuda->calls[from].blocks == 1 && cuda->call_count - from == 9);
  tear_down();
}

static void test_failed_join(void) {
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  moeflow_forward_args args = step_args(5, 20);
  args.out = (void *)0x10008;
  int from = cuda->call_count;
  EXPECT_STATUS(moeflow_forward(ranks[0].layer, &args), MOEFLOW_ERROR_ARGUMENT, "out is at");
  struct moeflow_pack_params pack;
  memcpy(&pack, cuda->calls[from].params, sizeof pack);
  EXPECT(cuda->call_count - from == 9 && pack.tokens == 0 && pack.flags == MOEFLOW_ROW_FAILED && pack.tokens_max == 20);
  args = step_args(5, 101);
  from = cuda->call_count;
  EXPECT_STATUS(moeflow_forward(ranks[0].layer, &args), MOEFLOW_ERROR_CAPACITY, "101");
  EXPECT(cuda->call_count == from, "refused without a launch");
  tear_down();
}

static void test_launch_error(void) {
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  moeflow_forward_args args = step_args(5, 20);
  cuda->fail_launch = 5;
  EXPECT_STATUS(moeflow_forward(ranks[0].layer, &args), MOEFLOW_ERROR_CUDA,
                "kernel gate_up, 160 blocks of 128 threads with 65536 bytes of shared memory: cuLaunchKernel");
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_PEER, "aborted");
  EXPECT(read_lane(ranks[0].group, 0).poison == MOEFLOW_POISON_ABORT);
  for (int phase = MOEFLOW_PHASE_DISPATCH, back = 2; back > 0; phase = MOEFLOW_PHASE_RETURN, back--) {
    const struct fake_call *last = &cuda->calls[cuda->call_count - back];
    struct moeflow_exchange_params exchange;
    memcpy(&exchange, last->params, sizeof exchange);
    EXPECT(!strcmp(last->kernel, "moeflow_exchange") && exchange.phase == phase, "peers are told, whatever they wait for");
  }
  tear_down();
}

/* ---- NCCL ---- */

static void *forward_nccl(void *argument) {
  struct rank *rank = argument;
  moeflow_forward_args args = step_args(5, 20);
  note(rank, moeflow_forward(rank->layer, &args));
  return NULL;
}

static void step_nccl(const char *library) {
  set_up(MOEFLOW_TRANSPORT_NCCL, library);
  for (int r = 0; r < RANKS; r++) ranks[r].config.lanes = 2;
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  EXPECT(nccl_fake->live == 3 * RANKS, "a communicator for the host and one a lane: %d", nccl_fake->live);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  const struct group_lane *lane = &ranks[0].group->lanes[0];
  const int64_t row = spec_row_bytes(&plan.spec);
  lane->send[32 * row] = 0x5a; /* the first byte of rank 0's block for rank 1 */
  int before = nccl_fake->all_to_alls + nccl_fake->sends;
  each(forward_nccl);
  expect_all(MOEFLOW_OK, "");
  int calls = nccl_fake->all_to_alls + nccl_fake->sends - before;
  EXPECT(calls == (nccl_fake->sends ? 2 * RANKS * RANKS : 2 * RANKS), "%d", calls);
  EXPECT(ranks[1].group->lanes[0].received[0] == 0x5a, "rank 0's block 1 arrives as rank 1's block 0");
  EXPECT(lane->dispatch_targets[0] == lane->send && lane->dispatch_targets[1] == lane->send, "pack adds the block");
  int seen = 0;
  for (int i = 0; i < cuda->call_count; i++) {
    if (strcmp(cuda->calls[i].name, "cuLaunchKernel") || strcmp(cuda->calls[i].kernel, "moeflow_pack")) continue;
    struct moeflow_pack_params pack;
    memcpy(&pack, cuda->calls[i].params, sizeof pack);
    EXPECT(pack.out.block_bytes == 32 * row, "two-sided blocks hold R rows");
    seen++;
  }
  EXPECT(seen == RANKS);
  tear_down();
  EXPECT(nccl_fake->destroyed == 2 * RANKS && nccl_fake->aborted == RANKS, "lanes destroyed, the idle control aborted");
}

static void test_step_nccl(void) {
  step_nccl("fake_nccl");
}

static void test_step_nccl_old(void) { /* no ncclAlltoAll: grouped sends and receives */
  step_nccl("fake_nccl_old");
  EXPECT(nccl_fake->sends > 0);
}

static void test_nccl_too_old(void) {
  moeflow_unique_id id;
  fake_load("fake_nccl");
  nccl_fake->version = 21403;
  EXPECT_STATUS(moeflow_get_unique_id(MOEFLOW_TRANSPORT_NCCL, &id), MOEFLOW_ERROR_ENVIRONMENT, "NCCL 2.14.3 at ");
  nccl_fake->version = 30000;
  EXPECT_STATUS(moeflow_get_unique_id(MOEFLOW_TRANSPORT_NCCL, &id), MOEFLOW_ERROR_ENVIRONMENT, "NCCL 3.0.0 at ");
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_AUTO, &id)); /* falls back to a local id */
  EXPECT(comm_local_made(&id));
}

static void test_nccl_init_never(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  nccl_fake->init_never = 1;
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 200;
  int64_t begin = deadline_now_ms();
  each(create_group);
  EXPECT(deadline_now_ms() - begin < 5000, "bounded");
  expect_all(MOEFLOW_ERROR_TIMEOUT, "not all ranks joined the group within 200 ms");
  EXPECT(nccl_fake->aborted == RANKS);
  tear_down();
}

static void test_nccl_rank_missing(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  ranks[0].config.timeout_ms = 200;
  ranks[1].config.ranks = 0; /* does not come */
  each(create_group);
  EXPECT(ranks[0].status == MOEFLOW_ERROR_TIMEOUT, "%s", ranks[0].message);
  EXPECT(ranks[1].status == MOEFLOW_OK);
  ranks[0].status = MOEFLOW_OK;
  for (int r = 0; r < RANKS; r++) EXPECT_OK(moeflow_close(ranks[r].context));
  EXPECT(cuda->live == 0 && nccl_fake->live == 0);
}

static void test_nccl_init_fails(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  nccl_fake->fail_init = 1;
  each(create_group);
  expect_all(MOEFLOW_ERROR_NCCL, "ncclCommInitRankConfig: made to fail");
  tear_down();
}

/* One rank never comes to moeflow_prepare. */
static void test_nccl_prepare_alone(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 300;
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  make_layer(&ranks[0]);
  EXPECT(ranks[0].status == MOEFLOW_ERROR_TIMEOUT, "%s", ranks[0].message);
  EXPECT(strstr(ranks[0].message, "a gather did not end within 300 ms"), "%s", ranks[0].message);
  ranks[0].status = MOEFLOW_OK;
  tear_down();
}

static void test_nccl_health_and_abort(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  nccl_fake->fail_async = 1;
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_NCCL, "remote error: fake detail");
  nccl_fake->fail_async = 0;
  EXPECT_OK(moeflow_abort(ranks[0].group));
  EXPECT_OK(moeflow_abort(ranks[0].group)); /* twice is once */
  EXPECT(nccl_fake->aborted == 2, "%d", nccl_fake->aborted);
  EXPECT(read_lane(ranks[0].group, 0).poison == MOEFLOW_POISON_ABORT);
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_PEER, "aborted");
  int before = nccl_fake->all_to_alls;
  moeflow_forward_args args = step_args(5, 20);
  EXPECT_STATUS(moeflow_forward(ranks[0].layer, &args), MOEFLOW_ERROR_PEER, "NaN");
  EXPECT(nccl_fake->all_to_alls == before, "no call on a communicator that is gone");
  tear_down();
}

/* A later prepare that a peer does not join gives the group up: no step may run over what is left of it. */
static void test_nccl_prepare_again_alone(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 300;
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  EXPECT_STATUS(moeflow_prepare(&ranks[0].layer, 1, 0), MOEFLOW_ERROR_TIMEOUT, "a gather did not end within 300 ms");
  EXPECT(read_lane(ranks[0].group, 0).poison == MOEFLOW_POISON_ABORT, "poisoned");
  moeflow_forward_args args = step_args(5, 20);
  EXPECT_STATUS(moeflow_forward(ranks[0].layer, &args), MOEFLOW_ERROR_PEER, "NaN");
  tear_down();
}

/* While a captured graph lives NCCL does not let a communicator go: abort returns all the same. */
static void test_nccl_abort_with_graph(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  nccl_fake->graphs = 1;
  int64_t begin = deadline_now_ms();
  EXPECT_OK(moeflow_abort(ranks[0].group));
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_PEER, "aborted");
  EXPECT(deadline_now_ms() - begin < 5000, "bounded");
  EXPECT(nccl_fake->aborted == 2 && nccl_fake->live == 2 * RANKS, "%d aborted, %d live", nccl_fake->aborted,
         nccl_fake->live);
  nccl_fake->graphs = 0;
  tear_down();
}

/* A forward that is held up inside NCCL: others may still poll and abort, and abort sets it free. */
static void test_nccl_abort_blocked(void) {
  pthread_t thread;
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  nccl_fake->all_to_all_blocks = 1;
  const int before = nccl_fake->all_to_alls;
  pthread_create(&thread, NULL, forward_nccl, &ranks[0]);
  while (nccl_fake->all_to_alls == before) sched_yield();
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_TIMEOUT, "1 step(s) enqueued");
  EXPECT_OK(moeflow_abort(ranks[0].group));
  pthread_join(thread, NULL);
  EXPECT(ranks[0].status == MOEFLOW_ERROR_PEER, "%s", ranks[0].message);
  ranks[0].status = MOEFLOW_OK;
  ranks[0].message[0] = 0;
  tear_down();
}

/* NCCL's destroy waits for the other ranks of the host; ours does for the group's timeout. */
static void test_nccl_destroy_alone(void) {
  const struct timespec nap = {0, 1000000};
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  for (int r = 0; r < RANKS; r++) ranks[r].config.timeout_ms = 300;
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  nccl_fake->destroy_meets = 1;
  destroy(&ranks[0]);
  EXPECT(nccl_fake->destroyed == 0 && ranks[0].status == MOEFLOW_OK, "%s", ranks[0].message);
  destroy(&ranks[1]);
  for (int i = 0; i < 5000 && nccl_fake->live; i++) nanosleep(&nap, NULL);
  tear_down();
}

/* ---- An adopted communicator ---- */

static void test_adopt(void) {
  set_up(MOEFLOW_TRANSPORT_NCCL, "fake_nccl");
  char path[1024];
  snprintf(path, sizeof path, "%s/tests/libfake_nccl.so", MOEFLOW_BINARY_DIR);
  ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *) = fake_symbol(path, "ncclCommInitRankConfig");
  ncclResult_t (*end)(ncclComm_t) = fake_symbol(path, "ncclCommDestroy");
  ncclUniqueId id;
  ncclComm_t comms[RANKS];
  memset(&id, 7, sizeof id);
  for (int r = 0; r < RANKS; r++) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    init(&comms[r], RANKS, id, r, &config);
  }
  for (int r = 0; r < RANKS; r++) {
    ranks[r].config.unique_id = NULL;
    ranks[r].config.nccl_comm = comms[1 - r]; /* the wrong one first */
  }
  each(create_group);
  EXPECT(strstr(ranks[0].message, "the communicator is rank 1 of 2 on device 0; the group is rank 0"), "%s",
         ranks[0].message);
  expect_all(MOEFLOW_ERROR_ARGUMENT, "");
  for (int r = 0; r < RANKS; r++) ranks[r].config.nccl_comm = comms[r];
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  each(make_layer);
  each(forward_nccl); /* non-blocking: each call is awaited */
  expect_all(MOEFLOW_OK, "");
  each(destroy);
  expect_all(MOEFLOW_OK, "");
  EXPECT(nccl_fake->live == RANKS && !nccl_fake->aborted && !nccl_fake->destroyed, "the caller's stay");
  for (int r = 0; r < RANKS; r++) end(comms[r]);
  ranks[0].config.lanes = 2;
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &ranks[0].config, &ranks[0].group), MOEFLOW_ERROR_ARGUMENT,
                "serves 1 lane");
  tear_down();
}

/* ---- Running out of memory at each allocation, one after the other ---- */

static void oom(moeflow_transport transport) {
  static moeflow_unique_id id;
  set_up(transport, "fake_nccl");
  int failed = 0, done = 0;
  const int live = cuda->live;
  for (int n = 1; n < 100 && !done; n++) {
    EXPECT_OK(moeflow_get_unique_id(transport, &id));
    for (int r = 0; r < RANKS; r++) {
      ranks[r].config.unique_id = &id;
      ranks[r].config.timeout_ms = 500;
      ranks[r].config.lanes = 2;
    }
    cuda->fail_allocation = n;
    each(create_group);
    done = ranks[0].status == MOEFLOW_OK && ranks[1].status == MOEFLOW_OK;
    EXPECT(done == (cuda->fail_allocation > 0), "allocation %d: both fail or none", n);
    if (done) break;
    failed++;
    EXPECT(ranks[0].status != MOEFLOW_OK && ranks[1].status != MOEFLOW_OK, "allocation %d: %s / %s", n, ranks[0].message,
           ranks[1].message);
    EXPECT(ranks[0].status == MOEFLOW_ERROR_MEMORY || ranks[1].status == MOEFLOW_ERROR_MEMORY, "allocation %d: %s / %s", n,
           ranks[0].message, ranks[1].message);
    EXPECT(cuda->live == live && nccl_fake->live == 0, "allocation %d: %d pieces, %d communicators left", n,
           cuda->live - live, nccl_fake->live);
    ranks[0].status = ranks[1].status = MOEFLOW_OK;
  }
  cuda->fail_allocation = 0;
  EXPECT(done && failed >= 2 * RANKS, "%d failures", failed);
  tear_down();
}

static void test_oom_local(void) {
  oom(MOEFLOW_TRANSPORT_LOCAL);
}

static void test_oom_nccl(void) {
  oom(MOEFLOW_TRANSPORT_NCCL);
}

static void test_oom_message(void) {
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  cuda->fail_allocation = 3 * RANKS; /* the second rank's arena: the first to come is another's */
  each(create_group);
  const int victim = ranks[0].status == MOEFLOW_ERROR_MEMORY ? 0 : 1;
  EXPECT(ranks[victim].status == MOEFLOW_ERROR_MEMORY, "%s", ranks[victim].message);
  EXPECT(strstr(ranks[victim].message, "for 2 ranks x capacity 100"), "%s", ranks[victim].message);
  EXPECT(strstr(ranks[victim].message, "1000 of 2000 bytes free"), "%s", ranks[victim].message);
  EXPECT(ranks[1 - victim].status == MOEFLOW_ERROR_PEER && strstr(ranks[1 - victim].message, "bytes free"), "%s",
         ranks[1 - victim].message);
  ranks[0].status = ranks[1].status = MOEFLOW_OK;
  tear_down();
}

/* ---- The caller's allocator ---- */

static atomic_int lent;

static void *lend(void *user, size_t bytes, size_t alignment) {
  (void)user;
  atomic_fetch_add(&lent, 1);
  void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  memset(memory, 0xee, bytes);
  return memory;
}

static void take_back(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  atomic_fetch_sub(&lent, 1);
  free(memory);
}

static void test_allocator(void) {
  moeflow_allocator allocator = {lend, take_back, NULL};
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  for (int r = 0; r < RANKS; r++) ranks[r].config.allocator = &allocator;
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  EXPECT(lent == 2 * RANKS, "%d: a window and an arena each", lent);
  memset(&allocator, 0, sizeof allocator); /* it was copied */
  EXPECT(read_lane(ranks[0].group, 0).epoch == 1 && ranks[0].group->lanes[0].flags[0] == 0, "zeroed");
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  tear_down();
  EXPECT(lent == 0, "%d", lent);
}

/* ---- Poll ---- */

static struct moeflow_combine_params last_combine(void) {
  struct moeflow_combine_params params;
  const struct fake_call *call = &cuda->calls[cuda->call_count - 1];
  EXPECT(!strcmp(call->kernel, "moeflow_combine"), "%s", call->kernel);
  memcpy(&params, call->params, sizeof params);
  return params;
}

static void test_poll(void) {
  set_up(MOEFLOW_TRANSPORT_LOCAL, "fake_nccl");
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  struct moeflow_record *record = ranks[0].group->lanes[0].record;
  moeflow_forward_args args = step_args(5, 20);
  EXPECT_OK(moeflow_forward(ranks[0].layer, &args));
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 20), MOEFLOW_ERROR_TIMEOUT, "1 step(s) enqueued, 0 ended");
  record->started = 1;
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_TIMEOUT, "step 1 is in the dispatch phase");
  record->received = 1;
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_TIMEOUT, "step 1 is in the experts or return phase");
  record->finished = record->steps = 1;
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  cuda->capturing = 1;
  EXPECT_OK(moeflow_forward(ranks[0].layer, &args)); /* a captured step is no step yet */
  EXPECT(last_combine().eager == 0, "its last kernel leaves the count of steps alone");
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  cuda->capturing = 0;
  record->started = record->finished = 4; /* three replays */
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  EXPECT_OK(moeflow_forward(ranks[0].layer, &args)); /* and a step that is held up behind other work of the stream */
  EXPECT(last_combine().eager == 1);
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_TIMEOUT, "2 step(s) enqueued, 1 ended");
  record->started = record->finished = 5, record->steps = 2;
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  record->failed_peer = 2;
  record->failed_step = 7;
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_PEER, "rank 1 joined step 7");
  EXPECT_OK(moeflow_poll(ranks[0].group, 0));
  const struct {
    uint32_t poison;
    moeflow_status status;
    const char *text;
  } cases[] = {
      {MOEFLOW_POISON_PEER, MOEFLOW_ERROR_PEER, "the peer's group is poisoned (rank 1, return phase, step 9)"},
      {MOEFLOW_POISON_TOKENS_MAX, MOEFLOW_ERROR_PEER, "different tokens_max: 20 here, 21 there (rank 1"},
      {MOEFLOW_POISON_EPOCH, MOEFLOW_ERROR_PEER, "different steps: 20 here, 21 there"},
      {MOEFLOW_POISON_TIMEOUT, MOEFLOW_ERROR_TIMEOUT, "stayed silent (rank 1, return phase, step 9)"},
      {MOEFLOW_POISON_ABORT, MOEFLOW_ERROR_PEER, "moeflow_abort"},
      {MOEFLOW_POISON_LEND, MOEFLOW_ERROR_ARGUMENT, "`lend` returned NULL"},
      {77, MOEFLOW_ERROR_INTERNAL, "77"},
  };
  record->peer = 1, record->phase = MOEFLOW_PHASE_RETURN, record->step = 9, record->mine = 20, record->theirs = 21;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    record->poison = cases[i].poison;
    EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), cases[i].status, cases[i].text);
  }
  tear_down();
}

/* ---- Too many ranks on one GPU ---- */

static void test_hardware_queues(void) {
  struct spec spec = fake_spec();
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_unique_id id;
  moeflow_group *group;
  fake_load("fake_nccl");
  spec.experts = 64;
  fake_plan(&spec, "sm_90a", &plan);
  open_contexts();
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));
  config.unique_id = &id;
  config.ranks = 9;
  config.timeout_ms = 50;
  config.transport = MOEFLOW_TRANSPORT_LOCAL;
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &config, &group), MOEFLOW_ERROR_ENVIRONMENT,
                "CUDA_DEVICE_MAX_CONNECTIONS=32");
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &config, &group), MOEFLOW_ERROR_TIMEOUT,
                "rank 1, 2, 3, 4, 5, 6, 7, 8 of 9 did not join");
  config.ranks = 33;
  EXPECT_STATUS(moeflow_group_create(&ranks[0].context, 1, &config, &group), MOEFLOW_ERROR_ARGUMENT, "at most 32");
  for (int r = 0; r < RANKS; r++) EXPECT_OK(moeflow_close(ranks[r].context));
}

int main(void) {
  in_child("step over local", test_step_local);
  in_child("variants", test_step_variants);
  in_child("failed join", test_failed_join);
  in_child("launch error", test_launch_error);
  in_child("step over nccl", test_step_nccl);
  in_child("step over an older nccl", test_step_nccl_old);
  in_child("nccl too old", test_nccl_too_old);
  in_child("nccl init never ends", test_nccl_init_never);
  in_child("nccl rank missing", test_nccl_rank_missing);
  in_child("nccl init fails", test_nccl_init_fails);
  in_child("nccl prepare alone", test_nccl_prepare_alone);
  in_child("nccl prepare again alone", test_nccl_prepare_again_alone);
  in_child("nccl health and abort", test_nccl_health_and_abort);
  in_child("nccl abort with a graph", test_nccl_abort_with_graph);
  in_child("nccl abort of a blocked forward", test_nccl_abort_blocked);
  in_child("nccl destroy alone", test_nccl_destroy_alone);
  in_child("adopt", test_adopt);
  in_child("out of memory, local", test_oom_local);
  in_child("out of memory, nccl", test_oom_nccl);
  in_child("out of memory, message", test_oom_message);
  in_child("allocator", test_allocator);
  in_child("poll", test_poll);
  in_child("hardware queues", test_hardware_queues);
  TEST_END;
}
