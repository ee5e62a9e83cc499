/* The routings that a benchmark rotates: for each layer, what the rows of all ranks pick, seen from the rank with the most
 * active experts. Drawn by counter (templates/random.h): any process draws the same. */
#ifndef MOEFLOW_BENCH_ROUTING_H
#define MOEFLOW_BENCH_ROUTING_H

#include <stdint.h>

#include "spec.h"

#define ROUTING_SAME (-1.0)
#define ROUTING_SKEW_MAX 16.0

struct routing_shape {
  const struct spec *spec;
  int ep;      /* a divisor of spec->experts */
  int tokens;  /* T, of each rank */
  double skew; /* 0: uniform; > 0: lognormal popularity of that sigma; ROUTING_SAME: all pick the same K of one rank */
  uint64_t seed;
};

struct routing { /* of one layer */
  int rows;         /* ep * T */
  int32_t *ids;     /* [rows, K]: experts of the rank played are 0 .. E / ep - 1, others -1 */
  float *weights;   /* [rows, K] */
  int active;       /* experts of that rank with at least one entry */
  int64_t entries;  /* its (row, choice) pairs */
  int *row_entries; /* [rows] */
};

/* MOEFLOW_ERROR_ARGUMENT: E is no multiple of ep; `same` with fewer than K experts a rank. */
moeflow_status routing_check(const struct routing_shape *shape);

/* Layer number `layer`. Each row draws K different experts in proportion to their popularity, without replacement. */
moeflow_status routing_draw(const struct routing_shape *shape, int layer, struct routing *routing);
void routing_free(struct routing *routing);
#endif
