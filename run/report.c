#include "report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "entry.h"
#include "json.h"
#include "nccl_library.h"
#include "provenance.h"
#include "sha256.h"

/* ---- Facts ---- */

static int nvrtc_of(const char *cache_option, const struct plan *plan) {
  struct entry entry = {.bytes = NULL};
  char path[CACHE_PATH_MAX];
  int fd = -1, version = 0;
  if (cache_path(cache_option, path, sizeof path) != MOEFLOW_OK || cache_open(path, &fd) != MOEFLOW_OK) return 0;
  if (plan->variant_count && entry_read(fd, path, plan->variants[0].entry, &entry, NULL) == MOEFLOW_OK)
    version = (int)entry.header.nvrtc_version;
  entry_free(&entry);
  close(fd);
  return version;
}

moeflow_status report_facts_create(const struct setup *setup, const moeflow_context *context, const moeflow_group *group,
                                   struct report_facts *facts) {
  *facts =
      (struct report_facts){.gpus = calloc((size_t)setup->ep, sizeof *facts->gpus), .plan = malloc(sizeof *facts->plan)};
  if (!facts->gpus || !facts->plan)
    return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the facts of %d ranks", setup->ep);
  *facts->plan = context->plan;
  memcpy(facts->plan_hash, context->plan_hash, sizeof facts->plan_hash);
  snprintf(facts->backend, sizeof facts->backend, "%s", context->backend->name);
  snprintf(facts->transport, sizeof facts->transport, "%s", options_transport_name(group->transport));
  if (group->comm->ops->over_nccl) facts->nccl = nccl.version;
  if (setup->backend == MOEFLOW_BACKEND_CUDA) facts->nvrtc = nvrtc_of(setup->options.cache, facts->plan);
  return MOEFLOW_OK;
}

void report_facts_destroy(struct report_facts *facts) {
  free(facts->gpus);
  free(facts->plan);
}

/* ---- Merging ---- */

static int32_t worse(int32_t a, int32_t b) {
  if (a == POINT_NO || b == POINT_NO) return POINT_NO;
  return a == POINT_NOT_CHECKED ? b : a;
}

/* A NaN is worse than any number. */
static double larger(double a, double b) {
  return isnan(a) || a > b ? a : b;
}

static void merge_outputs(const struct point_result *results, int ranks, int points, int point, uint8_t digest[32]) {
  static const uint8_t none[32] = {0};
  struct sha256 hash;
  sha256_begin(&hash);
  for (int rank = 0; rank < ranks; rank++) {
    const uint8_t *one = results[(size_t)rank * points + point].output_sha256;
    if (memcmp(one, none, sizeof none) != 0) sha256_add(&hash, one, sizeof none);
  }
  sha256_end(&hash, digest);
}

struct point_result report_merge(const struct point_result *results, int ranks, int points, int point) {
  struct point_result merged = results[point];
  for (int rank = 1; rank < ranks; rank++) {
    const struct point_result *one = &results[(size_t)rank * points + point];
    merged.rel_l2_max = larger(merged.rel_l2_max, one->rel_l2_max);
    merged.max_error_ratio = larger(merged.max_error_ratio, one->max_error_ratio);
    merged.step_us = larger(merged.step_us, one->step_us);
    merged.rows_checked += one->rows_checked;
    merged.rounding_rows += one->rounding_rows;
    merged.close_calls += one->close_calls;
    merged.dispatch_exact = worse(merged.dispatch_exact, one->dispatch_exact);
    merged.replay_exact = worse(merged.replay_exact, one->replay_exact);
    merged.repeat_exact = worse(merged.repeat_exact, one->repeat_exact);
    merged.router_exact = worse(merged.router_exact, one->router_exact);
    merged.forms_exact = worse(merged.forms_exact, one->forms_exact);
    merged.passed = merged.passed && one->passed;
    if (!merged.message[0]) memcpy(merged.message, one->message, sizeof merged.message);
  }
  merge_outputs(results, ranks, points, point, merged.output_sha256);
  return merged;
}

