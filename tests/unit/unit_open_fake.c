/* moeflow_open on a fake GPU: drivers, architectures, plans and entries that are missing, wrong or damaged. */
#include "fakes/fake_world.h"

static void open_and_close(moeflow_open_config *config) {
  moeflow_context *context;
  EXPECT_OK(moeflow_open(config, &context));
  EXPECT_OK(moeflow_close(context));
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
}

static void test_no_driver(void) {
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  setenv("MOEFLOW_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ENVIRONMENT, "no CUDA driver");
  EXPECT(strstr(moeflow_last_error(), "CPU backend"), "%s", moeflow_last_error());
  fake_load("fake_nccl"); /* a failure is not remembered */
  cuda->devices = 0;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ENVIRONMENT, "sees no GPU");
  cuda->devices = 1;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "no plan");
}

static void test_open(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  char name[160], path[1024];
  moeflow_open_config config = fake_open_config();
  moeflow_context *context;
  fake_load("fake_nccl");
  fake_plan(&spec, "sm_90a", &plan);
  open_and_close(&config);
  plan_file_name(&plan, name);
  snprintf(path, sizeof path, "%s/plans/%s", scratch, name);
  config = (moeflow_open_config)MOEFLOW_OPEN_CONFIG_INIT;
  config.plan = path; /* the cache is where the plan lies */
  open_and_close(&config);
  config.device = 1;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ARGUMENT, "device 1 does not exist");
}

static void test_old_driver(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  fake_load("fake_nccl");
  cuda->version = 12040;
  fake_plan(&spec, "sm_90a", &plan);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_ENVIRONMENT, "CUDA 12.4");
  EXPECT(strstr(moeflow_last_error(), "CUDA 13.0"), "%s", moeflow_last_error());
  EXPECT(cuda->live == 0);
}

static void test_missing(void) {
  struct spec spec = fake_spec(), other = fake_spec();
  struct plan plan;
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  char want[1200];
  fake_load("fake_nccl");
  snprintf(want, sizeof want, "`name: tiny`: moeflow-gen build MODEL.yaml --dtype bf16 --arch sm_90a --cache %s", scratch);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, want);
  fake_plan(&spec, "sm_100a", &plan); /* for another GPU */
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, want);
  EXPECT(strstr(moeflow_last_error(), "tiny.bf16.sm_100a."), "%s", moeflow_last_error());
  setenv("MOEFLOW_CACHE_DIR", scratch, 1);
  config.cache = NULL; /* the command needs no --cache then */
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "--arch sm_90a");
  EXPECT(!strstr(moeflow_last_error(), "--cache"), "%s", moeflow_last_error());
  fake_plan(&spec, "sm_90", &plan); /* without the suffix: fits too */
  open_and_close(&config);
  fake_plan(&spec, "sm_90a", &plan); /* the better one wins */
  EXPECT_OK(moeflow_open(&config, &context));
  EXPECT(!strcmp(context->plan.arch, "sm_90a"), "%s", context->plan.arch);
  EXPECT_OK(moeflow_close(context));
  other.hidden = 1024;
  fake_plan(&other, "sm_90a", &plan);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "two plans fit");
  EXPECT(cuda->live == 0);
}

static void test_wrong_gpu(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  char name[160], path[1024];
  moeflow_context *context;
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  fake_load("fake_nccl");
  fake_plan(&spec, "sm_90a", &plan);
  plan_file_name(&plan, name);
  snprintf(path, sizeof path, "%s/plans/%s", scratch, name);
  config.plan = path;
  cuda->major = 8;
  cuda->minor = 6;
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "built for sm_90a, and this GPU runs sm_86, sm_85");
}

static void test_damaged(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  char path[1024];
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  fake_load("fake_nccl");
  fake_plan(&spec, "sm_90a", &plan);
  snprintf(path, sizeof path, "%s/entries/%.2s/%s", scratch, plan.variants[5].entry, plan.variants[5].entry);
  FILE *file = fopen(path, "r+");
  fseek(file, -1, SEEK_END);
  fputc('X', file);
  fclose(file);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "`name: tiny`: moeflow-gen build MODEL.yaml");
  EXPECT(strstr(moeflow_last_error(), "kernel gate_up"), "%s", moeflow_last_error());
  unlink(path);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "`name: tiny`: moeflow-gen build MODEL.yaml");
  EXPECT(cuda->live == 0);
}

/* An entry of another kernel under a plan's hash: the symbol does not fit. */
static void test_swapped_kernel(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  static char text[PLAN_TEXT_MAX + 1];
  char name[160], path[1024];
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  fake_load("fake_nccl");
  fake_plan(&spec, "sm_90a", &plan);
  memcpy(plan.variants[1].entry, plan.variants[2].entry, sizeof plan.variants[1].entry);
  EXPECT_OK(plan_write(&plan, text, sizeof text));
  plan_file_name(&plan, name);
  snprintf(path, sizeof path, "%s/plans/%s", scratch, name);
  scratch_write(path, text, strlen(text), 0600);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "the plan means moeflow_pack");
}

static void test_cpu_takes_any_plan(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  config.backend = MOEFLOW_BACKEND_CPU;
  fake_plan(&spec, "sm_100a", &plan);
  fake_plan(&spec, "sm_80", &plan);
  EXPECT_OK(moeflow_open(&config, &context));
  EXPECT(context->plan.spec.hidden == 512);
  EXPECT_OK(moeflow_close(context));
  spec.hidden = 1024;
  fake_plan(&spec, "sm_80", &plan);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_CACHE, "two plans fit");
}

static void test_unsupported_dtype(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  moeflow_context *context;
  moeflow_open_config config = fake_open_config();
  fake_load("fake_nccl");
  spec.dtype = SPEC_FP8_W8A8;
  config.dtype = "fp8_w8a8";
  fake_plan(&spec, "sm_90a", &plan);
  EXPECT_STATUS(moeflow_open(&config, &context), MOEFLOW_ERROR_UNSUPPORTED, "fp8_w8a8");
}

/* The real driver is of no use in a child once its parent has initialised it, and its own error does not say so. */
static void test_forked(void) {
  struct spec spec = fake_spec();
  struct plan plan;
  moeflow_context *context, *late;
  moeflow_open_config config = fake_open_config();
  fake_load("fake_nccl");
  fake_plan(&spec, "sm_90a", &plan);
  EXPECT_OK(moeflow_open(&config, &context));
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    const moeflow_status status = moeflow_open(&config, &late);
    _exit(status == MOEFLOW_ERROR_ENVIRONMENT && strstr(moeflow_last_error(), "fork before") ? 0 : 1);
  }
  int result = 1;
  waitpid(child, &result, 0);
  EXPECT(result == 0, "a child opens");
  EXPECT_OK(moeflow_close(context));
}

int main(void) {
  in_child("no driver", test_no_driver);
  in_child("open", test_open);
  in_child("old driver", test_old_driver);
  in_child("missing", test_missing);
  in_child("wrong gpu", test_wrong_gpu);
  in_child("damaged", test_damaged);
  in_child("swapped kernel", test_swapped_kernel);
  in_child("cpu takes any plan", test_cpu_takes_any_plan);
  in_child("unsupported dtype", test_unsupported_dtype);
  in_child("forked", test_forked);
  TEST_END;
}
