/* The CPU backend: host memory, and a table of C functions in place of cubins. A launch runs at once on the calling thread.
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "cpu.h"

#define ALIGNMENT 256
#define WORKERS_MAX 255

static const cpu_kernel kernels[KERNEL_COUNT] = {
    [KERNEL_ROUTER] = cpu_router,
    [KERNEL_PACK] = cpu_pack,
    [KERNEL_EXCHANGE] = cpu_exchange,
    [KERNEL_EXPERT_INDEX] = cpu_expert_index,
    [KERNEL_EXPERT_PREPARE] = cpu_expert_prepare,
    [KERNEL_GATE_UP] = cpu_gate_up,
    [KERNEL_DOWN] = cpu_down,
    [KERNEL_IDENTITY] = cpu_identity,
    [KERNEL_OWNER_REDUCE] = cpu_owner_reduce,
    [KERNEL_COMBINE] = cpu_combine,
    [KERNEL_COMBINE_RING] = cpu_combine_ring,
    [KERNEL_FILL] = cpu_fill,
};

struct cpu_state {
  int cores;
  pthread_mutex_t mutex; /* two groups may prepare at the same time */
  struct cpu_pool *pool;
};

/* Cores that this process may use, which in a container are fewer than the machine's. */
static int usable_cores(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

static moeflow_status cpu_open(struct moeflow_context *context) {
  struct cpu_state *state = calloc(1, sizeof *state);
  if (!state) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the CPU backend's state");
  state->cores = usable_cores();
  context->multiprocessors = 1;
  pthread_mutex_init(&state->mutex, NULL);
  context->backend_state = state;
  return MOEFLOW_OK;
}

static void cpu_close(struct moeflow_context *context) {
  struct cpu_state *state = context->backend_state;
  if (!state) return;
  cpu_pool_destroy(state->pool);
  pthread_mutex_destroy(&state->mutex);
  free(state);
  context->backend_state = NULL;
}

static moeflow_status cpu_allocate(struct moeflow_context *context, size_t bytes, void **memory) {
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  (void)context;
  *memory = rounded >= bytes ? aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT) : NULL;
  if (!*memory) return status_set(MOEFLOW_ERROR_MEMORY, "no host memory for %zu bytes", bytes);
  memset(*memory, 0, rounded);
  return MOEFLOW_OK;
}

static void cpu_release(struct moeflow_context *context, void *memory) {
  (void)context;
  free(memory);
}

static moeflow_status cpu_allocate_record(struct moeflow_context *context, size_t bytes, void **host, void **device) {
  const moeflow_status status = cpu_allocate(context, bytes, host);
  *device = *host;
  return status;
}

static moeflow_status cpu_copy(struct moeflow_context *context, void *to, const void *from, size_t bytes) {
  (void)context;
  if (bytes) memcpy(to, from, bytes);
  return MOEFLOW_OK;
}

static moeflow_status cpu_prepare(struct moeflow_context *context) {
  struct cpu_state *state = context->backend_state;
  const int workers = state->cores - 1 < WORKERS_MAX ? state->cores - 1 : WORKERS_MAX;
  moeflow_status status = MOEFLOW_OK;
  pthread_mutex_lock(&state->mutex);
  if (!state->pool && workers > 0) status = cpu_pool_create(workers, &state->pool);
  pthread_mutex_unlock(&state->mutex);
  return status;
}

static moeflow_status cpu_launch(struct moeflow_context *context, const struct launch *launch) {
  const struct cpu_state *state = context->backend_state;
  const int ranks = launch->layer && launch->layer->group ? launch->layer->group->ranks : 1;
  const int threads = state->cores / ranks > 1 ? state->cores / ranks : 1;
  const struct cpu_call call = {&context->plan.spec, launch->layer, state->pool, threads};
  return kernels[launch->kernel](&call, launch->params);
}

const struct backend backend_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .allocate_record = cpu_allocate_record,
    .release_record = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .prepare = cpu_prepare,
    .launch = cpu_launch,
};
