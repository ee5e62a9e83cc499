/* `moeflow-gen sweep` from a YAML to a tuned file, with real cubins and a GPU that is made up. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "command.h"
#include "exit_code.h"
#include "scratch.h"
#include "status.h"
#include "sweep.h"
#include "test.h"

static const char yaml[] =
    "moeflow: 1\nname: tiny\nhidden: 512\nintermediate: 256\nexperts: 16\ntop_k: 2\nactivation: swiglu\n"
    "router: {score: softmax}\nweights: {dtype: bf16}\ndeploy: {ep: 2, capacity: 64, arch: [sm_90a]}\n";

/* Shared with the workers. */
static struct world {
  int opens, checks, missing_plans;
  int interrupt_at; /* a check, after which the parent gets SIGINT */
  int short_at;     /* a check, for which there is no memory */
  int no_gpu;
  int newer_driver;
  int meanwhile;  /* at the next check another sweep adds its line to the tuned file */
  uint64_t sizes; /* of the requests: bit t for t tokens */
} * world;

static char model_path[600], cache[600], log_path[600], tuned[700];

/* ---- A made-up GPU: likes few parts and narrow tiles ---- */

static moeflow_status probe(void *user, int device, struct sweep_gpu *gpu) {
  (void)user, (void)device;
  if (world->no_gpu) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "no CUDA driver");
  *gpu = (struct sweep_gpu){"NVIDIA Pretend 9000", 132, 9, 0, 13000 + world->newer_driver};
  return MOEFLOW_OK;
}

static moeflow_status open_fake(void *user, int device) {
  (void)user, (void)device;
  world->opens++;
  return MOEFLOW_OK;
}

/* The plan that an arm is said to be in names it. */
static moeflow_status prepare(void *user, const struct sweep_request *request) {
  const struct sweep_setting *setting = user;
  const struct sweep_arm *arm = &setting->arms->arms[request->arm];
  world->sizes |= (uint64_t)1 << request->tokens;
  static char text[PLAN_TEXT_MAX];
  static struct plan plan;
  FILE *file = fopen(setting->plans->paths[setting->plans->plan_of[request->arm]], "r");
  const size_t size = file ? fread(text, 1, sizeof text, file) : 0;
  if (file) fclose(file);
  if (plan_parse(text, size, "plan", &plan) != MOEFLOW_OK ||
      (arm->kernel != KERNEL_GATE_UP && plan_find_experts(&plan, arm->kernel, &arm->shape) < 0))
    world->missing_plans++;
  return MOEFLOW_OK;
}

static void add_a_line(void) {
  static struct tune tune;
  world->meanwhile = 0;
  if (tune_read(tuned, &tune) != MOEFLOW_OK || tune.count != 1) return;
  tune.lines[tune.count] = tune.lines[0];
  tune.lines[tune.count++].rows *= 4;
  tune_write(&tune, tuned);
}

static moeflow_status check(void *user, int arm, double *rel_l2) {
  (void)user, (void)arm;
  *rel_l2 = 3e-4;
  if (++world->checks == world->interrupt_at) kill(getppid(), SIGINT);
  if (world->meanwhile) add_a_line();
  if (world->checks == world->short_at) return status_set(MOEFLOW_ERROR_MEMORY, "cuMemAlloc: out of memory");
  return MOEFLOW_OK;
}

static moeflow_status time_fake(void *user, int number, int launches, double *us) {
  const struct sweep_setting *setting = user;
  const struct sweep_arm *arm = &setting->arms->arms[number];
  static unsigned seed;
  (void)launches;
  seed = seed * 1103515245u + 12345u;
  *us = arm->kernel == KERNEL_GATE_UP ? 30 : 20 + arm->shape.tile_tokens * 0.01 + arm->shape.parts;
  *us *= 1 + (seed >> 16 & 255) * 1e-6;
  return MOEFLOW_OK;
}

static const struct sweep_measure measure = {NULL, probe, open_fake, prepare, check, time_fake};

/* ---- The command ---- */

static int sweep_within(const char *tokens, int resume, int capacity) {
  const struct gen_options options = {.command = "sweep",
                                      .model = model_path,
                                      .cache = cache,
                                      .tokens = tokens,
                                      .resume = resume,
                                      .log = log_path,
                                      .overrides.capacity = capacity};
  world->opens = world->checks = world->missing_plans = 0;
  world->sizes = 0;
  return command_sweep(&options);
}

static int sweep(const char *tokens, int resume) {
  return sweep_within(tokens, resume, 0);
}

