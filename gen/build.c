#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bill.h"
#include "command.h"
#include "exit_code.h"
#include "json.h"
#include "note.h"
#include "pool.h"
#include "progress.h"
#include "status.h"
#include "tune_find.h"
#include "unit_entry.h"

#define COMPILE_SECONDS_MAX 120
#define LOCK_SECONDS_MAX 60 /* for another process that compiles the same variant */

enum row_state { ROW_MISSING, ROW_HIT, ROW_COMPILED };
static const char *const row_states[] = {"missing", "hit", "compiled"};

struct row { /* what became of a unit */
  enum row_state state;
  struct entry_header header;
  double seconds;
};

struct build {
  const struct gen_options *options;
  struct model model;
  struct toolchain toolchain;
  struct store store;
  struct tune_search tuned;
  struct units units;
  struct bill bill; /* of one rank, by --ep and --capacity */
  struct row *rows; /* one per unit */
  int *missing;     /* units to compile */
  int missing_count;
  struct progress progress;
  double start, seconds;
  int interrupted;
};

struct task_result { /* from worker to parent */
  struct entry_header header;
  double seconds;
  int32_t made;
  char warning[512];
};
_Static_assert(sizeof(struct task_result) <= sizeof(((struct pool_output *)0)->bytes), "a result fits the pool's reply");

/* ---- In a worker ---- */

static moeflow_status work(void *user, int task, struct pool_output *output) {
  struct build *build = user;
  const struct unit *unit = &build->units.units[build->missing[task]];
  struct store_outcome outcome;
  struct task_result result;
  double start = progress_seconds();
  moeflow_status status =
      unit_entry(&build->units, unit, &build->toolchain, &build->store, LOCK_SECONDS_MAX, &outcome, &output->log);
  memset(&result, 0, sizeof result);
  result.header = outcome.header;
  result.made = outcome.made;
  result.seconds = progress_seconds() - start;
  snprintf(result.warning, sizeof result.warning, "%s", outcome.warning);
  memcpy(output->bytes, &result, sizeof result);
  output->size = sizeof result;
  return status;
}

/* ---- In the parent ---- */

static const char *task_name(void *user, int task) {
  const struct build *build = user;
  return build->units.units[build->missing[task]].name;
}

/* The compiler's messages without ptxas' report. Only what is printable: the text may quote a template. */
static void print_log(const char *log) {
  for (const char *line = log; line && *line;) {
    size_t length = strcspn(line, "\n");
    if (!compile_is_report(line)) {
      for (size_t i = 0; i < length; i++) fputc((unsigned char)line[i] < 0x20 && line[i] != '\t' ? '?' : line[i], stderr);
      fputc('\n', stderr);
    }
    line += length + (line[length] == '\n');
  }
}

static void done(void *user, int task, moeflow_status status, const struct pool_output *output) {
  struct build *build = user;
  const struct unit *unit = &build->units.units[build->missing[task]];
  struct row *row = &build->rows[build->missing[task]];
  struct task_result result;
  char line[160];
  if (status != MOEFLOW_OK) {
    progress_end(&build->progress);
    print_log(output->log);
    return;
  }
  memcpy(&result, output->bytes, sizeof result);
  row->state = result.made ? ROW_COMPILED : ROW_HIT;
  row->header = result.header;
  row->seconds = result.seconds;
  if (result.warning[0]) fprintf(stderr, "moeflow-gen build: warning: %s; rebuilt\n", result.warning);
  snprintf(line, sizeof line, "%s %s %s in %.2f s", unit->arch->name, unit->name, row_states[row->state], row->seconds);
  progress_step(&build->progress, line);
}

/* What is there already; reads only. */
static void look_up(struct build *build) {
  for (int i = 0; i < build->units.count; i++) {
    struct entry entry;
    if (store_find(&build->store, &build->units.units[i].key, &entry) == STORE_HIT) {
      build->rows[i].state = ROW_HIT;
      build->rows[i].header = entry.header;
    } else {
      build->missing[build->missing_count++] = i;
    }
    entry_free(&entry);
  }
}

static moeflow_status compile_missing(struct build *build) {
  struct pool_job job = {.tasks = build->missing_count,
                         .workers = (int)build->options->jobs,
                         .timeout_s = COMPILE_SECONDS_MAX + LOCK_SECONDS_MAX,
                         .user = build,
                         .work = work,
                         .done = done,
                         .name = task_name};
  moeflow_status status = store_create(&build->store); /* before any worker: an unwritable cache is told once, at once */
  if (status != MOEFLOW_OK) return status;
  store_sweep(&build->store);
  progress_begin(&build->progress, build->missing_count);
  status = pool_run(&job, &build->interrupted);
  progress_end(&build->progress);
  return status;
}

