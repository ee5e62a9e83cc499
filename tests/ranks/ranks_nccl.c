/* Two processes, each with a GPU of its own, over both transports of NCCL. */
#include "pair.h"

#define TOKENS 40
#define CASE_SECONDS 40

/* ---- Cases ---- */

static void case_layer(void) {
  const int counts[][2] = {{1, 1}, {8, 8}, {40, 40}, {0, 33}, {17, 0}, {0, 0}};
  open_rank();
  for (int i = 0; i < 6; i++) {
    struct step step = {.tokens_max = i < 3 ? counts[i][0] : 40};
    fill(&step, counts[i][0], counts[i][1], 300 + i);
    run(&step);
    expect_mine(&step, "a step");
    step.flags = MOEFLOW_FORWARD_IDENTITY;
    run(&step);
    expect_mine(&step, "identity");
    step_free(&gpu.world, &step);
  }
  close_rank();
}

static void case_two_lanes(void) {
  gpu.world.lanes = 2;
  open_rank();
  for (int i = 0; i < 6; i++) {
    struct step step = {.tokens_max = 40, .lane = i % 2};
    fill(&step, 40 - i, 3 * i, 310 + i);
    run(&step);
    expect_mine(&step, "two lanes");
    step_free(&gpu.world, &step);
  }
  close_rank();
}

static void case_graph(void) {
  static uint16_t eager[TOKENS * 512];
  struct step step = {.tokens_max = TOKENS};
  open_rank();
  fill(&step, TOKENS, TOKENS - 7, 320);
  run(&step);
  expect_mine(&step, "eager");
  const size_t bytes = (size_t)step.tokens[my_rank] * 1024;
  memcpy(eager, step.out[my_rank], bytes);
  CUgraphExec exec = gpu_capture(&gpu, &step, my_rank);
  for (int i = 0; i < 100; i++) {
    gpu_put(&gpu, &step, my_rank);
    CUX(cuGraphLaunch(exec, gpu.rank[my_rank].stream));
    gpu_get(&gpu, &step, my_rank);
    EXPECT(!memcmp(eager, step.out[my_rank], bytes), "replay %d", i);
  }
  EXPECT(moeflow_poll(gpu.world.rank[my_rank].group, 1000) == MOEFLOW_OK, "%s", moeflow_last_error());
  CUX(cuGraphExecDestroy(exec));
  step_free(&gpu.world, &step);
  close_rank();
}

/* Ranks with different capacities: both are told, and which. */
static void case_capacity_differs(void) {
  gpu.world.capacity = my_rank ? 65 : 64;
  start();
  gpu_open_one(&gpu.world, my_rank, &gpu);
  const struct world_rank *mine = &gpu.world.rank[my_rank];
  EXPECT(mine->status == MOEFLOW_ERROR_MISMATCH, "%d: %s", mine->status, mine->message);
  EXPECT(strstr(mine->message, "capacity: rank 0 has 64, rank 1 has 65"), "%s", mine->message);
  EXPECT(moeflow_close(mine->context) == MOEFLOW_OK, "%s", moeflow_last_error());
}

