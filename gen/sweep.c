#include "sweep_command.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "exit_code.h"
#include "number.h"
#include "progress.h"
#include "sha256.h"
#include "status.h"

#define SECONDS_DEFAULT 240
#define TOKENS_LIMIT 65536
#define PREPARE_SECONDS 180 /* weights of 7 GB and their reference on the CPU; a slow disk's first read of the cubins */
#define MEASURE_SECONDS 30
#define SEED 1

const struct sweep_measure *sweep_measuring;

/* ---- What is asked ---- */

int sweep_read_list(const char *option, const char *text, int64_t least, int64_t most, int *numbers, int room) {
  int count = 0;
  for (const char *at = text; at;) {
    char word[32];
    int64_t number;
    const size_t length = strcspn(at, ",");
    snprintf(word, sizeof word, "%.*s", (int)(length < 31 ? length : 31), at);
    at = at[length] ? at + length + 1 : NULL;
    const char *wrong = number_read_integer(word, &number);
    if (wrong || number < least || number > most || count == room || (count && number <= numbers[count - 1])) {
      status_set(MOEFLOW_ERROR_ARGUMENT,
                 "--%s is '%.64s'; it must be up to %d ascending numbers of %lld to %lld, such as 1,2,4", option, text, room,
                 (long long)least, (long long)most);
      return -1;
    }
    numbers[count++] = (int)number;
  }
  return count;
}

static moeflow_status read_lists(struct sweep *sweep) {
  const struct gen_options *options = sweep->options;
  int tokens[SWEEP_POINTS_MAX];
  sweep->point_count = sweep_read_list("tokens", options->tokens ? options->tokens : SWEEP_TOKENS_DEFAULT, 1, TOKENS_LIMIT,
                                       tokens, SWEEP_POINTS_MAX);
  if (sweep->point_count < 0) return MOEFLOW_ERROR_ARGUMENT;
  for (int i = 0; i < sweep->point_count; i++) sweep->points[i].tokens = tokens[i];
  sweep->job.device_count =
      sweep_read_list("device", options->device ? options->device : "0", 0, 1023, sweep->job.devices, SWEEP_DEVICES_MAX);
  return sweep->job.device_count < 0 ? MOEFLOW_ERROR_ARGUMENT : MOEFLOW_OK;
}

/* The bucket of each size, which is what a step of so many tokens moves. Sizes ascend: of those that share one the last,
 * which fills it most, is measured. */
static moeflow_status place_points(struct sweep *sweep) {
  const struct model_deploy *deploy = &sweep->model.deploy;
  int count = 0;
  for (int i = 0; i < sweep->point_count; i++) {
    const int tokens = sweep->points[i].tokens, rows = model_rows(deploy->ep, deploy->capacity, tokens);
    if (tokens > deploy->capacity && !sweep->options->tokens) break; /* the default list goes as far as it may */
    if (tokens > deploy->capacity)
      return status_set(MOEFLOW_ERROR_ARGUMENT,
                        "--tokens %d is more than the capacity of %d tokens a rank; give --capacity %d or fewer tokens",
                        tokens, deploy->capacity, tokens);
    if (count && sweep->points[count - 1].rows == rows) {
      fprintf(stderr, "moeflow-gen sweep: %d and %d tokens a rank are both served as %d rows; %d are measured\n",
              sweep->points[count - 1].tokens, tokens, rows, tokens);
      count--;
    }
    sweep->points[count++] = (struct sweep_point){.tokens = tokens, .rows = rows};
  }
  sweep->point_count = count;
  return MOEFLOW_OK;
}

/* The best arch of the model's that runs on the GPU becomes its only one. */
static moeflow_status choose_arch(struct sweep *sweep) {
  const struct arch *candidates[ARCH_MAX];
  struct model_deploy *deploy = &sweep->model.deploy;
  const int count = arch_for_device(sweep->gpu.major, sweep->gpu.minor, candidates);
  for (int c = 0; c < count; c++) {
    for (int a = 0; a < deploy->arch_count; a++) {
      if (deploy->arch[a] != candidates[c]) continue;
      deploy->arch[0] = candidates[c];
      deploy->arch_count = 1;
      return MOEFLOW_OK;
    }
  }
  return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                    "the %s has compute capability %d.%d, for which %s is not built: give --arch %s", sweep->gpu.name,
                    sweep->gpu.major, sweep->gpu.minor, sweep->model.spec.name,
                    count ? candidates[0]->name : "of another GPU");
}

static moeflow_status check_kernels(const struct sweep *sweep) {
  if (sweep->model.spec.reduce == SPEC_REDUCE_CHOICES)
    return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                      "a sweep times the experts and the owner's sums, which `reduce: choices` has not");
  const struct arch *arch = sweep->model.deploy.arch[0];
  if (experts_kernel_on(KERNEL_EXPERTS, arch)) return MOEFLOW_OK;
  if (sweep->options->packed && experts_kernel_on(KERNEL_EXPERTS_STREAM, arch)) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                    "on %s there is one form of the kernels for plain weights and nothing to choose%s", arch->name,
                    sweep->options->packed ? "" : "; --packed sweeps experts_stream");
}

