/* Every shape and target gets a legal plan, and the compiler's report is read right. */
#include "plan_build.h"

#include "abi.h"
#include "arch.h"
#include "compile.h"
#include "status.h"
#include "test.h"

static struct spec spec_of(int experts, int top_k) {
  struct spec spec = {
      .hidden = 4096, .intermediate = 2048, .experts = experts, .top_k = top_k, .groups = 1, .top_groups = 1, .scale = 1};
  strcpy(spec.name, "test");
  return spec;
}

static void check_gemm(const struct plan_draft *draft, const struct arch *arch, int32_t kernel, int matrices) {
  int count = 0;
  for (int i = 0; i < draft->plan.variant_count; i++) {
    const struct plan_variant *variant = &draft->plan.variants[i];
    if (variant->kernel != kernel) continue;
    count++;
    EXPECT(variant->stages >= 2 && variant->shared_bytes <= arch->shared_bytes, "%s: %d stages, %d bytes", arch->name,
           variant->stages, variant->shared_bytes);
    EXPECT(variant->shared_bytes == moeflow_gemm_shared_bytes(matrices, variant->tile_tokens, variant->tile_rows,
                                                              variant->tile_depth, variant->stages));
  }
  EXPECT(count == 3, "%s has %d variants of %s", arch->name, count, kernel_names[kernel]);
}

static void legal_everywhere(void) {
  static const int shapes[][2] = {{1, 1}, {2, 2}, {5, 3}, {33, 32}, {257, 8}, {288, 8}, {1024, 8}, {1025, 1}, {4096, 32}};
  for (const struct arch *arch = arch_table; arch->name; arch++) {
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
      struct spec spec = spec_of(shapes[s][0], shapes[s][1]);
      struct plan_draft draft;
      EXPECT(plan_build(&spec, arch->name, NULL, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
      check_gemm(&draft, arch, KERNEL_GATE_UP, 2);
      check_gemm(&draft, arch, KERNEL_DOWN, 1);
      for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
        int optional = kernel == KERNEL_EXPERTS || kernel == KERNEL_EXPERTS_STREAM || kernel == KERNEL_PACK_WEIGHTS;
        const int fused = kernel == KERNEL_DISPATCH || kernel == KERNEL_RETURN_COMBINE;
        EXPECT(optional || !plan_variant(&draft.plan, kernel, 0) == (fused && !plan_fuses(&draft.plan)));
      }
      EXPECT(plan_variant(&draft.plan, KERNEL_ROUTER, 0)->threads == (spec.experts > 1024 ? 32 : 128));
      for (int b = 0; b < draft.plan.bucket_count; b++) {
        const struct plan_bucket *bucket = &draft.plan.buckets[b];
        EXPECT((bucket->rows_max == 0) == (b == draft.plan.bucket_count - 1), "only the last bucket is open");
        EXPECT(b == 0 || bucket->rows_max == 0 || bucket->rows_max > draft.plan.buckets[b - 1].rows_max);
        EXPECT(plan_variant(&draft.plan, KERNEL_GATE_UP, bucket->gate_up) &&
               plan_variant(&draft.plan, KERNEL_DOWN, bucket->down));
      }
    }
  }
}

/* The rule itself, worked out anew for each number of rows. */
static void buckets_follow_the_rule(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_OK);
  for (int rows = 1; rows <= 70000; rows += rows < 3000 ? 1 : 997) {
    double per_expert = (double)rows * 8 / 288;
    int tile = per_expert <= 8 ? 8 : per_expert <= 48 ? 32 : 64;
    const struct plan_bucket *bucket = plan_bucket_for(&draft.plan, rows);
    EXPECT(plan_variant(&draft.plan, KERNEL_GATE_UP, bucket->gate_up)->tile_tokens == tile, "%d rows", rows);
    EXPECT(plan_variant(&draft.plan, KERNEL_DOWN, bucket->down)->tile_tokens == tile, "%d rows", rows);
  }
}

