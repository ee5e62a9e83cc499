#include "kernels_report.h"

#include <math.h>

#include "limits_command.h"

/* ---- Text ---- */

static void active_range(const struct point *point, int *least, int *most) {
  *least = *most = point->active[0];
  for (int i = 1; i < BENCH_ROUTINGS; i++) {
    if (point->active[i] < *least) *least = point->active[i];
    if (point->active[i] > *most) *most = point->active[i];
  }
}

static void print_arm(const struct arm *arm, FILE *file) {
  if (!arm->checked) {
    fprintf(file, "  %-44s WRONG: %s\n", arm->name, arm->why);
    return;
  }
  fprintf(file, "  %-44s %9.2f us  [%.2f, %.2f]  %5.1f %% of the limit, error %.1e;", arm->name, arm->us,
          arm->median_ci95.low, arm->median_ci95.high, 100 * arm->fraction, arm->rel_l2);
  for (int i = 0; i < arm->facts_count; i++) {
    const struct kernel_facts *facts = &arm->facts[i];
    fprintf(file, " %s %d registers, %.1f KiB, %d block(s)", facts->kernel, facts->registers, facts->shared_bytes / 1024.0,
            facts->blocks_per_multiprocessor);
  }
  fputc('\n', file);
}

void kernels_print_point(const struct point *point, FILE *file) {
  char routing[32];
  int least, most;
  bench_skew_name(point->skew, routing);
  active_range(point, &least, &most);
  fprintf(
      file,
      "T=%d %s, %d rows: limit %.2f us; %.3f GB of %d to %d experts at %.0f GB/s [%s] take %.2f us, %.3g GFLOP %.2f us\n",
      point->tokens, routing, point->rows, point->limit_us, point->bytes / 1e9, least, most,
      point->read.gigabytes_per_second, point->read.shape, point->byte_us, point->flops / 1e9, point->flop_us);
  for (int i = 0; i < point->arm_count; i++) print_arm(&point->arms[i], file);
  fflush(file);
}

void kernels_print_verdicts(const struct point *points, int count, FILE *file) {
  fprintf(file,
          "moeflow against, time more or less in %%, 95 %% interval over launches, verdict (Holm over the arms that are "
          "compared):\n");
  for (int i = 0; i < count; i++) {
    for (int a = ARM_SERVED + 1; a < points[i].arm_count; a++) {
      const struct arm *arm = &points[i].arms[a];
      char routing[32];
      if (isnan(arm->difference)) continue;
      bench_skew_name(points[i].skew, routing);
      fprintf(file, "  T=%-5d %-14s %-44s %+7.2f  [%+.2f, %+.2f]  %s\n", points[i].tokens, routing, arm->name,
              100 * arm->difference, 100 * arm->difference_ci95.low, 100 * arm->difference_ci95.high,
              verdict_names[arm->verdict]);
    }
  }
}

/* ---- JSON ---- */

static void write_facts(const struct arm *arm, struct json *json) {
  json_key(json, "kernels");
  json_array(json);
  for (int i = 0; i < arm->facts_count; i++) {
    const struct kernel_facts *facts = &arm->facts[i];
    json_object(json);
    result_text(json, "kernel", facts->kernel);
    result_text(json, "sha256", facts->entry);
    result_integer(json, "tile_tokens", facts->tile_tokens);
    result_integer(json, "tile_rows", facts->tile_rows);
    result_integer(json, "tile_depth", facts->tile_depth);
    result_integer(json, "stages", facts->stages);
    result_integer(json, "parts", facts->parts);
    result_integer(json, "threads", facts->threads);
    result_integer(json, "order_tag", facts->order_tag);
    result_integer(json, "registers", facts->registers);
    result_integer(json, "shared_bytes", facts->shared_bytes);
    result_integer(json, "blocks_per_multiprocessor", facts->blocks_per_multiprocessor);
    json_object_end(json);
  }
  json_array_end(json);
}

static void write_difference(const struct arm *arm, struct json *json) {
  if (isnan(arm->difference)) return;
  json_key(json, "moeflow_against");
  json_object(json);
  result_real(json, "difference", arm->difference);
  result_interval(json, "ci95", arm->difference_ci95);
  result_real(json, "p_holm", arm->p_adjusted);
  result_text(json, "verdict", verdict_names[arm->verdict]);
  json_object_end(json);
}

static void write_arm(const struct arm *arm, int served, struct json *json) {
  json_key(json, arm->name);
  json_object(json);
  json_key(json, "checked");
  json_bool(json, arm->checked);
  result_real(json, "rel_l2_max", arm->rel_l2);
  if (!arm->checked) result_text(json, "message", arm->why);
  json_key(json, "weighted_sums");
  json_bool(json, arm->with_sum);
  result_real(json, "us", arm->us);
  result_interval(json, "median_ci95", arm->median_ci95);
  result_real(json, "mean_us", arm->mean_us);
  result_interval(json, "ci95", arm->ci95);
  result_real(json, "fraction", arm->fraction);
  if (!served) write_difference(arm, json);
  write_facts(arm, json);
  result_samples(json, "samples_us", arm->samples, arm->sample_count);
  json_object_end(json);
}

static void write_point(const struct kernels_facts *facts, const struct point *point, struct json *json) {
  char routing[32];
  bench_skew_name(point->skew, routing);
  json_object(json);
  result_text(json, "kernel", "experts");
  result_integer(json, "tokens", point->tokens);
  result_integer(json, "rows", point->rows);
  result_text(json, "dtype", spec_dtype_name(facts->spec->dtype));
  result_text(json, "routing", routing);
  result_integer(json, "bytes", (int64_t)point->bytes);
  result_integer(json, "flops", (int64_t)point->flops);
  json_key(json, "active_experts");
  json_array(json);
  for (int i = 0; i < BENCH_ROUTINGS; i++) json_int(json, point->active[i]);
  json_array_end(json);
  json_key(json, "entries");
  json_array(json);
  for (int i = 0; i < BENCH_ROUTINGS; i++) json_int(json, point->entries[i]);
  json_array_end(json);
  result_real(json, "read_gbs", point->read.gigabytes_per_second);
  result_text(json, "read_shape", point->read.shape);
  result_real(json, "byte_us", point->byte_us);
  result_real(json, "flop_us", point->flop_us);
  result_real(json, "limit_us", point->limit_us);
  json_key(json, "arms");
  json_object(json);
  for (int i = 0; i < point->arm_count; i++) write_arm(&point->arms[i], i == ARM_SERVED, json);
  json_object_end(json);
  json_object_end(json);
}

void kernels_write(const struct bench_options *options, const struct kernels_facts *facts, const struct point *points,
                   int count, FILE *file) {
  struct json json;
  json_begin(&json, file);
  result_begin(&json, options, &facts->header);
  result_text(&json, "model", facts->spec->name);
  result_integer(&json, "experts", facts->spec->experts);
  result_text(&json, "yaml_sha256", facts->yaml_sha256);
  result_text(&json, "plan_sha256", facts->plan_sha256);
  result_integer(&json, "ep", facts->ep);
  result_integer(&json, "layers_per_replay", BENCH_ROUTINGS);
  result_integer(&json, "launches", options->launches);
  result_integer(&json, "pairs", options->pairs);
  limits_write_dense(&facts->dense, &json);
  json_key(&json, "points");
  json_array(&json);
  for (int i = 0; i < count; i++) write_point(facts, &points[i], &json);
  json_array_end(&json);
  json_object_end(&json);
  json_end(&json);
}
