/* What must not reach the cache: templates that do not compile, kernels that spill, targets that NVRTC does not know. */
#include "compile/compiling.h"
#include "scratch.h"

static const char head[] = "#include \"abi.h\"\nnamespace moeflow {\ntemplate <class Model, class Variant>\n";

/* Compiles router.cu over a private router.cuh. */
static void refuse(struct compiling *compiling, const char *body, const char *arch_option, moeflow_status expected,
                   const char *message, const char *in_log) {
  char text[4096];
  struct units units;
  struct model model;
  struct compile_result result;
  const struct model_overrides overrides = {.dtype = "bf16"};
  snprintf(text, sizeof text, "%s%s\n}\n", head, body);
  scratch_write(scratch_path("router.cuh"), text, strlen(text), 0600);
  EXPECT(model_load(MOEFLOW_SOURCE_DIR "/models/deepseek-v2-lite.yaml", &overrides, &model) == MOEFLOW_OK);
  EXPECT(units_make(&model, NULL, scratch, 0, &units) == MOEFLOW_OK, "%s", moeflow_last_error());
  if (arch_option) strcpy(units.options[0].text[0], arch_option);
  compiling->units = &units;
  moeflow_status status = unit_compile(&units, &units.units[0], &compiling->toolchain, &result);
  EXPECT(status == expected, "%s: %s", moeflow_status_name(status), moeflow_last_error());
  if (status != MOEFLOW_OK)
    EXPECT(strstr(moeflow_last_error(), message), "'%s' is not in: %s", message, moeflow_last_error());
  EXPECT(strstr(result.log ? result.log : "", in_log), "'%s' is not in: %s", in_log, result.log);
  if (status != MOEFLOW_OK && expected == MOEFLOW_ERROR_FORMAT) EXPECT(!result.cubin, "a failed compile gave a cubin");
  compile_free(&result);
  units_free(&units);
}

/* A template that includes what is no template is refused before any compiler sees it. */
static void unreadable(const char *include) {
  char text[64];
  struct units units;
  struct model model;
  const struct model_overrides overrides = {.dtype = "bf16"};
  int size = snprintf(text, sizeof text, "  # include %s\n", include);
  scratch_write(scratch_path("router.cuh"), text, (size_t)size, 0600);
  EXPECT(model_load(MOEFLOW_SOURCE_DIR "/models/deepseek-v2-lite.yaml", &overrides, &model) == MOEFLOW_OK);
  EXPECT(units_make(&model, NULL, scratch, 0, &units) == MOEFLOW_ERROR_FORMAT, "%s", include);
  EXPECT(strstr(moeflow_last_error(), "router.cuh"), "%s", moeflow_last_error());
  units_free(&units);
}

#define KERNEL "__device__ void router(const moeflow_router_params &params) "

int main(void) {
  static struct compiling compiling;
  compiling_begin(&compiling);
  scratch_make();
  refuse(&compiling, KERNEL "{ params.weights[0] = 1; }", NULL, MOEFLOW_OK, "", "ptxas info");
  refuse(&compiling, KERNEL "{\n  undefined_name = 1;\n}", NULL, MOEFLOW_ERROR_FORMAT, "router.cu does not compile",
         "router.cuh:5: error");
  refuse(&compiling, KERNEL "{ static_assert(Model::experts < 8, \"too many experts\"); }", NULL, MOEFLOW_ERROR_FORMAT,
         "does not compile", "too many experts");
  refuse(&compiling,
         KERNEL
         "{ volatile float *p = params.weights; float v[400];\n#pragma unroll\nfor (int i = 0; i < 400; i++) v[i] = p[i];\n"
         "#pragma unroll\nfor (int i = 0; i < 400; i++) p[i] = v[399 - i] * v[(7 * i) % 400]; }",
         NULL, MOEFLOW_ERROR_INTERNAL, "spills", "ptxas info");
  refuse(&compiling,
         KERNEL "{ __shared__ float big[20000]; big[threadIdx.x] = 1; params.weights[0] = big[threadIdx.x ^ 1]; }", NULL,
         MOEFLOW_ERROR_INTERNAL, "80000 bytes of static shared memory", "ptxas info");
  refuse(&compiling, KERNEL "{}", "--gpu-architecture=sm_50", MOEFLOW_ERROR_ENVIRONMENT, "--gpu-architecture=sm_50", "");
  static const char *const includes[] = {"\"absent.cuh\"", "</etc/passwd>", "\"/etc/passwd\"", "\"../abi.h\"", "MACRO"};
  for (size_t i = 0; i < sizeof includes / sizeof includes[0]; i++) unreadable(includes[i]);
  scratch_remove();
  TEST_END;
}
