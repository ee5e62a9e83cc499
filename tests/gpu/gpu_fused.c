/* The fused pipeline on one GPU: the same bits as step by step, for any number of ranks and tokens, where ranks differ in
 * which they run, across the wrap of epochs, and in replays of graphs of several sizes in any order. */
#include "gpu_world.h"

#define SIZES 5
#define REPLAYS_DEFAULT 1500 /* of each number of ranks; MOEFLOW_REPLAYS overrides */
#define CAPACITY 128

static struct gpu gpu = {.world = {.capacity = CAPACITY}};

/* Tokens by size and rank: the last size has ranks without any. */
static int tokens_of(int size, int rank) {
  static const int most[SIZES] = {1, 8, 33, CAPACITY, 17};
  if (size == SIZES - 1) return rank % 2 ? 0 : most[size];
  return most[size] - (size == 2 ? rank : 0);
}

static void fill(struct step *step, int size, int seed, int logits) {
  const struct spec *spec = &gpu.world.spec;
  for (int r = 0; r < gpu.world.ranks; r++) {
    step->tokens[r] = tokens_of(size, r);
    if (step->tokens[r] > step->tokens_max) step->tokens_max = step->tokens[r];
  }
  step_fill(&gpu.world, step, seed);
  for (int r = 0; logits && r < gpu.world.ranks; r++) {
    step->logits[r] = step_memory((size_t)step->tokens[r] * spec->experts, sizeof(float));
    for (int i = 0; i < step->tokens[r] * spec->experts; i++) {
      step->logits[r][i] = (float)(step_draw(seed + 7, r, i) % 4096) / 512 - 4;
    }
  }
}

struct run {
  struct step *step;
  unsigned flags[WORLD_RANKS_MAX];
};

static void run_rank(struct world *world, int rank, void *argument) {
  struct run *run = argument;
  struct step *step = run->step;
  CU(cuCtxPushCurrent(gpu.context));
  gpu_put(&gpu, step, rank);
  moeflow_forward_args args = gpu_args(&gpu, step, rank);
  args.flags = run->flags[rank];
  step->forward[rank] = moeflow_forward(world->rank[rank].layer, &args);
  step->poll[rank] = moeflow_poll(world->rank[rank].group, 30000);
  if (step->poll[rank]) snprintf(step->poll_message[rank], 512, "%s", moeflow_last_error());
  gpu_get(&gpu, step, rank);
}

static size_t out_bytes(const struct step *step, int rank) {
  return (size_t)step->tokens[rank] * (size_t)gpu.world.spec.hidden * 2;
}

/* Bit r of `stepwise`: rank r runs step by step. */
static void run_step(struct step *step, unsigned stepwise) {
  struct run run = {.step = step};
  for (int r = 0; r < gpu.world.ranks; r++) run.flags[r] = stepwise >> r & 1 ? MOEFLOW_FORWARD_STEPWISE : 0;
  world_each(&gpu.world, run_rank, &run);
  for (int r = 0; r < gpu.world.ranks; r++) EXPECT(step->poll[r] == MOEFLOW_OK, "rank %d: %s", r, step->poll_message[r]);
}

static void test_same_bits(void) {
  static uint16_t first[WORLD_RANKS_MAX][CAPACITY * 512];
  const unsigned mixed[] = {0, 0x55, 0xfe, 0};
  for (int size = 0; size < SIZES; size++) {
    for (int logits = 0; logits < 2; logits++) {
      struct step step = {.tokens_max = 0};
      fill(&step, size, 50 + size, logits);
      run_step(&step, ~0u);
      if (!logits) step_expect(&gpu.world, &step, "stepwise");
      for (int r = 0; r < gpu.world.ranks; r++) memcpy(first[r], step.out[r], out_bytes(&step, r));
      for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
        run_step(&step, mixed[i]);
        for (int r = 0; r < gpu.world.ranks; r++) {
          EXPECT(!memcmp(first[r], step.out[r], out_bytes(&step, r)), "%d ranks, size %d, mask %x: rank %d has other bits",
                 gpu.world.ranks, size, mixed[i], r);
        }
      }
      step_free(&gpu.world, &step);
    }
  }
}

/* As if so many steps had been run: epochs, and the flags of the last step. */
static void set_epoch(uint32_t epoch) {
  for (int r = 0; r < gpu.world.ranks; r++) {
    struct moeflow_group *group = gpu.world.rank[r].group;
    struct group_lane *lane = &group->lanes[0];
    const size_t words = (size_t)moeflow_mark_at(0, group->ranks, group->flag_words);
    uint32_t *flags = calloc(words, sizeof *flags);
    for (size_t i = 0; i < words; i++) flags[i] = epoch - 1;
    CU(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)lane->flags, flags, words * sizeof *flags, gpu.rank[r].stream));
    CU(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)&lane->state->epoch, &epoch, sizeof epoch, gpu.rank[r].stream));
    CU(cuStreamSynchronize(gpu.rank[r].stream));
    free(flags);
    lane->record->started = lane->record->received = lane->record->finished = epoch - 1;
  }
}

