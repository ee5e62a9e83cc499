/* A point of `moeflow-bench kernels` from made-up samples: arms, summary, verdicts, table and JSON. */
#include <math.h>

#include "kernels_report.h"
#include "test.h"

#define LAUNCHES 5
#define PAIRS 8

static struct spec model = {.name = "model", .hidden = 64, .intermediate = 64, .experts = 16, .top_k = 2};

static void make_plan(struct plan *plan) {
  static const int32_t kernels[] = {KERNEL_GATE_UP, KERNEL_DOWN, KERNEL_EXPERTS, KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM};
  memset(plan, 0, sizeof *plan);
  plan->spec = model;
  for (int i = 0; i < 5; i++) {
    plan->variants[plan->variant_count++] = (struct plan_variant){.kernel = kernels[i],
                                                                  .tile_tokens = 8,
                                                                  .tile_rows = 128,
                                                                  .tile_depth = 128,
                                                                  .stages = 6,
                                                                  .parts = 4,
                                                                  .residency = 1};
  }
  plan->buckets[0] = (struct plan_bucket){16, 0, 0, 1, 0};
  plan->buckets[1] = (struct plan_bucket){64, 0, 0, 0, PLAN_NONE};
  plan->buckets[2] = (struct plan_bucket){0, 0, 0, PLAN_NONE, PLAN_NONE};
  plan->bucket_count = 3;
}

/* "moeflow control ..." of a point's arms. */
static const char *names_of(const struct bench_options *options, int rows) {
  static char text[1024];
  static struct plan plan;
  static struct point point;
  make_plan(&plan);
  text[0] = 0;
  EXPECT(point_choose_arms(options, &plan, rows, &point) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < point.arm_count; i++) {
    strcat(text, i ? " " : "");
    strcat(text, point.arms[i].name);
  }
  if (rows <= 16) EXPECT(point.arms[0].variant == 1 && point.arms[0].kernel == BENCH_EXPERTS, "what is served");
  return text;
}

static void test_arms(void) {
  struct bench_options options = {.variants = VARIANTS_SERVED};
  EXPECT(!strcmp(names_of(&options, 16), "moeflow control portable stream alone"), "%s", names_of(&options, 16));
  EXPECT(!strcmp(names_of(&options, 17), "moeflow control portable alone"), "%s", names_of(&options, 17));
  EXPECT(!strcmp(names_of(&options, 65), "moeflow control alone"), "%s", names_of(&options, 65));
  options.no_sum = 1;
  options.variants = VARIANTS_ALL;
  EXPECT(!strcmp(names_of(&options, 64),
                 "moeflow control portable experts-8x128x128-stages6-parts4-residency1 "
                 "experts-8x128x128-stages6-parts4-residency1 experts_stream-8x128x128-stages6-parts4-residency1"),
         "%s", names_of(&options, 64));
}

/* An arm of so many microseconds, with noise that is the same for all and a share of its own. */
static void add_arm(struct point *point, const char *name, double us, int compared) {
  struct arm *arm = &point->arms[point->arm_count++];
  *arm = (struct arm){.compared = compared, .checked = 1, .with_sum = 1, .rel_l2 = 1e-3, .sample_count = LAUNCHES * PAIRS};
  snprintf(arm->name, sizeof arm->name, "%s", name);
  arm->samples = calloc(LAUNCHES * PAIRS, sizeof *arm->samples);
  for (int i = 0; i < LAUNCHES * PAIRS; i++)
    arm->samples[i] = us * (1 + 0.002 * (i % 5) + 0.001 * ((i * (point->arm_count + 3)) % 7));
  arm->facts_count = 1;
  arm->facts[0] = (struct kernel_facts){.kernel = "experts", .entry = "ab12", .registers = 168, .shared_bytes = 222208};
}

static void make_point(struct point *point, double portable_us) {
  *point = (struct point){.tokens = 8, .rows = 16, .skew = 0.7, .bytes = 1e9, .flops = 2e9, .byte_us = 90, .limit_us = 90};
  point->read = (struct read_result){.gigabytes_per_second = 4600, .shape = "16 KiB x 12 stages"};
  for (int i = 0; i < BENCH_ROUTINGS; i++) point->active[i] = 5 + i % 3;
  add_arm(point, "moeflow", 100, 0);
  add_arm(point, "control", 100, 0);
  add_arm(point, "portable", portable_us, 1);
}

