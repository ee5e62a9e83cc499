/* The experts bench without a GPU: on the CPU backend, where numbers are real, and on a fake GPU, where launches are written
 * down. */
#include <math.h>

#include "experts_state.h"
#include "fakes/fake_graph.h"

static char plan_path[1024];

static void make_plan(int experts_too) {
  struct spec spec = fake_spec();
  struct plan plan;
  char name[160];
  spec.intermediate = 128;
  spec.hidden = 256;
  (experts_too ? fake_plan_experts : fake_plan)(&spec, "sm_90a", &plan);
  plan_file_name(&plan, name);
  snprintf(plan_path, sizeof plan_path, "%s/plans/%s", scratch, name);
}

static struct experts_bench_config config_of(moeflow_backend backend) {
  return (struct experts_bench_config){
      .plan = plan_path, .cache = scratch, .ep = 2, .capacity = 4, .tokens_max = 4, .seed = 1, .backend = backend};
}

/* ---- CPU ---- */

static struct experts_bench *open_cpu(int tokens, double skew) {
  const struct experts_bench_config config = config_of(MOEFLOW_BACKEND_CPU);
  struct experts_bench *bench = NULL;
  make_plan(0);
  EXPECT_OK(experts_bench_open(&config, &bench));
  EXPECT_OK(experts_bench_routing(bench, tokens, skew));
  return bench;
}

static struct experts_arm *portable_arm(struct experts_bench *bench, int with_sum) {
  struct experts_arm *arm = NULL;
  EXPECT_OK(experts_bench_arm(bench, BENCH_PORTABLE, 0, with_sum, &arm));
  return arm;
}

static int check(struct experts_arm *arm, double *worst) {
  int passed = -1;
  EXPECT_OK(experts_arm_check(arm, worst, &passed));
  return passed;
}

static void check_arm(double skew) {
  struct experts_bench *bench = open_cpu(3, skew); /* 3 tokens a rank: 2 x 4 rows, of which 6 are sent */
  struct experts_arm *sums = portable_arm(bench, 1), *alone = portable_arm(bench, 0);
  uint64_t one[BENCH_ROUTINGS], two[BENCH_ROUTINGS];
  double worst = NAN, us = 0;
  EXPECT(experts_bench_rows(bench) == 8, "%d rows", experts_bench_rows(bench));
  EXPECT(check(sums, &worst) == 1 && worst == 0, "worst row %g: %s", worst, moeflow_last_error());
  EXPECT(check(alone, &worst) == 1 && worst == 0, "worst row %g: %s", worst, moeflow_last_error());
  EXPECT_OK(experts_arm_launch(sums, &us));
  EXPECT(us > 0, "a layer takes %g us", us);
  EXPECT_OK(experts_arm_hash(sums, one));
  EXPECT_OK(experts_arm_hash(alone, two));
  EXPECT(!memcmp(one, two, sizeof one) && one[0] != one[1], "hashes");
  EXPECT_STATUS(experts_bench_routing(bench, 1, 0), MOEFLOW_ERROR_STATE, "2 arm(s)");
  experts_arm_destroy(sums);
  experts_arm_destroy(alone);
  EXPECT_OK(experts_bench_routing(bench, 1, 0));
  experts_bench_close(bench);
}

static void test_uniform(void) {
  check_arm(0);
}

static void test_same(void) {
  check_arm(BENCH_SKEW_SAME);
}

/* A step moves no more rows than the capacity, power of two or not. */
static void test_capacity(void) {
  struct experts_bench_config config = config_of(MOEFLOW_BACKEND_CPU);
  struct experts_bench *bench = NULL;
  double worst;
  config.capacity = 3;
  make_plan(0);
  EXPECT_OK(experts_bench_open(&config, &bench));
  EXPECT_OK(experts_bench_routing(bench, 3, 0));
  EXPECT(experts_bench_rows(bench) == 6, "%d rows", experts_bench_rows(bench));
  struct experts_arm *arm = portable_arm(bench, 1);
  EXPECT(check(arm, &worst) == 1 && worst == 0, "worst row %g: %s", worst, moeflow_last_error());
  experts_arm_destroy(arm);
  EXPECT_OK(experts_bench_routing(bench, 4, 0)); /* a group of a larger capacity */
  EXPECT(experts_bench_rows(bench) == 8, "%d rows", experts_bench_rows(bench));
  experts_bench_close(bench);
}

