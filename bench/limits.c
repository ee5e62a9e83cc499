/* The command `limits`, and what of it others share. */
#include "limits_command.h"

#include <string.h>

#include "gpu.h"
#include "provenance.h"
#include "result.h"

moeflow_status limits_read(struct read_bench *bench, int64_t bytes, struct read_result *result) {
  const moeflow_status status = read_bench_measure(bench, READ_BULK, bytes, result);
  return status == MOEFLOW_ERROR_UNSUPPORTED ? read_bench_measure(bench, READ_LOADS, bytes, result) : status;
}

moeflow_status limits_dense(const struct read_bench *bench, const char *cublas, struct dense_result *result) {
  int64_t bytes;
  const void *memory = read_bench_memory(bench, &bytes);
  return dense_rate_measure(cublas, memory, bytes, result);
}

void limits_print_dense(const struct dense_result *result, FILE *file) {
  if (result->teraflops > 0) {
    fprintf(file, "dense bf16, cuBLAS, %d x %d x %d: %.0f TFLOP/s\n", result->m, result->n, result->k, result->teraflops);
  } else {
    fprintf(file, "dense bf16: not measured: %s\n", result->why);
  }
}

void limits_write_dense(const struct dense_result *result, struct json *json) {
  char shape[64];
  snprintf(shape, sizeof shape, "%dx%dx%d", result->m, result->n, result->k);
  json_key(json, "dense");
  json_object(json);
  result_text(json, "shape", shape);
  json_key(json, "tflops");
  result->teraflops > 0 ? json_double(json, result->teraflops) : json_null(json);
  if (!(result->teraflops > 0)) result_text(json, "why", result->why);
  json_object_end(json);
}

/* ---- The command ---- */

struct limits {
  struct bench_gpu gpu;
  struct read_bench *bench;
  struct read_result read[BENCH_LIST_MAX][2]; /* by size and method; 0 where the GPU has none */
  struct dense_result dense;
};

static void write_json(const struct bench_options *options, const struct limits *limits, FILE *file) {
  static const char *const keys[] = {[READ_BULK] = "bulk", [READ_LOADS] = "loads"};
  const struct result_header header = {.kind = "limits", .gpu = limits->gpu.gpu, .driver = limits->gpu.all.driver};
  struct json json;
  json_begin(&json, file);
  result_begin(&json, options, &header);
  limits_write_dense(&limits->dense, &json);
  json_key(&json, "points");
  json_array(&json);
  for (int i = 0; i < options->sizes.count; i++) {
    json_object(&json);
    result_integer(&json, "bytes", limits->read[i][0].bytes);
    for (int method = 0; method < 2; method++) {
      const struct read_result *result = &limits->read[i][method];
      json_key(&json, keys[method]);
      json_object(&json);
      result_real(&json, "gbs", result->gigabytes_per_second);
      result_text(&json, "shape", result->shape);
      json_object_end(&json);
    }
    json_object_end(&json);
  }
  json_array_end(&json);
  json_object_end(&json);
  json_end(&json);
}

static moeflow_status measure(const struct bench_options *options, struct limits *limits) {
  moeflow_status status = MOEFLOW_OK;
  int64_t most = 0;
  for (int i = 0; i < options->sizes.count; i++)
    if (options->sizes.values[i] > most) most = options->sizes.values[i];
  CHECK(read_bench_open(&limits->gpu.read, (int)options->device, most, &limits->bench));
  printf("%s. GB/s (1e9 bytes) read, launch included; the best launch shape in brackets.\n%9s  %-34s %s\n",
         limits->gpu.gpu->name, "GB", read_method_names[READ_BULK], read_method_names[READ_LOADS]);
  for (int i = 0; i < options->sizes.count; i++) {
    char text[2][64] = {"-", "-"};
    for (int method = 0; method < 2; method++) {
      struct read_result *result = &limits->read[i][method];
      status = read_bench_measure(limits->bench, (enum read_method)method, options->sizes.values[i], result);
      if (status == MOEFLOW_ERROR_UNSUPPORTED) continue;
      CHECK(status);
      snprintf(text[method], sizeof text[method], "%.0f [%.40s]", result->gigabytes_per_second, result->shape);
    }
    printf("%9.3f  %-34s %s\n", (double)options->sizes.values[i] / 1e9, text[0], text[1]);
    fflush(stdout);
  }
  CHECK(limits_dense(limits->bench, options->cublas, &limits->dense));
  limits_print_dense(&limits->dense, stdout);

cleanup:
  return status;
}

int command_limits(const struct bench_options *options) {
  static struct limits limits; /* large */
  moeflow_status status = MOEFLOW_OK;
  FILE *file = NULL;
  CHECK(provenance_check_output("--json", options->json));
  CHECK(bench_gpu_find(options, &limits.gpu));
  CHECK(bench_gpu_take(options, &limits.gpu));
  CHECK(measure(options, &limits));
  CHECK(result_open(options, &file));
  if (file) write_json(options, &limits, file);
  status = result_close(options, file);

cleanup:
  read_bench_close(limits.bench);
  bench_gpu_leave(&limits.gpu);
  return bench_exit_code(options, status);
}
