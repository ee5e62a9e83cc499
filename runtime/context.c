/* moeflow_open and moeflow_close: find the plan, read it, let the backend make it ready. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entry.h"
#include "internal.h"

#define ARCHITECTURES_MAX 16
#define PLAN_NAME_MAX 256

struct architectures {
  char names[ARCHITECTURES_MAX][PLAN_ARCH_MAX];
  int count; /* 0: any */
};

void context_log(const struct moeflow_context *context, moeflow_log_level level, const char *format, ...) {
  if (!context->log) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  context->log(context->log_user, level, text);
}

moeflow_status context_enter(struct moeflow_context *context) {
  return context->backend->enter ? context->backend->enter(context) : MOEFLOW_OK;
}

void context_leave(struct moeflow_context *context) {
  if (context->backend->leave) context->backend->leave(context);
}

/* ---- The plan's text ---- */

/* Appends the command that builds what is missing to the present message. */
static moeflow_status say_build(const moeflow_open_config *config, const char *model, const char *dtype, const char *arch) {
  return status_set(MOEFLOW_ERROR_CACHE,
                    "%s; to build it, MODEL.yaml being the file with `name: %s`: moeflow-gen build MODEL.yaml --dtype %s "
                    "--arch %s%s%s",
                    moeflow_last_error(), model, dtype, arch, config->cache ? " --cache " : "",
                    config->cache ? config->cache : "");
}

struct search {
  const moeflow_open_config *config;
  const struct architectures *architectures;
  int rank; /* of the best architecture seen: index in the list, or 0 when any will do */
  int matches;
  char best[PLAN_NAME_MAX], second[PLAN_NAME_MAX], other[PLAN_NAME_MAX]; /* other: right model, wrong architecture */
};

/* `name` is <model>.<dtype>.<arch>.<16 hex>.plan with the wanted model and dtype: points at its arch and hash. */
static int match(const char *name, const moeflow_open_config *config, const char **arch, size_t *arch_length,
                 const char **hash) {
  char prefix[PLAN_NAME_MAX];
  int length = snprintf(prefix, sizeof prefix, "%s.%s.", config->model, config->dtype);
  if (length < 0 || (size_t)length >= sizeof prefix || strncmp(name, prefix, (size_t)length)) return 0;
  *arch = name + length;
  *arch_length = strcspn(*arch, ".");
  if (*arch_length == 0 || *arch_length >= PLAN_ARCH_MAX || (*arch)[*arch_length] != '.') return 0;
  *hash = *arch + *arch_length + 1;
  return strspn(*hash, "0123456789abcdef") == 16 && !strcmp(*hash + 16, ".plan");
}

static void consider(struct search *search, const char *name) {
  const char *arch, *hash, *best_arch, *best_hash;
  size_t length, best_length;
  if (strlen(name) >= PLAN_NAME_MAX || !match(name, search->config, &arch, &length, &hash)) return;
  int rank = 0;
  const struct architectures *list = search->architectures;
  while (rank < list->count && (strlen(list->names[rank]) != length || strncmp(list->names[rank], arch, length))) rank++;
  if (list->count && rank == list->count) {
    strcpy(search->other, name);
    return;
  }
  if (!search->matches || rank < search->rank) {
    search->rank = rank;
    search->matches = 1;
    strcpy(search->best, name);
  } else if (rank ==
             search->rank) { /* with no list: plans of several architectures are as good when the model is the same */
    match(search->best, search->config, &best_arch, &best_length, &best_hash);
    if (!list->count && !strcmp(hash, best_hash)) return;
    search->matches++;
    strcpy(search->second, name);
  }
}

