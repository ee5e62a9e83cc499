#include "point.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits_command.h"
#include "status.h"

#define WARM_UPS 3

/* ---- Which arms ---- */

static moeflow_status add_arm(struct point *point, const char *name, enum experts_bench_kernel kernel, int variant,
                              int with_sum, int compared) {
  if (point->arm_count == PAIRING_ARMS_MAX)
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "more than %d arms; leave --variants all out", PAIRING_ARMS_MAX);
  struct arm *arm = &point->arms[point->arm_count++];
  *arm = (struct arm){.kernel = kernel, .variant = variant, .with_sum = with_sum, .compared = compared, .checked = 1};
  snprintf(arm->name, sizeof arm->name, "%s", name);
  return MOEFLOW_OK;
}

static moeflow_status add_variants(const struct plan *plan, enum kernel_id id, enum experts_bench_kernel kernel,
                                   int with_sum, struct point *point) {
  const struct plan_variant *variant;
  moeflow_status status = MOEFLOW_OK;
  for (int n = 0; status == MOEFLOW_OK && (variant = plan_variant(plan, id, n)); n++) {
    char name[ARM_NAME_MAX];
    snprintf(name, sizeof name, "%s-%dx%dx%d-stages%d-parts%d-residency%d", kernel_names[id], variant->tile_tokens,
             variant->tile_rows, variant->tile_depth, variant->stages, variant->parts, variant->residency);
    status = add_arm(point, name, kernel, n, with_sum, 1);
  }
  return status;
}

moeflow_status point_choose_arms(const struct bench_options *options, const struct plan *plan, int rows,
                                 struct point *point) {
  const struct plan_bucket *bucket = plan_bucket_for(plan, rows);
  const int fused = bucket->experts != PLAN_NONE, sum = !options->no_sum;
  const enum experts_bench_kernel served = fused ? BENCH_EXPERTS : BENCH_PORTABLE;
  moeflow_status status = MOEFLOW_OK;
  point->arm_count = 0;
  CHECK(add_arm(point, "moeflow", served, bucket->experts, sum, 0));
  CHECK(add_arm(point, "control", served, bucket->experts, sum, 0));
  if (fused) CHECK(add_arm(point, "portable", BENCH_PORTABLE, 0, sum, 1));
  if (bucket->experts_stream != PLAN_NONE)
    CHECK(add_arm(point, "stream", BENCH_EXPERTS_STREAM, bucket->experts_stream, sum, 1));
  if (sum) CHECK(add_arm(point, "alone", served, bucket->experts, 0, 0)); /* what the sums cost */
  if (options->variants != VARIANTS_ALL) goto cleanup;
  CHECK(add_variants(plan, KERNEL_EXPERTS, BENCH_EXPERTS, sum, point));
  CHECK(add_variants(plan, KERNEL_EXPERTS_STREAM, BENCH_EXPERTS_STREAM, sum, point));

cleanup:
  return status;
}

static moeflow_status read_facts(const struct bench_options *options, const struct plan *plan, int rows, struct arm *arm) {
  const struct plan_bucket *bucket = plan_bucket_for(plan, rows);
  const int portable = arm->kernel == BENCH_PORTABLE;
  const enum kernel_id first = portable                       ? KERNEL_GATE_UP
                               : arm->kernel == BENCH_EXPERTS ? KERNEL_EXPERTS
                                                              : KERNEL_EXPERTS_STREAM;
  const struct plan_variant *variants[2] = {plan_variant(plan, first, portable ? bucket->gate_up : arm->variant),
                                            portable ? plan_variant(plan, KERNEL_DOWN, bucket->down) : NULL};
  for (int i = 0; i < 2 && variants[i]; i++) {
    const moeflow_status status = kernel_facts_read(options->cache, variants[i], &arm->facts[arm->facts_count++]);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

/* ---- Limits ---- */

static moeflow_status measure_limits(const struct experts_bench *bench, struct read_bench *read,
                                     const struct dense_result *dense, struct point *point) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 0; i < BENCH_ROUTINGS; i++) {
    point->active[i] = experts_bench_active(bench, i);
    point->entries[i] = experts_bench_entries(bench, i);
    point->bytes += (double)experts_bench_bytes(bench, i) / BENCH_ROUTINGS;
    point->flops += (double)experts_bench_flops(bench, i) / BENCH_ROUTINGS;
  }
  CHECK(limits_read(read, (int64_t)point->bytes, &point->read));
  point->byte_us = point->bytes / point->read.gigabytes_per_second / 1e3;
  point->flop_us = dense->teraflops > 0 ? point->flops / dense->teraflops / 1e6 : 0;
  point->limit_us = point->byte_us > point->flop_us ? point->byte_us : point->flop_us;

cleanup:
  return status;
}

