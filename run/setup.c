#include "setup.h"

#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "number.h"
#include "provenance.h"
#include "status.h"

static void say(const struct setup *setup, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One line on stderr, once a run. */
static void say(const struct setup *setup, const char *format, ...) {
  va_list arguments;
  if (setup->launcher.rank != 0) return;
  va_start(arguments, format);
  fputs("moeflow-run: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

int setup_tokens_max(const struct setup *setup) {
  int most = 0;
  for (int p = 0; p < setup->options.point_count; p++) {
    const int tokens = options_tokens_max(&setup->options.points[p]);
    if (tokens > most) most = tokens;
  }
  return most;
}

/* ---- Model ---- */

static const char *reduce_name(const struct options *options) {
  if (options->reduce == OPTIONS_UNSET) return NULL;
  return options->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner";
}

static struct model_overrides overrides_of(const struct options *options) {
  return (struct model_overrides){.dtype = options->dtype,
                                  .ep = options->ep > 0 ? options->ep : 0,
                                  .capacity = options->capacity > 0 ? options->capacity : 0,
                                  .experts = options->experts > 0 ? options->experts : 0,
                                  .reduce = reduce_name(options)};
}

static moeflow_status load_model(struct setup *setup) {
  const struct options *options = &setup->options;
  const struct model_overrides overrides = overrides_of(options);
  struct model *model = &setup->model;
  moeflow_status status = MOEFLOW_OK;
  CHECK(model_load(options->model, &overrides, model));
  CHECK(model_buildable(model));
  if (options->transport == MOEFLOW_TRANSPORT_ALLGATHER && model->spec.reduce == SPEC_REDUCE_CHOICES)
    FAIL(MOEFLOW_ERROR_ARGUMENT,
         "--transport allgather adds owners' sums, and with reduce: choices there are none; give --reduce owner");
  if (options->combine == MOEFLOW_COMBINE_RING && options->transport == MOEFLOW_TRANSPORT_ALLGATHER)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "--combine ring is not for --transport allgather, which adds owners' sums on the way");
  if (options->combine == MOEFLOW_COMBINE_RING && model->spec.reduce == SPEC_REDUCE_CHOICES)
    FAIL(MOEFLOW_ERROR_ARGUMENT,
         "--combine ring adds owners' sums, and with reduce: choices there are none; give --reduce owner");
  CHECK(spec_write(&model->spec, setup->spec_text));
  CHECK(provenance_hash_file(options->model, setup->yaml_sha256));
  setup->capacity = model->deploy.capacity;

cleanup:
  return status;
}

/* ---- Ranks ---- */

static moeflow_status choose_ranks(struct setup *setup) {
  const struct launcher *launcher = &setup->launcher;
  const int64_t asked = setup->options.ep;
  if (launcher->name && asked != OPTIONS_UNSET && asked != launcher->size)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "--ep %lld, but %s started %d ranks; leave --ep out, or start as many",
                      (long long)asked, launcher->name, launcher->size);
  setup->ep = launcher->name ? launcher->size : setup->model.deploy.ep;
  if (setup->ep > setup->model.spec.experts)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d ranks for %d experts: every rank must own one", setup->ep,
                      setup->model.spec.experts);
  for (int p = 0; p < setup->options.point_count; p++) {
    const struct options_point *point = &setup->options.points[p];
    if (point->count != 1 && point->count != setup->ep)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "point %d of --tokens gives %d counts for %d ranks", p + 1, point->count,
                        setup->ep);
    if (options_tokens_max(point) > setup->capacity)
      return status_set(MOEFLOW_ERROR_CAPACITY,
                        "%d tokens on a rank exceed the capacity of %d; give --capacity %d or fewer "
                        "tokens",
                        options_tokens_max(point), setup->capacity, options_tokens_max(point));
  }
  if (setup->options.die_rank >= setup->ep)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "--die-rank %lld, but there are %d ranks", (long long)setup->options.die_rank,
                      setup->ep);
  return MOEFLOW_OK;
}

static int over_nccl(moeflow_transport transport) {
  return transport == MOEFLOW_TRANSPORT_NCCL || transport == MOEFLOW_TRANSPORT_ALLGATHER;
}

static int needs_gpus(moeflow_transport transport) {
  return over_nccl(transport) || transport == MOEFLOW_TRANSPORT_WINDOW;
}