static void case_places_differ(void) {
  static int32_t places[16];
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  moeflow_layer *layer;
  open_rank();
  struct world_rank *mine = &gpu.world.rank[my_rank];
  for (int e = 0; e < 16; e++) places[e] = my_rank ? (e % 2) << 16 | e / 2 : (e / 8) << 16 | e % 8;
  config.places = places;
  EXPECT(moeflow_layer_create(mine->group, mine->context, &config, &layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = gpu_pointer(gpu.rank[my_rank].matrices[0]);
  weights.down = gpu_pointer(gpu.rank[my_rank].matrices[1]);
  EXPECT(moeflow_layer_bind(layer, &weights) == MOEFLOW_OK, "%s", moeflow_last_error());
  const moeflow_status status = moeflow_prepare(&layer, 1, 0);
  EXPECT(status == MOEFLOW_ERROR_MISMATCH && strstr(moeflow_last_error(), "places"), "%d: %s", status, moeflow_last_error());
  EXPECT(moeflow_layer_destroy(layer) == MOEFLOW_OK);
  close_rank();
}

/* Rank 1 never joins: an error within the timeout, and this process can end. */
static void case_rank_missing(void) {
  gpu.world.timeout_ms = 3000;
  start();
  if (my_rank == 1) return;
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  gpu_open_one(&gpu.world, my_rank, &gpu);
  clock_gettime(CLOCK_MONOTONIC, &end);
  const struct world_rank *mine = &gpu.world.rank[my_rank];
  EXPECT(mine->status == MOEFLOW_ERROR_TIMEOUT, "%d: %s", mine->status, mine->message);
  EXPECT(end.tv_sec - begin.tv_sec < 20, "%ld s", (long)(end.tv_sec - begin.tv_sec));
  EXPECT(moeflow_close(mine->context) == MOEFLOW_OK, "%s", moeflow_last_error());
}

/* Rank 1 ends itself between two steps: rank 0's next step is reported, and an abort frees it. */
static void case_rank_dies(void) {
  struct step step = {.tokens_max = TOKENS};
  open_rank();
  fill(&step, 8, 8, 330);
  run(&step);
  expect_mine(&step, "before");
  if (my_rank == 1) _exit(0);
  sleep(1);
  struct world_rank *mine = &gpu.world.rank[0];
  gpu_put(&gpu, &step, 0);
  moeflow_forward_args args = gpu_args(&gpu, &step, 0);
  moeflow_forward(mine->layer, &args);
  const moeflow_status status = moeflow_poll(mine->group, 3000);
  EXPECT(status == MOEFLOW_ERROR_TIMEOUT || status == MOEFLOW_ERROR_NCCL, "%d: %s", status, moeflow_last_error());
  EXPECT(moeflow_abort(mine->group) == MOEFLOW_OK, "%s", moeflow_last_error());
  gpu_get(&gpu, &step, 0); /* the stream ends */
  EXPECT(moeflow_poll(mine->group, 1000) == MOEFLOW_ERROR_PEER, "%s", moeflow_last_error());
  for (int i = 0; i < 8 * 512; i++) EXPECT(step.out[0][i] == 0x7fc0, "element %d", i);
  close_rank();
}

static void case_adopt(void) {
  struct step step = {.tokens_max = TOKENS};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm;
  ncclUniqueId id;
  start();
  memcpy(&id, &gpu.world.id, sizeof id);
  EXPECT(nccl_load() == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(nccl.ncclCommInitRankConfig(&comm, RANKS, id, my_rank, &config) == ncclSuccess);
  moeflow_open_config open = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_group_config group = MOEFLOW_GROUP_CONFIG_INIT;
  struct world_rank *mine = &gpu.world.rank[my_rank];
  open.device = gpu.device;
  open.model = gpu.world.spec.name;
  open.cache = gpu_cache;
  group.rank = my_rank;
  group.ranks = RANKS;
  group.capacity = gpu.world.capacity;
  group.transport = pair_transport;
  group.nccl_comm = comm;
  EXPECT(moeflow_open(&open, &mine->context) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_group_create(&mine->context, 1, &group, &mine->group) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(moeflow_layer_create(mine->group, mine->context, NULL, &mine->layer) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(gpu_bind(&gpu, my_rank) == MOEFLOW_OK && moeflow_prepare(&mine->layer, 1, 0) == MOEFLOW_OK, "%s",
         moeflow_last_error());
  gpu_make_buffers(&gpu, my_rank);
  fill(&step, TOKENS, 5, 340);
  run(&step);
  expect_mine(&step, "adopted communicator");
  step_free(&gpu.world, &step);
  close_rank();
  EXPECT(nccl.ncclCommDestroy(comm) == ncclSuccess, "the caller's communicator is still good");
}

static void all_to_all(const char *send, char *receive, size_t bytes, ncclComm_t comm, cudaStream_t stream) {
  if (nccl.ncclAlltoAll) {
    EXPECT(nccl.ncclAlltoAll(send, receive, bytes, ncclInt8, comm, stream) == ncclSuccess);
    return;
  }
  EXPECT(nccl.ncclGroupStart() == ncclSuccess);
  for (int p = 0; p < RANKS; p++) {
    EXPECT(nccl.ncclSend(send + (size_t)p * bytes, bytes, ncclInt8, p, comm, stream) == ncclSuccess);
    EXPECT(nccl.ncclRecv(receive + (size_t)p * bytes, bytes, ncclInt8, p, comm, stream) == ncclSuccess);
  }
  EXPECT(nccl.ncclGroupEnd() == ncclSuccess);
}

/* All-to-all, all-gather and reduce-scatter captured in one process over plain device memory, 8 MB a peer: replays end. */
static void case_all_kinds_captured(void) {
  const size_t bytes = 8 << 20;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm;
  ncclUniqueId id;
  CUstream stream;
  CUgraph graph;
  CUgraphExec exec;
  start();
  memcpy(&id, &gpu.world.id, sizeof id);
  EXPECT(nccl_load() == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(nccl.ncclCommInitRankConfig(&comm, RANKS, id, my_rank, &config) == ncclSuccess);
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  void *send = gpu_pointer(gpu_memory(NULL, RANKS * bytes)), *receive = gpu_pointer(gpu_memory(NULL, RANKS * bytes));
  for (int captured = 0; captured < 2; captured++) {
    if (captured) CUX(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    all_to_all(send, receive, bytes, comm, (cudaStream_t)stream);
    EXPECT(nccl.ncclAllGather(send, receive, bytes, ncclInt8, comm, (cudaStream_t)stream) == ncclSuccess);
    EXPECT(nccl.ncclReduceScatter(send, receive, bytes / 2, ncclBfloat16, ncclSum, comm, (cudaStream_t)stream) ==
           ncclSuccess);
  }
  CUX(cuStreamEndCapture(stream, &graph));
  CUX(cuGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 100; i++) CUX(cuGraphLaunch(exec, stream));
  CU(cuStreamSynchronize(stream));
  CUX(cuGraphExecDestroy(exec));
  CUX(cuGraphDestroy(graph));
  EXPECT(nccl.ncclCommDestroy(comm) == ncclSuccess);
}

static void run_case(const char *name, void (*run_it)(void)) {
  run_pair(name, run_it, CASE_SECONDS, 0);
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  pair_begin();
  run_case("layer", case_layer);
  run_case("two lanes", case_two_lanes);
  run_case("graph", case_graph);
  run_case("capacity differs", case_capacity_differs);
  run_case("places differ", case_places_differ);
  run_case("rank missing", case_rank_missing);
  run_case("rank dies", case_rank_dies);
  run_case("adopt", case_adopt);
  run_case("all kinds captured", case_all_kinds_captured);
  pair_transport = MOEFLOW_TRANSPORT_ALLGATHER;
  run_case("allgather: layer", case_layer);
  run_case("allgather: two lanes", case_two_lanes);
  run_case("allgather: graph", case_graph);
  run_case("allgather: rank dies", case_rank_dies);
  run_case("allgather: adopt", case_adopt);
  pair_end();
  TEST_END;
}