/* Whether plan_parse accepts what plan_write writes, and nothing is lost. */
static void survives_its_file(struct plan_draft *draft) {
  static char text[PLAN_TEXT_MAX], again[PLAN_TEXT_MAX];
  static struct plan read;
  draft->plan.minimum_driver = 13000;
  for (int i = 0; i < draft->plan.variant_count; i++) memset(draft->plan.variants[i].entry, 'a' + i % 6, 64);
  EXPECT(plan_write(&draft->plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_parse(text, strlen(text), "a test", &read) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_write(&read, again, sizeof again) == MOEFLOW_OK && strcmp(text, again) == 0);
}

/* ---- The experts kernels ---- */

static const struct plan_variant *serving(const struct plan *plan, int32_t kernel, int rows) {
  const struct plan_bucket *bucket = plan_bucket_for(plan, rows);
  return plan_variant(plan, kernel, kernel == KERNEL_EXPERTS ? bucket->experts : bucket->experts_stream);
}

/* Every width the spec allows in steps that break tiles, every arch: legal variants alone, and a plan that its reader takes.
 */
static void experts_are_legal(void) {
  static const int widths[] = {8, 64, 224, 704, 768, 1408, 2048, 2880, 14336, 65536};
  const int count = sizeof widths / sizeof widths[0];
  for (const struct arch *arch = arch_table; arch->name; arch++) {
    for (int i = 0; i < count * count * 4; i++) {
      struct spec spec = spec_of(64, 8);
      static struct plan_draft draft;
      const struct plan_options options = {.packed = i & 1};
      spec.batch_invariant = i >> 1 & 1;
      spec.hidden = widths[i / 4 % count];
      spec.intermediate = widths[i / 4 / count];
      EXPECT(plan_build(&spec, arch->name, &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
      for (int v = 0; v < draft.plan.variant_count; v++) {
        const struct plan_variant *variant = &draft.plan.variants[v];
        struct experts_shape shape;
        char why[EXPERTS_WHY_MAX];
        if (variant->kernel != KERNEL_EXPERTS && variant->kernel != KERNEL_EXPERTS_STREAM) continue;
        EXPECT(experts_kernel_on(variant->kernel, arch), "%s on %s", kernel_names[variant->kernel], arch->name);
        experts_shape_of(variant, &shape);
        EXPECT(experts_shape_check(&spec, variant->kernel, &shape, arch->shared_bytes, why) == EXPERTS_LEGAL, "%s", why);
      }
      EXPECT((plan_variant(&draft.plan, KERNEL_PACK_WEIGHTS, 0) != NULL) ==
             (plan_variant(&draft.plan, KERNEL_EXPERTS_STREAM, 0) != NULL));
      survives_its_file(&draft);
    }
  }
}

static void experts_by_rows(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_OK);
  static const int rows[][2] = {{1, 8}, {8, 8}, {9, 16}, {16, 16}, {17, 64}, {64, 64}, {65, 64}, {1024, 64}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const struct plan_variant *variant = serving(&draft.plan, KERNEL_EXPERTS, rows[i][0]);
    EXPECT(variant && variant->tile_tokens == rows[i][1], "%d rows", rows[i][0]);
  }
  EXPECT(!serving(&draft.plan, KERNEL_EXPERTS, 1025), "many rows: gate_up and down");
  EXPECT(!serving(&draft.plan, KERNEL_EXPERTS_STREAM, 8), "packed weights only when asked for");
  EXPECT(plan_build(&spec, "sm_90", NULL, &draft) == MOEFLOW_OK && !serving(&draft.plan, KERNEL_EXPERTS, 8));
}

/* A narrow layer: parts that would be unequal or empty are not made. */
static void narrow_layers(void) {
  struct spec spec = spec_of(64, 6);
  struct plan_draft draft;
  spec.hidden = 2048, spec.intermediate = 1408; /* 22 steps of 64 */
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_OK);
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 8)->parts == 2);
  spec.intermediate = 64;
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_OK);
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 8)->parts == 1);
}