static void test_counts(void) {
  struct experts_bench *bench = open_cpu(2, 0);
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    const int64_t active = experts_bench_active(bench, i), entries = experts_bench_entries(bench, i);
    EXPECT(active >= 4 && active <= 8 && entries >= active && entries <= 16, "routing %d: %lld active, %lld entries", i,
           (long long)active, (long long)entries);
    EXPECT(experts_bench_bytes(bench, i) == active * 3 * 256 * 128 * 2, "routing %d: bytes", i);
    EXPECT(experts_bench_flops(bench, i) == entries * 6 * 256 * 128, "routing %d: FLOPs", i);
  }
  experts_bench_close(bench);
}

/* One weight of an active expert changed behind the reference's back: the samples see it. */
static void test_wrong_reference(void) {
  struct experts_bench *bench = open_cpu(2, BENCH_SKEW_SAME);
  struct experts_arm *arm = portable_arm(bench, 1);
  double worst;
  const int expert = bench->routings[0].ids[0];
  uint16_t *down = (uint16_t *)bench->plain[0].down + (size_t)expert * 256 * 128;
  for (int i = 0; i < 128; i++) down[i] ^= 0x8000; /* a row */
  EXPECT(check(arm, &worst) == 0, "a wrong down row passes");
  EXPECT(strstr(moeflow_last_error(), "gate_up + down") && strstr(moeflow_last_error(), "value 0"), "%s",
         moeflow_last_error());
  experts_arm_destroy(arm);
  experts_bench_close(bench);
}

/* The same once the reference is known: only the rows are compared. */
static void test_wrong_arm(void) {
  struct experts_bench *bench = open_cpu(2, 0);
  struct experts_arm *arm = portable_arm(bench, 1);
  double worst;
  EXPECT(check(arm, &worst) == 1, "%s", moeflow_last_error());
  int32_t *ids = bench->routings[5].ids, expert = -1;
  for (int i = 0; expert < 0; i++) expert = ids[i];
  uint16_t *down = (uint16_t *)bench->plain[0].down + (size_t)expert * 256 * 128 + 77 * 128;
  for (int i = 0; i < 128; i++) down[i] ^= 0x8000;
  EXPECT(check(arm, &worst) == 0 && worst > EXPERTS_ROW_L2_MAX, "worst %g", worst);
  EXPECT(strstr(moeflow_last_error(), "value 77"), "%s", moeflow_last_error());
  experts_arm_destroy(arm);
  experts_bench_close(bench);
}

/* An arm that does not write a row: poison is not a result. */
static void test_unwritten(void) {
  struct experts_bench *bench = open_cpu(2, 0);
  struct experts_arm *arm = portable_arm(bench, 1);
  double worst;
  EXPECT(check(arm, &worst) == 1, "%s", moeflow_last_error());
  arm->groups[3]->lanes[0].state->poison = MOEFLOW_POISON_ABORT; /* its kernels return at once */
  EXPECT(check(arm, &worst) == 0 && !(worst <= EXPERTS_ROW_L2_MAX), "worst %g", worst);
  EXPECT(strstr(moeflow_last_error(), "routing 3"), "%s", moeflow_last_error());
  arm->groups[3]->lanes[0].state->poison = 0;
  experts_arm_destroy(arm);
  experts_bench_close(bench);
}