/* ---- Where results go ---- */

/* The file that `build` looks for, unless another is given; in a folder that is there. */
static moeflow_status choose_output(struct sweep *sweep) {
  const char *given = sweep->options->output;
  char folder[TUNE_PATH_MAX];
  if (!given && sweep->options->overrides.experts)
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "with --experts say where the choices go, with --output: they are not the whole "
                      "model's, whose file has the default name");
  if (given) {
    snprintf(sweep->output, sizeof sweep->output, "%s", given);
  } else {
    tune_path_beside(sweep->options->model, &sweep->model.spec, sweep->gpu.name, sweep->output);
  }
  if (strlen(sweep->output) > sizeof sweep->output - 16)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the path of the tuned file is too long: %.64s...", sweep->output);
  snprintf(folder, sizeof folder, "%s", sweep->output);
  char *end = strrchr(folder, '/');
  if (end) end[end == folder] = 0;
  if (end && !given && mkdir(folder, 0755) && errno != EEXIST)
    return status_set(MOEFLOW_ERROR_CACHE, "cannot make %s: %s; say where with --output", folder, strerror(errno));
  if (access(end ? folder : ".", W_OK | X_OK))
    return status_set(MOEFLOW_ERROR_CACHE, "cannot write into %s: %s; say where with --output", end ? folder : ".",
                      strerror(errno));
  return MOEFLOW_OK;
}

static moeflow_status fill_identity(struct sweep *sweep) {
  struct tune_identity *identity = &sweep->tune.identity;
  const struct spec *spec = &sweep->model.spec;
  snprintf(identity->model, sizeof identity->model, "%s", spec->name);
  snprintf(identity->dtype, sizeof identity->dtype, "%s", spec_dtype_name(spec->dtype));
  snprintf(identity->gpu, sizeof identity->gpu, "%s", sweep->gpu.name);
  snprintf(identity->arch, sizeof identity->arch, "%s", sweep->model.deploy.arch[0]->name);
  identity->multiprocessors = sweep->gpu.multiprocessors;
  identity->driver = sweep->gpu.driver;
  spec_hash(spec, identity->spec);
  return units_experts_digest(&sweep->units, identity->templates);
}

/* All that a record depends on but for its rows, so that another sweep may use it: EP too, since it decides how many experts
 * a rank has, and the sizes that leave a part of their rows empty. */
static void log_identity(const struct sweep *sweep, char digits[17]) {
  const struct tune_identity *identity = &sweep->tune.identity;
  uint8_t digest[32];
  char text[2048], hex[65];
  int length = snprintf(text, sizeof text,
                        "spec %s\ngpu %s\nmultiprocessors %d\ndriver %d\narch %s\ntemplates %s\n%s\nep %d\nseed %d\n",
                        identity->spec, identity->gpu, identity->multiprocessors, identity->driver, identity->arch,
                        identity->templates, sweep->toolchain.identity, sweep->model.deploy.ep, SEED);
  for (int i = 0; i < sweep->point_count; i++)
    if (sweep->points[i].rows != sweep->model.deploy.ep * sweep->points[i].tokens)
      length += snprintf(text + length, sizeof text - (size_t)length, "tokens %d\n", sweep->points[i].tokens);
  sha256(text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1, digest);
  sha256_hex(digest, hex);
  snprintf(digits, 17, "%.16s", hex);
}

static void learn(void *user, const struct sweep_record *record) {
  struct sweep *sweep = user;
  if (record->event == SWEEP_SKIPPED) return; /* there may be memory for it now */
  sweep->known++;
  sweep_learn(&sweep->arms, sweep->points, sweep->point_count, record);
}

static moeflow_status open_log(struct sweep *sweep) {
  char path[TUNE_PATH_MAX], digits[17];
  log_identity(sweep, digits);
  snprintf(path, sizeof path, "%.*s.log", (int)sizeof path - 8, sweep->output);
  if (sweep->options->log && !strcmp(sweep->options->log, sweep->output))
    return status_set(MOEFLOW_ERROR_ARGUMENT, "--log and --output are both %s: give two files", sweep->output);
  moeflow_status status = sweep_log_open(sweep->options->log ? sweep->options->log : path, digits,
                                         sweep->options->resume != 0, learn, sweep, &sweep->log);
  if (status == MOEFLOW_OK && sweep->log.passed_over)
    fprintf(stderr, "moeflow-gen sweep: %d lines of %s are torn or unknown and are passed over\n", sweep->log.passed_over,
            sweep->log.path);
  return status;
}

/* ---- The command ---- */