static void one_order(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  const struct plan_options packed = {.packed = 1};
  spec.batch_invariant = 1;
  EXPECT(plan_build(&spec, "sm_90a", &packed, &draft) == MOEFLOW_OK);
  for (int rows = 1; rows < 100000; rows *= 2) {
    const struct plan_variant *experts = serving(&draft.plan, KERNEL_EXPERTS, rows);
    const struct plan_variant *stream = serving(&draft.plan, KERNEL_EXPERTS_STREAM, rows);
    EXPECT(experts && experts->order_tag == 16 && stream && stream->order_tag == 32, "%d rows", rows);
  }
  EXPECT(plan_build(&spec, "sm_80", NULL, &draft) == MOEFLOW_OK && !serving(&draft.plan, KERNEL_EXPERTS, 8));
}

/* ---- Tuned files ---- */

static struct tune tune_of(int count, const struct tune_line *lines) {
  struct tune tune = {.count = count, .path = "test.tune"};
  strcpy(tune.identity.arch, "sm_90a");
  memcpy(tune.lines, lines, (size_t)count * sizeof *lines);
  return tune;
}

static const struct tune_line tuned_lines[] = {
    {.rows = 4, .kernel = KERNEL_EXPERTS, .shape = {8, 64, 128, 8, 2, 1}, .us = 1, .default_us = 2},
    {.rows = 64, .kernel = KERNEL_GATE_UP},
    {.rows = 500, .kernel = KERNEL_EXPERTS_STREAM, .shape = {64, 64, 256, 16, 1, 2}},
};

/* A line of a kernel that the arch lacks says nothing. */
static void tuned_elsewhere(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct tune tune = tune_of(1, tuned_lines);
  const struct plan_options options = {.tune = &tune};
  EXPECT(plan_build(&spec, "sm_80", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < draft.plan.bucket_count; i++) EXPECT(draft.reasons[i].source != BUCKET_TUNED, "bucket %d", i);
}

static void tuned_buckets(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct experts_shape shape;
  struct tune tune = tune_of(3, tuned_lines);
  struct plan_options options = {.tune = &tune};
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int rows = 1; rows <= 4; rows++) {
    experts_shape_of(serving(&draft.plan, KERNEL_EXPERTS, rows), &shape);
    EXPECT(experts_shape_same(&shape, &tuned_lines[0].shape), "%d rows", rows);
  }
  EXPECT(!serving(&draft.plan, KERNEL_EXPERTS, 5) && !serving(&draft.plan, KERNEL_EXPERTS, 64), "the portable form won");
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 65)->tile_tokens == 64, "packed weights won, but these are plain");
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 501)->tile_tokens == 64, "the default, beyond what was measured");
  EXPECT(!serving(&draft.plan, KERNEL_EXPERTS, 1025));
  static const struct {
    int rows;
    enum bucket_source source;
    int line;
  } expected[] = {{4, BUCKET_TUNED, 4},      {64, BUCKET_TUNED, 64}, {288, BUCKET_DEFAULT, 0}, {500, BUCKET_DEFAULT, 0},
                  {1024, BUCKET_DEFAULT, 0}, {1728, BUCKET_ONLY, 0}, {0, BUCKET_ONLY, 0}};
  EXPECT(draft.plan.bucket_count == 7, "%d buckets", draft.plan.bucket_count);
  for (int i = 0; i < 7; i++) {
    EXPECT(draft.plan.buckets[i].rows_max == expected[i].rows && draft.reasons[i].source == expected[i].source &&
               draft.reasons[i].line.rows == expected[i].line,
           "bucket %d", i);
  }
  EXPECT(strstr(draft.reasons[3].note, "--packed") && !draft.reasons[4].note[0]);
  survives_its_file(&draft);

  EXPECT(plan_guessed_bucket(&draft, 64) == -1 && plan_guessed_bucket(&draft, 65) == 2, "up to 64 rows all is measured");
  options.packed = 1;
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK && plan_guessed_bucket(&draft, 500) == -1);
  experts_shape_of(serving(&draft.plan, KERNEL_EXPERTS_STREAM, 65), &shape);
  EXPECT(experts_shape_same(&shape, &tuned_lines[2].shape));
  survives_its_file(&draft);
  EXPECT(plan_build(&spec, "sm_80", &options, &draft) == MOEFLOW_OK && plan_guessed_bucket(&draft, 1) == 0,
         "another arch: nothing was measured");
}