static const char *json_of(const struct point *points, int count) {
  static char text[65536];
  static char *argv[] = {"moeflow-bench", "kernels", "models/model.yaml", "--ep", "2"};
  const struct gpu gpu = {.name = "NVIDIA H200", .major = 9};
  const struct bench_options options = {.pairs = PAIRS, .launches = LAUNCHES, .seed = 7, .argc = 5, .argv = argv};
  struct kernels_facts facts = {
      .spec = &model, .ep = 2, .header = {.kind = "kernels", .gpu = &gpu, .driver = 13000, .nvrtc = 13000}};
  FILE *file = fmemopen(text, sizeof text, "w");
  snprintf(facts.dense.why, sizeof facts.dense.why, "no cuBLAS");
  kernels_write(&options, &facts, points, count, file);
  fclose(file);
  return text;
}

static void test_summary(void) {
  struct point points[2];
  make_point(&points[0], 110);
  make_point(&points[1], 95);
  for (int i = 0; i < 2; i++) point_summarize(&points[i], LAUNCHES, PAIRS);
  EXPECT(points_judge(points, 2) == MOEFLOW_OK, "%s", moeflow_last_error());
  const struct arm *served = &points[0].arms[0], *portable = &points[0].arms[2];
  EXPECT(served->us > 100 && served->us < 101.5, "moeflow takes %g us", served->us);
  EXPECT(served->ci95.low < served->us && served->ci95.high > served->us, "[%g, %g]", served->ci95.low, served->ci95.high);
  EXPECT(fabs(served->fraction - 90 / served->us) < 1e-12, "fraction %g", served->fraction);
  EXPECT(fabs(portable->difference + 1.0 / 11) < 0.003, "difference %g", portable->difference);
  EXPECT(points[0].arms[1].verdict == VERDICT_SAME, "the control is %s", verdict_names[points[0].arms[1].verdict]);
  EXPECT(portable->verdict == VERDICT_FAST, "%s", verdict_names[portable->verdict]);
  EXPECT(points[1].arms[2].verdict == VERDICT_SLOW, "%s", verdict_names[points[1].arms[2].verdict]);
  EXPECT(portable->p_adjusted > portable->p, "p %g is not corrected", portable->p);
  EXPECT(!points_slow(points, 1) && points_slow(points, 2) && !points_wrong(points, 2), "the whole table");
  points[1].arms[2].compared = 0; /* as a control or another kind of work: tells nothing */
  EXPECT(!points_slow(points, 2), "an arm that is not compared fails the table");
  for (int i = 0; i < 2; i++) point_free(&points[i]);
}

/* Launches differ by 1 % each, and every eighth sample takes ten times as long. A launch is one observation, however many
 * samples it has, and each interval is about its own middle: 102 +- 2.776 * 0.7071 for the medians. */
static void test_launches(void) {
  struct point point;
  make_point(&point, 110);
  struct arm *arm = &point.arms[0];
  for (int i = 0; i < LAUNCHES * PAIRS; i++) arm->samples[i] = (100 + i / PAIRS) * (i % PAIRS == 3 ? 10.0 : 1.0);
  point_summarize(&point, LAUNCHES, PAIRS);
  EXPECT(fabs(arm->us - 102) < 1e-9, "%g us", arm->us);
  EXPECT(fabs(arm->median_ci95.low - 100.0368) < 1e-3 && fabs(arm->median_ci95.high - 103.9632) < 1e-3, "[%g, %g]",
         arm->median_ci95.low, arm->median_ci95.high);
  char text[4096], *line;
  double us = 0, low = 0, high = 0;
  FILE *file = fmemopen(text, sizeof text, "w");
  kernels_print_point(&point, file);
  fclose(file);
  line = strstr(text, "  moeflow ");
  EXPECT(line && sscanf(line, " moeflow %lf us [%lf, %lf]", &us, &low, &high) == 3 && low <= us && us <= high, "%s", text);
  const char *json = json_of(&point, 1), *mean = strstr(json, "\"mean_us\": "), *ci95 = strstr(json, "\"ci95\": [");
  EXPECT(mean && ci95 && sscanf(ci95, "\"ci95\": [%lf, %lf", &low, &high) == 2 && low < atof(mean + 11) &&
             high > atof(mean + 11),
         "%.2000s", json);
  point_free(&point);
}