static void test_epochs(void) {
  const uint32_t starts[] = {0xfffffffcu, 0x7ffffffcu};
  for (int i = 0; i < 2; i++) {
    set_epoch(starts[i]);
    for (int n = 0; n < 8; n++) {
      struct step step = {.tokens_max = 0};
      fill(&step, n % SIZES, 70 + n, 0);
      run_step(&step, n == 3 ? 1 : 0);
      step_expect(&gpu.world, &step, "across the wrap");
      step_free(&gpu.world, &step);
    }
  }
}

/* ---- Replays: a graph of each size, the same order on all ranks, the host late now and then ---- */

struct replays {
  struct step steps[SIZES];
  CUgraphExec exec[SIZES][WORLD_RANKS_MAX];
  int first, count, last; /* of the order; the size of the last one */
};

static void capture_rank(struct world *world, int rank, void *argument) {
  struct replays *replays = argument;
  (void)world;
  CU(cuCtxPushCurrent(gpu.context));
  for (int size = 0; size < SIZES; size++) replays->exec[size][rank] = gpu_capture(&gpu, &replays->steps[size], rank);
}

static void replay_rank(struct world *world, int rank, void *argument) {
  struct replays *replays = argument;
  struct step *last = &replays->steps[replays->last];
  CU(cuCtxPushCurrent(gpu.context));
  gpu_put(&gpu, &replays->steps[3], rank); /* the largest: the others' tokens are its first ones */
  for (int i = 0; i < replays->count; i++) {
    const uint32_t draw = step_draw(90, 0, replays->first + i);
    const int size = i + 1 < replays->count ? (int)(draw % SIZES) : replays->last;
    if (step_draw(91, rank, replays->first + i) % 64 == 0) usleep(300);
    CUX(cuGraphLaunch(replays->exec[size][rank], gpu.rank[rank].stream));
  }
  gpu_get(&gpu, last, rank);
  last->poll[rank] = moeflow_poll(world->rank[rank].group, 30000);
  if (last->poll[rank]) snprintf(last->poll_message[rank], 512, "%s", moeflow_last_error());
}

static void test_replays(void) {
  static struct replays replays;
  static uint16_t eager[SIZES][WORLD_RANKS_MAX][CAPACITY * 512];
  const char *wanted = getenv("MOEFLOW_REPLAYS");
  const int total = wanted && atoi(wanted) > 0 ? atoi(wanted) : REPLAYS_DEFAULT;
  memset(&replays, 0, sizeof replays);
  for (int size = 0; size < SIZES; size++) {
    fill(&replays.steps[size], size, 80, 0); /* draws by rank and token: each size has the first tokens of the largest */
    run_step(&replays.steps[size], 0);
    for (int r = 0; r < gpu.world.ranks; r++) {
      memcpy(eager[size][r], replays.steps[size].out[r], out_bytes(&replays.steps[size], r));
    }
  }
  world_each(&gpu.world, capture_rank, &replays);
  for (replays.first = 0; replays.first < total; replays.first += replays.count) {
    replays.count = 50;
    replays.last = replays.first / 50 % SIZES;
    world_each(&gpu.world, replay_rank, &replays);
    for (int r = 0; r < gpu.world.ranks; r++) {
      const struct step *last = &replays.steps[replays.last];
      EXPECT(last->poll[r] == MOEFLOW_OK, "rank %d after %d replays: %s", r, replays.first, last->poll_message[r]);
      EXPECT(!memcmp(eager[replays.last][r], last->out[r], out_bytes(last, r)),
             "%d ranks, after %d replays: rank %d, size %d", gpu.world.ranks, replays.first, r, replays.last);
    }
  }
  for (int size = 0; size < SIZES; size++) {
    for (int r = 0; r < gpu.world.ranks; r++) CUX(cuGraphExecDestroy(replays.exec[size][r]));
    step_free(&gpu.world, &replays.steps[size]);
  }
}

int main(void) {
  const int ranks[] = {1, 2, 3, 5, 8};
  for (int i = 0; i < 5; i++) {
    gpu.world.spec = world_spec(512, 256, 16, 4);
    gpu.world.ranks = ranks[i];
    gpu_open(&gpu);
    if (gpu.arch[3] < '9') SKIP("no fused pipeline for %s", gpu.arch);
    test_same_bits();
    test_epochs();
    test_replays();
    gpu_close(&gpu);
  }
  TEST_END;
}
