/* Which tuned file a build takes on a machine without a GPU; tests/commands has the one with. */
#include "tune_find.h"

#include "scratch.h"
#include "status.h"
#include "test.h"

static struct model model;
static char model_path[1024];
static int untold; /* of the last search */

/* A file of this spec but for what the arguments say. */
static const char *put(const char *file, const char *gpu, const char *arch, int other_spec) {
  struct tune tune = {.count = 0};
  const char *path = scratch_path(file);
  strcpy(tune.identity.model, model.spec.name);
  strcpy(tune.identity.dtype, "bf16");
  strcpy(tune.identity.gpu, gpu);
  strcpy(tune.identity.arch, arch);
  spec_hash(&model.spec, tune.identity.spec);
  if (other_spec) tune.identity.spec[0] = tune.identity.spec[0] == '0' ? '1' : '0';
  memset(tune.identity.templates, 'a', 64);
  tune.identity.multiprocessors = 132, tune.identity.driver = tune.identity.nvrtc = 13000;
  EXPECT(tune_write(&tune, path) == MOEFLOW_OK, "%s", moeflow_last_error());
  return path;
}

/* The file's last name, "" for none, or the error. */
static const char *found(struct gen_options options) {
  static char name[TUNE_PATH_MAX];
  struct tune_search search;
  options.command = "test", options.model = model_path;
  moeflow_status status = tune_find(&options, &model, &search);
  if (status != MOEFLOW_OK) {
    EXPECT(!search.tune);
    snprintf(name, sizeof name, "%s", moeflow_last_error());
    return name;
  }
  untold = search.untold;
  const char *path = search.tune ? search.tune->path : "";
  snprintf(name, sizeof name, "%s", strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
  tune_search_free(&search);
  return name;
}
#define FOUND(expected, ...)                                                   \
  do {                                                                         \
    const char *got = found((struct gen_options){__VA_ARGS__});                \
    EXPECT(strcmp(got, expected) == 0, "'%s' instead of '%s'", got, expected); \
  } while (0)
#define UNTOLD(expected) EXPECT(untold == (expected), "line %d: a note is %s due", __LINE__, untold ? "" : "not")

static const char yaml[] =
    "moeflow: 1\nname: tiny\nhidden: 128\nintermediate: 128\nexperts: 4\ntop_k: 2\nactivation: swiglu\n"
    "router: {score: softmax}\nweights: {dtype: bf16}\ndeploy: {arch: [sm_80, sm_90a]}\n";

static void one_after_the_other(void) {
  FOUND("", 0); /* no folder */
  UNTOLD(1);
  EXPECT(mkdir(scratch_path("tuned"), 0700) == 0);
  FOUND("", 0);
  put("tuned/tiny.bf16.h200.tune", "NVIDIA H200", "sm_90a", 0);
  put("tuned/tiny-2.bf16.h200.tune", "NVIDIA H200", "sm_90a", 0); /* of another model, by its name */
  FOUND("tiny.bf16.h200.tune", 0);                                /* the only one, the second arch of the model */
  FOUND("tiny.bf16.h200.tune", .gpu = "h200");
  UNTOLD(0);
  FOUND("tiny.bf16.h200.tune", .gpu = "NVIDIA H200");
  FOUND("", .gpu = "h100");
  UNTOLD(1);
  FOUND("", .tuned = "none");
  UNTOLD(0);
  FOUND("", .overrides = {.experts = 4}); /* a model of another size has none, even where it is the same */
  UNTOLD(0);
  put("tuned/tiny.bf16.l4.tune", "NVIDIA L4", "sm_89", 0);
  FOUND("tiny.bf16.h200.tune", 0); /* the only one of an arch that is built */
  put("tuned/tiny.bf16.a100.tune", "NVIDIA A100", "sm_80", 0);
  FOUND("", 0); /* two */
  UNTOLD(0);
  FOUND("tiny.bf16.a100.tune", .gpu = "a100");
  FOUND("", .gpu = "l4"); /* no sm_89 here */
  put("tuned/tiny.bf16.a100.tune", "NVIDIA A100", "sm_80", 1);
  FOUND("tiny.bf16.h200.tune", 0);
  FOUND("", .gpu = "a100");
  UNTOLD(0);
}

static void named(void) {
  char path[1024], other[1024];
  strcpy(path, put("named.tune", "NVIDIA H200", "sm_90a", 0));
  FOUND("named.tune", .tuned = path);
  FOUND("named.tune", .tuned = path, .gpu = "h200");
  EXPECT(strstr(found((struct gen_options){.tuned = path, .gpu = "h100"}), "is for GPU NVIDIA H200, this is h100; run: "));
  strcpy(other, put("other.tune", "NVIDIA H200", "sm_90a", 1));
  EXPECT(strstr(found((struct gen_options){.tuned = other}), "is for spec "));
  strcpy(other, put("other.tune", "NVIDIA L4", "sm_89", 0));
  EXPECT(strstr(found((struct gen_options){.tuned = other}), "is for arch sm_89, this is sm_80; run: "));
  EXPECT(strstr(found((struct gen_options){.tuned = scratch}), "cannot read"));
}

/* One that belongs to this model but cannot be read is an error, not a slower build. */
static void damaged(void) {
  scratch_write(scratch_path("tuned/tiny.bf16.h200.tune"), "<<<<<<<\n", 8, 0600);
  EXPECT(strstr(found((struct gen_options){0}), "tiny.bf16.h200.tune:1: no tuned file"));
  FOUND("", .tuned = "none");
  FOUND("", .gpu = "h100"); /* nobody's business who has another GPU */
}

static void beside(void) {
  char path[TUNE_PATH_MAX];
  tune_path_beside("models/a.yaml", &model.spec, "NVIDIA H200", path);
  EXPECT(!strcmp(path, "models/tuned/tiny.bf16.h200.tune"), "%s", path);
  tune_path_beside("a.yaml", &model.spec, "NVIDIA H200", path);
  EXPECT(!strcmp(path, "tuned/tiny.bf16.h200.tune"), "%s", path);
  tune_path_beside("/a.yaml", &model.spec, "NVIDIA H200", path);
  EXPECT(!strcmp(path, "/tuned/tiny.bf16.h200.tune"), "%s", path);
}

int main(void) {
  setenv("MOEFLOW_CUDA_LIB", "/nonexistent", 1);
  scratch_make();
  snprintf(model_path, sizeof model_path, "%s/m.yaml", scratch);
  EXPECT(model_parse(yaml, strlen(yaml), "tiny", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  one_after_the_other();
  named();
  damaged();
  beside();
  scratch_remove();
  TEST_END;
}
