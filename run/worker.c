#include "worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "driver.h"
#include "exit_code.h"
#include "random.h"
#include "report.h"

#define FILL_BLOCKS 1024

moeflow_status worker_agree(struct worker *worker, moeflow_status mine) {
  int culprit = -1;
  if (mine != MOEFLOW_OK && worker->group) {
    char message[STAR_MESSAGE_MAX]; /* aborting may leave a message of its own */
    snprintf(message, sizeof message, "%s", moeflow_last_error());
    moeflow_abort(worker->group);
    status_set(mine, "%s", message);
  }
  const moeflow_status status = star_agree(worker->star, mine, &culprit);
  worker->agreed = culprit >= 0;
  return status;
}

/* ---- Weights ---- */

static int first_expert(const struct worker *worker) {
  return (int)((int64_t)worker->rank * worker->setup->model.spec.experts / worker->setup->ep);
}

/* The CPU backend's threads each keep one matrix, made when it is asked for. */
struct lent {
  uint16_t *matrix;
  int expert, down;
};
static pthread_key_t lent_key;
static pthread_once_t lent_once = PTHREAD_ONCE_INIT;

static void lent_free(void *memory) {
  struct lent *lent = memory;
  free(lent->matrix);
  free(lent);
}

static void lent_begin(void) {
  pthread_key_create(&lent_key, lent_free);
}

static struct lent *lent_new(const struct spec *spec) {
  struct lent *lent = calloc(1, sizeof *lent);
  const size_t bytes = (size_t)spec_gate_up_bytes(spec); /* down takes half of it */
  if (lent) lent->matrix = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!lent || !lent->matrix || pthread_setspecific(lent_key, lent)) {
    if (lent) lent_free(lent);
    return NULL;
  }
  lent->expert = -1;
  return lent;
}

static const void *lend(void *user, int local_expert, int down) {
  const struct worker *worker = user;
  const struct setup *setup = worker->setup;
  const int expert = first_expert(worker) + local_expert;
  pthread_once(&lent_once, lent_begin);
  struct lent *lent = pthread_getspecific(lent_key);
  if (!lent) lent = lent_new(&setup->model.spec);
  if (!lent) return NULL;
  if (lent->expert != expert || lent->down != down)
    inputs_weights(&setup->model.spec, setup->options.seed, expert, down, lent->matrix);
  lent->expert = expert;
  lent->down = down;
  return lent->matrix;
}

static moeflow_status fill(struct worker *worker, void *out, enum moeflow_random_matrix matrix, int64_t rows,
                           int64_t columns) {
  struct moeflow_fill_params params = {.out = out,
                                       .seed = worker->setup->options.seed,
                                       .rows = rows,
                                       .columns = columns,
                                       .first_expert = first_expert(worker),
                                       .experts = moeflow_layer_local_experts(worker->layer),
                                       .matrix = matrix,
                                       .shift = moeflow_random_shift(columns)};
  const struct launch launch = {
      .kernel = KERNEL_FILL, .blocks = FILL_BLOCKS, .params = &params, .stream = worker->stage.stream};
  return worker->context->backend->launch(worker->context, &launch);
}

static moeflow_status fill_weights(struct worker *worker, moeflow_weights *weights) {
  const struct spec *spec = &worker->setup->model.spec;
  const struct backend *backend = worker->context->backend;
  const size_t experts = (size_t)moeflow_layer_local_experts(worker->layer);
  moeflow_status status = MOEFLOW_OK;
  CHECK(backend->allocate(worker->context, experts * (size_t)spec_gate_up_bytes(spec), &worker->gate_up));
  CHECK(backend->allocate(worker->context, experts * (size_t)spec_down_bytes(spec), &worker->down));
  CHECK(fill(worker, worker->gate_up, MOEFLOW_RANDOM_GATE_UP, 2 * (int64_t)spec->intermediate, spec->hidden));
  CHECK(fill(worker, worker->down, MOEFLOW_RANDOM_DOWN, spec->hidden, spec->intermediate));
  CHECK_CUDA(cuStreamSynchronize(worker->stage.stream));
  weights->gate_up = worker->gate_up;
  weights->down = worker->down;

cleanup:
  return status;
}

