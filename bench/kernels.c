/* The command `kernels`. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"
#include "entry.h"
#include "exit_code.h"
#include "gpu.h"
#include "kernels_report.h"
#include "limits_command.h"
#include "model.h"
#include "provenance.h"

struct kernels {
  const struct bench_options *options;
  struct model model;
  char plan[CACHE_PATH_MAX + 256];
  struct bench_gpu gpu;
  struct experts_bench *bench;
  struct read_bench *read;
  struct kernels_facts facts;
  struct point *points;
  int point_count; /* measured */
};

/* ---- The plan ---- */

static struct model_overrides overrides_of(const struct bench_options *options) {
  return (struct model_overrides){.dtype = options->dtype, .ep = options->ep, .experts = options->experts};
}

static moeflow_status no_plan(const struct kernels *kernels, const char *arch, const char *cache) {
  const struct bench_options *options = kernels->options;
  struct model_overrides overrides = overrides_of(options);
  char line[MODEL_BUILD_LINE_MAX];
  overrides.dtype = spec_dtype_name(kernels->model.spec.dtype);
  model_build_line(options->model, &overrides, arch, options->cache, line);
  return status_set(MOEFLOW_ERROR_CACHE, "no cubins of %s for %s in %s; to build them: %s", kernels->model.spec.name, arch,
                    cache, line);
}

/* By the spec's hash, so that a scaled-down or overridden model finds its own cubins. */
static moeflow_status find_plan(struct kernels *kernels) {
  const struct gpu *gpu = kernels->gpu.gpu;
  const struct arch *candidates[ARCH_MAX];
  const int count = arch_for_device(gpu->major, gpu->minor, candidates);
  char cache[CACHE_PATH_MAX], name[160];
  static struct plan plan; /* large, and only named here */
  moeflow_status status = cache_path(kernels->options->cache, cache, sizeof cache);
  if (status != MOEFLOW_OK) return status;
  plan.spec = kernels->model.spec;
  for (int i = 0; i < count; i++) {
    snprintf(plan.arch, sizeof plan.arch, "%s", candidates[i]->name);
    plan_file_name(&plan, name);
    snprintf(kernels->plan, sizeof kernels->plan, "%s/plans/%s", cache, name);
    if (access(kernels->plan, F_OK) == 0) return MOEFLOW_OK;
  }
  return no_plan(kernels, candidates[0]->name, cache);
}

static moeflow_status load_model(struct kernels *kernels) {
  const struct model_overrides overrides = overrides_of(kernels->options);
  moeflow_status status = MOEFLOW_OK;
  CHECK(model_load(kernels->options->model, &overrides, &kernels->model));
  CHECK(model_buildable(&kernels->model));
  CHECK(provenance_hash_file(kernels->options->model, kernels->facts.yaml_sha256));

cleanup:
  return status;
}

/* ---- Opening ---- */

static int64_t local_bytes(const struct kernels *kernels) {
  const struct spec *spec = &kernels->model.spec;
  return spec->experts / kernels->model.deploy.ep * (spec_gate_up_bytes(spec) + spec_down_bytes(spec));
}

static int most_tokens(const struct bench_options *options) {
  int most = 0;
  for (int i = 0; i < options->tokens.count; i++)
    if (options->tokens.values[i] > most) most = options->tokens.values[i];
  return most;
}

/* Of the cubin that the plan names first: a build makes all with one NVRTC. */
static int nvrtc_of(const struct kernels *kernels, const struct plan *plan) {
  struct entry entry = {.bytes = NULL};
  char path[CACHE_PATH_MAX];
  int fd = -1, version = 0;
  if (cache_path(kernels->options->cache, path, sizeof path) != MOEFLOW_OK || cache_open(path, &fd) != MOEFLOW_OK) return 0;
  if (entry_read(fd, path, plan->variants[0].entry, &entry, NULL) == MOEFLOW_OK) version = (int)entry.header.nvrtc_version;
  entry_free(&entry);
  close(fd);
  return version;
}

static void note_facts(struct kernels *kernels) {
  const struct plan *plan = experts_bench_plan(kernels->bench);
  struct kernels_facts *facts = &kernels->facts;
  facts->spec = &kernels->model.spec;
  facts->ep = kernels->model.deploy.ep;
  plan_hash(plan, facts->plan_sha256);
  facts->header = (struct result_header){
      .kind = "kernels", .gpu = kernels->gpu.gpu, .driver = kernels->gpu.all.driver, .nvrtc = nvrtc_of(kernels, plan)};
}

