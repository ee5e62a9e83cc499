/* Two processes, each with a GPU of its own: the allgather transport against nccl, bit for bit, as steps and as replays of
 * both in turn in one process. */
#include "pair.h"

#define CASE_SECONDS 60

static struct gpu other; /* the same model over the other transport */

static void swap(void) {
  const struct gpu held = gpu;
  gpu = other;
  other = held;
}

/* `gpu` over nccl, `other` over allgather. */
static void open_both(void) {
  other = gpu;
  pair_transport = MOEFLOW_TRANSPORT_NCCL;
  open_rank();
  swap();
  pair_transport = MOEFLOW_TRANSPORT_ALLGATHER;
  open_rank();
  swap();
}

static void close_both(void) {
  close_rank();
  swap();
  close_rank();
}

/* The output over nccl, which the caller frees; `step` keeps that over allgather. */
static uint16_t *run_both(struct step *step, const char *what) {
  const size_t bytes = (size_t)step->tokens[my_rank] * (size_t)gpu.world.spec.hidden * 2;
  uint16_t *out = malloc(bytes + 1);
  run(step);
  memcpy(out, step->out[my_rank], bytes);
  swap();
  run(step);
  swap();
  EXPECT(!memcmp(out, step->out[my_rank], bytes), "rank %d: %s: allgather has other bits than nccl", my_rank, what);
  return out;
}

static void case_same_bits(void) {
  const int counts[][2] = {{1, 1}, {8, 8}, {64, 64}, {0, 33}, {17, 0}, {64, 2}};
  open_both();
  for (int i = 0; i < 6; i++) {
    struct step step = {.tokens_max = i < 3 ? counts[i][0] : 64};
    fill(&step, counts[i][0], counts[i][1], 400 + i);
    free(run_both(&step, "a step"));
    expect_mine(&step, "allgather");
    step_free(&gpu.world, &step);
  }
  close_both();
}

/* All-gather, reduce-scatter and all-to-all captured in one process, more than 4 MB a rank: replays end, with the same bits.
 */
static void case_captured(void) {
  const int tokens = 4096;
  struct step step = {.tokens_max = tokens};
  gpu.world.capacity = tokens;
  open_both();
  fill(&step, tokens, tokens - 7, 410);
  uint16_t *eager = run_both(&step, "eager");
  const size_t bytes = (size_t)step.tokens[my_rank] * (size_t)gpu.world.spec.hidden * 2;
  CUgraphExec graphs[2];
  for (int i = 0; i < 2; i++) {
    gpu_put(&gpu, &step, my_rank);
    graphs[i] = gpu_capture(&gpu, &step, my_rank);
    swap();
  }
  for (int i = 0; i < 40; i++) {
    gpu_put(&gpu, &step, my_rank);
    CUX(cuGraphLaunch(graphs[i % 2], gpu.rank[my_rank].stream));
    gpu_get(&gpu, &step, my_rank);
    EXPECT(!memcmp(eager, step.out[my_rank], bytes), "rank %d: replay %d", my_rank, i);
    swap();
  }
  for (int i = 0; i < 2; i++) CUX(cuGraphExecDestroy(graphs[i]));
  free(eager);
  step_free(&gpu.world, &step);
  close_both();
}

int main(void) {
  gpu.world.spec = world_spec(512, 256, 16, 4);
  pair_begin();
  run_pair("same bits", case_same_bits, CASE_SECONDS, 0);
  run_pair("captured", case_captured, CASE_SECONDS, 0);
  gpu.world.spec.returned = SPEC_WIRE_FP32;
  pair_build();
  run_pair("fp32", case_same_bits, CASE_SECONDS, 0);
  pair_end();
  TEST_END;
}