/* ---- Text ---- */

static void tokens_text(const struct options_point *point, char text[64]) {
  int length = 0;
  for (int i = 0; i < point->count && length < 60; i++)
    length += snprintf(text + length, 64 - (size_t)length, "%s%d", i ? "/" : "", point->tokens[i]);
}

static const char *verdict_text(int32_t verdict) {
  return verdict == POINT_YES ? "exact" : verdict == POINT_NO ? "DIFFERS" : "-";
}

static void write_title(const struct setup *setup, const struct report_facts *facts, FILE *file) {
  const struct spec *spec = &setup->model.spec;
  fprintf(file, "%s %s: H %d, I %d, E %d, K %d; %d rank(s), capacity %d, backend %s, transport %s, reduce %s, seed %llu\n",
          spec->name, spec_dtype_name(spec->dtype), spec->hidden, spec->intermediate, spec->experts, spec->top_k, setup->ep,
          setup->capacity, facts->backend, facts->transport, spec->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner",
          (unsigned long long)setup->options.seed);
}

static void write_checks(const struct setup *setup, const struct point_result *points, FILE *file) {
  fprintf(file, "%-12s %6s %11s %11s  %-8s %-8s %-8s %-8s %-8s  %s\n", "tokens", "rows", "rel_l2_max", "max_error", "router",
          "dispatch", "forms", "repeat", "replay", "result");
  for (int p = 0; p < setup->options.point_count; p++) {
    const struct point_result *point = &points[p];
    char tokens[64], edge[64] = "";
    tokens_text(&setup->options.points[p], tokens);
    if (point->rounding_rows) snprintf(edge, sizeof edge, ", %d row(s) on the edge of a rounding", point->rounding_rows);
    fprintf(file, "%-12s %6d %11.3g %11.3g  %-8s %-8s %-8s %-8s %-8s  %s%s\n", tokens, point->rows_checked,
            point->rel_l2_max, point->max_error_ratio, verdict_text(point->router_exact),
            verdict_text(point->dispatch_exact), verdict_text(point->forms_exact), verdict_text(point->repeat_exact),
            verdict_text(point->replay_exact), point->passed ? "ok" : "FAILED", edge);
  }
  fprintf(
      file,
      "rel_l2_max: worst row's relative L2 error (at most %g); max_error: worst error over its row's largest value (at most "
      "%g); %d repeat(s)%s\n",
      REFERENCE_L2_MAX, REFERENCE_ELEMENT_MAX, setup->replays,
      setup->backend == MOEFLOW_BACKEND_CUDA ? " and as many graph replays" : "");
}

static void write_times(const struct setup *setup, const struct point_result *points, FILE *file) {
  fprintf(file, "%-12s %14s\n", "tokens", "us per step");
  for (int p = 0; p < setup->options.point_count; p++) {
    char tokens[64];
    tokens_text(&setup->options.points[p], tokens);
    fprintf(file, "%-12s %14.1f\n", tokens, points[p].step_us);
  }
  fprintf(file, "median of %d %s, slowest rank; a sign of life, not a benchmark; nothing was checked\n", setup->replays,
          setup->backend == MOEFLOW_BACKEND_CUDA ? "graph replays" : "steps on the CPU");
}

/* ---- JSON ---- */

static void json_text(struct json *json, const char *key, const char *value) {
  json_key(json, key);
  json_string(json, value);
}

static void json_number(struct json *json, const char *key, int64_t value) {
  json_key(json, key);
  json_int(json, value);
}

static void json_real(struct json *json, const char *key, double value) {
  json_key(json, key);
  json_double(json, value);
}

static void json_verdict(struct json *json, const char *key, int32_t verdict) {
  json_key(json, key);
  if (verdict == POINT_NOT_CHECKED) {
    json_null(json);
  } else {
    json_bool(json, verdict == POINT_YES);
  }
}