static moeflow_status make_arms(struct sweep *sweep) {
  const struct sweep_space space = {.spec = &sweep->model.spec,
                                    .draft = &sweep->units.drafts[0],
                                    .arch = sweep->model.deploy.arch[0],
                                    .ep = sweep->model.deploy.ep,
                                    .multiprocessors = sweep->gpu.multiprocessors,
                                    .packed = sweep->options->packed != 0,
                                    .exhaustive = sweep->options->exhaustive != 0};
  sweep_space_count(&space, &sweep->legal, &sweep->space);
  moeflow_status status = sweep_space_arms(&space, &sweep->arms, sweep->points, sweep->point_count);
  if (status == MOEFLOW_OK && sweep->arms.left_out)
    fprintf(stderr,
            "moeflow-gen sweep: %d of %d legal shapes are left out, the least promising at the smallest size: a sweep holds "
            "%d arms\n",
            sweep->arms.left_out, sweep->legal, SWEEP_ARMS_MAX);
  return status;
}

static moeflow_status compile_arms(struct sweep *sweep) {
  const struct sweep_compiling compiling = {.model = &sweep->model,
                                            .templates = sweep->options->templates,
                                            .packed = sweep->options->packed != 0,
                                            .jobs = (int)sweep->options->jobs,
                                            .toolchain = &sweep->toolchain,
                                            .store = &sweep->store,
                                            .log = &sweep->log};
  moeflow_status status = sweep_compile(&compiling, &sweep->arms, &sweep->plans, &sweep->interrupted);
  if (status == MOEFLOW_OK)
    fprintf(stderr, "moeflow-gen sweep: %d arms of %d legal shapes (%d in all): %d variants compiled, %d found, in %.1f s\n",
            sweep->arms.count, sweep->legal, sweep->space, sweep->plans.compiled, sweep->plans.hits, sweep->plans.seconds);
  return status;
}

static moeflow_status measure_arms(struct sweep *sweep) {
  const struct gen_options *options = sweep->options;
  const int64_t limit = options->time_limit ? options->time_limit : options->exhaustive ? 0 : SECONDS_DEFAULT;
  sweep->setting = (struct sweep_setting){.arms = &sweep->arms,
                                          .plans = &sweep->plans,
                                          .cache = sweep->store.path,
                                          .ep = sweep->model.deploy.ep,
                                          .capacity = sweep->model.deploy.capacity,
                                          .tokens_max = sweep->points[sweep->point_count - 1].tokens,
                                          .seed = SEED};
  sweep->job.measure = &sweep->measure;
  sweep->job.patience = (struct sweep_patience){PREPARE_SECONDS, MEASURE_SECONDS};
  sweep->job.arms = &sweep->arms;
  sweep->job.points = sweep->points;
  sweep->job.point_count = sweep->point_count;
  sweep->job.log = &sweep->log;
  sweep->job.end = limit ? sweep->start + (double)limit : 0;
  if (sweep->known) fprintf(stderr, "moeflow-gen sweep: %d records of %s are used again\n", sweep->known, sweep->log.path);
  return sweep_run(&sweep->job, &sweep->interrupted);
}

static moeflow_status run(struct sweep *sweep) {
  moeflow_status status = MOEFLOW_OK;
  const struct gen_options *options = sweep->options;
  const struct plan_options plan_options = {.packed = options->packed != 0};
  CHECK(read_lists(sweep));
  CHECK(model_load(options->model, &options->overrides, &sweep->model));
  CHECK(place_points(sweep));
  CHECK(model_buildable(&sweep->model));
  if (!sweep_measuring) FAIL(MOEFLOW_ERROR_INTERNAL, "this program was linked without what measures");
  sweep->measure = *sweep_measuring;
  sweep->measure.user = &sweep->setting;
  CHECK(sweep_probe(&sweep->measure, sweep->job.devices, sweep->job.device_count, &sweep->gpu));
  CHECK(choose_arch(sweep));
  CHECK(check_kernels(sweep));
  CHECK(toolchain_find(&sweep->toolchain));
  CHECK(units_make(&sweep->model, &plan_options, options->templates, 0, &sweep->units));
  CHECK(choose_output(sweep));
  CHECK(fill_identity(sweep));
  CHECK(sweep_read_old(sweep));
  CHECK(make_arms(sweep));
  CHECK(open_log(sweep));
  CHECK(store_open(options->cache, &sweep->store));
  CHECK(compile_arms(sweep));
  status = measure_arms(sweep);
  if (status != MOEFLOW_OK) {
    sweep_say_resume(sweep, "the sweep broke off");
    goto cleanup;
  }
  if (!sweep->interrupted) CHECK(sweep_write_result(sweep));
cleanup:
  return status;
}

int command_sweep(const struct gen_options *options) {
  struct sweep *sweep = calloc(1, sizeof *sweep);
  if (!sweep) return command_status(options, status_set(MOEFLOW_ERROR_MEMORY, "no memory for a sweep"));
  sweep->options = options;
  sweep->store.fd = sweep->log.fd = -1;
  sweep->start = progress_seconds();
  int code = command_status(options, run(sweep));
  if (sweep->interrupted) {
    sweep_say_resume(sweep, "interrupted, nothing was chosen");
    code = EXIT_INTERRUPTED;
  }
  sweep_log_close(&sweep->log);
  sweep_plans_free(&sweep->plans);
  sweep_space_free(&sweep->arms, sweep->points, sweep->point_count > 0 ? sweep->point_count : 0);
  store_close(&sweep->store);
  units_free(&sweep->units);
  free(sweep);
  return code;
}