/* Plans come last: whoever finds one finds all of its entries. */
static moeflow_status write_plans(struct build *build) {
  for (int i = 0; i < build->units.count; i++) {
    struct plan *plan = &build->units.units[i].draft->plan;
    int32_t needed = (int32_t)build->rows[i].header.minimum_driver;
    if (needed > plan->minimum_driver) plan->minimum_driver = needed;
  }
  for (int a = 0; a < build->units.arch_count; a++) {
    moeflow_status status = store_put_plan(&build->store, &build->units.drafts[a].plan);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

/* ---- Tuned files ---- */

static moeflow_status check_tuned(const struct build *build) {
  const struct model *model = &build->model;
  const int64_t rows = (int64_t)model->deploy.ep * model->deploy.capacity;
  for (int a = 0; build->options->tuned_only && a < build->units.arch_count; a++) {
    const struct plan_draft *draft = &build->units.drafts[a];
    int bucket = plan_guessed_bucket(draft, rows);
    char bound[24] = "more", line[NOTE_SWEEP_LINE_MAX];
    if (bucket < 0) continue;
    if (draft->plan.buckets[bucket].rows_max)
      snprintf(bound, sizeof bound, "up to %d", draft->plan.buckets[bucket].rows_max);
    if (model->spec.reduce == SPEC_REDUCE_CHOICES)
      return status_set(MOEFLOW_ERROR_ARGUMENT,
                        "--tuned-only: a sweep times the owner's sums, which `reduce: choices` has not: "
                        "build without --tuned-only");
    note_sweep_line(build->options, model, line);
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "--tuned-only: nothing says what is best for %s received rows on %s (%s), and ep %d x capacity %d "
                      "rows come; run: %s",
                      bound, draft->plan.arch, build->tuned.tune ? build->tuned.tune->path : "no tuned file",
                      model->deploy.ep, model->deploy.capacity, line);
  }
  return MOEFLOW_OK;
}

/* Once the cubins are there, and with them what compiled them. */
static moeflow_status compare_tuned(struct build *build) {
  struct tune_identity *here = &build->tuned.here;
  char text[TUNE_DIFFERENCES_MAX];
  if (!build->tuned.tune) return MOEFLOW_OK;
  moeflow_status status = units_experts_digest(&build->units, here->templates);
  for (int i = 0; i < build->units.count; i++) {
    if (build->rows[i].state != ROW_MISSING) here->nvrtc = (int32_t)build->rows[i].header.nvrtc_version;
  }
  if (status == MOEFLOW_OK && tune_differs(build->tuned.tune, here, text)) {
    fprintf(stderr, "moeflow-gen build: warning: %s was measured with other software (%s); used\n", build->tuned.tune->path,
            text);
  }
  return status;
}

static moeflow_status run(struct build *build) {
  moeflow_status status = MOEFLOW_OK;
  const struct gen_options *options = build->options;
  CHECK(model_load(options->model, &options->overrides, &build->model));
  CHECK(model_buildable(&build->model));
  CHECK(tune_find(options, &build->model, &build->tuned));
  const struct plan_options plan = {.tune = build->tuned.tune, .packed = options->packed != 0};
  CHECK(units_make(&build->model, &plan, options->templates, options->lineinfo != 0, &build->units));
  CHECK(check_tuned(build));
  CHECK(bill_make(&build->model, &build->units.drafts[0].plan, &build->bill));
  CHECK(toolchain_find(&build->toolchain));
  CHECK(units_keys(&build->units, &build->toolchain));
  build->rows = calloc((size_t)build->units.count, sizeof *build->rows);
  build->missing = calloc((size_t)build->units.count, sizeof *build->missing);
  if (!build->rows || !build->missing) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d variants", build->units.count);
  CHECK(store_open(options->cache, &build->store));
  look_up(build);
  if (build->missing_count && !options->dry_run) CHECK(compile_missing(build));
  CHECK(compare_tuned(build));
  note_archs(options, &build->model.deploy);
  note_untuned(options, &build->model, &build->tuned);
  if (options->dry_run) goto cleanup;
  CHECK(write_plans(build));
cleanup:
  build->seconds = progress_seconds() - build->start;
  return status;
}

static int count_rows(const struct build *build, enum row_state state) {
  int count = 0;
  for (int i = 0; i < build->units.count; i++) count += build->rows[i].state == state;
  return count;
}

static void json_rows(struct json *json, const struct build *build) {
  json_key(json, "kernels");
  json_array(json);
  for (int i = 0; i < build->units.count; i++) {
    const struct unit *unit = &build->units.units[i];
    const struct plan_variant *variant = &unit->draft->plan.variants[unit->variant];
    const struct row *row = &build->rows[i];
    json_object(json);
    json_key(json, "arch"), json_string(json, unit->arch->name);
    json_key(json, "kernel"), json_string(json, kernel_names[variant->kernel]);
    json_key(json, "unit"), json_string(json, unit->name);
    json_key(json, "state"), json_string(json, row_states[row->state]);
    json_key(json, "entry"), json_string(json, unit->key.hash);
    json_key(json, "threads"), json_int(json, variant->threads);
    json_key(json, "shared_bytes"), json_int(json, variant->shared_bytes);
    if (row->state != ROW_MISSING) {
      json_key(json, "registers"), json_int(json, row->header.registers);
      json_key(json, "static_shared_bytes"), json_int(json, row->header.static_shared_bytes);
      json_key(json, "cubin_bytes"), json_int(json, (int64_t)row->header.cubin_bytes);
      json_key(json, "seconds"), json_double(json, row->seconds);
    }
    json_object_end(json);
  }
  json_array_end(json);
}

/* "arch" is a string for one target and an array for several. */
static void json_archs(struct json *json, const struct build *build) {
  json_key(json, "arch");
  if (build->units.arch_count > 1) json_array(json);
  for (int a = 0; a < build->units.arch_count; a++) json_string(json, build->units.drafts[a].plan.arch);
  if (build->units.arch_count > 1) json_array_end(json);
}

static void print_json(const struct build *build) {
  struct json json;
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "model"), json_string(&json, build->model.spec.name);
  json_key(&json, "dtype"), json_string(&json, spec_dtype_name(build->model.spec.dtype));
  json_archs(&json, build);
  json_key(&json, "variants"), json_int(&json, build->units.count);
  json_key(&json, "compiled"), json_int(&json, count_rows(build, ROW_COMPILED));
  json_key(&json, "hits"), json_int(&json, count_rows(build, ROW_HIT));
  json_key(&json, "missing"), json_int(&json, count_rows(build, ROW_MISSING));
  json_key(&json, "seconds"), json_double(&json, build->seconds);
  json_key(&json, "cache"), json_string(&json, build->store.path);
  json_key(&json, "dry_run"), json_bool(&json, build->options->dry_run != 0);
  json_key(&json, "tuned"), json_string(&json, build->tuned.tune ? build->tuned.tune->path : NULL);
  json_key(&json, "toolchain"), json_string(&json, build->toolchain.identity);
  json_key(&json, "ep"), json_int(&json, build->model.deploy.ep);
  json_key(&json, "capacity"), json_int(&json, build->model.deploy.capacity);
  json_key(&json, "lane_bytes"), json_int(&json, build->bill.lane);
  json_key(&json, "weight_bytes"), json_int(&json, build->bill.weights);
  json_key(&json, "plans");
  json_array(&json);
  for (int a = 0; a < build->units.arch_count; a++) {
    char name[160];
    plan_file_name(&build->units.drafts[a].plan, name);
    json_string(&json, name);
  }
  json_array_end(&json);
  json_rows(&json, build);
  json_object_end(&json);
  json_end(&json);
}

