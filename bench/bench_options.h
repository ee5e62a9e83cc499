/* The command line of moeflow-bench: one table drives parsing, ranges and help. */
#ifndef MOEFLOW_BENCH_OPTIONS_H
#define MOEFLOW_BENCH_OPTIONS_H

#include <stdint.h>
#include <stdio.h>

#include "moeflow.h"

#define BENCH_LIST_MAX 32
#define BENCH_LAUNCHES_MAX 100

struct bench_tokens {
  int count;
  int32_t values[BENCH_LIST_MAX];
};

struct bench_skews {
  int count;
  double values[BENCH_LIST_MAX]; /* as experts_bench_routing takes them */
};

struct bench_sizes {
  int count;
  int64_t values[BENCH_LIST_MAX]; /* bytes */
};

enum bench_variants { VARIANTS_SERVED, VARIANTS_ALL };
enum bench_kernel { KERNEL_OF_EXPERTS };
enum bench_fail_on { FAIL_ON_NOTHING, FAIL_ON_SLOW };

struct bench_options {
  const struct bench_command *command;
  const char *model;
  int64_t ep; /* 0: the model's */
  struct bench_tokens tokens;
  struct bench_skews skews;
  struct bench_sizes sizes;
  int64_t variants, kernel, fail_on; /* the enums above */
  int64_t pairs, launches;
  int64_t no_sum;
  int64_t experts; /* 0: the model's */
  int64_t device;
  uint64_t seed;
  const char *dtype, *cache, *cublas, *json, *machine;
  int64_t help, version;
  int argc; /* for the result's `command` */
  char **argv;
};

struct bench_command {
  const char *name;
  const char *operand; /* NULL: takes none */
  const char *summary;
  unsigned scope; /* its bit in the table */
  int (*run)(const struct bench_options *options);
};

/* Reads argv. 1: options->command is to be run. 0: *code is what the process ends with, and help, the version or a message
 * on stderr has been printed. Strings are borrowed from argv. */
int bench_options_parse(int argc, char **argv, struct bench_options *options, int *code);

/* "uniform", "lognormal:0.7", "same" */
void bench_skew_name(double skew, char text[32]);

/* Rows of the command table; each returns the process's exit code. */
int command_limits(const struct bench_options *options);
int command_kernels(const struct bench_options *options);
#endif
