#include "routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "random.h"
#include "status.h"

#define WEIGHTS_MATRIX 8 /* coordinates of random.h that nothing else draws at */
#define CHOICES_MATRIX 9

/* In the open interval (0, 1). */
static double uniform(uint32_t bits) {
  return (bits + 0.5) * 0x1p-32;
}

static int local_experts(const struct routing_shape *shape) {
  return shape->spec->experts / shape->ep;
}

moeflow_status routing_check(const struct routing_shape *shape) {
  const struct spec *spec = shape->spec;
  if (shape->ep < 1 || spec->experts % shape->ep) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d experts do not divide among %d ranks; give an --ep that divides them",
                      spec->experts, shape->ep);
  }
  if (shape->skew == ROUTING_SAME && local_experts(shape) < spec->top_k) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "skew `same` wants %d experts of one rank, and with --ep %d each has %d",
                      spec->top_k, shape->ep, local_experts(shape));
  }
  if (shape->tokens < 1) return status_set(MOEFLOW_ERROR_ARGUMENT, "%d tokens a rank; give at least 1", shape->tokens);
  return MOEFLOW_OK;
}

/* ---- Draws ---- */

/* Log of each expert's popularity: the same for all layers of a model would let a few experts stay in the L2, so each layer
 * has its own. */
static void draw_popularity(const struct routing_shape *shape, int layer, double *popularity) {
  for (int e = 0; e < shape->spec->experts; e++) {
    const uint32_t key = moeflow_random_row(shape->seed, (uint32_t)layer, MOEFLOW_RANDOM_POPULARITY, (uint32_t)e);
    const double radius = sqrt(-2 * log(uniform(moeflow_random_bits(key, 0)))); /* Box and Muller's normal */
    popularity[e] =
        shape->skew > 0 ? shape->skew * radius * cos(6.283185307179586 * uniform(moeflow_random_bits(key, 1))) : 0;
  }
}

/* The K largest of popularity plus Gumbel noise, largest first. */
static void draw_row(const struct routing_shape *shape, int layer, int row, const double *popularity, double *scores,
                     int32_t *ids) {
  const struct spec *spec = shape->spec;
  const uint32_t key = moeflow_random_row(shape->seed, (uint32_t)layer, CHOICES_MATRIX, (uint32_t)row);
  for (int e = 0; e < spec->experts; e++)
    scores[e] = popularity[e] - log(-log(uniform(moeflow_random_bits(key, (uint32_t)e))));
  for (int k = 0; k < spec->top_k; k++) {
    int best = 0;
    for (int e = 1; e < spec->experts; e++)
      if (scores[e] > scores[best]) best = e;
    ids[k] = best;
    scores[best] = -INFINITY;
  }
}

/* All rows as the first, moved to rank 0's experts: which K of them, each layer draws. */
static void draw_same(const struct routing_shape *shape, int layer, struct routing *routing) {
  const int experts = local_experts(shape), top_k = shape->spec->top_k;
  const uint32_t key = moeflow_random_row(shape->seed, (uint32_t)layer, CHOICES_MATRIX, 0);
  const int first = (int)(moeflow_random_bits(key, 0) % (uint32_t)experts);
  for (int row = 0; row < routing->rows; row++)
    for (int k = 0; k < top_k; k++) routing->ids[(size_t)row * top_k + k] = (first + k) % experts;
}

static moeflow_status draw_ids(const struct routing_shape *shape, int layer, struct routing *routing) {
  const struct spec *spec = shape->spec;
  double *popularity = malloc((size_t)spec->experts * sizeof *popularity);
  double *scores = malloc((size_t)spec->experts * sizeof *scores);
  moeflow_status status = MOEFLOW_OK;
  if (!popularity || !scores) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the scores of %d experts", spec->experts);
  if (shape->skew == ROUTING_SAME) {
    draw_same(shape, layer, routing);
  } else {
    draw_popularity(shape, layer, popularity);
    for (int row = 0; row < routing->rows; row++)
      draw_row(shape, layer, row, popularity, scores, routing->ids + (size_t)row * spec->top_k);
  }

cleanup:
  free(popularity);
  free(scores);
  return status;
}

/* A row's weights are positive and add up to 1. */
static void draw_weights(const struct routing_shape *shape, int layer, struct routing *routing) {
  const int top_k = shape->spec->top_k;
  for (int row = 0; row < routing->rows; row++) {
    const uint32_t key = moeflow_random_row(shape->seed, (uint32_t)layer, WEIGHTS_MATRIX, (uint32_t)row);
    float *weights = routing->weights + (size_t)row * top_k;
    double sum = 0;
    for (int k = 0; k < top_k; k++) sum += weights[k] = (float)(0.25 + uniform(moeflow_random_bits(key, (uint32_t)k)));
    for (int k = 0; k < top_k; k++) weights[k] = (float)(weights[k] / sum);
  }
}

/* ---- The rank played ---- */

/* How many experts of each rank are active; returns the rank with the most, the first of several. */
static int busiest(const struct routing_shape *shape, const struct routing *routing, char *active) {
  const int experts = shape->spec->experts, local = local_experts(shape);
  int best = 0, most = -1;
  memset(active, 0, (size_t)experts);
  for (int64_t i = 0; i < (int64_t)routing->rows * shape->spec->top_k; i++) active[routing->ids[i]] = 1;
  for (int rank = 0; rank < shape->ep; rank++) {
    int count = 0;
    for (int e = 0; e < local; e++) count += active[rank * local + e];
    if (count <= most) continue;
    most = count;
    best = rank;
  }
  return best;
}

/* Renumbers that rank's experts from 0, strikes out the others' and counts. */
static void play(const struct routing_shape *shape, int rank, struct routing *routing, char *active) {
  const int local = local_experts(shape), top_k = shape->spec->top_k;
  memset(active, 0, (size_t)shape->spec->experts);
  for (int row = 0; row < routing->rows; row++) {
    for (int k = 0; k < top_k; k++) {
      int32_t *id = &routing->ids[(size_t)row * top_k + k];
      const int32_t slot = *id - rank * local;
      const int mine = slot >= 0 && slot < local;
      *id = mine ? slot : -1;
      if (!mine) continue;
      routing->row_entries[row]++;
      routing->entries++;
      routing->active += !active[slot];
      active[slot] = 1;
    }
  }
}

moeflow_status routing_draw(const struct routing_shape *shape, int layer, struct routing *routing) {
  const size_t rows = (size_t)shape->ep * (size_t)shape->tokens, choices = rows * (size_t)shape->spec->top_k;
  moeflow_status status = MOEFLOW_OK;
  char *active = NULL;
  *routing = (struct routing){.rows = (int)rows};
  CHECK(routing_check(shape));
  active = malloc((size_t)shape->spec->experts);
  routing->ids = malloc(choices * sizeof *routing->ids);
  routing->weights = malloc(choices * sizeof *routing->weights);
  routing->row_entries = calloc(rows, sizeof *routing->row_entries);
  if (!active || !routing->ids || !routing->weights || !routing->row_entries)
    FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the routing of %zu rows", rows);
  CHECK(draw_ids(shape, layer, routing));
  draw_weights(shape, layer, routing);
  play(shape, busiest(shape, routing, active), routing, active);

cleanup:
  free(active);
  if (status != MOEFLOW_OK) routing_free(routing);
  return status;
}

void routing_free(struct routing *routing) {
  free(routing->ids);
  free(routing->weights);
  free(routing->row_entries);
  *routing = (struct routing){.rows = 0};
}