static void good(void) {
  struct tune tune, again;
  EXPECT(sweep("4,8", 0) == 0);
  EXPECT(world->opens == 1 && world->checks > 8 && world->missing_plans == 0, "%d, %d, %d", world->opens, world->checks,
         world->missing_plans);
  EXPECT(tune_read(tuned, &tune) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(tune.count == 2 && tune.lines[0].rows == 8 && tune.lines[1].rows == 16, "%d", tune.count);
  for (int i = 0; i < tune.count; i++) {
    EXPECT(tune.lines[i].kernel == KERNEL_EXPERTS && tune.lines[i].shape.parts == 1 &&
               tune.lines[i].shape.tile_tokens <= tune.lines[i].rows,
           "%d, %d", tune.lines[i].shape.parts, tune.lines[i].shape.tile_tokens);
    EXPECT(tune.lines[i].us <= tune.lines[i].default_us && tune.lines[i].runner_up[0]);
  }
  EXPECT(!strcmp(tune.identity.gpu, "NVIDIA Pretend 9000") && tune.identity.multiprocessors == 132 &&
         tune.identity.nvrtc >= 12000 && tune.identity.driver == 13000);
  EXPECT(sweep("4,8", 1) == 0 && world->opens == 0, "all is known: no GPU is opened, %d", world->opens);
  EXPECT(tune_read(tuned, &again) == MOEFLOW_OK && !memcmp(tune.lines, again.lines, sizeof tune.lines), "the same choice");
  EXPECT(sweep("8", 0) == 0 && world->opens == 1, "without --resume nothing is reused");
  EXPECT(tune_read(tuned, &again) == MOEFLOW_OK && again.count == 2, "the line of other rows stays: %d", again.count);
}

/* A bucket is what a step moves: ranks x (tokens rounded up to a power of two, at most the capacity). */
static void served_rows(void) {
  struct tune tune;
  unlink(tuned);
  EXPECT(sweep("3,4,5", 0) == 0 && tune_read(tuned, &tune) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(tune.count == 2 && tune.lines[0].rows == 8 && tune.lines[1].rows == 16, "%d lines, %d rows and %d", tune.count,
         tune.lines[0].rows, tune.lines[1].rows);
  EXPECT(world->sizes == (1u << 4 | 1u << 5), "3 tokens move as many rows as 4, which are measured once: %llx",
         (unsigned long long)world->sizes);
  unlink(tuned);
  EXPECT(sweep_within("33,40", 0, 40) == 0 && tune_read(tuned, &tune) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(tune.count == 1 && tune.lines[0].rows == 80, "%d lines, %d rows", tune.count, tune.lines[0].rows);
  unlink(tuned);
  EXPECT(sweep_within("33", 0, 16) == EXIT_USAGE && strstr(moeflow_last_error(), "--capacity 33") && !world->opens,
         "a rank of capacity 16 has no 33 tokens: %s", moeflow_last_error());
  EXPECT(sweep_within(NULL, 0, 2) == 0 && tune_read(tuned, &tune) == MOEFLOW_OK && tune.count == 2,
         "without a list those that there are: %d lines", tune.count);
}

/* A record counts only for what it was measured on and with. */
static void other_identities(void) {
  EXPECT(sweep("4", 0) == 0 && sweep("4", 1) == 0 && world->opens == 0, "all is known");
  world->newer_driver = 10;
  EXPECT(sweep("4", 1) == 0 && world->opens == 1, "another driver compiles nothing, but may schedule otherwise");
  world->newer_driver = 0;
  EXPECT(sweep("4", 1) == 0 && world->opens == 0, "the first driver's records are still there");
  EXPECT(sweep("3", 1) == 0 && world->opens == 1, "the same rows, of which less is used");
  EXPECT(sweep("3", 1) == 0 && world->opens == 0, "all is known");
}

/* What there was no memory for is asked again. */
static void out_of_memory(void) {
  world->short_at = 3;
  EXPECT(sweep("4", 0) == 0 && world->checks > 3 && world->opens == 2, "%d, %d", world->checks, world->opens);
  world->short_at = 0;
  EXPECT(sweep("4", 1) == 0 && world->checks >= 1 && world->checks <= 4, "%d", world->checks);
  EXPECT(sweep("4", 1) == 0 && world->checks == 0, "%d", world->checks);
}

/* What was chosen is what a build then uses. */
static void used_by_build(void) {
  struct tune tune;
  struct model model;
  static struct plan_draft draft;
  const struct model_overrides none = {0};
  EXPECT(tune_read(tuned, &tune) == MOEFLOW_OK && model_load(model_path, &none, &model) == MOEFLOW_OK);
  const struct plan_options options = {.tune = &tune};
  EXPECT(plan_build(&model.spec, "sm_90a", &options, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < tune.count; i++) {
    const struct plan_bucket *bucket = plan_bucket_for(&draft.plan, tune.lines[i].rows);
    const struct plan_variant *variant = plan_variant(&draft.plan, KERNEL_EXPERTS, bucket->experts);
    struct experts_shape shape = {0};
    if (variant) experts_shape_of(variant, &shape);
    EXPECT(experts_shape_same(&shape, &tune.lines[i].shape), "rows %d", tune.lines[i].rows);
  }
}

static void interrupted(void) {
  struct tune before, after;
  EXPECT(tune_read(tuned, &before) == MOEFLOW_OK);
  world->interrupt_at = 5;
  EXPECT(sweep("4,8", 0) == EXIT_INTERRUPTED && world->checks == 5, "%d", world->checks);
  world->interrupt_at = 0;
  EXPECT(tune_read(tuned, &after) == MOEFLOW_OK && !memcmp(&before, &after, sizeof before), "nothing is chosen");
  EXPECT(sweep("4,8", 1) == 0);
  const int left = world->checks;
  EXPECT(sweep("4,8", 0) == 0 && world->checks == left + 5, "five are not measured again: %d, %d", world->checks, left);
}

/* What another sweep or program owns. */
static void other_files(void) {
  struct tune tune;
  struct gen_options options = {.command = "sweep", .model = model_path, .cache = cache, .tokens = "4", .log = model_path};
  EXPECT(command_sweep(&options) == EXIT_USAGE, "a model's YAML is no log");
  options.output = options.log = tuned;
  EXPECT(command_sweep(&options) == EXIT_USAGE, "one file for both");
  options.output = NULL;
  options.log = log_path;
  options.overrides.experts = 8;
  EXPECT(command_sweep(&options) == EXIT_USAGE, "a scaled-down model's choices in the model's own file");
  EXPECT(tune_read(tuned, &tune) == MOEFLOW_OK, "the tuned file is what it was: %s", moeflow_last_error());
  tune.identity.nvrtc -= 10;
  tune.lines[0].us = 11.11;
  EXPECT(tune_write(&tune, tuned) == MOEFLOW_OK && sweep("8", 0) == 0 && tune_read(tuned, &tune) == MOEFLOW_OK);
  for (int i = 0; i < tune.count; i++) EXPECT(tune.lines[i].us != 11.11, "a line of another NVRTC got this one's name");
}

/* What another sweep writes into the same file while this one measures is kept. */
static void two_at_once(void) {
  struct tune tune;
  EXPECT(remove(tuned) == 0 && sweep("4", 0) == 0);
  world->meanwhile = 1; /* a line for other rows, at the first check */
  EXPECT(sweep("8", 0) == 0 && tune_read(tuned, &tune) == MOEFLOW_OK && tune.count == 3, "%d lines", tune.count);
}

static void refusals(void) {
  struct tune tune;
  EXPECT(sweep("4,x", 0) == EXIT_USAGE && sweep("8,4", 0) == EXIT_USAGE && sweep("", 0) == EXIT_USAGE);
  world->no_gpu = 1;
  EXPECT(sweep("4", 0) == EXIT_ENVIRONMENT);
  world->no_gpu = 0;
  EXPECT(tune_read(tuned, &tune) == MOEFLOW_OK);
  snprintf(tune.identity.gpu, sizeof tune.identity.gpu, "NVIDIA Other");
  EXPECT(tune_write(&tune, tuned) == MOEFLOW_OK && sweep("4", 0) == EXIT_USAGE && world->opens == 0,
         "a file of another GPU is not overwritten");
}

int main(void) {
  struct toolchain toolchain;
  if (toolchain_find(&toolchain) != MOEFLOW_OK) SKIP("no NVRTC: %s", moeflow_last_error());
  scratch_make();
  world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (world == MAP_FAILED) return 1;
  snprintf(model_path, sizeof model_path, "%s/tiny.yaml", scratch);
  snprintf(cache, sizeof cache, "%s/cache", scratch);
  snprintf(log_path, sizeof log_path, "%s/sweep.log", scratch);
  snprintf(tuned, sizeof tuned, "%s/tuned/tiny.bf16.pretend-9000.tune", scratch);
  scratch_write(model_path, yaml, strlen(yaml), 0600);
  sweep_measuring = &measure;
  good();
  used_by_build();
  interrupted();
  other_files();
  two_at_once();
  refusals();
  served_rows();
  other_identities();
  out_of_memory();
  scratch_remove();
  TEST_END;
}
