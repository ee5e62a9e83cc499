/* A layer on one real GPU for tests: cubins made by moeflow-gen into a scratch cache (or MOEFLOW_TEST_CACHE), inputs and the
 * reference from cpu_world.h, mirrored into device memory. Ranks are threads over the local transport (gpu_open), or this
 * process is one rank of a group over NCCL (gpu_open_rank). */
#ifndef MOEFLOW_GPU_WORLD_H
#define MOEFLOW_GPU_WORLD_H

#pragma GCC diagnostic ignored "-Wunused-function" /* a test uses part of this */

#include <dlfcn.h>
#include <unistd.h>

#include "cpu_world.h"
#include "driver.h"
#include "internal.h"
#include "scratch.h"

/* Driver functions that the library itself does not need. */
#define GPU_FUNCTIONS(X)  \
  X(cuStreamBeginCapture) \
  X(cuStreamEndCapture)   \
  X(cuGraphInstantiate)   \
  X(cuGraphLaunch)        \
  X(cuGraphExecDestroy)   \
  X(cuGraphDestroy)       \
  X(cuMemcpyDtoDAsync)    \
  X(cuCtxSynchronize)
#define GPU_STRING(name) #name
#define GPU_SYMBOL(name) GPU_STRING(name)
static struct {
#define GPU_MEMBER(name) __typeof__(name) *name;
  GPU_FUNCTIONS(GPU_MEMBER)
#undef GPU_MEMBER
} gpu_driver;

#define CU(call) gpu_check(driver.call, #call, __LINE__)
#define CUX(call) gpu_check(gpu_driver.call, #call, __LINE__)

static void gpu_check(CUresult result, const char *call, int line) {
  test_checks++;
  if (result == CUDA_SUCCESS) return;
  driver_status(result, call);
  fprintf(stderr, "line %d: %s\n", line, moeflow_last_error());
  exit(1);
}

/* Device memory of one rank. */
struct gpu_rank {
  CUstream stream;
  CUdeviceptr matrices[2], pointers[2], hidden, out, ids, weights, logits; /* pointers: with WORLD_POINTERS */
};

struct gpu {
  struct world world; /* host side: inputs, places, reference */
  struct gpu_rank rank[WORLD_RANKS_MAX];
  moeflow_transport transport;
  int device;
  CUcontext context;
  char arch[16];
};

/* ---- The GPU and its cubins ---- */

static void gpu_start(struct gpu *gpu) {
  CUdevice device;
  int major, minor;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); /* ranks on one GPU wait for each other */
  if (driver_load() != MOEFLOW_OK) SKIP("%s", moeflow_last_error());
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define GPU_RESOLVE(name) *(void **)&gpu_driver.name = library ? dlsym(library, GPU_SYMBOL(name)) : NULL;
  GPU_FUNCTIONS(GPU_RESOLVE)
