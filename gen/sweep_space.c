#include "sweep_space.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emit.h"
#include "status.h"

/* ---- The floor model ----
 * A layer takes as long as its bytes at the memory's rate, but no less than its blocks' rounds of whole units; then the
 * tail, where the last units end one by one, and the extra sums of each part. It ranks, it does not predict: the figures are
 * those of an H200, and on another GPU the order of the shapes is much the same. */
#define MEMORY_RATE 4.72e6 /* bytes a microsecond, all multiprocessors */
#define LATENCY 0.8        /* microseconds from asking to having */
#define CACHE_GAIN 0.5     /* a second tile of an expert finds half of the weights in the L2 */
#define CACHE_RATE 3.0e6   /* of the sums of parts, written and read */
#define CLOCK 1700.0       /* cycles a microsecond */
#define ROWS_COST 0.05     /* of a received row's bytes, which come from the L2, in bytes from memory */
#define UNIT_OVERHEAD 0.3  /* microseconds of a unit that its loads do not hide */
#define LAUNCH 4.0

/* What an expert can expect, when each of n rows picks it with probability p: to be picked at all, and its tiles. */
static void expect_tiles(int n, double p, int tile_tokens, double *picked, double *tiles) {
  double term = exp(n * log1p(-p)), sum = 0; /* the probability of `rows` rows; together */
  *picked = 1 - term;
  *tiles = n * p / tile_tokens + 0.5;
  if (term < 1e-300) return; /* so many that the last tile alone is not full */
  *tiles = 0;
  for (int rows = 0; rows <= n && sum < 1 - 1e-12; rows++) {
    *tiles += term * ((rows + tile_tokens - 1) / tile_tokens);
    sum += term;
    term *= (double)(n - rows) / (rows + 1) * p / (1 - p);
  }
}

/* Cycles in which a multiprocessor's tensor cores take 64 weight rows of 16 columns: the operands out of shared memory, or
 * the products. */
static double mma_cycles(int tile_tokens) {
  const double operands = 16 + tile_tokens / 4.0, products = tile_tokens / 2.0;
  return operands > products ? operands : products;
}

double sweep_estimate(const struct sweep_space *space, int32_t kernel, const struct experts_shape *shape, int tokens) {
  const struct spec *spec = space->spec;
  const int n = tokens * space->ep;
  const double local = ceil((double)spec->experts / space->ep);
  const double p = spec->top_k < spec->experts ? (double)spec->top_k / spec->experts : 1 - 1e-9;
  const double entries = local * n * p;
  double active, tiles;
  expect_tiles(n, p, shape->tile_tokens, &active, &tiles);
  active *= local;
  tiles *= local;

  const double blocks = (double)space->multiprocessors * shape->residency;
  const double in_flight = (double)experts_bytes_in_flight(kernel, shape) / shape->residency;
  double rate = MEMORY_RATE / blocks; /* bytes a microsecond of a block */
  if (in_flight / LATENCY < rate) rate = in_flight / LATENCY;
  const double mma_rate = 64 * 16 * 2 / mma_cycles(shape->tile_tokens) * CLOCK / shape->residency;
  if (mma_rate < rate) rate = mma_rate;

  rate /= 1 + ROWS_COST * shape->tile_tokens / shape->tile_rows;

  const double gate_up_unit = (double)shape->tile_rows * spec->hidden * 2 / rate + UNIT_OVERHEAD;
  const double down_unit = (double)shape->tile_rows * spec->intermediate * 2 / shape->parts / rate + UNIT_OVERHEAD;
  const double gate_up_units = tiles * ceil(2.0 * spec->intermediate / shape->tile_rows);
  const double down_units = tiles * ceil((double)spec->hidden / shape->tile_rows) * shape->parts;
  const double again = tiles > active ? CACHE_GAIN * (tiles - active) / tiles : 0;
  const double even = (gate_up_units * gate_up_unit + down_units * down_unit) / blocks * (1 - again);
  const double rounds = ceil(gate_up_units / blocks) * gate_up_unit + down_unit;
  const double tail = down_unit * 64 / shape->tile_rows / 2;
  const double sums = entries * spec->hidden * 4 * 2 * shape->parts / CACHE_RATE;
  return LAUNCH + (even > rounds ? even : rounds) + tail + sums;
}

/* ---- Arms ---- */

struct ranked {
  int32_t kernel;
  struct experts_shape shape;
  double estimate;
};

static int by_estimate(const void *a, const void *b) {
  const double x = ((const struct ranked *)a)->estimate, y = ((const struct ranked *)b)->estimate;
  if (x != y) return x < y ? -1 : 1;
  return memcmp(&((const struct ranked *)a)->shape, &((const struct ranked *)b)->shape, sizeof(struct experts_shape));
}

static int is_swept(const struct sweep_space *space, int32_t kernel) {
  if (kernel != KERNEL_EXPERTS && !(kernel == KERNEL_EXPERTS_STREAM && space->packed)) return 0;
  return experts_kernel_on(kernel, space->arch);
}