static moeflow_status scan(int cache_fd, const char *path, struct search *search) {
  int fd = -1, missing = 0;
  moeflow_status status = cache_open_below(cache_fd, path, "plans", 0, &fd, &missing);
  if (missing) return MOEFLOW_OK; /* an empty cache */
  if (status != MOEFLOW_OK) return status;
  DIR *directory = fdopendir(fd);
  if (!directory) {
    status = status_set(MOEFLOW_ERROR_CACHE, "cannot list %s/plans: %s", path, strerror(errno));
    close(fd);
    return status;
  }
  for (struct dirent *item; (item = readdir(directory));) consider(search, item->d_name);
  closedir(directory);
  return MOEFLOW_OK;
}

static moeflow_status find_plan(struct moeflow_context *context, const moeflow_open_config *config,
                                const struct architectures *architectures, char name[PLAN_NAME_MAX]) {
  moeflow_status status = MOEFLOW_OK;
  const char *arch = architectures->count ? architectures->names[0] : "sm_90a";
  struct search search = {.config = config, .architectures = architectures};
  if (context->cache_fd < 0) {
    status_set(MOEFLOW_ERROR_CACHE, "there is no cache at %s", context->cache_path);
    return say_build(config, config->model, config->dtype, arch);
  }
  CHECK(scan(context->cache_fd, context->cache_path, &search));
  if (search.matches > 1) {
    FAIL(MOEFLOW_ERROR_CACHE, "two plans fit in %s/plans: %s and %s; say which with `plan`", context->cache_path,
         search.best, search.second);
  }
  if (!search.matches) {
    status_set(MOEFLOW_ERROR_CACHE, "no plan for %s %s %s in %s%s%s", config->model, config->dtype, arch,
               context->cache_path, *search.other ? ", only for another GPU: " : "", search.other);
    return say_build(config, config->model, config->dtype, arch);
  }
  memcpy(name, search.best, PLAN_NAME_MAX);
cleanup:
  return status;
}

/* A plan given by path is read as any file of the caller's; the cubins it names still come from a trusted cache. */
static moeflow_status read_plan_file(const char *path, uint8_t **bytes, size_t *size) {
  moeflow_status status = MOEFLOW_OK;
  struct stat info;
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  *bytes = NULL;
  if (fd < 0 || fstat(fd, &info)) FAIL(MOEFLOW_ERROR_CACHE, "cannot read the plan %s: %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode) || info.st_size > PLAN_TEXT_MAX) {
    FAIL(MOEFLOW_ERROR_FORMAT, "%s is no plan: not a regular file of at most %d bytes", path, PLAN_TEXT_MAX);
  }
  *bytes = malloc((size_t)info.st_size + 1);
  if (!*bytes) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the plan %s", path);
  *size = 0;
  for (ssize_t n = 1; n > 0 && *size < (size_t)info.st_size; *size += (size_t)n) {
    n = read(fd, *bytes + *size, (size_t)info.st_size - *size);
    if (n < 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot read the plan %s: %s", path, strerror(errno));
  }
cleanup:
  if (status != MOEFLOW_OK) {
    free(*bytes);
    *bytes = NULL;
  }
  if (fd >= 0) close(fd);
  return status;
}

static moeflow_status load_plan(struct moeflow_context *context, const moeflow_open_config *config,
                                const struct architectures *architectures) {
  moeflow_status status = MOEFLOW_OK;
  char name[PLAN_NAME_MAX], below[PLAN_NAME_MAX + 8];
  uint8_t *bytes = NULL;
  size_t size = 0;
  if (config->plan) {
    CHECK(read_plan_file(config->plan, &bytes, &size));
    CHECK(plan_parse((const char *)bytes, size, config->plan, &context->plan));
  } else {
    CHECK(find_plan(context, config, architectures, name));
    snprintf(below, sizeof below, "plans/%s", name);
    CHECK(cache_read(context->cache_fd, context->cache_path, below, PLAN_TEXT_MAX, &bytes, &size, NULL));
    CHECK(plan_parse((const char *)bytes, size, below, &context->plan));
  }
  plan_hash(&context->plan, context->plan_hash);
cleanup:
  free(bytes);
  return status;
}

/* ---- What a plan must be for this device and this version ---- */

static moeflow_status check_architecture(const struct plan *plan, const struct architectures *architectures) {
  char list[ARCHITECTURES_MAX * (PLAN_ARCH_MAX + 2)] = "";
  if (!architectures->count) return MOEFLOW_OK;
  for (int i = 0; i < architectures->count; i++) {
    if (!strcmp(plan->arch, architectures->names[i])) return MOEFLOW_OK;
    if (i) strcat(list, ", ");
    strcat(list, architectures->names[i]);
  }
  return status_set(MOEFLOW_ERROR_CACHE, "the plan of %s was built for %s, and this GPU runs %s", plan->spec.name,
                    plan->arch, list);
}

static moeflow_status check_plan(const struct plan *plan) {
  if (plan->spec.dtype != SPEC_BF16 || plan->spec.dispatch != SPEC_WIRE_BF16) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "%s has dtype %s; this version runs bf16 weights and bf16 dispatch only",
                      plan->spec.name, spec_dtype_name(plan->spec.dtype));
  }
  for (int i = 0; i < plan->bucket_count; i++) { /* one tile list serves both GEMMs */
    const struct plan_variant *gate_up = plan_variant(plan, KERNEL_GATE_UP, plan->buckets[i].gate_up);
    const struct plan_variant *down = plan_variant(plan, KERNEL_DOWN, plan->buckets[i].down);
    if (!gate_up || !down || gate_up->tile_tokens != down->tile_tokens || gate_up->tile_tokens < 1) {
      return status_set(MOEFLOW_ERROR_FORMAT,
                        "bucket %d of the plan pairs gate_up and down variants of different tile_tokens", i);
    }
  }
  return MOEFLOW_OK;
}

