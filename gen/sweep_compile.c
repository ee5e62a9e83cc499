#include "sweep_compile.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool.h"
#include "progress.h"
#include "status.h"
#include "unit_entry.h"

#define COMPILE_SECONDS_MAX 120
#define LOCK_SECONDS_MAX 60

struct batch { /* the arms of one plan */
  int arms[PLAN_VARIANTS_MAX];
  int count;
  struct units units;
};

struct task {
  const struct batch *batch;
  const struct unit *unit;
  int arm; /* -1: a kernel of the default plan */
};

struct result { /* from a worker */
  struct entry_header header;
  int32_t made, refused;
  char why[SWEEP_WHY_MAX];
};
_Static_assert(sizeof(struct result) <= sizeof(((struct pool_output *)0)->bytes), "a result fits the pool's reply");

struct work {
  const struct sweep_compiling *compiling;
  struct sweep_arms *arms;
  struct sweep_plans *plans;
  struct batch *batches; /* plans->count */
  struct task *tasks;
  int task_count;
  int32_t minimum_driver;
  struct progress progress;
  moeflow_status log_status;
};

/* ---- Batches ---- */

static moeflow_status make_units(const struct work *work, struct batch *batch) {
  struct plan_candidate candidates[PLAN_VARIANTS_MAX];
  const struct sweep_compiling *compiling = work->compiling;
  for (int i = 0; i < batch->count; i++) {
    const struct sweep_arm *arm = &work->arms->arms[batch->arms[i]];
    candidates[i] = (struct plan_candidate){arm->kernel, arm->shape};
  }
  const struct plan_options options = {
      .packed = compiling->packed, .candidates = candidates, .candidate_count = batch->count};
  units_free(&batch->units);
  moeflow_status status = units_make(compiling->model, &options, compiling->templates, 0, &batch->units);
  return status == MOEFLOW_OK ? units_keys(&batch->units, compiling->toolchain) : status;
}

static int find_arm(const struct sweep_arms *arms, const struct plan_variant *variant) {
  struct experts_shape shape;
  if (variant->kernel != KERNEL_EXPERTS && variant->kernel != KERNEL_EXPERTS_STREAM) return -1;
  experts_shape_of(variant, &shape);
  for (int i = 0; i < arms->count; i++)
    if (arms->arms[i].kernel == variant->kernel && experts_shape_same(&arms->arms[i].shape, &shape)) return i;
  return -1;
}

/* The first batch is the default plan, whose own experts are arms already; then the others, as many as fit. */
static moeflow_status make_batches(struct work *work) {
  moeflow_status status = MOEFLOW_OK;
  struct batch *batch = &work->batches[0];
  struct sweep_plans *plans = work->plans;
  plans->count = 1;
  CHECK(make_units(work, batch));
  const struct plan standard = batch->units.drafts[0].plan;
  const int room = PLAN_VARIANTS_MAX - standard.variant_count;
  for (int i = 0; i < work->arms->count; i++) {
    const struct sweep_arm *arm = &work->arms->arms[i];
    if (arm->refused || arm->kernel == KERNEL_GATE_UP || plan_find_experts(&standard, arm->kernel, &arm->shape) >= 0)
      continue;
    if (batch->count == room) {
      if (plans->count == SWEEP_PLANS_MAX || !room)
        FAIL(MOEFLOW_ERROR_UNSUPPORTED, "%d arms are more than %d plans of %d variants hold", work->arms->count,
             SWEEP_PLANS_MAX, PLAN_VARIANTS_MAX);
      batch = &work->batches[plans->count++];
    }
    batch->arms[batch->count++] = i;
  }
  for (int b = 0; b < plans->count; b++) CHECK(make_units(work, &work->batches[b]));
cleanup:
  return status;
}

/* ---- In a worker ---- */