static int is_legal(const struct sweep_space *space, int32_t kernel, const struct experts_shape *shape) {
  return experts_shape_check(space->spec, kernel, shape, space->draft->shared_max, NULL) == EXPERTS_LEGAL;
}

/* One more stage would be legal too: unless all are wanted, only the deepest ring of a shape is. */
static int is_shallow(const struct sweep_space *space, int32_t kernel, const struct experts_shape *shape) {
  struct experts_shape deeper = *shape;
  deeper.stages++;
  return !space->exhaustive && kernel == KERNEL_EXPERTS && is_legal(space, kernel, &deeper);
}

/* With batch_invariant one order of sums serves all buckets: the default's. */
static int is_allowed(const struct sweep_space *space, int32_t kernel, const struct experts_shape *shape) {
  if (!space->spec->batch_invariant) return 1;
  const struct plan_variant *standard = plan_variant(&space->draft->plan, kernel, 0);
  return standard && standard->order_tag == experts_order_tag(kernel, shape->parts);
}

/* All shapes that may be arms: for the caller to free, also after an error. */
static moeflow_status list_shapes(const struct sweep_space *space, struct ranked **shapes, int *count) {
  int room = 0;
  *shapes = NULL;
  *count = 0;
  for (int32_t kernel = KERNEL_EXPERTS; kernel <= KERNEL_EXPERTS_STREAM; kernel++) {
    struct experts_shape shape = {0};
    while (is_swept(space, kernel) && experts_space_next(kernel, &shape)) {
      if (!is_legal(space, kernel, &shape) || is_shallow(space, kernel, &shape) || !is_allowed(space, kernel, &shape))
        continue;
      if (*count == room) {
        struct ranked *more = realloc(*shapes, (size_t)(room = room ? 2 * room : 64) * sizeof *more);
        if (!more) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d shapes", room);
        *shapes = more;
      }
      (*shapes)[(*count)++] = (struct ranked){kernel, shape, 0};
    }
  }
  return MOEFLOW_OK;
}

void sweep_space_count(const struct sweep_space *space, int *legal, int *all) {
  *legal = *all = 0;
  for (int32_t kernel = KERNEL_EXPERTS; kernel <= KERNEL_EXPERTS_STREAM; kernel++) {
    struct experts_shape shape = {0};
    while (is_swept(space, kernel) && experts_space_next(kernel, &shape)) {
      ++*all;
      *legal += is_legal(space, kernel, &shape);
    }
  }
}

static int find_arm(const struct sweep_arms *arms, int32_t kernel, const struct experts_shape *shape) {
  for (int i = 0; i < arms->count; i++)
    if (arms->arms[i].kernel == kernel && experts_shape_same(&arms->arms[i].shape, shape)) return i;
  return -1;
}

static int add_arm(struct sweep_arms *arms, int32_t kernel, const struct experts_shape *shape) {
  const int found = find_arm(arms, kernel, shape);
  if (found >= 0 || arms->count == SWEEP_ARMS_MAX) return found;
  struct sweep_arm *arm = &arms->arms[arms->count];
  *arm = (struct sweep_arm){.kernel = kernel, .shape = *shape};
  return arms->count++;
}

/* An arm is called what its unit is. */
static void name_arm(const struct sweep_space *space, struct plan_draft *scratch, struct sweep_arm *arm) {
  char name[EMIT_NAME_MAX];
  if (arm->kernel == KERNEL_GATE_UP) {
    snprintf(arm->name, sizeof arm->name, "portable");
    return;
  }
  *scratch = *space->draft;
  experts_variant(arm->kernel, &arm->shape, &scratch->plan.variants[0]);
  emit_file_name(scratch, 0, name);
  snprintf(arm->name, sizeof arm->name, "%.*s", (int)(strlen(name) - strlen(".cu")), name);
}

static void rank(const struct sweep_space *space, struct ranked *shapes, int count, int tokens) {
  for (int i = 0; i < count; i++) shapes[i].estimate = sweep_estimate(space, shapes[i].kernel, &shapes[i].shape, tokens);
  qsort(shapes, (size_t)count, sizeof *shapes, by_estimate);
}

/* What the default plan has for this number of rows, as an arm. */
static int standard_arm(const struct sweep_space *space, struct sweep_arms *arms, int rows) {
  const struct plan_bucket *bucket = plan_bucket_for(&space->draft->plan, rows);
  struct experts_shape shape;
  if (bucket->experts < 0) return SWEEP_PORTABLE;
  experts_shape_of(plan_variant(&space->draft->plan, KERNEL_EXPERTS, bucket->experts), &shape);
  return add_arm(arms, KERNEL_EXPERTS, &shape);
}