static moeflow_status choose_backend(struct setup *setup) {
  const int64_t asked = setup->options.backend;
  const moeflow_transport transport = (moeflow_transport)setup->options.transport;
  setup->backend = asked == MOEFLOW_BACKEND_CPU ? MOEFLOW_BACKEND_CPU : MOEFLOW_BACKEND_CUDA;
  if (setup->backend == MOEFLOW_BACKEND_CPU) return MOEFLOW_OK;
  gpus_probe(&setup->gpus);
  if (setup->gpus.count) return MOEFLOW_OK;
  if (needs_gpus(transport))
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "--transport %s needs a GPU for each rank: %d ranks, 0 GPUs (%s)",
                      options_transport_name(transport), setup->ep, setup->gpus.why);
  if (asked == MOEFLOW_BACKEND_CUDA)
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "--backend cuda needs a GPU: %s; or run with --backend cpu",
                      setup->gpus.why);
  say(setup, "running on the CPU backend: %s", setup->gpus.why);
  setup->backend = MOEFLOW_BACKEND_CPU;
  return MOEFLOW_OK;
}

/* The transport, and where the ranks live. */
static moeflow_status choose_transport(struct setup *setup) {
  const moeflow_transport asked = (moeflow_transport)setup->options.transport;
  const int cpu = setup->backend == MOEFLOW_BACKEND_CPU, gpus = setup->gpus.count;
  const int here = setup->launcher.name ? 1 : setup->ep; /* ranks that this process must find GPUs for */
  if (cpu && needs_gpus(asked))
    return status_set(MOEFLOW_ERROR_ARGUMENT, "--transport %s needs GPUs; the CPU backend has local alone",
                      options_transport_name(asked));
  if (over_nccl(asked) && gpus < here)
    return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                      "--transport %s needs a GPU for each rank: %d ranks, %d GPUs; --transport "
                      "local runs them all on one GPU",
                      options_transport_name(asked), here, gpus);
  if (asked == MOEFLOW_TRANSPORT_WINDOW && gpus < here)
    say(setup, "%d GPU(s) for %d ranks: processes share a GPU, which runs them in turns, slowly", gpus, setup->ep);
  setup->transport = asked;
  if (asked == MOEFLOW_TRANSPORT_AUTO) {
    setup->transport = cpu || setup->ep == 1 || gpus < here ? MOEFLOW_TRANSPORT_LOCAL : MOEFLOW_TRANSPORT_NCCL;
    if (!cpu && setup->ep > 1 && setup->transport == MOEFLOW_TRANSPORT_LOCAL)
      say(setup, "%d GPU(s) for %d ranks: all ranks run on GPU 0 (--transport local)", gpus, setup->ep);
  }
  if (!cpu && setup->transport == MOEFLOW_TRANSPORT_LOCAL)
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* a hardware queue per waiting rank, before anything touches the GPU */
  setup->ranks = RANKS_FORKED;
  if (setup->launcher.name) setup->ranks = RANKS_LAUNCHED;
  if (setup->transport == MOEFLOW_TRANSPORT_LOCAL)
    setup->ranks = setup->launcher.name && setup->launcher.rank != 0 ? RANKS_ELSEWHERE : RANKS_THREADS;
  if (setup->ranks == RANKS_THREADS && setup->launcher.name)
    say(setup, "--transport local: all %d ranks run in the launcher's first process", setup->ep);
  if (setup->options.die_rank != OPTIONS_UNSET && setup->ranks == RANKS_THREADS)
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "--die-rank ends a rank's process, and with --transport local all ranks share one");
  return MOEFLOW_OK;
}

/* ---- Plan and resources ---- */

static moeflow_status no_plan(const struct setup *setup, const char *arch, const char *cache) {
  const char *dtype = spec_dtype_name(setup->model.spec.dtype);
  struct model_overrides overrides = overrides_of(&setup->options);
  char line[MODEL_BUILD_LINE_MAX];
  overrides.dtype = dtype;
  model_build_line(setup->options.model, &overrides, arch, setup->options.cache, line);
  return status_set(MOEFLOW_ERROR_CACHE, "no cubins of %s (%s) for %s in %s; to build them: %s", setup->model.spec.name,
                    dtype, arch, cache, line);
}

/* By the spec's hash, so that a scaled-down or overridden model finds its own cubins. */
static moeflow_status find_plan(struct setup *setup) {
  const struct gpu *gpu = &setup->gpus.gpu[0];
  const struct arch *candidates[ARCH_MAX];
  char cache[CACHE_PATH_MAX], name[160];
  static struct plan plan; /* large, and only named here */
  const int count = arch_for_device(gpu->major, gpu->minor, candidates);
  moeflow_status status = cache_path(setup->options.cache, cache, sizeof cache);
  if (status != MOEFLOW_OK) return status;
  if (!count)
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "%s has compute capability %d.%d, for which this version builds no cubins",
                      gpu->name, gpu->major, gpu->minor);
  plan.spec = setup->model.spec;
  for (int i = 0; i < count; i++) {
    snprintf(plan.arch, sizeof plan.arch, "%s", candidates[i]->name);
    plan_file_name(&plan, name);
    snprintf(setup->plan, sizeof setup->plan, "%s/plans/%s", cache, name);
    if (access(setup->plan, F_OK) == 0) return MOEFLOW_OK;
  }
  return no_plan(setup, candidates[0]->name, cache);
}

