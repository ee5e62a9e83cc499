#include "experts_bench.h"

#include <stdlib.h>
#include <string.h>

#include "experts_state.h"
#include "model.h"
#include "random.h"

#define FILL_BLOCKS 1024
#define COLD_BYTES ((int64_t)200 << 20) /* read between two uses of an expert: over three times the largest L2 */

/* ---- Memory ---- */

moeflow_status experts_allocate(struct experts_bench *bench, size_t bytes, void **memory) {
  return bench->context->backend->allocate(bench->context, bytes, memory);
}

void experts_release(struct experts_bench *bench, void *memory) {
  if (memory) bench->context->backend->release(bench->context, memory);
}

static int64_t expert_bytes(const struct spec *spec) {
  return spec_gate_up_bytes(spec) + spec_down_bytes(spec);
}

/* As many copies as keep weights cold with the fewest experts that a rank may have active: one token's, divided evenly. */
static int copies_wanted(const struct experts_bench *bench) {
  const struct spec *spec = &bench->plan.spec;
  const int64_t layer = (spec->top_k + bench->ep - 1) / bench->ep * expert_bytes(spec);
  const int64_t copies = (COLD_BYTES + layer - 1) / layer;
  if (!bench->cuda) return 1;
  return copies < BENCH_ROUTINGS ? (int)copies : BENCH_ROUTINGS;
}

static moeflow_status fill(struct experts_bench *bench, void *out, enum moeflow_random_matrix matrix, int64_t rows,
                           int64_t columns) {
  struct moeflow_fill_params params = {.out = out,
                                       .seed = bench->inputs.seed,
                                       .rows = rows,
                                       .columns = columns,
                                       .experts = bench->local_experts,
                                       .matrix = matrix,
                                       .shift = moeflow_random_shift(columns)};
  const struct launch launch = {
      .kernel = KERNEL_FILL, .blocks = FILL_BLOCKS, .params = &params, .stream = bench->timer.stream};
  return bench->context->backend->launch(bench->context, &launch);
}

static moeflow_status make_weights(struct experts_bench *bench, struct experts_weights *weights) {
  const struct spec *spec = &bench->plan.spec;
  const size_t experts = (size_t)bench->local_experts;
  moeflow_status status = MOEFLOW_OK;
  CHECK(experts_allocate(bench, experts * (size_t)spec_gate_up_bytes(spec), &weights->gate_up));
  CHECK(experts_allocate(bench, experts * (size_t)spec_down_bytes(spec), &weights->down));
  CHECK(fill(bench, weights->gate_up, MOEFLOW_RANDOM_GATE_UP, 2 * (int64_t)spec->intermediate, spec->hidden));
  CHECK(fill(bench, weights->down, MOEFLOW_RANDOM_DOWN, spec->hidden, spec->intermediate));
  if (bench->cuda) CHECK_CUDA(cuStreamSynchronize(bench->timer.stream));

cleanup:
  return status;
}

static moeflow_status make_rows(struct experts_bench *bench, struct experts_rows *rows) {
  const struct spec *spec = &bench->plan.spec;
  const size_t count = (size_t)bench->ep * (size_t)bench->tokens_max, picks = count * (size_t)spec->top_k;
  moeflow_status status = MOEFLOW_OK;
  CHECK(experts_allocate(bench, count * (size_t)spec->hidden * sizeof(uint16_t), &rows->hidden));
  CHECK(experts_allocate(bench, picks * sizeof(int32_t), &rows->ids));
  CHECK(experts_allocate(bench, picks * sizeof(float), &rows->weights));

cleanup:
  return status;
}

/* ---- Opening ---- */

static moeflow_status check_config(const struct experts_bench_config *config, const struct spec *spec) {
  const struct routing_shape shape = {.spec = spec, .ep = config->ep, .tokens = config->tokens_max};
  if (spec->reduce != SPEC_REDUCE_OWNER) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                      "%s returns choices, and the experts are timed with the owner's sums; build it with reduce: owner",
                      spec->name);
  }
  return routing_check(&shape);
}

static moeflow_status open_context(const struct experts_bench_config *config, struct experts_bench *bench) {
  moeflow_open_config open = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_status status = MOEFLOW_OK;
  open.backend = config->backend;
  open.device = config->device;
  open.plan = config->plan;
  open.cache = config->cache;
  CHECK(moeflow_open(&open, &bench->context));
  CHECK(context_enter(bench->context));
  bench->entered = 1;
  bench->cuda = bench->context->backend == &backend_cuda;
  bench->plan = bench->context->plan;
  CHECK(check_config(config, &bench->plan.spec));
  if (bench->cuda) CHECK(timer_open(&bench->timer));

cleanup:
  return status;
}

static moeflow_status make_places(struct experts_bench *bench) {
  const int experts = bench->plan.spec.experts;
  bench->places = malloc((size_t)experts * sizeof *bench->places);
  if (!bench->places) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the places of %d experts", experts);
  for (int e = 0; e < experts; e++) bench->places[e] = e < bench->local_experts ? moeflow_place(0, e) : MOEFLOW_PLACE_NONE;
  return MOEFLOW_OK;
}