static void test_refusals(void) {
  struct experts_bench_config config = config_of(MOEFLOW_BACKEND_CPU);
  struct experts_bench *bench = NULL;
  struct experts_arm *arm = NULL;
  make_plan(0);
  config.ep = 3;
  EXPECT_STATUS(experts_bench_open(&config, &bench), MOEFLOW_ERROR_ARGUMENT, "16 experts do not divide among 3");
  config.ep = 2;
  EXPECT_OK(experts_bench_open(&config, &bench));
  EXPECT_STATUS(experts_bench_arm(bench, BENCH_PORTABLE, 0, 1, &arm), MOEFLOW_ERROR_STATE, "no routing");
  EXPECT_STATUS(experts_bench_routing(bench, 5, 0), MOEFLOW_ERROR_ARGUMENT, "1 to 4");
  EXPECT_OK(experts_bench_routing(bench, 4, 0));
  EXPECT_STATUS(experts_bench_arm(bench, BENCH_EXPERTS, 0, 1, &arm), MOEFLOW_ERROR_ARGUMENT, "no experts variant 0");
  EXPECT(!arm && !bench->arms, "an arm is left");
  experts_bench_close(bench);
}

/* ---- Fake GPU ---- */

/* The last kernel of a step counts it as ended; moeflow_poll waits for that. */
static void end_step(const char *kernel, void *params) {
  if (!strcmp(kernel, "moeflow_combine")) ((struct moeflow_combine_params *)params)->record->steps++;
  if (!strcmp(kernel, "moeflow_return_combine")) ((struct moeflow_return_combine_params *)params)->combine.record->steps++;
}

static struct moeflow_experts_params captured_experts(int launch) {
  struct moeflow_experts_params params;
  memcpy(&params, seen.params[launch], sizeof params);
  return params;
}

static struct experts_bench *open_fake(int tokens) {
  const struct experts_bench_config config = config_of(MOEFLOW_BACKEND_CUDA);
  struct experts_bench *bench = NULL;
  fake_load("fake_nccl");
  make_plan(1);
  fake_graphs();
  seen.launched = end_step;
  EXPECT_OK(experts_bench_open(&config, &bench));
  EXPECT_OK(experts_bench_routing(bench, tokens, 0));
  return bench;
}

/* 16 layers, each the kernel of `name` in so many blocks, and the sums behind it if they are wanted. */
static void expect_captured(const char *name, unsigned blocks, int sums) {
  EXPECT(seen.captured == BENCH_ROUTINGS * (1 + sums), "%d launches are captured", seen.captured);
  for (int i = 0; i < seen.captured; i++) {
    const int sum = sums && i % 2;
    EXPECT(!strcmp(seen.kernel[i], sum ? "moeflow_owner_reduce" : name), "launch %d is %s", i, seen.kernel[i]);
    EXPECT(sum || seen.blocks[i] == blocks, "launch %d: %u blocks", i, seen.blocks[i]);
  }
}

static void test_fake_arms(void) {
  struct experts_bench *bench = open_fake(2); /* 4 rows: the first bucket, which is served by variant 0 */
  const struct plan before = bench->context->plan;
  struct experts_arm *arm = NULL, *other = NULL, *stream = NULL;
  const unsigned processors = (unsigned)cuda->multiprocessors;
  double us;
  EXPECT(bench->copies == BENCH_ROUTINGS, "%d copies of small weights", bench->copies);
  EXPECT_OK(experts_bench_arm(bench, BENCH_EXPERTS, 1, 1, &arm)); /* not what the plan serves; two blocks each */
  expect_captured("moeflow_experts", 2 * processors, 0);          /* it makes the sums itself */
  EXPECT(captured_experts(0).gate_up != captured_experts(1).gate_up, "two layers read the same weights");
  EXPECT(captured_experts(0).sum == 1 && captured_experts(0).outputs == captured_experts(1).outputs,
         "sums in the kernel, in one workspace");
  EXPECT_OK(experts_bench_arm(bench, BENCH_EXPERTS_STREAM, 0, 1, &stream));
  expect_captured("moeflow_experts_stream", processors, 1);
  EXPECT(captured_experts(0).gate_up_packed.base == bench->packed[0].gate_up, "the stream reads no packed weights");
  EXPECT(captured_experts(2).gate_up_packed.base == bench->packed[1].gate_up, "layer 1 reads another copy");
  EXPECT_OK(experts_bench_arm(bench, BENCH_EXPERTS, 0, 0, &other));
  expect_captured("moeflow_experts", processors, 1); /* the graph that is captured last is the one for checks */
  EXPECT(!memcmp(&before, &bench->context->plan, sizeof before), "the plan has changed");
  EXPECT(seen.graphs == 4 && bench->arms == 3, "%d graphs, %d arms", seen.graphs, bench->arms);
  EXPECT_OK(experts_arm_launch(arm, &us));
  EXPECT(fabs(us - 100) < 1e-3 && seen.replays == 1, "%g us a layer, %d launches", us, seen.replays);
  EXPECT(*seen.gate == 1, "the stream waits for ever");
  experts_arm_destroy(arm);
  experts_arm_destroy(other);
  experts_arm_destroy(stream);
  experts_bench_close(bench);
  EXPECT(!seen.graphs && !seen.events, "%d graphs and %d events are not given back", seen.graphs, seen.events);
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
}

