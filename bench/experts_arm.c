#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "experts_state.h"

/* ---- Which variant serves ---- */

static struct plan_bucket *bucket_of(const struct experts_bench *bench) {
  return (struct plan_bucket *)plan_bucket_for(&bench->context->plan, experts_bench_rows(bench));
}

static struct plan_bucket serve(const struct experts_arm *arm) {
  struct plan_bucket *bucket = bucket_of(arm->bench);
  const struct plan_bucket before = *bucket;
  *bucket = arm->serving;
  return before;
}

static void serve_again(const struct experts_arm *arm, struct plan_bucket before) {
  *bucket_of(arm->bench) = before;
}

static moeflow_status choose(struct experts_arm *arm, int variant) {
  static const enum kernel_id kernels[] = {
      [BENCH_PORTABLE] = KERNEL_GATE_UP, [BENCH_EXPERTS] = KERNEL_EXPERTS, [BENCH_EXPERTS_STREAM] = KERNEL_EXPERTS_STREAM};
  const struct plan *plan = &arm->bench->plan;
  const enum kernel_id kernel = kernels[arm->kernel];
  arm->serving = *bucket_of(arm->bench);
  arm->serving.experts = arm->serving.experts_stream = PLAN_NONE;
  if (arm->kernel == BENCH_EXPERTS) arm->serving.experts = variant;
  if (arm->kernel == BENCH_EXPERTS_STREAM) arm->serving.experts_stream = variant;
  arm->parts = 1;
  if (arm->kernel == BENCH_PORTABLE) return MOEFLOW_OK;
  const struct plan_variant *found = plan_variant(plan, kernel, variant);
  if (!found) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the plan of %s has no %s variant %d", plan->spec.name, kernel_names[kernel],
                      variant);
  }
  arm->parts = arm->bench->cuda ? found->parts : 1;
  return MOEFLOW_OK;
}

/* ---- A group of one rank for each routing ---- */

static moeflow_status create_layer(struct experts_arm *arm, int i) {
  struct experts_bench *bench = arm->bench;
  const int rows = experts_bench_rows(bench);
  moeflow_group_config group = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_layer_config layer = MOEFLOW_LAYER_CONFIG_INIT;
  moeflow_unique_id id;
  moeflow_status status = MOEFLOW_OK;
  CHECK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));
  group.capacity = rows;
  group.transport = MOEFLOW_TRANSPORT_LOCAL;
  group.unique_id = &id;
  group.local_experts_max = bench->local_experts;
  if (i > 0) group.workspace_of = arm->groups[0]; /* as a model's layers share one group's: its lines are in the L2 */
  layer.places = bench->places;
  CHECK(moeflow_group_create(&bench->context, 1, &group, &arm->groups[i]));
  CHECK(moeflow_layer_create(arm->groups[i], bench->context, &layer, &arm->layers[i]));

cleanup:
  return status;
}

static moeflow_weights plain_weights(const struct experts_bench *bench, int copy) {
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = bench->plain[copy].gate_up;
  weights.down = bench->plain[copy].down;
  return weights;
}

/* Packs a copy of the weights when the first arm wants it. */
static moeflow_status pack(struct experts_bench *bench, moeflow_layer *layer, int copy) {
  struct experts_weights *packed = &bench->packed[copy];
  const moeflow_weights plain = plain_weights(bench, copy);
  const size_t experts = (size_t)bench->local_experts;
  int64_t gate_up_bytes, down_bytes;
  moeflow_status status = MOEFLOW_OK;
  if (packed->down) return MOEFLOW_OK;
  CHECK(moeflow_layer_packed_bytes(layer, &gate_up_bytes, &down_bytes));
  if (!packed->gate_up) CHECK(experts_allocate(bench, experts * (size_t)gate_up_bytes, &packed->gate_up));
  CHECK(experts_allocate(bench, experts * (size_t)down_bytes, &packed->down));
  status = moeflow_layer_pack(layer, &plain, 0, bench->local_experts, packed->gate_up, packed->down, bench->timer.stream);
  if (status == MOEFLOW_OK && bench->cuda) CHECK_CUDA(cuStreamSynchronize(bench->timer.stream));
  if (status == MOEFLOW_OK) return MOEFLOW_OK;
  experts_release(bench, packed->down);
  packed->down = NULL;

cleanup:
  return status;
}