static moeflow_status bind_weights(struct worker *worker) {
  const struct inputs *inputs = &worker->setup->inputs;
  const size_t bias_bytes = (size_t)worker->setup->model.spec.experts * sizeof(float);
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  moeflow_status status = MOEFLOW_OK;
  if (worker->setup->backend == MOEFLOW_BACKEND_CUDA) {
    CHECK(fill_weights(worker, &weights));
  } else {
    weights.lend = lend;
    weights.lend_user = worker;
  }
  if (inputs->bias) {
    CHECK(worker->context->backend->allocate(worker->context, bias_bytes, &worker->bias));
    CHECK(worker->context->backend->upload(worker->context, worker->bias, inputs->bias, bias_bytes));
    weights.correction_bias = worker->bias;
  }
  CHECK(moeflow_layer_bind(worker->layer, &weights));

cleanup:
  return status;
}

/* ---- Open ---- */

static int device_of(const struct setup *setup, int rank) {
  if (setup->ranks == RANKS_THREADS) return 0;
  if (setup->ranks == RANKS_FORKED) return rank % setup->gpus.count; /* more ranks than GPUs: --transport window alone */
  return setup->gpus.count == 1 ? 0 : setup->launcher.local_rank;    /* a launcher may show each rank its own GPU alone */
}

static void print_log(void *user, moeflow_log_level level, const char *message) {
  static const char *const names[] = {"error", "warning", "info", "debug"};
  const struct setup *setup = user;
  if ((int)level <= setup->log_level) fprintf(stderr, "moeflow-run: %s: %s\n", names[level], message);
}

static moeflow_status open_context(struct worker *worker) {
  const struct setup *setup = worker->setup;
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  config.backend = setup->backend;
  config.device = device_of(setup, worker->rank);
  config.cache = setup->options.cache;
  config.log = setup->log_level == OPTIONS_UNSET ? NULL : print_log;
  config.log_user = (void *)setup;
  if (setup->backend == MOEFLOW_BACKEND_CPU) {
    config.spec = setup->spec_text;
  } else {
    config.plan = setup->plan;
    if (config.device >= setup->gpus.count)
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "local rank %d has no GPU: this machine shows %d", config.device,
                        setup->gpus.count);
  }
  return moeflow_open(&config, &worker->context);
}

/* Threads share the context that rank 0 opened. */
static moeflow_status open_shared(struct worker *worker) {
  struct worker_shared *shared = worker->shared;
  const int mine = worker->setup->ranks != RANKS_THREADS || worker->rank == 0;
  moeflow_status status = mine ? open_context(worker) : MOEFLOW_OK;
  if (mine && status == MOEFLOW_OK) shared->context = worker->context;
  CHECK(worker_agree(worker, status));
  worker->context = shared->context;
  CHECK(worker_agree(worker, context_enter(worker->context)));

cleanup:
  return status;
}

static moeflow_status create_group(struct worker *worker) {
  const struct setup *setup = worker->setup;
  moeflow_unique_id id = {{0}};
  char flight[4096];
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_status status = MOEFLOW_OK;
  if (worker->rank == 0) status = moeflow_get_unique_id(setup->transport, &id);
  CHECK(worker_agree(worker, status));
  CHECK(star_broadcast(worker->star, &id, sizeof id));
  config.rank = worker->rank;
  config.ranks = setup->ep;
  config.capacity = setup->capacity;
  config.lanes = (int)setup->options.lanes;
  config.transport = setup->transport;
  config.unique_id = &id;
  config.timeout_ms = (int)setup->options.timeout * 1000;
  if (setup->options.flight) {
    char suffix[24] = "";
    if (setup->ep > 1) snprintf(suffix, sizeof suffix, ".rank%d", worker->rank);
    snprintf(flight, sizeof flight, "%s%s", setup->options.flight, suffix);
    config.flight = flight;
  }
  CHECK(worker_agree(worker, moeflow_group_create(&worker->context, 1, &config, &worker->group)));

cleanup:
  return status;
}

static moeflow_status create_layer(struct worker *worker) {
  const struct setup *setup = worker->setup;
  const int tokens_max = setup_tokens_max(setup);
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  moeflow_status status = MOEFLOW_OK;
  config.combine = (moeflow_combine)setup->options.combine;
  status = moeflow_layer_create(worker->group, worker->context, &config, &worker->layer);
  if (status == MOEFLOW_OK)
    status = stage_create(worker->layer, tokens_max, (int)setup->options.timeout * 1000, &worker->stage);
  if (status == MOEFLOW_OK) status = bind_weights(worker);
  CHECK(worker_agree(worker, status));
  CHECK(worker_agree(worker, moeflow_prepare(&worker->layer, 1, tokens_max > 0 ? tokens_max : 1)));

cleanup:
  return status;
}

/* ---- Close ---- */

static void release_memory(struct worker *worker) {
  void **memory[] = {&worker->gate_up, &worker->down, &worker->bias};
  stage_destroy(&worker->stage);
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
    if (*memory[i]) worker->context->backend->release(worker->context, *memory[i]);
    *memory[i] = NULL;
  }
}