/* What was measured does not change the order of additions where one is promised. */
static void tuned_one_order(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct tune tune = tune_of(3, tuned_lines);
  const struct plan_options options = {.tune = &tune};
  spec.batch_invariant = 1;
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(draft.reasons[0].source == BUCKET_DEFAULT && strstr(draft.reasons[0].note, "batch_invariant"));
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 32)->tile_tokens == 64, "as without the file");
  survives_its_file(&draft);
}

/* Where a line does not decide a kernel, that kernel's defaults keep their own bounds: no wide tile serves few rows. */
static void tuned_for_the_other_kernel(void) {
  static const int32_t kernels[] = {KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM};
  static const struct tune_line lines[] = {{.rows = 256, .kernel = KERNEL_EXPERTS_STREAM, .shape = {64, 64, 256, 16, 1, 2}},
                                           {.rows = 256, .kernel = KERNEL_EXPERTS, .shape = {64, 128, 64, 8, 1, 1}}};
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  for (int i = 0; i < 2; i++) {
    struct tune tune = tune_of(1, &lines[i]);
    const struct plan_options options = {.tune = &tune, .packed = 1};
    EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
    for (int tokens = 8; tokens <= 64; tokens *= 2) {
      const int32_t tile = i == 0 && tokens == 32 ? 64 : tokens; /* plain weights have no default of 32 */
      EXPECT(serving(&draft.plan, kernels[i], tokens)->tile_tokens == tile, "%d rows", tokens);
      EXPECT(serving(&draft.plan, kernels[1 - i], tokens)->tile_tokens == 64, "%d rows", tokens);
    }
  }
}

static void tuned_refusals(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct tune tune = tune_of(1, tuned_lines);
  const struct plan_options options = {.tune = &tune};
  tune.lines[0].shape.stages = 13, tune.lines[0].shape.tile_depth = 256;
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_ERROR_FORMAT);
  EXPECT(strstr(moeflow_last_error(), "test.tune: rows 4: ") && strstr(moeflow_last_error(), "shared memory"), "%s",
         moeflow_last_error());
}

/* As many sizes as a file holds: all are buckets, and the widest default still stands behind them. */
static void tuned_to_the_brim(void) {
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct tune_line many[TUNE_ROWS_MAX];
  for (int i = 0; i < TUNE_ROWS_MAX; i++) many[i] = (struct tune_line){.rows = i + 1, .kernel = KERNEL_GATE_UP};
  struct tune tune = tune_of(TUNE_ROWS_MAX, many);
  const struct plan_options options = {.tune = &tune};
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < TUNE_ROWS_MAX; i++) EXPECT(draft.reasons[i].source == BUCKET_TUNED);
  EXPECT(serving(&draft.plan, KERNEL_EXPERTS, 1024) && !serving(&draft.plan, KERNEL_EXPERTS, 1025));
  survives_its_file(&draft);
}