/* ---- Timing ---- */

struct launch_set { /* arms of one launch, as they stand on the device */
  struct point *point;
  struct pairing pairing;
  struct experts_arm *arms[PAIRING_ARMS_MAX];
};

static void destroy_arms(struct launch_set *set) {
  for (int i = 0; i < set->point->arm_count; i++) experts_arm_destroy(set->arms[i]);
}

/* In an order that changes from launch to launch, as memory and its addresses may matter. */
static moeflow_status create_arms(struct launch_set *set, struct experts_bench *bench, int launch) {
  int order[PAIRING_ARMS_MAX];
  moeflow_status status = MOEFLOW_OK;
  pairing_order(&set->pairing, launch, order);
  for (int i = 0; i < set->pairing.arms && status == MOEFLOW_OK; i++) {
    struct arm *arm = &set->point->arms[order[i]];
    if (arm->checked) status = experts_bench_arm(bench, arm->kernel, arm->variant, arm->with_sum, &set->arms[order[i]]);
    if (status != MOEFLOW_OK) status_prefix(status, "arm %s", arm->name);
  }
  return status;
}

static moeflow_status check_arms(struct launch_set *set) {
  for (int i = 0; i < set->point->arm_count; i++) {
    struct arm *arm = &set->point->arms[i];
    double worst;
    int passed;
    if (!arm->checked) continue;
    const moeflow_status status = experts_arm_check(set->arms[i], &worst, &passed);
    if (status != MOEFLOW_OK) return status_prefix(status, "arm %s", arm->name);
    if (!(worst <= arm->rel_l2)) arm->rel_l2 = worst;
    if (passed) continue;
    arm->checked = 0;
    snprintf(arm->why, sizeof arm->why, "%s", moeflow_last_error());
  }
  return MOEFLOW_OK;
}

static moeflow_status warm_up(struct launch_set *set) {
  double microseconds;
  moeflow_status status = MOEFLOW_OK;
  for (int round = 0; round < WARM_UPS; round++)
    for (int i = 0; i < set->point->arm_count; i++)
      if (set->point->arms[i].checked) CHECK(experts_arm_launch(set->arms[i], &microseconds));

cleanup:
  return status;
}

static moeflow_status take_samples(struct launch_set *set, int launch, int pairs) {
  for (int round = 0; round < pairs; round++) {
    int order[PAIRING_ARMS_MAX];
    pairing_order(&set->pairing, launch * pairs + round, order);
    for (int i = 0; i < set->pairing.arms; i++) {
      struct arm *arm = &set->point->arms[order[i]];
      if (!arm->checked) continue;
      const moeflow_status status = experts_arm_launch(set->arms[order[i]], &arm->samples[launch * pairs + round]);
      if (status != MOEFLOW_OK) return status_prefix(status, "arm %s", arm->name);
      arm->sample_count = launch * pairs + round + 1;
    }
  }
  return MOEFLOW_OK;
}

/* Checked before and after, on the graphs that were timed. */
static moeflow_status run_launch(const struct bench_options *options, struct experts_bench *bench, struct point *point,
                                 int launch) {
  struct launch_set set = {.point = point, .pairing = {.seed = options->seed, .arms = point->arm_count}};
  moeflow_status status = MOEFLOW_OK;
  CHECK(create_arms(&set, bench, launch));
  CHECK(check_arms(&set));
  CHECK(warm_up(&set));
  CHECK(take_samples(&set, launch, (int)options->pairs));
  CHECK(check_arms(&set));

cleanup:
  destroy_arms(&set);
  return status;
}

moeflow_status point_measure(const struct bench_options *options, struct experts_bench *bench, struct read_bench *read,
                             const struct dense_result *dense, int tokens, double skew, struct point *point) {
  const size_t samples = (size_t)options->launches * (size_t)options->pairs;
  const struct plan *plan = experts_bench_plan(bench);
  moeflow_status status = MOEFLOW_OK;
  *point = (struct point){.tokens = tokens, .skew = skew};
  CHECK(experts_bench_routing(bench, tokens, skew));
  point->rows = experts_bench_rows(bench);
  CHECK(point_choose_arms(options, plan, point->rows, point));
  for (int i = 0; i < point->arm_count; i++) {
    CHECK(read_facts(options, plan, point->rows, &point->arms[i]));
    point->arms[i].samples = calloc(samples, sizeof *point->arms[i].samples);
    if (!point->arms[i].samples) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu samples", samples);
  }
  CHECK(measure_limits(bench, read, dense, point));
  for (int launch = 0; launch < options->launches; launch++) CHECK(run_launch(options, bench, point, launch));
  point_summarize(point, (int)options->launches, (int)options->pairs);

cleanup:
  return status;
}

