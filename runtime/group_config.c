#include "group_config.h"

#include <stdlib.h>

#define TIMEOUT_MS_DEFAULT 30000
#define LOCAL_GPU_RANKS_MAX 32
#define CONTEXTS_MAX 64

static moeflow_status check_contexts(moeflow_context *const *contexts, int count) {
  moeflow_status status = MOEFLOW_OK;
  if (!contexts || count < 1 || count > CONTEXTS_MAX) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "%d contexts given; a group needs 1 to %d", contexts ? count : 0, CONTEXTS_MAX);
  }
  for (int i = 0; i < count; i++) {
    CHECK(handle_check(contexts[i], HANDLE_CONTEXT));
    if (contexts[i]->backend != contexts[0]->backend || contexts[i]->device != contexts[0]->device) {
      FAIL(MOEFLOW_ERROR_ARGUMENT, "context %d is on %s device %d, context 0 on %s device %d; a group has one", i,
           contexts[i]->backend->name, contexts[i]->device, contexts[0]->backend->name, contexts[0]->device);
    }
  }
cleanup:
  return status;
}

static moeflow_status check_numbers(const moeflow_group_config *config) {
  const struct {
    const char *name;
    int value, least, most;
  } ranges[] = {
      {"ranks", config->ranks, 1, SPEC_EXPERTS_MAX},
      {"rank", config->rank, 0, config->ranks - 1},
      {"capacity", config->capacity, 1, INT32_MAX},
      {"lanes", config->lanes, 1, GROUP_LANES_MAX},
      {"timeout_ms", config->timeout_ms, 0, INT32_MAX},
      {"local_experts_max", config->local_experts_max, 0, MOEFLOW_LOCAL_EXPERTS_MAX},
  };
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
    if (ranges[i].value >= ranges[i].least && ranges[i].value <= ranges[i].most) continue;
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s is %d and must be %d to %d", ranges[i].name, ranges[i].value,
                      ranges[i].least, ranges[i].most);
  }
  return MOEFLOW_OK;
}

static moeflow_status check_shape(const struct spec *spec, const moeflow_group_config *config) {
  if (config->ranks > spec->experts) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d ranks for the %d experts of %s: each rank must own at least one",
                      config->ranks, spec->experts, spec->name);
  }
  if ((int64_t)config->ranks * config->capacity > MOEFLOW_ENTRIES_MAX / spec->top_k) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d ranks x capacity %d x %d choices of %s exceeds 2^31 - 1024 entries",
                      config->ranks, config->capacity, spec->top_k, spec->name);
  }
  return MOEFLOW_OK;
}

/* ---- Transport ---- */

static moeflow_transport resolve(const moeflow_group_config *config, int on_gpu, const char **why) {
  *why = "the backend is the CPU's";
  if (!on_gpu) return MOEFLOW_TRANSPORT_LOCAL;
  *why = "a communicator was given";
  if (config->nccl_comm) return MOEFLOW_TRANSPORT_NCCL;
  *why = "there is one rank";
  if (config->ranks == 1) return MOEFLOW_TRANSPORT_LOCAL;
  *why = "the unique id was made for it";
  if (config->unique_id && comm_local_made(config->unique_id)) return MOEFLOW_TRANSPORT_LOCAL;
  if (config->unique_id && comm_window_made(config->unique_id)) return MOEFLOW_TRANSPORT_WINDOW;
  *why = "ranks may be in several processes";
  return MOEFLOW_TRANSPORT_NCCL;
}

/* Each rank's exchange waits on the device for kernels and copies of the others, which must not queue behind it: a hardware
 * queue (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default) for each lane's stream and for each context's own, and one resident
 * block for each waiting rank. Fewer queues were seen to hang now and then: 8 ranks with 8 of them. */
static moeflow_status check_local_gpu(const moeflow_group_config *config) {
  const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  int queues = text && atoi(text) > 0 ? atoi(text) : 8;
  if (config->ranks > LOCAL_GPU_RANKS_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d ranks on one GPU; at most %d", config->ranks, LOCAL_GPU_RANKS_MAX);
  }
  const int needed = config->ranks == 1 ? 1 : config->ranks * (config->lanes + 1);
  if (needed <= queues) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                    "%d ranks with %d lane(s) on one GPU need %d hardware queues and there are %d: set "
                    "CUDA_DEVICE_MAX_CONNECTIONS=32 before the process touches the GPU",
                    config->ranks, config->lanes, needed, queues);
}

static moeflow_status check_one_sided(const moeflow_group_config *config) {
  if (config->nccl_comm) return status_set(MOEFLOW_ERROR_ARGUMENT, "a communicator to adopt is for nccl and allgather");
  if (config->ranks == 1 || config->unique_id) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT, "%d ranks need a unique_id, the same on all of them", config->ranks);
}

static moeflow_status check_local(const moeflow_group_config *config, int on_gpu) {
  moeflow_status status = check_one_sided(config);
  return status == MOEFLOW_OK && on_gpu ? check_local_gpu(config) : status;
}