/* Two points of a control and one arm that is compared: a family of two, not of four. */
static void test_family(void) {
  struct point points[2];
  for (int i = 0; i < 2; i++) {
    make_point(&points[i], 95);
    point_summarize(&points[i], LAUNCHES, PAIRS);
    points[i].arms[1].p = 0.3 + i * 0.1;
    points[i].arms[2].p = 0.02 + i * 0.01;
  }
  EXPECT(points_judge(points, 2) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(fabs(points[0].arms[2].p_adjusted - 0.04) < 1e-12 && fabs(points[1].arms[2].p_adjusted - 0.04) < 1e-12, "%g, %g",
         points[0].arms[2].p_adjusted, points[1].arms[2].p_adjusted);
  EXPECT(points_slow(points, 2), "both are slower");
  EXPECT(fabs(points[0].arms[1].p_adjusted - 0.6) < 1e-12 && fabs(points[1].arms[1].p_adjusted - 0.6) < 1e-12, "%g, %g",
         points[0].arms[1].p_adjusted, points[1].arms[1].p_adjusted);
  for (int i = 0; i < 2; i++) point_free(&points[i]);
}

/* One that was wrong half-way has no time and no verdict. */
static void test_wrong_arm(void) {
  struct point point;
  make_point(&point, 50);
  point.arms[2].checked = 0;
  point.arms[2].sample_count = PAIRS;
  point_summarize(&point, LAUNCHES, PAIRS);
  EXPECT(points_judge(&point, 1) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(isnan(point.arms[2].us) && isnan(point.arms[2].difference), "%g us", point.arms[2].us);
  EXPECT(points_wrong(&point, 1) && !points_slow(&point, 1), "the table");
  point.arms[2].sample_count = LAUNCHES * PAIRS; /* found out at the very end */
  point_summarize(&point, LAUNCHES, PAIRS);
  EXPECT(isnan(point.arms[2].us), "%g us", point.arms[2].us);
  point_free(&point);
}

static void test_json(void) {
  static const char *const wanted[] = {"\"schema\": \"moeflow-bench/1\"",
                                       "\"kind\": \"kernels\"",
                                       "\"trees\"",
                                       "\"machine\": \"h200x1\"",
                                       "\"driver\": 13000",
                                       "\"toolchain\": \"NVRTC 13.0\"",
                                       "\"command\": \"moeflow-bench kernels models/model.yaml --ep 2\"",
                                       "\"seed\": 7",
                                       "\"model\": \"model\"",
                                       "\"ep\": 2",
                                       "\"tflops\": null",
                                       "\"why\": \"no cuBLAS\"",
                                       "\"routing\": \"lognormal:0.7\"",
                                       "\"kernel\": \"experts\"",
                                       "\"bytes\": 1000000000",
                                       "\"limit_us\": 90",
                                       "\"active_experts\"",
                                       "\"verdict\": \"FAST\"",
                                       "\"registers\": 168",
                                       "\"fraction\": 0.8",
                                       "\"checked\": true",
                                       "\"samples_us\"",
                                       "\"control\""};
  struct point point;
  make_point(&point, 110);
  point_summarize(&point, LAUNCHES, PAIRS);
  points_judge(&point, 1);
  const char *text = json_of(&point, 1);
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    EXPECT(strstr(text, wanted[i]), "no %s in %.3000s", wanted[i], text);
  point_free(&point);
}

static void test_table(void) {
  static char text[8192];
  struct point point;
  make_point(&point, 95);
  point.arms[1].checked = 0;
  snprintf(point.arms[1].why, sizeof point.arms[1].why, "row 3 is off");
  point_summarize(&point, LAUNCHES, PAIRS);
  points_judge(&point, 1);
  FILE *file = fmemopen(text, sizeof text, "w");
  kernels_print_point(&point, file);
  kernels_print_verdicts(&point, 1, file);
  fclose(file);
  EXPECT(strstr(text, "T=8 lognormal:0.7, 16 rows: limit 90.00 us") && strstr(text, "of 5 to 7 experts"), "%s", text);
  EXPECT(strstr(text, "WRONG: row 3 is off") && strstr(text, "168 registers") && strstr(text, "SLOW"), "%s", text);
  point_free(&point);
}

int main(void) {
  test_arms();
  test_summary();
  test_launches();
  test_family();
  test_wrong_arm();
  test_json();
  test_table();
  TEST_END;
}