#undef GPU_RESOLVE
  CU(cuDeviceGet(&device, gpu->device));
  CU(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  CU(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  snprintf(gpu->arch, sizeof gpu->arch, "sm_%d%d%s", major, minor, major >= 9 ? "a" : "");
  CU(cuDevicePrimaryCtxRetain(&gpu->context, device));
  CU(cuCtxPushCurrent(gpu->context));
}

static char gpu_cache[600];

static void gpu_choose_cache(void) {
  const char *given = getenv("MOEFLOW_TEST_CACHE");
  if (*gpu_cache) return;
  scratch_make();
  atexit(scratch_remove);
  snprintf(gpu_cache, sizeof gpu_cache, "%s", given && *given ? given : scratch_path("cache"));
}

/* Name, shape, reduction and activation make the model; two tests that share a cache share its cubins. */
static void gpu_name(struct spec *spec) {
  snprintf(spec->name, sizeof spec->name, "test-%d-%d-%d-%d-%s%s%s%s", spec->hidden, spec->intermediate, spec->experts,
           spec->top_k, spec->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner",
           spec->score == SPEC_SOFTMAX ? "-softmax" : "", spec->returned == SPEC_WIRE_FP32 ? "-fp32" : "",
           spec->activation == SPEC_SWIGLU_CLAMP ? "-clamp" : "");
}

static void gpu_build(const struct spec *spec, const char *arch) {
  char yaml[1024], path[1024], command[4096], activation[80] = "swiglu";
  gpu_choose_cache();
  if (spec->activation == SPEC_SWIGLU_CLAMP) {
    snprintf(activation, sizeof activation, "{kind: swiglu_clamp, limit: %g}", spec->activation_limit);
  }
  snprintf(yaml, sizeof yaml,
           "moeflow: 1\nname: %s\nhidden: %d\nintermediate: %d\nexperts: %d\ntop_k: %d\nactivation: %s\n"
           "router: {score: %s, renormalize: false, scale: 1.0}\nweights: {dtype: bf16}\nreturn: %s\nreduce: %s\n",
           spec->name, spec->hidden, spec->intermediate, spec->experts, spec->top_k, activation,
           spec->score == SPEC_SOFTMAX ? "softmax" : "sigmoid", spec->returned == SPEC_WIRE_FP32 ? "fp32" : "bf16",
           spec->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner");
  snprintf(path, sizeof path, "%s", scratch_path("model.yaml"));
  scratch_write(path, yaml, strlen(yaml), 0600);
  const char *bin = getenv("MOEFLOW_BIN"); /* a tree that was built elsewhere */
  snprintf(command, sizeof command, "'%s/moeflow-gen' build '%s' --dtype bf16 --arch %s --cache '%s' > '%s.log' 2>&1",
           bin ? bin : MOEFLOW_BINARY_DIR "/bin", path, arch, gpu_cache, path);
  if (system(command) != 0) {
    snprintf(command, sizeof command, "cat '%s.log' >&2", path);
    EXPECT(system(command) == 0 && 0, "moeflow-gen build failed");
    exit(1);
  }
}

/* ---- Ranks ---- */

static CUdeviceptr gpu_memory(const void *from, size_t bytes) {
  CUdeviceptr memory;
  CUstream stream;
  CU(cuMemAlloc(&memory, bytes + 256));
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(cuMemsetD8Async(memory, 0xff, bytes + 256, stream));
  if (from) CU(cuMemcpyHtoDAsync(memory, from, bytes, stream));
  CU(cuStreamSynchronize(stream));
  CU(cuStreamDestroy(stream));
  return memory;
}

static void *gpu_pointer(CUdeviceptr memory) {
  return (void *)(uintptr_t)memory;
}

/* The experts' matrices last to first, where no base and stride would find them, and the array that says where they are. */
static void gpu_scatter(struct gpu *gpu, int rank, int down, size_t expert_bytes) {
  const struct world_rank *host = &gpu->world.rank[rank];
  struct gpu_rank *mine = &gpu->rank[rank];
  const size_t experts = (size_t)host->local_experts;
  char *reversed = malloc(experts * expert_bytes + 1);
  CUdeviceptr *at = calloc(experts + 1, sizeof *at);
  for (size_t e = 0; e < experts; e++) {
    memcpy(reversed + (experts - 1 - e) * expert_bytes, host->pointers[down][e], expert_bytes);
  }
  mine->matrices[down] = gpu_memory(reversed, experts * expert_bytes);
  for (size_t e = 0; e < experts; e++) at[e] = mine->matrices[down] + (experts - 1 - e) * expert_bytes;
  mine->pointers[down] = gpu_memory(at, experts * sizeof *at);
  free(reversed);
  free(at);
}

static moeflow_status gpu_bind(struct gpu *gpu, int rank) {
  struct world_rank *host = &gpu->world.rank[rank];
  struct gpu_rank *mine = &gpu->rank[rank];
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  int64_t expert_stride[2], row_stride[2]; /* in elements */
  host->local_experts = moeflow_layer_local_experts(host->layer);
  for (int down = 0; down < 2; down++) {
    world_make_matrices(&gpu->world, rank, down, &expert_stride[down], &row_stride[down]);
    if (gpu->world.weights == WORLD_POINTERS) {
      gpu_scatter(gpu, rank, down, (size_t)(2 * expert_stride[down]));
    } else {
      mine->matrices[down] = gpu_memory(host->matrices[down], (size_t)(2 * host->local_experts * expert_stride[down]));
    }
  }
  weights.order = gpu->world.order;
  if (gpu->world.weights == WORLD_POINTERS) {
    weights.gate_up_experts = gpu_pointer(mine->pointers[0]);
    weights.down_experts = gpu_pointer(mine->pointers[1]);
  } else {
    weights.gate_up = gpu_pointer(mine->matrices[0]);
    weights.down = gpu_pointer(mine->matrices[1]);
    weights.gate_up_expert_stride = 2 * expert_stride[0];
    weights.down_expert_stride = 2 * expert_stride[1];
  }
  weights.gate_up_row_stride = 2 * row_stride[0];
  weights.down_row_stride = 2 * row_stride[1];
  return moeflow_layer_bind(host->layer, &weights);
}

static void gpu_make_buffers(struct gpu *gpu, int rank) {
  const struct spec *spec = &gpu->world.spec;
  struct gpu_rank *mine = &gpu->rank[rank];
  const size_t tokens = (size_t)gpu->world.capacity;
  CU(cuStreamCreate(&mine->stream, CU_STREAM_NON_BLOCKING));
  mine->hidden = gpu_memory(NULL, tokens * spec->hidden * 2);
  mine->out = gpu_memory(NULL, tokens * spec->hidden * 2);
  mine->ids = gpu_memory(NULL, tokens * spec->top_k * 4);
  mine->weights = gpu_memory(NULL, tokens * spec->top_k * 4);
  mine->logits = gpu_memory(NULL, tokens * spec->experts * 4);
}

static void gpu_open_one(struct world *world, int rank, void *argument) {
  struct gpu *gpu = argument;
  struct world_rank *mine = &world->rank[rank];
  moeflow_open_config open = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_layer_config layer = MOEFLOW_LAYER_CONFIG_INIT;
  CU(cuCtxPushCurrent(gpu->context));
  open.device = gpu->device;
  open.model = world->spec.name;
  open.cache = gpu_cache;
  config.rank = rank;
  config.ranks = world->ranks;
  config.capacity = world->capacity;
  config.lanes = world->lanes;
  config.transport = gpu->transport;
  config.unique_id = &world->id;
  config.timeout_ms = world->timeout_ms;
  layer.combine = world->combine;
  world_note(world, rank, moeflow_open(&open, &mine->context));
  if (!mine->status) world_note(world, rank, moeflow_group_create(&mine->context, 1, &config, &mine->group));
  if (!mine->status) world_note(world, rank, moeflow_layer_create(mine->group, mine->context, &layer, &mine->layer));
  if (!mine->status) world_note(world, rank, gpu_bind(gpu, rank));
  if (!mine->status) world_note(world, rank, moeflow_prepare(&mine->layer, 1, 0));
  if (!mine->status) gpu_make_buffers(gpu, rank);
}

static void gpu_defaults(struct gpu *gpu) {
  struct world *world = &gpu->world;
  if (!world->lanes) world->lanes = 1;
  if (!world->replicas) world->replicas = 1;
  if (!world->timeout_ms) world->timeout_ms = 20000;
  gpu_name(&world->spec);
}

/* All ranks, on one GPU. */
static void gpu_open(struct gpu *gpu) {
  gpu_defaults(gpu);
  if (!gpu->context) gpu_start(gpu);
  gpu_build(&gpu->world.spec, gpu->arch);
  gpu->transport = MOEFLOW_TRANSPORT_LOCAL;
  EXPECT(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &gpu->world.id) == MOEFLOW_OK, "%s", moeflow_last_error());
  world_each(&gpu->world, gpu_open_one, gpu);
  for (int r = 0; r < gpu->world.ranks; r++) {
    EXPECT(gpu->world.rank[r].status == MOEFLOW_OK, "rank %d: %s", r, gpu->world.rank[r].message);
    if (gpu->world.rank[r].status != MOEFLOW_OK) exit(1);
  }
}

static void gpu_close_one(struct world *world, int rank, void *argument) {
  struct gpu *gpu = argument;
  struct world_rank *host = &world->rank[rank];
  struct gpu_rank *mine = &gpu->rank[rank];
  CU(cuCtxPushCurrent(gpu->context));
  EXPECT(moeflow_layer_destroy(host->layer) == MOEFLOW_OK, "rank %d: %s", rank, moeflow_last_error());
  EXPECT(moeflow_group_destroy(host->group) == MOEFLOW_OK, "rank %d: %s", rank, moeflow_last_error());
  EXPECT(moeflow_close(host->context) == MOEFLOW_OK, "rank %d: %s", rank, moeflow_last_error());
  CUdeviceptr memory[] = {mine->matrices[0], mine->matrices[1], mine->pointers[0], mine->pointers[1], mine->hidden,
                          mine->out,         mine->ids,         mine->weights,     mine->logits};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
    if (memory[i]) CU(cuMemFree(memory[i]));
  }
  if (mine->stream) CU(cuStreamDestroy(mine->stream));
  for (int down = 0; down < 2; down++) {
    free(host->matrices[down]);
    free(host->pointers[down]);
  }
  memset(host, 0, sizeof *host);
  memset(mine, 0, sizeof *mine);
}

