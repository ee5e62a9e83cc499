/* A sweep's measuring on a GPU: the arms of bench/experts_bench.h, as they are served. In worker processes alone. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "experts_bench.h"
#include "status.h"
#include "sweep.h"

_Static_assert(SWEEP_SKEWED_ROUTING == BENCH_SKEW_SAME, "the worst routing that there is");

_Static_assert(SWEEP_REL_L2_MAX == EXPERTS_ROW_L2_MAX, "one bar");

#define NO_PLAN (-1)
#define LIVE 2 /* arms that are kept: those of a pair */

static struct {
  struct experts_bench *bench;
  int device, plan; /* the plan that is open */
  int tokens;       /* of the routings drawn, 0: none */
  double skew;
  int has_reference; /* for those routings */
  struct {
    struct experts_arm *arm;
    int number;
  } live[LIVE];
  int oldest;
} state = {.plan = NO_PLAN};

static moeflow_status probe(void *user, int device, struct sweep_gpu *gpu) {
  moeflow_status status = MOEFLOW_OK;
  CUdevice handle;
  (void)user;
  CHECK(driver_load());
  CHECK_CUDA(cuDeviceGet(&handle, device));
  CHECK_CUDA(cuDeviceGetName(gpu->name, sizeof gpu->name, handle));
  CHECK_CUDA(cuDeviceGetAttribute(&gpu->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle));
  CHECK_CUDA(cuDeviceGetAttribute(&gpu->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle));
  CHECK_CUDA(cuDeviceGetAttribute(&gpu->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle));
  gpu->driver = driver.version;
cleanup:
  return status;
}

/* Weights come with the first plan that an arm needs. */
static moeflow_status open_device(void *user, int device) {
  (void)user;
  state.device = device;
  return MOEFLOW_OK;
}

static void drop_arms(void) {
  for (int i = 0; i < LIVE; i++) {
    experts_arm_destroy(state.live[i].arm);
    state.live[i].arm = NULL;
  }
}

static moeflow_status open_plan(const struct sweep_setting *setting, int plan) {
  if (state.plan == plan) return MOEFLOW_OK;
  drop_arms();
  experts_bench_close(state.bench);
  state.bench = NULL;
  state.plan = NO_PLAN;
  state.tokens = 0;
  const struct experts_bench_config config = {.plan = setting->plans->paths[plan],
                                              .cache = setting->cache,
                                              .device = state.device,
                                              .ep = setting->ep,
                                              .capacity = setting->capacity,
                                              .tokens_max = setting->tokens_max,
                                              .seed = setting->seed};
  moeflow_status status = experts_bench_open(&config, &state.bench);
  if (status == MOEFLOW_OK) state.plan = plan;
  return status;
}

/* Where the arm stands among its kernel's variants of the open plan, -1: it is not there. */
static int variant_of(const struct sweep_setting *setting, int number) {
  const struct sweep_arm *arm = &setting->arms->arms[number];
  if (arm->kernel == KERNEL_GATE_UP) return 0;
  return plan_find_experts(experts_bench_plan(state.bench), arm->kernel, &arm->shape);
}

/* The default's arms are in every plan, the others in one. */
static int plan_for(const struct sweep_setting *setting, int arm) {
  if (state.plan != NO_PLAN && variant_of(setting, arm) >= 0) return state.plan;
  return setting->plans->plan_of[arm];
}

static moeflow_status draw(const struct sweep_request *request) {
  if (state.tokens == request->tokens && state.skew == request->skew) return MOEFLOW_OK;
  drop_arms();
  state.tokens = state.has_reference = 0;
  moeflow_status status = experts_bench_routing(state.bench, request->tokens, request->skew);
  if (status != MOEFLOW_OK) return status;
  state.tokens = request->tokens;
  state.skew = request->skew;
  return MOEFLOW_OK;
}

/* An arm is made once for its check and its times, and left to the next but one. */
static moeflow_status find_arm(const struct sweep_setting *setting, int number, struct experts_arm **arm) {
  const int32_t kernel = setting->arms->arms[number].kernel;
  const enum experts_bench_kernel kind = kernel == KERNEL_EXPERTS          ? BENCH_EXPERTS
                                         : kernel == KERNEL_EXPERTS_STREAM ? BENCH_EXPERTS_STREAM
                                                                           : BENCH_PORTABLE;
  double first;
  for (int i = 0; i < LIVE; i++) {
    *arm = state.live[i].arm;
    if (*arm && state.live[i].number == number) return MOEFLOW_OK;
  }
  experts_arm_destroy(state.live[state.oldest].arm);
  state.live[state.oldest].arm = NULL;
  moeflow_status status = experts_bench_arm(state.bench, kind, variant_of(setting, number), 1, arm);
  if (status == MOEFLOW_OK) status = experts_arm_launch(*arm, &first); /* a graph's first launch is not like the others */
  if (status != MOEFLOW_OK) return status;
  state.live[state.oldest].arm = *arm;
  state.live[state.oldest].number = number;
  state.oldest = (state.oldest + 1) % LIVE;
  return MOEFLOW_OK;
}

/* The bench computes its reference on the CPU, at the first check of a routing. That takes long and is no arm's fault: it is
 * had by checking gate_up + down, out of which it is made. */
static moeflow_status make_reference(const struct sweep_setting *setting) {
  moeflow_status status = MOEFLOW_OK;
  struct experts_arm *arm;
  double rel_l2;
  int passed;
  CHECK(find_arm(setting, SWEEP_PORTABLE, &arm));
  CHECK(experts_arm_check(arm, &rel_l2, &passed));
  if (!passed) CHECK(status_prefix(MOEFLOW_ERROR_INTERNAL, "no reference"));
  state.has_reference = 1;
cleanup:
  return status;
}

static moeflow_status prepare(void *user, const struct sweep_request *request) {
  moeflow_status status = MOEFLOW_OK;
  const struct sweep_setting *setting = user;
  CHECK(open_plan(setting, plan_for(setting, request->arm)));
  CHECK(draw(request));
  if (request->task != SWEEP_PAIR && !state.has_reference) CHECK(make_reference(setting));
cleanup:
  return status;
}

static moeflow_status check(void *user, int number, double *rel_l2) {
  moeflow_status status = MOEFLOW_OK;
  struct experts_arm *arm;
  int passed;
  CHECK(find_arm(user, number, &arm));
  CHECK(experts_arm_check(arm, rel_l2, &passed));
  if (!passed) status = status_prefix(MOEFLOW_ERROR_INTERNAL, "wrong");
cleanup:
  return status;
}

static moeflow_status time_arm(void *user, int number, int launches, double *microseconds) {
  moeflow_status status = MOEFLOW_OK;
  struct experts_arm *arm;
  double sum = 0, one;
  CHECK(find_arm(user, number, &arm));
  for (int i = 0; i < launches; i++) {
    CHECK(experts_arm_launch(arm, &one));
    sum += one;
  }
  *microseconds = sum / launches;
cleanup:
  return status;
}

const struct sweep_measure sweep_measure_bench = {
    .probe = probe, .open = open_device, .prepare = prepare, .check = check, .time = time_arm};