/* The model is not exact enough to leave all places to one width of units: no width gets more than half of them. */
static int of_width(const struct sweep_arms *arms, const struct sweep_point *point, int tile_rows) {
  int count = 0;
  for (int i = 0; i < point->order_count; i++) count += arms->arms[point->order[i]].shape.tile_rows == tile_rows;
  return count;
}

/* Shortlists of `length` arms at every point; how many arms that makes in all is arms->count. */
static void shortlist(const struct sweep_space *space, struct ranked *shapes, int shape_count, int length,
                      struct sweep_arms *arms, struct sweep_point *points, int count) {
  arms->count = 0;
  add_arm(arms, KERNEL_GATE_UP, &(struct experts_shape){0});
  for (int i = 0; i < count; i++) points[i].standard = standard_arm(space, arms, points[i].rows);
  for (int i = 0; i < count; i++) {
    struct sweep_point *point = &points[i];
    rank(space, shapes, shape_count, point->tokens);
    point->order_count = 0;
    for (int s = 0; s < shape_count && point->order_count < length; s++) {
      if (!space->exhaustive && of_width(arms, point, shapes[s].shape.tile_rows) >= (length + 1) / 2) continue;
      const int arm = add_arm(arms, shapes[s].kernel, &shapes[s].shape);
      if (arm >= 0 && arm != point->standard) point->order[point->order_count++] = arm;
    }
    if (point->standard != SWEEP_PORTABLE && !space->spec->batch_invariant) /* which adds in another order */
      point->order[point->order_count++] = SWEEP_PORTABLE;
  }
}

int sweep_plan_room(const struct plan_draft *draft) {
  return PLAN_VARIANTS_MAX - draft->plan.variant_count;
}

/* Arms of the shortlists that the default plan does not hold. */
static int new_arms(const struct sweep_space *space, const struct sweep_arms *arms) {
  int known = 1; /* the portable form */
  for (int i = 0; i < space->draft->plan.variant_count; i++) {
    const struct plan_variant *variant = &space->draft->plan.variants[i];
    struct experts_shape shape;
    if (variant->kernel != KERNEL_EXPERTS && variant->kernel != KERNEL_EXPERTS_STREAM) continue;
    experts_shape_of(variant, &shape);
    known += find_arm(arms, variant->kernel, &shape) >= 0;
  }
  return arms->count - known;
}

static int by_number(const void *a, const void *b) {
  return *(const int *)a - *(const int *)b;
}

/* Several plans: each point takes them one after another, as sweep_compile fills them. */
static void order_by_plan(struct sweep_point *points, int count) {
  for (int i = 0; i < count; i++) qsort(points[i].order, (size_t)points[i].order_count, sizeof(int), by_number);
}

/* Shapes that are no arms because there are too many. */
static int left_out(const struct sweep_arms *arms, const struct ranked *shapes, int count) {
  int missing = 0;
  for (int i = 0; arms->count == SWEEP_ARMS_MAX && i < count; i++)
    missing += find_arm(arms, shapes[i].kernel, &shapes[i].shape) < 0;
  return missing;
}

moeflow_status sweep_space_arms(const struct sweep_space *space, struct sweep_arms *arms, struct sweep_point *points,
                                int count) {
  moeflow_status status = MOEFLOW_OK;
  int shape_count;
  struct plan_draft *scratch = malloc(sizeof *scratch);
  struct ranked *shapes;
  *arms = (struct sweep_arms){.arms = calloc(SWEEP_ARMS_MAX, sizeof *arms->arms)};
  CHECK(list_shapes(space, &shapes, &shape_count));
  if (!arms->arms || !scratch) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d arms", SWEEP_ARMS_MAX);
  for (int i = 0; i < count; i++) {
    points[i].order = calloc((size_t)shape_count + 2, sizeof *points[i].order);
    points[i].results = calloc(SWEEP_ARMS_MAX, sizeof *points[i].results);
    if (!points[i].order || !points[i].results) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d shapes", shape_count);
  }
  /* As long as they may be while one plan holds all arms: a worker opens another plan slowly. */
  int length = space->exhaustive ? shape_count : SWEEP_SHORTLIST_MAX;
  do {
    shortlist(space, shapes, shape_count, length, arms, points, count);
  } while (!space->exhaustive && new_arms(space, arms) > sweep_plan_room(space->draft) && --length >= SWEEP_SHORTLIST_MIN);
  if (new_arms(space, arms) > sweep_plan_room(space->draft)) order_by_plan(points, count);
  arms->left_out = left_out(arms, shapes, space->exhaustive ? shape_count : 0);
  for (int i = 0; i < arms->count; i++) name_arm(space, scratch, &arms->arms[i]);
cleanup:
  free(shapes);
  free(scratch);
  return status;
}

void sweep_space_free(struct sweep_arms *arms, struct sweep_point *points, int count) {
  for (int i = 0; i < count; i++) {
    free(points[i].order);
    free(points[i].results);
  }
  free(arms->arms);
  *arms = (struct sweep_arms){.arms = NULL};
}