static void gpu_close(struct gpu *gpu) {
  world_each(&gpu->world, gpu_close_one, gpu);
}

/* ---- A step ---- */

static void gpu_put(struct gpu *gpu, const struct step *step, int rank) {
  const struct spec *spec = &gpu->world.spec;
  const struct gpu_rank *mine = &gpu->rank[rank];
  const size_t tokens = (size_t)step->tokens[rank];
  if (!tokens) return;
  CU(cuMemcpyHtoDAsync(mine->hidden, step->hidden[rank], tokens * spec->hidden * 2, mine->stream));
  CU(cuMemcpyHtoDAsync(mine->ids, step->ids[rank], tokens * spec->top_k * 4, mine->stream));
  CU(cuMemcpyHtoDAsync(mine->weights, step->weights[rank], tokens * spec->top_k * 4, mine->stream));
  if (step->logits[rank]) {
    CU(cuMemcpyHtoDAsync(mine->logits, step->logits[rank], tokens * spec->experts * 4, mine->stream));
  }
  CU(cuMemsetD8Async(mine->out, 0xff, tokens * spec->hidden * 2, mine->stream)); /* NaN: stale values show */
}

static moeflow_forward_args gpu_args(const struct gpu *gpu, const struct step *step, int rank) {
  const struct gpu_rank *mine = &gpu->rank[rank];
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = step->tokens[rank];
  args.tokens_max = step->tokens_max;
  args.hidden = gpu_pointer(mine->hidden);
  if (step->logits[rank]) {
    args.logits = gpu_pointer(mine->logits);
  } else {
    args.ids = gpu_pointer(mine->ids);
    args.weights = gpu_pointer(mine->weights);
  }
  args.out = gpu_pointer(mine->out);
  args.lane = step->lane;
  args.stream = mine->stream;
  args.flags = step->flags;
  return args;
}