static moeflow_status open_all(struct kernels *kernels) {
  const struct bench_options *options = kernels->options;
  const struct experts_bench_config config = {.plan = kernels->plan,
                                              .cache = options->cache,
                                              .device = (int)options->device,
                                              .ep = kernels->model.deploy.ep,
                                              .capacity = kernels->model.deploy.capacity,
                                              .tokens_max = most_tokens(options),
                                              .seed = options->seed};
  moeflow_status status = MOEFLOW_OK;
  CHECK(bench_gpu_take(options, &kernels->gpu));
  CHECK(experts_bench_open(&config, &kernels->bench));
  CHECK(read_bench_open(&kernels->gpu.read, (int)options->device, local_bytes(kernels), &kernels->read));
  CHECK(limits_dense(kernels->read, options->cublas, &kernels->facts.dense));
  note_facts(kernels);

cleanup:
  return status;
}

/* ---- Measuring ---- */

static void print_title(const struct kernels *kernels) {
  const struct spec *spec = &kernels->model.spec;
  const struct bench_options *options = kernels->options;
  printf("%s %s: H %d, I %d, E %d, K %d; experts of one of %d rank(s) on %s, %d layers a replay; %d launches of %d pairs\n",
         spec->name, spec_dtype_name(spec->dtype), spec->hidden, spec->intermediate, spec->experts, spec->top_k,
         kernels->facts.ep, kernels->gpu.gpu->name, BENCH_ROUTINGS, (int)options->launches, (int)options->pairs);
  limits_print_dense(&kernels->facts.dense, stdout);
  printf("arms: gate_up, activation, down%s; `alone` leaves the sums out; `control` is moeflow once more\n",
         options->no_sum ? "" : " and the owner's weighted sums");
  fflush(stdout);
}

static moeflow_status measure(struct kernels *kernels) {
  const struct bench_options *options = kernels->options;
  moeflow_status status = MOEFLOW_OK;
  kernels->points = calloc((size_t)(options->skews.count * options->tokens.count), sizeof *kernels->points);
  if (!kernels->points) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the points");
  print_title(kernels);
  for (int s = 0; s < options->skews.count; s++) {
    for (int t = 0; t < options->tokens.count; t++) {
      struct point *point = &kernels->points[kernels->point_count++];
      CHECK(point_measure(options, kernels->bench, kernels->read, &kernels->facts.dense, options->tokens.values[t],
                          options->skews.values[s], point));
      kernels_print_point(point, stdout);
    }
  }
  CHECK(points_judge(kernels->points, kernels->point_count));
  kernels_print_verdicts(kernels->points, kernels->point_count, stdout);

cleanup:
  return status;
}

static moeflow_status write_file(const struct kernels *kernels) {
  FILE *file;
  moeflow_status status = result_open(kernels->options, &file);
  if (file) kernels_write(kernels->options, &kernels->facts, kernels->points, kernels->point_count, file);
  return status == MOEFLOW_OK ? result_close(kernels->options, file) : status;
}

static int verdict_code(const struct kernels *kernels) {
  if (points_wrong(kernels->points, kernels->point_count)) {
    fprintf(stderr, "moeflow-bench kernels: an arm computes something wrong; see above\n");
    return EXIT_CHECK_FAILED;
  }
  if (kernels->options->fail_on == FAIL_ON_SLOW && points_slow(kernels->points, kernels->point_count)) {
    fprintf(stderr, "moeflow-bench kernels: what is served is slower than another arm; see the verdicts\n");
    return EXIT_CHECK_FAILED;
  }
  return 0;
}

static void close_all(struct kernels *kernels) {
  for (int i = 0; i < kernels->point_count; i++) point_free(&kernels->points[i]);
  free(kernels->points);
  read_bench_close(kernels->read);
  experts_bench_close(kernels->bench);
  bench_gpu_leave(&kernels->gpu);
}

int command_kernels(const struct bench_options *options) {
  static struct kernels kernels; /* large */
  moeflow_status status = MOEFLOW_OK;
  int code = 0;
  kernels.options = options;
  CHECK(provenance_check_output("--json", options->json));
  CHECK(load_model(&kernels));
  CHECK(bench_gpu_find(options, &kernels.gpu));
  CHECK(find_plan(&kernels));
  CHECK(open_all(&kernels));
  CHECK(measure(&kernels));
  CHECK(write_file(&kernels));
  code = verdict_code(&kernels);

cleanup:
  if (status != MOEFLOW_OK) code = bench_exit_code(options, status);
  close_all(&kernels);
  return code;
}