static moeflow_status compile_one(void *user, int number, struct pool_output *output) {
  const struct work *work = user;
  const struct task *task = &work->tasks[number];
  struct store_outcome outcome = {.made = 0};
  struct result result;
  memset(&result, 0, sizeof result);
  moeflow_status status = unit_entry(&task->batch->units, task->unit, work->compiling->toolchain, work->compiling->store,
                                     LOCK_SECONDS_MAX, &outcome, &output->log);
  if (task->arm >= 0 && (status == MOEFLOW_ERROR_FORMAT || status == MOEFLOW_ERROR_INTERNAL)) {
    result.refused = 1;
    snprintf(result.why, sizeof result.why, "%.250s", moeflow_last_error());
    status = MOEFLOW_OK;
  }
  result.header = outcome.header;
  result.made = outcome.made;
  memcpy(output->bytes, &result, sizeof result);
  output->size = sizeof result;
  return status;
}

/* ---- In the parent ---- */

static const char *task_name(void *user, int number) {
  return ((const struct work *)user)->tasks[number].unit->name;
}

static void refuse(struct work *work, int arm, const char *why) {
  struct sweep_record record = {.event = SWEEP_REFUSED};
  snprintf(record.arm, sizeof record.arm, "%s", work->arms->arms[arm].name);
  snprintf(record.why, sizeof record.why, "%s", why);
  work->arms->arms[arm].refused = 1;
  moeflow_status status = sweep_log_append(work->compiling->log, &record);
  if (status != MOEFLOW_OK) work->log_status = status;
}

static void done(void *user, int number, moeflow_status status, const struct pool_output *output) {
  struct work *work = user;
  const struct task *task = &work->tasks[number];
  struct result result;
  char line[160];
  if (status != MOEFLOW_OK) {
    progress_end(&work->progress);
    return;
  }
  memcpy(&result, output->bytes, sizeof result);
  if (result.refused) {
    progress_end(&work->progress);
    fprintf(stderr, "moeflow-gen sweep: left out: %s\n", result.why);
    refuse(work, task->arm, result.why);
  } else {
    work->plans->compiled += result.made;
    work->plans->hits += !result.made;
    work->plans->nvrtc = (int32_t)result.header.nvrtc_version;
    if ((int32_t)result.header.minimum_driver > work->minimum_driver)
      work->minimum_driver = (int32_t)result.header.minimum_driver;
  }
  snprintf(line, sizeof line, "compiling %s", task->unit->name);
  progress_step(&work->progress, line);
}

static int is_task(const struct work *work, const struct unit *unit) {
  for (int i = 0; i < work->task_count; i++)
    if (!strcmp(work->tasks[i].unit->key.hash, unit->key.hash)) return 1;
  return 0;
}

static moeflow_status compile_all(struct work *work, int *interrupted) {
  work->tasks = calloc((size_t)work->plans->count * PLAN_VARIANTS_MAX, sizeof *work->tasks);
  if (!work->tasks) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d arms", work->arms->count);
  for (int b = 0; b < work->plans->count; b++) {
    const struct batch *batch = &work->batches[b];
    for (int i = 0; i < batch->units.count; i++) {
      const struct unit *unit = &batch->units.units[i];
      const int arm = find_arm(work->arms, &unit->draft->plan.variants[unit->variant]);
      int candidate = -1; /* an arm of the default plan itself must compile */
      for (int j = 0; j < batch->count; j++)
        if (batch->arms[j] == arm) candidate = arm;
      if (!is_task(work, unit)) work->tasks[work->task_count++] = (struct task){batch, unit, candidate};
    }
  }
  const struct pool_job job = {.tasks = work->task_count,
                               .workers = work->compiling->jobs,
                               .timeout_s = COMPILE_SECONDS_MAX + LOCK_SECONDS_MAX,
                               .user = work,
                               .work = compile_one,
                               .done = done,
                               .name = task_name};
  progress_begin(&work->progress, work->task_count);
  moeflow_status status = pool_run(&job, interrupted);
  progress_end(&work->progress);
  return status == MOEFLOW_OK ? work->log_status : status;
}