/* What a sweep adds does not touch the buckets, and each variant is there once. */
static void candidates(void) {
  struct spec spec = spec_of(288, 8);
  static struct plan_draft plain, draft;
  static const struct plan_candidate list[] = {{KERNEL_EXPERTS, {8, 64, 128, 8, 2, 1}},
                                               {KERNEL_EXPERTS, {8, 128, 256, 3, 2, 1}},
                                               {KERNEL_EXPERTS, {8, 64, 128, 8, 2, 1}}};
  const struct plan_options options = {.candidates = list, .candidate_count = 3};
  EXPECT(plan_build(&spec, "sm_90a", NULL, &plain) == MOEFLOW_OK);
  EXPECT(plan_build(&spec, "sm_90a", &options, &draft) == MOEFLOW_OK);
  EXPECT(draft.plan.variant_count == plain.plan.variant_count + 1);
  EXPECT(memcmp(draft.plan.buckets, plain.plan.buckets, sizeof plain.plan.buckets) == 0);
  EXPECT(plan_find_experts(&draft.plan, KERNEL_EXPERTS, &list[0].shape) == 3);
  EXPECT(plan_find_experts(&draft.plan, KERNEL_EXPERTS, &list[1].shape) == 0);
  EXPECT(plan_find_experts(&plain.plan, KERNEL_EXPERTS, &list[0].shape) == PLAN_NONE);
}

static void no_ring_without_owner_sums(void) {
  struct spec spec = spec_of(16, 4);
  struct plan_draft draft;
  spec.reduce = SPEC_REDUCE_CHOICES;
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_OK && !plan_variant(&draft.plan, KERNEL_COMBINE_RING, 0));
  EXPECT(plan_variant(&draft.plan, KERNEL_COMBINE, 0) && plan_variant(&draft.plan, KERNEL_FILL, 0));
  for (int b = 0; b < draft.plan.bucket_count; b++) { /* choices' sums are the same however many ranks and rows there are */
    const struct plan_variant *variant = plan_variant(&draft.plan, KERNEL_EXPERTS, draft.plan.buckets[b].experts);
    EXPECT(variant && variant->order_tag == 16, "bucket %d adds in another order", b);
  }
}

static void refusals(void) {
  struct spec spec = spec_of(8, 2);
  struct plan_draft draft;
  EXPECT(plan_build(&spec, "sm_91", NULL, &draft) == MOEFLOW_ERROR_ARGUMENT);
  spec.dtype = SPEC_FP8_W8A8;
  EXPECT(plan_build(&spec, "sm_90a", NULL, &draft) == MOEFLOW_ERROR_UNSUPPORTED);
}

static void report(void) {
  struct compile_result result;
  static const char good[] =
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'moeflow_x' for 'sm_90a'\n"
      "ptxas info    : Function properties for moeflow_x\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 40 registers, used 1 barriers, 4608 bytes smem, 24 bytes cmem[2]\n";
  static const char spilling[] =
      "ptxas info    : Compiling entry function 'moeflow_x' for 'sm_90a'\n"
      "ptxas info    : Function properties for helper\n"
      "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
      "ptxas info    : Function properties for moeflow_x\n"
      "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 255 registers\n";
  EXPECT(compile_parse_report(good, "moeflow_x", &result) == 0);
  EXPECT(result.registers == 40 && result.static_shared_bytes == 4608 && result.spill_bytes == 0);
  EXPECT(compile_parse_report(spilling, "moeflow_x", &result) == 0 && result.spill_bytes == 32 && result.registers == 255);
  EXPECT(compile_parse_report(good, "moeflow_y", &result) != 0, "a report on another kernel is none");
  EXPECT(compile_parse_report(good, "moeflow_", &result) != 0, "nor is one on a longer name");
  EXPECT(compile_parse_report("", "moeflow_x", &result) != 0, "nor is silence");
}

int main(void) {
  legal_everywhere();
  buckets_follow_the_rule();
  experts_are_legal();
  experts_by_rows();
  narrow_layers();
  one_order();
  tuned_elsewhere();
  tuned_buckets();
  tuned_one_order();
  tuned_for_the_other_kernel();
  tuned_refusals();
  tuned_to_the_brim();
  candidates();
  no_ring_without_owner_sums();
  refusals();
  report();
  TEST_END;
}