static void gpu_get(struct gpu *gpu, struct step *step, int rank) {
  const size_t bytes = (size_t)step->tokens[rank] * (size_t)gpu->world.spec.hidden * 2;
  if (bytes) CU(cuMemcpyDtoHAsync(step->out[rank], gpu->rank[rank].out, bytes, gpu->rank[rank].stream));
  CU(cuStreamSynchronize(gpu->rank[rank].stream));
}

struct gpu_step {
  struct gpu *gpu;
  struct step *step;
};

static void gpu_step_one(struct world *world, int rank, void *argument) {
  struct gpu *gpu = ((struct gpu_step *)argument)->gpu;
  struct step *step = ((struct gpu_step *)argument)->step;
  CU(cuCtxPushCurrent(gpu->context));
  gpu_put(gpu, step, rank);
  moeflow_forward_args args = gpu_args(gpu, step, rank);
  step->forward[rank] = moeflow_forward(world->rank[rank].layer, &args);
  if (step->forward[rank]) snprintf(step->forward_message[rank], 512, "%s", moeflow_last_error());
  step->poll[rank] = moeflow_poll(world->rank[rank].group, 30000);
  if (step->poll[rank]) snprintf(step->poll_message[rank], 512, "%s", moeflow_last_error());
  gpu_get(gpu, step, rank);
}

static void gpu_run(struct gpu *gpu, struct step *step) {
  struct gpu_step both = {gpu, step};
  world_each(&gpu->world, gpu_step_one, &both);
}

/* ---- Graphs ---- */

static CUgraphExec gpu_capture(struct gpu *gpu, const struct step *step, int rank) {
  CUgraph graph;
  CUgraphExec exec;
  moeflow_forward_args args = gpu_args(gpu, step, rank);
  CUX(cuStreamBeginCapture(gpu->rank[rank].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  const moeflow_status status = moeflow_forward(gpu->world.rank[rank].layer, &args);
  EXPECT(status == MOEFLOW_OK, "rank %d: %s", rank, moeflow_last_error());
  CUX(cuStreamEndCapture(gpu->rank[rank].stream, &graph));
  CUX(cuGraphInstantiate(&exec, graph, 0));
  CUX(cuGraphDestroy(graph));
  return exec;
}
#endif