/* Any id serves by which processes can meet: a local one was made for threads. */
static moeflow_status check_window(const moeflow_group_config *config, int on_gpu) {
  if (!on_gpu)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the window transport moves GPU memory; the CPU backend has local only");
  if (config->unique_id && comm_local_made(config->unique_id)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "this unique_id was made for the local transport; window needs its own or NCCL's");
  }
  return check_one_sided(config);
}

static moeflow_status check_nccl(const moeflow_group_config *config, const char *name, int on_gpu) {
  if (!on_gpu)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the %s transport moves GPU memory; the CPU backend has local only", name);
  if (!config->unique_id == !config->nccl_comm) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the %s transport needs either a unique_id or a communicator to adopt", name);
  }
  if (config->nccl_comm && config->lanes != 1) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "an adopted communicator serves 1 lane, not %d", config->lanes);
  }
  if (config->unique_id && (comm_local_made(config->unique_id) || comm_window_made(config->unique_id))) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "this unique_id was made for the %s transport; the %s transport needs NCCL's",
                      comm_local_made(config->unique_id) ? "local" : "window", name);
  }
  return MOEFLOW_OK;
}

/* The transport adds the owners' sums, all of one dtype since it does not know whose rows they are. */
static moeflow_status check_allgather(moeflow_context *const *contexts, int count) {
  const struct spec *first = &contexts[0]->plan.spec;
  for (int i = 0; i < count; i++) {
    const struct spec *spec = &contexts[i]->plan.spec;
    if (spec->reduce != SPEC_REDUCE_OWNER) {
      return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                        "the allgather transport adds the owners' sums, and %s returns choices; use nccl, window or local",
                        spec->name);
    }
    if (spec->returned != first->returned) {
      return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                        "%s and %s return different dtypes; the allgather transport needs a group for each", first->name,
                        spec->name);
    }
  }
  return MOEFLOW_OK;
}

static moeflow_status check_transport(moeflow_context *const *contexts, int count, moeflow_group_config *config) {
  const struct moeflow_context *context = contexts[0];
  moeflow_status status;
  const int on_gpu = context->backend == &backend_cuda;
  static const char *const names[] = {[MOEFLOW_TRANSPORT_NCCL] = "nccl",
                                      [MOEFLOW_TRANSPORT_WINDOW] = "window",
                                      [MOEFLOW_TRANSPORT_LOCAL] = "local"}; /* those that AUTO chooses among */
  if (config->transport == MOEFLOW_TRANSPORT_AUTO) {
    const char *why;
    config->transport = resolve(config, on_gpu, &why);
    context_log(context, MOEFLOW_LOG_INFO, "transport %s: %s", names[config->transport], why);
  }
  switch (config->transport) {
    case MOEFLOW_TRANSPORT_LOCAL:
      return check_local(config, on_gpu);
    case MOEFLOW_TRANSPORT_NCCL:
      return check_nccl(config, "nccl", on_gpu);
    case MOEFLOW_TRANSPORT_ALLGATHER:
      status = check_nccl(config, "allgather", on_gpu);
      return status == MOEFLOW_OK ? check_allgather(contexts, count) : status;
    case MOEFLOW_TRANSPORT_WINDOW:
      return check_window(config, on_gpu);
    default:
      return status_set(MOEFLOW_ERROR_ARGUMENT, "transport %d does not exist", (int)config->transport);
  }
}

static moeflow_status check_allocator(const moeflow_allocator *allocator) {
  if (!allocator || (allocator->allocate && allocator->release)) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT, "an allocator needs both functions, allocate and release");
}

static moeflow_status check_workspace(const struct moeflow_context *context, const moeflow_group_config *config) {
  const struct moeflow_group *lender = config->workspace_of;
  if (!lender) return MOEFLOW_OK;
  moeflow_status status = handle_check(lender, HANDLE_GROUP);
  if (status != MOEFLOW_OK) return status_prefix(status, "workspace_of");
  if (lender->contexts[0]->backend != context->backend || lender->contexts[0]->device != context->device ||
      lender->lane_count < config->lanes) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "workspace_of is on %s device %d with %d lane(s), and this group on %s device %d with %d",
                      lender->contexts[0]->backend->name, lender->contexts[0]->device, lender->lane_count,
                      context->backend->name, context->device, config->lanes);
  }
  return MOEFLOW_OK;
}

moeflow_status group_config_check(moeflow_context *const *contexts, int context_count, moeflow_group_config *config) {
  moeflow_status status = MOEFLOW_OK;
  int local_experts = 0;
  CHECK(check_contexts(contexts, context_count));
  CHECK(check_numbers(config));
  for (int i = 0; i < context_count; i++) {
    const struct spec *spec = &contexts[i]->plan.spec;
    CHECK(check_shape(spec, config));
    int most = (spec->experts + config->ranks - 1) / config->ranks;
    if (most > local_experts) local_experts = most;
  }
  if (!config->local_experts_max) config->local_experts_max = local_experts;
  if (!config->timeout_ms) config->timeout_ms = TIMEOUT_MS_DEFAULT;
  CHECK(check_allocator(config->allocator));
  CHECK(check_workspace(contexts[0], config));
  CHECK(check_transport(contexts, context_count, config));
cleanup:
  return status;
}