static void print_table(const struct build *build) {
  printf("%-8s %-72s %-8s %9s %8s  %s\n", "arch", "unit", "state", "registers", "cubin B", "entry");
  for (int i = 0; i < build->units.count; i++) {
    const struct unit *unit = &build->units.units[i];
    const struct row *row = &build->rows[i];
    char registers[16] = "-", bytes[24] = "-";
    if (row->state != ROW_MISSING) {
      snprintf(registers, sizeof registers, "%u", row->header.registers);
      snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)row->header.cubin_bytes);
    }
    printf("%-8s %-72s %-8s %9s %8s  %.16s\n", unit->arch->name, unit->name, row_states[row->state], registers, bytes,
           unit->key.hash);
  }
  for (int a = 0; a < build->units.arch_count; a++) {
    char name[160];
    plan_file_name(&build->units.drafts[a].plan, name);
    printf("plan %s\n", name);
  }
  printf("one rank of %d, %d tokens each: %.1f MB a lane, %.1f MB of expert weights a layer\n", build->model.deploy.ep,
         build->model.deploy.capacity, (double)build->bill.lane / 1e6, (double)build->bill.weights / 1e6);
  printf("%s %s: %d variants, %d compiled, %d hits, %d missing in %.2f s; cache %s%s\n", build->model.spec.name,
         spec_dtype_name(build->model.spec.dtype), build->units.count, count_rows(build, ROW_COMPILED),
         count_rows(build, ROW_HIT), count_rows(build, ROW_MISSING), build->seconds, build->store.path,
         build->options->dry_run ? " (dry run: nothing written)" : "");
}

int command_build(const struct gen_options *options) {
  struct build *build = calloc(1, sizeof *build);
  if (!build) return command_status(options, status_set(MOEFLOW_ERROR_MEMORY, "no memory for a build"));
  build->options = options;
  build->store.fd = -1;
  build->start = progress_seconds();
  moeflow_status status = run(build);
  int code = command_status(options, status);
  if (build->interrupted) code = EXIT_INTERRUPTED;
  if (status == MOEFLOW_OK) {
    if (options->format == FORMAT_JSON) {
      print_json(build);
    } else {
      print_table(build);
    }
  }
  store_close(&build->store);
  units_free(&build->units);
  tune_search_free(&build->tuned);
  free(build->rows);
  free(build->missing);
  free(build);
  return code;
}
