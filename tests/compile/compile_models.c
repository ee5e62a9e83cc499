/* Every variant of the shipped models for sm_90a, packed weights too, one per kernel family for the other generations,
 * without a GPU; and the corners of the space that `sweep` searches. */
#include "compile/compiling.h"
#include "progress.h"

static struct model model_of(const char *name, const char *archs) {
  char path[4096];
  struct model model;
  const struct model_overrides overrides = {.dtype = "bf16", .arch = archs};
  snprintf(path, sizeof path, MOEFLOW_SOURCE_DIR "/models/%s.yaml", name);
  EXPECT(model_load(path, &overrides, &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  return model;
}

static void one_model(struct compiling *compiling, const char *name, const char *archs, int one_per_kernel) {
  const struct plan_options packed = {.packed = 1};
  struct model model = model_of(name, archs);
  double start = progress_seconds();
  compiling_model(compiling, &model, &packed, one_per_kernel);
  printf("  in %.1f s\n", progress_seconds() - start);
}

/* Of each width of tile, unit, stage and block residency the first legal shape of the experts kernel: what decides its
 * registers is in these four, not in the number of stages or parts. */
static void corners(struct compiling *compiling, const char *name) {
  struct plan_candidate list[PLAN_VARIANTS_MAX];
  struct plan_options options = {.candidates = list};
  struct model model = model_of(name, "sm_90a");
  struct experts_shape shape = {0}, *last = NULL;
  struct plan_draft defaults;
  EXPECT(plan_build(&model.spec, "sm_90a", NULL, &defaults) == MOEFLOW_OK, "%s", moeflow_last_error());
  while (experts_space_next(KERNEL_EXPERTS, &shape)) {
    if (experts_shape_check(&model.spec, KERNEL_EXPERTS, &shape, 227 << 10, NULL) != EXPERTS_LEGAL || shape.parts > 1)
      continue;
    if (last && last->tile_tokens == shape.tile_tokens && last->tile_rows == shape.tile_rows &&
        last->tile_depth == shape.tile_depth && shape.residency <= last->residency)
      continue;
    list[options.candidate_count++] = (struct plan_candidate){KERNEL_EXPERTS, shape};
    last = &list[options.candidate_count - 1].shape;
    if (options.candidate_count == PLAN_VARIANTS_MAX - defaults.plan.variant_count) {
      compiling_model(compiling, &model, &options, 0);
      options.candidate_count = 0;
    }
  }
  compiling_model(compiling, &model, &options, 0);
}

int main(void) {
  static struct compiling compiling;
  compiling_begin(&compiling);
  one_model(&compiling, "glm-5.3-flash", "sm_90a", 0);
  one_model(&compiling, "deepseek-v2-lite", "sm_90a", 0);
  one_model(&compiling, "qwen3-30b-a3b", "sm_90a", 0);
  one_model(&compiling, "mixtral-8x7b", "sm_90a", 0);
  one_model(&compiling, "glm-5.3-flash", "sm_80,sm_100a,sm_120", 1);
  corners(&compiling, "glm-5.3-flash");
  TEST_END;
}