moeflow_status experts_bench_open(const struct experts_bench_config *config, struct experts_bench **made) {
  moeflow_status status = MOEFLOW_OK;
  struct experts_bench *bench = calloc(1, sizeof *bench);
  *made = NULL;
  if (!bench) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for a bench");
  bench->ep = config->ep;
  bench->capacity = config->capacity;
  bench->tokens_max = config->tokens_max;
  CHECK(open_context(config, bench));
  bench->local_experts = bench->plan.spec.experts / bench->ep;
  bench->inputs = (struct inputs){.spec = &bench->plan.spec, .seed = config->seed};
  bench->copies = copies_wanted(bench);
  CHECK(make_places(bench));
  for (int i = 0; i < bench->copies; i++) CHECK(make_weights(bench, &bench->plain[i]));
  for (int i = 0; i < BENCH_ROUTINGS; i++) CHECK(make_rows(bench, &bench->memory[i]));
  *made = bench;
  return MOEFLOW_OK;

cleanup:
  experts_bench_close(bench);
  return status;
}

static void forget_routing(struct experts_bench *bench) {
  for (int i = 0; i < BENCH_ROUTINGS; i++) routing_free(&bench->routings[i]);
  free(bench->reference);
  bench->reference = NULL;
  bench->tokens = 0;
}

static void release_all(struct experts_bench *bench) {
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    void *memory[] = {bench->plain[i].gate_up, bench->plain[i].down, bench->packed[i].gate_up, bench->packed[i].down,
                      bench->memory[i].hidden, bench->memory[i].ids, bench->memory[i].weights};
    for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) experts_release(bench, memory[m]);
  }
}

void experts_bench_close(struct experts_bench *bench) {
  char message[1024];
  if (!bench) return;
  snprintf(message, sizeof message, "%s", moeflow_last_error()); /* of the failure that may have led here */
  forget_routing(bench);
  if (bench->entered) {
    release_all(bench);
    if (bench->cuda) timer_close(&bench->timer);
    context_leave(bench->context);
  }
  if (bench->context) moeflow_close(bench->context);
  free(bench->places);
  free(bench);
  if (*message) status_set(MOEFLOW_OK, "%s", message);
}

/* ---- Routings ---- */

void experts_hidden(const struct experts_bench *bench, int routing, int row, uint16_t *hidden) {
  inputs_hidden(&bench->inputs, routing, 0, row, hidden);
}

static moeflow_status upload(struct experts_bench *bench, int routing, uint16_t *hidden) {
  const struct spec *spec = &bench->plan.spec;
  const struct routing *from = &bench->routings[routing];
  const struct experts_rows *to = &bench->memory[routing];
  const struct backend *backend = bench->context->backend;
  const size_t rows = (size_t)from->rows, picks = rows * (size_t)spec->top_k, h = (size_t)spec->hidden;
  moeflow_status status = MOEFLOW_OK;
  for (int row = 0; row < from->rows; row++) experts_hidden(bench, routing, row, hidden + (size_t)row * h);
  CHECK(backend->upload(bench->context, to->hidden, hidden, rows * h * sizeof *hidden));
  CHECK(backend->upload(bench->context, to->ids, from->ids, picks * sizeof *from->ids));
  CHECK(backend->upload(bench->context, to->weights, from->weights, picks * sizeof *from->weights));

cleanup:
  return status;
}

moeflow_status experts_bench_routing(struct experts_bench *bench, int tokens, double skew) {
  const struct routing_shape shape = {
      .spec = &bench->plan.spec, .ep = bench->ep, .tokens = tokens, .skew = skew, .seed = bench->inputs.seed};
  moeflow_status status = MOEFLOW_OK;
  uint16_t *hidden = NULL;
  if (bench->arms) return status_set(MOEFLOW_ERROR_STATE, "%d arm(s) still use the present routing", bench->arms);
  if (tokens < 1 || tokens > bench->tokens_max) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d tokens a rank; the bench was opened for 1 to %d", tokens,
                      bench->tokens_max);
  }
  forget_routing(bench);
  hidden = malloc((size_t)bench->ep * (size_t)tokens * (size_t)bench->plan.spec.hidden * sizeof *hidden);
  if (!hidden) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d rows", bench->ep * tokens);
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    CHECK(routing_draw(&shape, i, &bench->routings[i]));
    CHECK(upload(bench, i, hidden));
  }
  bench->tokens = tokens;

cleanup:
  free(hidden);
  if (status != MOEFLOW_OK) forget_routing(bench);
  return status;
}

/* ---- What they are ---- */

int experts_bench_active(const struct experts_bench *bench, int routing) {
  return bench->routings[routing].active;
}

int64_t experts_bench_entries(const struct experts_bench *bench, int routing) {
  return bench->routings[routing].entries;
}

int64_t experts_bench_bytes(const struct experts_bench *bench, int routing) {
  return bench->routings[routing].active * expert_bytes(&bench->plan.spec);
}

int64_t experts_bench_flops(const struct experts_bench *bench, int routing) {
  return bench->routings[routing].entries * 6 * (int64_t)bench->plan.spec.hidden * bench->plan.spec.intermediate;
}

const struct plan *experts_bench_plan(const struct experts_bench *bench) {
  return &bench->plan;
}

int experts_bench_rows(const struct experts_bench *bench) {
  return model_rows(bench->ep, bench->capacity, bench->tokens);
}