void point_free(struct point *point) {
  for (int i = 0; i < point->arm_count; i++) free(point->arms[i].samples);
  point->arm_count = 0;
}

/* ---- Summary ---- */

static int complete(const struct arm *arm, int launches, int pairs) {
  return arm->checked && arm->sample_count == launches * pairs;
}

static void summarize_arm(const struct point *point, struct arm *arm, int launches, int pairs) {
  double means[BENCH_LAUNCHES_MAX], medians[BENCH_LAUNCHES_MAX];
  for (int l = 0; l < launches; l++) {
    means[l] = statistics_mean(arm->samples + l * pairs, pairs);
    medians[l] = statistics_median(arm->samples + l * pairs, pairs);
  }
  arm->us = statistics_mean(medians, launches);
  arm->median_ci95 = statistics_mean_interval(medians, launches);
  arm->mean_us = statistics_mean(means, launches);
  arm->ci95 = statistics_mean_interval(means, launches);
  arm->fraction = point->limit_us / arm->us;
}

static void compare_arm(const struct arm *served, struct arm *arm, int launches, int pairs) {
  double means[BENCH_LAUNCHES_MAX];
  for (int l = 0; l < launches; l++) {
    means[l] = 0;
    for (int i = l * pairs; i < (l + 1) * pairs; i++)
      means[l] += (served->samples[i] - arm->samples[i]) / arm->samples[i] / pairs;
  }
  arm->difference = statistics_mean(means, launches);
  arm->difference_ci95 = statistics_mean_interval(means, launches);
  arm->p = statistics_mean_p(means, launches);
}

void point_summarize(struct point *point, int launches, int pairs) {
  struct arm *served = &point->arms[ARM_SERVED];
  for (int i = 0; i < point->arm_count; i++) {
    struct arm *arm = &point->arms[i];
    arm->us = arm->mean_us = arm->fraction = arm->difference = NAN;
    arm->p = 1;
    if (!complete(arm, launches, pairs)) continue;
    summarize_arm(point, arm, launches, pairs);
    if (complete(served, launches, pairs)) compare_arm(served, arm, launches, pairs);
  }
}

/* ---- The table ---- */

/* Every comparison of the table with an arm that is `compared`, or that is not. */
static int gather(struct point *points, int count, int compared, struct arm **arms, double *p) {
  int family = 0;
  for (int i = 0; i < count; i++) {
    for (int a = ARM_SERVED + 1; a < points[i].arm_count; a++) {
      if (isnan(points[i].arms[a].difference) || points[i].arms[a].compared != compared) continue;
      arms[family] = &points[i].arms[a];
      p[family++] = points[i].arms[a].p;
    }
  }
  return family;
}

moeflow_status points_judge(struct point *points, int count) {
  const size_t most = (size_t)count * PAIRING_ARMS_MAX + 1;
  double *p = calloc(most, sizeof *p), *adjusted = calloc(most, sizeof *adjusted);
  struct arm **arms = calloc(most, sizeof *arms);
  moeflow_status status = MOEFLOW_OK;
  if (!p || !adjusted || !arms) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d points", count);
  for (int compared = 0; compared < 2; compared++) {
    const int family = gather(points, count, compared, arms, p);
    statistics_holm(p, family, adjusted);
    for (int i = 0; i < family; i++) {
      arms[i]->p_adjusted = adjusted[i];
      arms[i]->verdict = statistics_verdict(arms[i]->difference_ci95, adjusted[i]);
    }
  }

cleanup:
  free(p);
  free(adjusted);
  free(arms);
  return status;
}

static int any_arm(const struct point *points, int count, int (*is)(const struct arm *arm)) {
  for (int i = 0; i < count; i++)
    for (int a = 0; a < points[i].arm_count; a++)
      if (is(&points[i].arms[a])) return 1;
  return 0;
}

static int is_wrong(const struct arm *arm) {
  return !arm->checked;
}

/* What is served is, beyond chance, slower than this arm. */
static int shows_slow(const struct arm *arm) {
  return arm->compared && !isnan(arm->difference) && arm->verdict == VERDICT_SLOW;
}

int points_wrong(const struct point *points, int count) {
  return any_arm(points, count, is_wrong);
}

int points_slow(const struct point *points, int count) {
  return any_arm(points, count, shows_slow);
}
