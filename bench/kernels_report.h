/* How the result of `kernels` looks: a table for people, JSON for everybody else. */
#ifndef MOEFLOW_BENCH_KERNELS_REPORT_H
#define MOEFLOW_BENCH_KERNELS_REPORT_H

#include "point.h"
#include "result.h"

struct kernels_facts {
  const struct spec *spec;
  int ep;
  char yaml_sha256[65], plan_sha256[65];
  struct result_header header;
  struct dense_result dense;
};

void kernels_print_point(const struct point *point, FILE *file);
void kernels_print_verdicts(const struct point *points, int count, FILE *file);
void kernels_write(const struct bench_options *options, const struct kernels_facts *facts, const struct point *points,
                   int count, FILE *file);
#endif
