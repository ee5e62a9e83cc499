/* Two processes that share one GPU, over both transports of NCCL: NCCL takes them for two hosts and goes through sockets,
 * and the GPU runs them in turns. Slow, and all that a machine with one GPU can show of it. */
#include "pair.h"

#define TOKENS 16
#define REPLAYS 5
#define CASE_SECONDS 90

/* Before NCCL is loaded. */
static void share_gpu(void) {
  static const char *const settings[][2] = {{"NCCL_NET", "Socket"},
                                            {"NCCL_SOCKET_IFNAME", "lo"},
                                            {"NCCL_IB_DISABLE", "1"},
                                            {"NCCL_P2P_DISABLE", "1"},
                                            {"NCCL_SHM_DISABLE", "1"}};
  char host[16];
  snprintf(host, sizeof host, "rank%d", my_rank);
  setenv("NCCL_HOSTID", host, 1);
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) setenv(settings[i][0], settings[i][1], 1);
}

static void replay(const struct step *eager) {
  struct step step = *eager;
  uint16_t out[TOKENS * 512];
  const size_t bytes = (size_t)step.tokens[my_rank] * 1024;
  memcpy(out, eager->out[my_rank], bytes);
  CUgraphExec exec = gpu_capture(&gpu, &step, my_rank);
  for (int i = 0; i < REPLAYS; i++) {
    gpu_put(&gpu, &step, my_rank);
    CUX(cuGraphLaunch(exec, gpu.rank[my_rank].stream));
    gpu_get(&gpu, &step, my_rank);
    EXPECT(!memcmp(out, step.out[my_rank], bytes), "rank %d: replay %d", my_rank, i);
  }
  CUX(cuGraphExecDestroy(exec));
}

static void case_steps(void) {
  const int counts[][2] = {{1, 1}, {5, 0}, {TOKENS, TOKENS - 3}};
  share_gpu();
  gpu.world.timeout_ms = 60000;
  open_rank();
  for (int i = 0; i < 3; i++) {
    struct step step = {.tokens_max = i ? TOKENS : 1};
    fill(&step, counts[i][0], counts[i][1], 500 + i);
    step.flags = MOEFLOW_FORWARD_IDENTITY;
    run(&step);
    expect_mine(&step, "identity");
    step.flags = 0;
    run(&step);
    expect_mine(&step, "a step");
    if (i == 2) replay(&step);
    step_free(&gpu.world, &step);
  }
  close_rank();
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  pair_gpus = 1;
  pair_begin();
  run_pair("nccl", case_steps, CASE_SECONDS, 0);
  pair_transport = MOEFLOW_TRANSPORT_ALLGATHER;
  run_pair("allgather", case_steps, CASE_SECONDS, 0);
  pair_end();
  TEST_END;
}