/* "h200x2", or "cpu". */
static void machine_name(const struct setup *setup, const struct report_facts *facts, char name[PROVENANCE_MACHINE_MAX]) {
  if (setup->backend == MOEFLOW_BACKEND_CPU) {
    snprintf(name, PROVENANCE_MACHINE_MAX, "cpu");
  } else {
    provenance_machine(facts->gpus[0].name, setup->ranks == RANKS_THREADS ? 1 : setup->ep, name);
  }
}

static void write_gpus(const struct setup *setup, const struct report_facts *facts, struct json *json) {
  const int gpus = setup->backend == MOEFLOW_BACKEND_CPU ? 0 : setup->ranks == RANKS_THREADS ? 1 : setup->ep;
  json_key(json, "gpus");
  json_array(json);
  for (int i = 0; i < gpus; i++) json_string(json, facts->gpus[i].name);
  json_array_end(json);
}

static void write_cubins(const struct setup *setup, const struct report_facts *facts, struct json *json) {
  json_text(json, "yaml_sha256", setup->yaml_sha256);
  json_text(json, "plan_sha256", setup->backend == MOEFLOW_BACKEND_CUDA ? facts->plan_hash : NULL);
  json_key(json, "cubins");
  json_array(json);
  for (int i = 0; setup->backend == MOEFLOW_BACKEND_CUDA && i < facts->plan->variant_count; i++) {
    const struct plan_variant *variant = &facts->plan->variants[i];
    json_object(json);
    json_text(json, "kernel", kernel_names[variant->kernel]);
    json_text(json, "sha256", variant->entry);
    json_object_end(json);
  }
  json_array_end(json);
  provenance_toolchain(facts->nvrtc, json);
}

static void version_text(int version, char text[32]) { /* NCCL: 22809 -> 2.28.9 */
  snprintf(text, 32, "%d.%d.%d", version / 10000, version % 10000 / 100, version % 100);
}