/* ---- Opening ---- */

static moeflow_status check_config(const moeflow_open_config *config) {
  int32_t dtype;
  if (config->backend != MOEFLOW_BACKEND_CUDA && config->backend != MOEFLOW_BACKEND_CPU) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "backend %d is neither CUDA (0) nor CPU (1)", (int)config->backend);
  }
  if (config->spec && config->backend != MOEFLOW_BACKEND_CPU) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "`spec` text is for the CPU backend; on a GPU give a model or a plan");
  }
  if (config->spec || config->plan) return MOEFLOW_OK;
  if (!config->model || !*config->model) return status_set(MOEFLOW_ERROR_ARGUMENT, "give a model, a plan or (CPU) a spec");
  if (strlen(config->model) > SPEC_NAME_MAX || strpbrk(config->model, "/ ")) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.80s' is no model name: letters, digits, '.', '_' and '-', at most %d",
                      config->model, SPEC_NAME_MAX);
  }
  if (!config->dtype || spec_dtype_from_name(config->dtype, &dtype)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "dtype '%s' is unknown; this version runs bf16",
                      config->dtype ? config->dtype : "NULL");
  }
  return MOEFLOW_OK;
}

/* Where entries come from. A plan given by path brings its own cache when it lies in one. */
static moeflow_status open_cache(struct moeflow_context *context, const moeflow_open_config *config) {
  moeflow_status status = MOEFLOW_OK;
  char given[CACHE_PATH_MAX];
  const char *path = config->cache;
  int missing = 0;
  if (!path && config->plan) {
    const char *end = strstr(config->plan, "/plans/");
    for (const char *next = end; next; next = strstr(next + 1, "/plans/")) end = next;
    if (end && !strchr(end + 7, '/') && end > config->plan && (size_t)(end - config->plan) < sizeof given) {
      memcpy(given, config->plan, (size_t)(end - config->plan));
      given[end - config->plan] = 0;
      path = given;
    }
  }
  CHECK(cache_path(path, context->cache_path, sizeof context->cache_path));
  status = cache_open_or_create(context->cache_path, 0, &context->cache_fd, &missing);
  if (status != MOEFLOW_OK && missing) status = MOEFLOW_OK; /* whoever needs it says what is missing and how to build it */
cleanup:
  return status;
}

