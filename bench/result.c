#include "result.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "provenance.h"
#include "status.h"

void result_text(struct json *json, const char *key, const char *value) {
  json_key(json, key);
  json_string(json, value);
}

void result_integer(struct json *json, const char *key, int64_t value) {
  json_key(json, key);
  json_int(json, value);
}

void result_real(struct json *json, const char *key, double value) {
  json_key(json, key);
  json_double(json, value);
}

void result_interval(struct json *json, const char *key, struct interval interval) {
  json_key(json, key);
  json_array(json);
  json_double(json, interval.low);
  json_double(json, interval.high);
  json_array_end(json);
}

/* A hundredth of a microsecond is finer than any of these clocks. */
void result_samples(struct json *json, const char *key, const double *values, int count) {
  json_key(json, key);
  json_array(json);
  for (int i = 0; i < count; i++) json_double(json, round(values[i] * 100) / 100);
  json_array_end(json);
}

void result_begin(struct json *json, const struct bench_options *options, const struct result_header *header) {
  char machine[PROVENANCE_MACHINE_MAX];
  provenance_machine(header->gpu->name, 1, machine);
  json_object(json);
  result_text(json, "schema", "moeflow-bench/1");
  result_text(json, "kind", header->kind);
  json_key(json, "git");
  json_raw(json, moeflow_build_info());
  result_text(json, "machine", options->machine ? options->machine : machine);
  result_text(json, "gpu", header->gpu->name);
  result_integer(json, "driver", header->driver);
  provenance_toolchain(header->nvrtc, json);
  provenance_environment(json);
  provenance_command("moeflow-bench", options->argc, options->argv, json);
  result_integer(json, "seed", (int64_t)options->seed);
}

moeflow_status result_open(const struct bench_options *options, FILE **file) {
  *file = options->json ? fopen(options->json, "w") : NULL;
  if (*file || !options->json) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", options->json, strerror(errno));
}

moeflow_status result_close(const struct bench_options *options, FILE *file) {
  const int failed = file && ferror(file);
  if (!file || (!fclose(file) && !failed)) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", options->json, strerror(errno));
}