static void write_header(const struct setup *setup, const struct report_facts *facts, struct json *json) {
  const struct spec *spec = &setup->model.spec;
  char machine[PROVENANCE_MACHINE_MAX], nccl_text[32];
  machine_name(setup, facts, machine);
  version_text(facts->nccl, nccl_text);
  json_text(json, "schema", "moeflow-run/1");
  json_text(json, "kind", "run");
  json_key(json, "git");
  json_raw(json, moeflow_build_info());
  json_text(json, "machine", setup->options.machine ? setup->options.machine : machine);
  provenance_command("moeflow-run", setup->argc, setup->argv, json);
  json_key(json, "seed");
  char seed[32];
  snprintf(seed, sizeof seed, "%llu", (unsigned long long)setup->options.seed);
  json_raw(json, seed);
  json_text(json, "model", spec->name);
  json_text(json, "backend", facts->backend);
  json_text(json, "transport", facts->transport);
  json_number(json, "ep", setup->ep);
  json_number(json, "capacity", setup->capacity);
  json_number(json, "experts", spec->experts);
  json_text(json, "dtype", spec_dtype_name(spec->dtype));
  json_text(json, "reduce", spec->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner");
  json_text(json, "combine", setup->options.combine == MOEFLOW_COMBINE_RING ? "ring" : "plan");
  json_number(json, "lanes", setup->options.lanes);
  json_number(json, "replays", setup->replays);
  write_gpus(setup, facts, json);
  json_number(json, "driver", setup->gpus.driver);
  json_text(json, "nccl", facts->nccl ? nccl_text : NULL);
  provenance_environment(json);
  write_cubins(setup, facts, json);
}

static void write_tokens(const struct options_point *point, struct json *json) {
  int equal = 1;
  for (int i = 1; i < point->count; i++) equal = equal && point->tokens[i] == point->tokens[0];
  json_key(json, "tokens");
  if (equal) {
    json_int(json, point->tokens[0]);
    return;
  }
  json_array(json);
  for (int i = 0; i < point->count; i++) json_int(json, point->tokens[i]);
  json_array_end(json);
}

static void write_point(const struct setup *setup, const struct point_result *result, struct json *json) {
  char output[65];
  sha256_hex(result->output_sha256, output);
  json_text(json, "output_sha256", output);
  if (!setup->options.check) {
    json_real(json, "step_us", result->step_us);
    return;
  }
  json_real(json, "rel_l2_max", result->rel_l2_max);
  json_real(json, "max_error_ratio", result->max_error_ratio);
  json_number(json, "rows_checked", result->rows_checked);
  json_number(json, "rounding_rows", result->rounding_rows);
  json_verdict(json, "dispatch_exact", result->dispatch_exact);
  json_verdict(json, "replay_exact", result->replay_exact);
  json_verdict(json, "repeat_exact", result->repeat_exact);
  json_verdict(json, "router_exact", result->router_exact);
  json_number(json, "router_close_calls", result->close_calls);
  json_verdict(json, "forms_exact", result->forms_exact);
  if (result->message[0]) json_text(json, "message", result->message);
  json_key(json, "passed");
  json_bool(json, result->passed);
}

static void write_json(const struct setup *setup, const struct report_facts *facts, const struct point_result *points,
                       int passed, FILE *file) {
  struct json json;
  json_begin(&json, file);
  json_object(&json);
  write_header(setup, facts, &json);
  json_key(&json, "checked");
  json_bool(&json, setup->options.check != 0);
  json_key(&json, "points");
  json_array(&json);
  for (int p = 0; p < setup->options.point_count; p++) {
    json_object(&json);
    write_tokens(&setup->options.points[p], &json);
    write_point(setup, &points[p], &json);
    json_object_end(&json);
  }
  json_array_end(&json);
  json_key(&json, "passed");
  if (setup->options.check) {
    json_bool(&json, passed);
  } else {
    json_null(&json);
  }
  json_object_end(&json);
  json_end(&json);
}

/* ---- Both ---- */

static moeflow_status write_file(const struct setup *setup, const struct report_facts *facts,
                                 const struct point_result *points, int passed) {
  FILE *file = fopen(setup->options.output, "w");
  if (!file) return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", setup->options.output, strerror(errno));
  write_json(setup, facts, points, passed, file);
  const int failed = ferror(file);
  if (fclose(file) || failed)
    return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", setup->options.output, strerror(errno));
  return MOEFLOW_OK;
}

static moeflow_status write_stdout(const struct setup *setup, const struct report_facts *facts,
                                   const struct point_result *points, int passed) {
  if (setup->options.format == OPTIONS_JSON) {
    write_json(setup, facts, points, passed, stdout);
  } else {
    write_title(setup, facts, stdout);
    (setup->options.check ? write_checks : write_times)(setup, points, stdout);
  }
  if (fflush(stdout) || ferror(stdout))
    return status_set(MOEFLOW_ERROR_CACHE, "cannot write the result: %s", strerror(errno));
  return MOEFLOW_OK;
}

moeflow_status report_write(const struct setup *setup, const struct report_facts *facts, const struct point_result *results,
                            int *passed) {
  const int count = setup->options.point_count;
  moeflow_status status = MOEFLOW_OK;
  struct point_result *points = calloc((size_t)count, sizeof *points);
  if (!points) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d points", count);
  *passed = 1;
  for (int p = 0; p < count; p++) {
    points[p] = report_merge(results, setup->ep, count, p);
    *passed = *passed && points[p].passed;
    if (!points[p].message[0]) continue;
    char tokens[64];
    tokens_text(&setup->options.points[p], tokens);
    fprintf(stderr, "moeflow-run: check failed at tokens %s: %s\n", tokens, points[p].message);
  }
  CHECK(write_stdout(setup, facts, points, *passed));
  if (setup->options.output) CHECK(write_file(setup, facts, points, *passed));

cleanup:
  free(points);
  return status;
}