static moeflow_status read_model(struct moeflow_context *context, const moeflow_open_config *config) {
  moeflow_status status = MOEFLOW_OK;
  struct architectures architectures = {.count = 0};
  if (context->backend->architectures) {
    CHECK(context->backend->architectures(context, architectures.names, ARCHITECTURES_MAX, &architectures.count));
  }
  if (config->spec) {
    status = spec_parse(config->spec, "spec", &context->plan.spec);
    if (status != MOEFLOW_OK) /* a YAML was passed, say */
      FAIL(status, "%s; spec text is made by: moeflow-gen explain MODEL.yaml --format spec", moeflow_last_error());
    spec_hash(&context->plan.spec, context->plan_hash);
  } else {
    CHECK(open_cache(context, config));
    CHECK(load_plan(context, config, &architectures));
    CHECK(check_architecture(&context->plan, &architectures));
  }
  CHECK(check_plan(&context->plan));
  CHECK(spec_write(&context->plan.spec, context->spec_text));
  spec_hash(&context->plan.spec, context->spec_hash);
cleanup:
  return status;
}

static moeflow_status open_backend(struct moeflow_context *context, const moeflow_open_config *config) {
  const struct spec *spec = &context->plan.spec;
  moeflow_status status = context->backend->open(context);
  if (status == MOEFLOW_ERROR_CACHE) say_build(config, spec->name, spec_dtype_name(spec->dtype), context->plan.arch);
  return status;
}

static void note_open(const struct moeflow_context *context) {
  const struct spec *spec = &context->plan.spec;
  context_log(context, MOEFLOW_LOG_INFO, "opened %s %s%s%s on the %s backend: H %d, I %d, E %d, K %d", spec->name,
              spec_dtype_name(spec->dtype), *context->plan.arch ? " for " : "", context->plan.arch, context->backend->name,
              spec->hidden, spec->intermediate, spec->experts, spec->top_k);
  if (spec->shared_experts) {
    context_log(context, MOEFLOW_LOG_WARNING, "%s has %d shared expert(s): this version's layer does not compute them",
                spec->name, spec->shared_experts);
  }
}

moeflow_status moeflow_open(const moeflow_open_config *config_given, moeflow_context **context_out) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  struct moeflow_context *context = NULL;
  if (!context_out) return status_set(MOEFLOW_ERROR_ARGUMENT, "the place for the context is NULL");
  *context_out = NULL;
  CHECK(config_read(config_given, &config, sizeof config, "moeflow_open_config"));
  CHECK(check_config(&config));
  context = handle_create(HANDLE_CONTEXT, sizeof *context);
  if (!context) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for a context of %zu bytes", sizeof *context);
  context->backend = config.backend == MOEFLOW_BACKEND_CPU ? &backend_cpu : &backend_cuda;
  context->device = config.device;
  context->cache_fd = -1;
  context->log = config.log;
  context->log_user = config.log_user;
  CHECK(read_model(context, &config));
  CHECK(open_backend(context, &config));
  note_open(context);
  *context_out = context;
cleanup:
  if (context && context->cache_fd >= 0) close(context->cache_fd);
  if (context) context->cache_fd = -1;
  if (status != MOEFLOW_OK) handle_destroy(context, HANDLE_CONTEXT);
  return status;
}

moeflow_status moeflow_close(moeflow_context *context) {
  if (!context) return MOEFLOW_OK;
  moeflow_status status = handle_check(context, HANDLE_CONTEXT);
  if (status != MOEFLOW_OK) return status;
  int groups = atomic_load(&context->groups);
  if (groups) return status_set(MOEFLOW_ERROR_STATE, "%d group(s) still use the context; destroy them first", groups);
  context->backend->close(context);
  handle_destroy(context, HANDLE_CONTEXT);
  return MOEFLOW_OK;
}

const char *moeflow_context_spec(const moeflow_context *context) {
  return handle_check(context, HANDLE_CONTEXT) == MOEFLOW_OK ? context->spec_text : NULL;
}
