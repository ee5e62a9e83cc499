/* Every variant of the shipped models for sm_90a, one per kernel family for the other generations, without a GPU. */
#include "compile/compiling.h"

static void one_model(struct compiling *compiling, const char *name, const char *archs, int one_per_kernel) {
  char path[4096];
  struct model model;
  const struct model_overrides overrides = {.dtype = "bf16", .arch = archs};
  snprintf(path, sizeof path, MOEFLOW_SOURCE_DIR "/models/%s.yaml", name);
  EXPECT(model_load(path, &overrides, &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  compiling_model(compiling, &model, one_per_kernel);
}

int main(void) {
  static struct compiling compiling;
  compiling_begin(&compiling);
  one_model(&compiling, "glm-5.3-flash", "sm_90a", 0);
  one_model(&compiling, "deepseek-v2-lite", "sm_90a", 0);
  one_model(&compiling, "glm-5.3-flash", "sm_80,sm_100a,sm_120", 1);
  TEST_END;
}