static moeflow_status close_layer(struct worker *worker) {
  moeflow_status status = MOEFLOW_OK;
  release_memory(worker);
  CHECK(moeflow_layer_destroy(worker->layer));
  worker->layer = NULL;
  CHECK(moeflow_group_destroy(worker->group));
  worker->group = NULL;
  context_leave(worker->context);

cleanup:
  return status;
}

static moeflow_status close_context(struct worker *worker) {
  const int mine = worker->setup->ranks != RANKS_THREADS || worker->rank == 0;
  moeflow_context *context = worker->context;
  worker->context = NULL;
  return mine ? moeflow_close(context) : MOEFLOW_OK;
}

/* ---- A life ---- */

/* Self-test: what a crashed or killed rank looks like to the others. */
static void maybe_die(const struct worker *worker) {
  if (worker->setup->options.die_rank == worker->rank) raise(SIGKILL);
}

static moeflow_status run_points(struct worker *worker) {
  const struct options *options = &worker->setup->options;
  moeflow_status status = MOEFLOW_OK;
  maybe_die(worker);
  for (int point = 0; point < options->point_count; point++) {
    struct point_result *result = &worker->results[point];
    CHECK(options->check ? check_point(worker, point, result) : check_nothing(worker, point, result));
  }

cleanup:
  return status;
}

/* Rank 0 writes the report; everybody leaves with the same exit code. */
static moeflow_status report(struct worker *worker, const struct report_facts *facts, int *code) {
  const struct setup *setup = worker->setup;
  const size_t bytes = (size_t)setup->options.point_count * sizeof *worker->results;
  struct point_result *all = worker->rank == 0 ? calloc((size_t)setup->ep, bytes) : NULL;
  moeflow_status status = MOEFLOW_OK;
  if (worker->rank == 0 && !all)
    status = status_set(MOEFLOW_ERROR_MEMORY, "no memory for the results of %d ranks", setup->ep);
  CHECK(worker_agree(worker, status));
  CHECK(star_gather(worker->star, worker->results, bytes, all));
  if (worker->rank == 0) {
    int passed = 0;
    status = report_write(setup, facts, all, &passed);
    *code = setup->options.check && !passed ? EXIT_CHECK_FAILED : 0;
  }
  CHECK(worker_agree(worker, status));
  CHECK(star_broadcast(worker->star, code, sizeof *code));

cleanup:
  free(all);
  return status;
}

static moeflow_status gather_facts(struct worker *worker, struct report_facts *facts) {
  const struct setup *setup = worker->setup;
  struct gpu mine = {.name = ""};
  moeflow_status status = MOEFLOW_OK;
  if (setup->backend == MOEFLOW_BACKEND_CUDA) mine = setup->gpus.gpu[device_of(setup, worker->rank)];
  if (worker->rank == 0) status = report_facts_create(setup, worker->context, worker->group, facts);
  CHECK(worker_agree(worker, status));
  CHECK(star_gather(worker->star, &mine, sizeof mine, facts->gpus));

cleanup:
  return status;
}

static moeflow_status live(struct worker *worker, int *code) {
  struct report_facts facts = {0};
  moeflow_status status = MOEFLOW_OK;
  worker->results = calloc((size_t)worker->setup->options.point_count, sizeof *worker->results);
  if (!worker->results) status = status_set(MOEFLOW_ERROR_MEMORY, "no memory for the results");
  CHECK(worker_agree(worker, status));
  CHECK(open_shared(worker));
  CHECK(create_group(worker));
  CHECK(create_layer(worker));
  CHECK(gather_facts(worker, &facts));
  CHECK(run_points(worker));
  CHECK(worker_agree(worker, close_layer(worker)));
  CHECK(worker_agree(worker, close_context(worker)));
  CHECK(report(worker, &facts, code));

cleanup:
  report_facts_destroy(&facts);
  return status;
}

int worker_run(void *user, int rank, struct star *star, struct launch_failure *failure) {
  struct worker_shared *shared = user;
  struct worker worker = {.shared = shared, .setup = shared->setup, .star = star, .rank = rank};
  int code = 0;
  const moeflow_status status = live(&worker, &code);
  if (status != MOEFLOW_OK) { /* what it holds goes with the process: peers may still write into it */
    if (worker.group) moeflow_abort(worker.group);
    code = status_exit_code(status);
    if (!(shared->setup->ranks == RANKS_LAUNCHED && worker.agreed && rank != 0))
      snprintf(failure->message, sizeof failure->message, "%s", moeflow_last_error());
  }
  free(worker.results);
  return code;
}