/* ---- Plans ---- */

static moeflow_status write_plan(const struct plan *plan, const char *path) {
  moeflow_status status = MOEFLOW_OK;
  FILE *file = NULL;
  char *text = malloc(PLAN_TEXT_MAX);
  if (!text) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a plan of %d bytes", PLAN_TEXT_MAX);
  CHECK(plan_write(plan, text, PLAN_TEXT_MAX));
  file = fopen(path, "wbe");
  if (!file || fputs(text, file) < 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", path, strerror(errno));
cleanup:
  free(text);
  if (file && fclose(file) && status == MOEFLOW_OK)
    status = status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", path, strerror(errno));
  return status;
}

/* Without the arms that were refused: a plan must have every cubin that it names. */
static moeflow_status finish_batch(struct work *work, int b) {
  moeflow_status status = MOEFLOW_OK;
  struct batch *batch = &work->batches[b];
  struct sweep_plans *plans = work->plans;
  int kept = 0;
  for (int i = 0; i < batch->count; i++)
    if (!work->arms->arms[batch->arms[i]].refused) batch->arms[kept++] = batch->arms[i];
  if (kept < batch->count) {
    batch->count = kept;
    CHECK(make_units(work, batch));
  }
  struct plan *plan = &batch->units.drafts[0].plan;
  plan->minimum_driver = work->minimum_driver;
  for (int i = 0; i < batch->count; i++) plans->plan_of[batch->arms[i]] = b;
  snprintf(plans->paths[b], sizeof plans->paths[b], "%s/%d.plan", plans->folder, b);
  CHECK(write_plan(plan, plans->paths[b]));
cleanup:
  return status;
}

static moeflow_status make_folder(struct sweep_plans *plans) {
  const char *base = getenv("TMPDIR");
  const int n =
      snprintf(plans->folder, sizeof plans->folder, "%s/moeflow-sweep-XXXXXX", base && *base == '/' ? base : "/tmp");
  if (n >= (int)sizeof plans->folder) snprintf(plans->folder, sizeof plans->folder, "/tmp/moeflow-sweep-XXXXXX");
  if (mkdtemp(plans->folder)) return MOEFLOW_OK;
  plans->folder[0] = 0;
  return status_set(MOEFLOW_ERROR_CACHE, "cannot make a folder for plans in %s: %s", base ? base : "/tmp", strerror(errno));
}

moeflow_status sweep_compile(const struct sweep_compiling *compiling, struct sweep_arms *arms, struct sweep_plans *plans,
                             int *interrupted) {
  moeflow_status status = MOEFLOW_OK;
  const double start = progress_seconds();
  struct work work = {.compiling = compiling, .arms = arms, .plans = plans};
  memset(plans, 0, sizeof *plans);
  work.batches = calloc(SWEEP_PLANS_MAX, sizeof *work.batches);
  if (!work.batches) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d arms", arms->count);
  CHECK(make_folder(plans));
  CHECK(make_batches(&work));
  CHECK(store_create(compiling->store)); /* before any worker: an unwritable cache is told once, at once */
  CHECK(compile_all(&work, interrupted));
  for (int b = 0; b < plans->count; b++) CHECK(finish_batch(&work, b));
cleanup:
  for (int b = 0; work.batches && b < SWEEP_PLANS_MAX; b++) units_free(&work.batches[b].units);
  free(work.batches);
  free(work.tasks);
  plans->seconds = progress_seconds() - start;
  return status;
}

void sweep_plans_free(struct sweep_plans *plans) {
  for (int i = 0; i < plans->count; i++)
    if (plans->paths[i][0]) unlink(plans->paths[i]);
  if (plans->folder[0]) rmdir(plans->folder);
  plans->folder[0] = 0;
}
