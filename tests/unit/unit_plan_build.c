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
    EXPECT(draft->depth[i].stages >= 2 && variant->shared_bytes <= arch->shared_bytes, "%s: %d stages, %d bytes", arch->name,
           draft->depth[i].stages, variant->shared_bytes);
    EXPECT(variant->shared_bytes == moeflow_gemm_shared_bytes(matrices, variant->tile_tokens, variant->tile_rows,
                                                              draft->depth[i].tile_depth, draft->depth[i].stages));
  }
  EXPECT(count == 3, "%s has %d variants of %s", arch->name, count, kernel_names[kernel]);
}

static void legal_everywhere(void) {
  static const int shapes[][2] = {{1, 1}, {2, 2}, {5, 3}, {33, 32}, {257, 8}, {288, 8}, {1024, 8}, {1025, 1}, {4096, 32}};
  for (const struct arch *arch = arch_table; arch->name; arch++) {
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
      struct spec spec = spec_of(shapes[s][0], shapes[s][1]);
      struct plan_draft draft;
      EXPECT(plan_build(&spec, arch->name, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
      check_gemm(&draft, arch, KERNEL_GATE_UP, 2);
      check_gemm(&draft, arch, KERNEL_DOWN, 1);
      for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) EXPECT(plan_variant(&draft.plan, kernel, 0) != NULL);
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
  EXPECT(plan_build(&spec, "sm_90a", &draft) == MOEFLOW_OK);
  for (int rows = 1; rows <= 70000; rows += rows < 3000 ? 1 : 997) {
    double per_expert = (double)rows * 8 / 288;
    int tile = per_expert <= 8 ? 8 : per_expert <= 48 ? 32 : 64;
    const struct plan_bucket *bucket = plan_bucket_for(&draft.plan, rows);
    EXPECT(plan_variant(&draft.plan, KERNEL_GATE_UP, bucket->gate_up)->tile_tokens == tile, "%d rows", rows);
    EXPECT(plan_variant(&draft.plan, KERNEL_DOWN, bucket->down)->tile_tokens == tile, "%d rows", rows);
  }
}

static void survives_its_file(void) {
  static char text[PLAN_TEXT_MAX], again[PLAN_TEXT_MAX];
  struct spec spec = spec_of(288, 8);
  struct plan_draft draft;
  struct plan read;
  EXPECT(plan_build(&spec, "sm_120", &draft) == MOEFLOW_OK);
  draft.plan.minimum_driver = 13000;
  for (int i = 0; i < draft.plan.variant_count; i++) memset(draft.plan.variants[i].entry, 'a' + i % 6, 64);
  EXPECT(plan_write(&draft.plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_parse(text, strlen(text), "a test", &read) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_write(&read, again, sizeof again) == MOEFLOW_OK && strcmp(text, again) == 0);
}

static void no_ring_without_owner_sums(void) {
  struct spec spec = spec_of(16, 4);
  struct plan_draft draft;
  spec.reduce = SPEC_REDUCE_CHOICES;
  EXPECT(plan_build(&spec, "sm_90a", &draft) == MOEFLOW_OK && !plan_variant(&draft.plan, KERNEL_COMBINE_RING, 0));
  EXPECT(plan_variant(&draft.plan, KERNEL_COMBINE, 0) && plan_variant(&draft.plan, KERNEL_FILL, 0));
}

static void refusals(void) {
  struct spec spec = spec_of(8, 2);
  struct plan_draft draft;
  EXPECT(plan_build(&spec, "sm_91", &draft) == MOEFLOW_ERROR_ARGUMENT);
  spec.dtype = SPEC_FP8_W8A8;
  EXPECT(plan_build(&spec, "sm_90a", &draft) == MOEFLOW_ERROR_UNSUPPORTED);
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
  survives_its_file();
  no_ring_without_owner_sums();
  refusals();
  report();
  TEST_END;
}