static moeflow_status bind(struct experts_arm *arm, int i) {
  struct experts_bench *bench = arm->bench;
  const int copy = i % bench->copies;
  moeflow_weights weights = plain_weights(bench, copy);
  moeflow_status status = MOEFLOW_OK;
  if (arm->kernel == BENCH_EXPERTS_STREAM) {
    CHECK(pack(bench, arm->layers[i], copy));
    weights.gate_up = bench->packed[copy].gate_up;
    weights.down = bench->packed[copy].down;
    weights.packed = 1;
  }
  CHECK(moeflow_layer_bind(arm->layers[i], &weights));
  if (bench->cuda && arm->kernel == BENCH_EXPERTS && !arm->layers[i]->maps)
    FAIL(MOEFLOW_ERROR_INTERNAL, "the layer has no tensor maps, so gate_up and down would serve in place of experts");
  CHECK(moeflow_prepare(&arm->layers[i], 1, experts_bench_rows(bench)));

cleanup:
  return status;
}

/* ---- Steps ---- */

static size_t out_values(const struct experts_bench *bench) { /* of one routing */
  return (size_t)experts_bench_rows(bench) * (size_t)bench->plan.spec.hidden;
}

static moeflow_status wait_for(struct experts_bench *bench) {
  moeflow_status status = MOEFLOW_OK;
  if (bench->cuda) CHECK_CUDA(cuStreamSynchronize(bench->timer.stream));

cleanup:
  return status;
}

/* A whole step, which leaves rows and lists on the lane. */
static moeflow_status whole_step(struct experts_arm *arm, int i) {
  struct experts_bench *bench = arm->bench;
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  moeflow_status status = MOEFLOW_OK;
  args.tokens = bench->routings[i].rows;
  args.tokens_max = experts_bench_rows(bench);
  args.hidden = bench->memory[i].hidden;
  args.ids = bench->memory[i].ids;
  args.weights = bench->memory[i].weights;
  args.out = arm->out + (size_t)i * out_values(bench);
  args.stream = bench->timer.stream;
  CHECK(moeflow_forward(arm->layers[i], &args));
  CHECK(wait_for(bench));
  CHECK(moeflow_poll(arm->groups[i], 10000));

cleanup:
  return status;
}

static moeflow_status enqueue_layers(struct experts_arm *arm, int sums) {
  const struct experts_bench *bench = arm->bench;
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
    args.tokens_max = experts_bench_rows(bench);
    args.out = sums ? arm->out + (size_t)i * out_values(bench) : NULL;
    args.stream = bench->timer.stream;
    args.flags = MOEFLOW_FORWARD_EXPERTS;
    const moeflow_status status = moeflow_forward(arm->layers[i], &args);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

static moeflow_status capture(struct experts_arm *arm, int sums, CUgraphExec *graph) {
  struct timer *timer = &arm->bench->timer;
  moeflow_status status = MOEFLOW_OK;
  CHECK(timer_capture(timer));
  CHECK(timer_captured(timer, enqueue_layers(arm, sums), graph));

cleanup:
  return status;
}

/* With the arm's variant serving. */
static moeflow_status make_ready(struct experts_arm *arm) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    CHECK(create_layer(arm, i));
    CHECK(bind(arm, i));
    CHECK(whole_step(arm, i));
  }
  if (!arm->bench->cuda) goto cleanup;
  CHECK(capture(arm, arm->with_sum, &arm->timed));
  if (arm->with_sum) goto cleanup;
  for (int i = 0; i < BENCH_ROUTINGS; i++) arm->layers[i]->separate_sums = 1; /* so that the outputs stay to be compared */
  CHECK(capture(arm, 1, &arm->checked));

cleanup:
  return status;
}