/* A launch that fails in the capture ends it, and nothing stays behind. */
static void test_fake_failure(void) {
  struct experts_bench *bench = open_fake(2);
  struct experts_arm *arm = NULL;
  const struct plan before = bench->context->plan;
  cuda->fail_launch = 20;
  EXPECT(experts_bench_arm(bench, BENCH_EXPERTS, 0, 1, &arm) == MOEFLOW_ERROR_CUDA, "%s", moeflow_last_error());
  EXPECT(strstr(moeflow_last_error(), "cuLaunchKernel"), "%s", moeflow_last_error());
  EXPECT(!arm && !bench->arms && !seen.capturing, "an arm is left");
  EXPECT(!memcmp(&before, &bench->context->plan, sizeof before), "the plan has changed");
  experts_bench_close(bench);
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
}

static CUresult CUDAAPI no_launch(CUgraphExec graph, CUstream stream) {
  (void)graph, (void)stream;
  return CUDA_ERROR_LAUNCH_FAILED;
}

/* What was not measured is not divided. */
static void test_fake_lost_launch(void) {
  struct experts_bench *bench = open_fake(2);
  struct experts_arm *arm = NULL;
  double us = 7;
  EXPECT_OK(experts_bench_arm(bench, BENCH_EXPERTS, 0, 1, &arm));
  driver.cuGraphLaunch = no_launch;
  EXPECT(experts_arm_launch(arm, &us) == MOEFLOW_ERROR_CUDA && us == 7, "%g us", us);
  experts_arm_destroy(arm);
  experts_bench_close(bench);
}

/* No experts output on a fake GPU: NaN stays NaN, and that is no reference. */
static void test_fake_check(void) {
  struct experts_bench *bench = open_fake(2);
  struct experts_arm *arm = NULL;
  double worst;
  EXPECT_OK(experts_bench_arm(bench, BENCH_EXPERTS, 0, 1, &arm));
  EXPECT(check(arm, &worst) == 0, "kernels that do nothing pass");
  EXPECT(strstr(moeflow_last_error(), "routing 0 row 0 value 0 is"), "%s", moeflow_last_error());
  experts_arm_destroy(arm);
  experts_bench_close(bench);
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
}

int main(void) {
  in_child("uniform", test_uniform);
  in_child("same", test_same);
  in_child("capacity", test_capacity);
  in_child("counts", test_counts);
  in_child("wrong reference", test_wrong_reference);
  in_child("wrong arm", test_wrong_arm);
  in_child("unwritten", test_unwritten);
  in_child("refusals", test_refusals);
  in_child("fake arms", test_fake_arms);
  in_child("fake failure", test_fake_failure);
  in_child("fake lost launch", test_fake_lost_launch);
  in_child("fake check", test_fake_check);
  TEST_END;
}