static int usable_cores(void) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
}

/* --threads: as many of the cores that this process may use, for all its threads. */
static void limit_cores(int64_t threads) {
  cpu_set_t set, few;
  int taken = 0;
  if (threads == OPTIONS_UNSET || sched_getaffinity(0, sizeof set, &set)) return;
  CPU_ZERO(&few);
  for (int cpu = 0; cpu < CPU_SETSIZE && taken < threads; cpu++) {
    if (!CPU_ISSET(cpu, &set)) continue;
    CPU_SET(cpu, &few);
    taken++;
  }
  sched_setaffinity(0, sizeof few, &few);
}

/* What the CPU backend takes: each rank's lanes, and a weight buffer for each thread of the layer and of the reference. */
static moeflow_status check_memory(const struct setup *setup) {
  const struct spec *spec = &setup->model.spec;
  const double ranks = setup->ep, rows = ranks * setup->capacity;
  const double lane =
      rows * (double)(spec_row_bytes(spec) + spec_return_row_bytes(spec) * spec_return_rows_per_token(spec)) +
      rows * spec->top_k * (4.0 * spec->hidden + 2.0 * spec->intermediate + 24);
  const double threads = usable_cores() + ranks + (setup->options.check ? ranks * setup->threads_per_rank : 0);
  const double total = ranks * (double)setup->options.lanes * lane + threads * (double)spec_gate_up_bytes(spec);
  if (total <= (double)setup->options.host_memory) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_MEMORY,
                    "the CPU backend needs about %.0f bytes (%.1f GiB) for %d ranks of capacity %d, and "
                    "--host-memory allows %llu; give it %.0fGiB, a lower --capacity or a lower --ep",
                    total, total / (1 << 30), setup->ep, setup->capacity, (unsigned long long)setup->options.host_memory,
                    total / (1 << 30) + 1);
}

static void choose_threads(struct setup *setup) {
  limit_cores(setup->options.threads);
  const int cores = usable_cores();
  const int here = setup->ranks == RANKS_LAUNCHED && !setup->launcher.one_machine ? setup->gpus.count : setup->ep;
  setup->threads_per_rank = here > 0 && cores / here > 1 ? cores / here : 1;
  setup->replays = setup->options.replays != OPTIONS_UNSET  ? (int)setup->options.replays
                   : setup->backend == MOEFLOW_BACKEND_CUDA ? 100
                                                            : 2;
}

static moeflow_status read_environment(struct setup *setup) {
  static const char *const levels[] = {"error", "warning", "info", "debug"};
  const char *log = getenv("MOEFLOW_LOG"), *timeout = getenv("MOEFLOW_TIMEOUT_S");
  int64_t seconds = 60;
  setup->log_level = OPTIONS_UNSET;
  for (int i = 0; log && i < 4; i++)
    if (!strcmp(log, levels[i])) setup->log_level = i;
  if (log && *log && setup->log_level == OPTIONS_UNSET)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "MOEFLOW_LOG=%s is not error, warning, info or debug", log);
  if (timeout && *timeout && (number_read_integer(timeout, &seconds) || seconds < 1 || seconds > 86400))
    return status_set(MOEFLOW_ERROR_ARGUMENT, "MOEFLOW_TIMEOUT_S=%s is not an integer from 1 to 86400", timeout);
  if (setup->options.timeout == OPTIONS_UNSET) setup->options.timeout = seconds;
  return MOEFLOW_OK;
}

moeflow_status setup_create(struct setup *setup) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(read_environment(setup));
  CHECK(launcher_detect(&setup->launcher));
  CHECK(load_model(setup));
  CHECK(choose_ranks(setup));
  if (setup->launcher.rank == 0) CHECK(provenance_check_output("--output", setup->options.output));
  CHECK(choose_backend(setup));
  CHECK(choose_transport(setup));
  choose_threads(setup);
  if (setup->backend == MOEFLOW_BACKEND_CUDA && setup->ranks != RANKS_ELSEWHERE) CHECK(find_plan(setup));
  if (setup->backend == MOEFLOW_BACKEND_CPU) CHECK(check_memory(setup));
  if (setup->model.spec.shared_experts)
    say(setup, "%s has %d shared expert(s): the layer does not compute them", setup->model.spec.name,
        setup->model.spec.shared_experts);
  CHECK(inputs_create(&setup->model.spec, setup->options.seed, &setup->options.routing, &setup->inputs));

cleanup:
  return status;
}

void setup_destroy(struct setup *setup) {
  inputs_destroy(&setup->inputs);
  options_free(&setup->options);
}
