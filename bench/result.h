/* A result file's common part and its points: schema moeflow-bench/1, see bench/README.md. */
#ifndef MOEFLOW_BENCH_RESULT_H
#define MOEFLOW_BENCH_RESULT_H

#include "bench_options.h"
#include "gpus.h"
#include "json.h"
#include "statistics.h"

struct result_header {
  const char *kind; /* "kernels" */
  const struct gpu *gpu;
  int driver;
  int nvrtc; /* major * 1000 + minor * 10 of what was measured; 0 unknown */
};

/* Begins the object and writes what every kind has; the caller adds the rest and ends the object. */
void result_begin(struct json *json, const struct bench_options *options, const struct result_header *header);

void result_text(struct json *json, const char *key, const char *value);
void result_integer(struct json *json, const char *key, int64_t value);
void result_real(struct json *json, const char *key, double value);
void result_interval(struct json *json, const char *key, struct interval interval); /* [low, high] */
void result_samples(struct json *json, const char *key, const double *values, int count);

/* Opens --json, or NULL when there is none; closes it and says whether all was written. */
moeflow_status result_open(const struct bench_options *options, FILE **file);
moeflow_status result_close(const struct bench_options *options, FILE *file);
#endif