moeflow_status experts_bench_arm(struct experts_bench *bench, enum experts_bench_kernel kernel, int variant, int with_sum,
                                 struct experts_arm **made) {
  moeflow_status status = MOEFLOW_OK;
  struct experts_arm *arm = NULL;
  *made = NULL;
  if (!bench->tokens) return status_set(MOEFLOW_ERROR_STATE, "no routing yet; call experts_bench_routing first");
  arm = calloc(1, sizeof *arm);
  if (!arm) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for an arm");
  bench->arms++;
  arm->bench = bench;
  arm->kernel = kernel;
  arm->with_sum = with_sum;
  CHECK(choose(arm, variant));
  CHECK(experts_allocate(bench, BENCH_ROUTINGS * out_values(bench) * sizeof *arm->out, (void **)&arm->out));
  const struct plan_bucket before = serve(arm);
  status = make_ready(arm);
  serve_again(arm, before);
  CHECK(status);
  *made = arm;
  return MOEFLOW_OK;

cleanup:
  experts_arm_destroy(arm);
  return status;
}

void experts_arm_destroy(struct experts_arm *arm) {
  char message[1024];
  if (!arm) return;
  snprintf(message, sizeof message, "%s", moeflow_last_error()); /* of the failure that may have led here */
  if (arm->timed) driver.cuGraphExecDestroy(arm->timed);
  if (arm->checked) driver.cuGraphExecDestroy(arm->checked);
  for (int i = BENCH_ROUTINGS - 1; i >= 0; i--) { /* the first group, whose workspace the others use, is the last */
    moeflow_layer_destroy(arm->layers[i]);
    moeflow_group_destroy(arm->groups[i]);
  }
  experts_release(arm->bench, arm->out);
  arm->bench->arms--;
  free(arm);
  if (*message) status_set(MOEFLOW_OK, "%s", message);
}

/* ---- Running ---- */

static double wall_microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static moeflow_status run_here(struct experts_arm *arm, int sums, double *microseconds) {
  const struct plan_bucket before = serve(arm);
  const double begin = wall_microseconds();
  const moeflow_status status = enqueue_layers(arm, sums);
  *microseconds = wall_microseconds() - begin;
  serve_again(arm, before);
  return status;
}

static moeflow_status run_layers(struct experts_arm *arm, int sums, double *microseconds) {
  if (!arm->bench->cuda) return run_here(arm, sums, microseconds);
  return timer_launch(&arm->bench->timer, sums && arm->checked ? arm->checked : arm->timed, microseconds);
}

moeflow_status experts_arm_launch(struct experts_arm *arm, double *microseconds) {
  const moeflow_status status = run_layers(arm, arm->with_sum, microseconds);
  if (status == MOEFLOW_OK) *microseconds /= BENCH_ROUTINGS;
  return status;
}

moeflow_status experts_arm_run(struct experts_arm *arm, int checked) {
  double microseconds;
  return run_layers(arm, checked || arm->with_sum, &microseconds);
}

static moeflow_status poison(struct experts_bench *bench, void *memory, size_t bytes) {
  moeflow_status status = MOEFLOW_OK;
  if (bench->cuda) {
    CHECK_CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, 0xff, bytes, bench->timer.stream));
  } else {
    memset(memory, 0xff, bytes);
  }

cleanup:
  return status;
}

moeflow_status experts_arm_poison(struct experts_arm *arm) {
  struct experts_bench *bench = arm->bench;
  const struct spec *spec = &bench->plan.spec;
  const size_t entries = (size_t)experts_bench_rows(bench) * (size_t)spec->top_k;
  moeflow_status status = MOEFLOW_OK;
  CHECK(poison(bench, arm->out, BENCH_ROUTINGS * out_values(bench) * sizeof *arm->out));
  const struct group_lane *lane = &arm->groups[0]->lanes[0]; /* all routings' workspace */
  CHECK(poison(bench, lane->outputs, (size_t)arm->parts * entries * (size_t)spec->hidden * sizeof *lane->outputs));
  CHECK(poison(bench, lane->activations, entries * (size_t)spec->intermediate * sizeof *lane->activations));
  CHECK(wait_for(bench));

cleanup:
  return status;
}

moeflow_status experts_arm_rows(struct experts_arm *arm, uint16_t *rows) {
  struct experts_bench *bench = arm->bench;
  return bench->context->backend->download(bench->context, rows, arm->out,
                                           BENCH_ROUTINGS * out_values(bench) * sizeof *rows);
}
