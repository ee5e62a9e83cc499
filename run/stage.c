#include "stage.h"

#include <stdlib.h>
#include <string.h>

#include "deadline.h"
#include "driver.h"

static const struct spec *spec_of(const struct stage *stage) {
  return &stage->context->plan.spec;
}

static size_t hidden_bytes(const struct stage *stage, int tokens) {
  return (size_t)tokens * (size_t)spec_of(stage)->hidden * sizeof(uint16_t);
}

static size_t picks(const struct stage *stage, int tokens) {
  return (size_t)tokens * (size_t)spec_of(stage)->top_k;
}

static moeflow_status allocate(struct stage *stage, size_t bytes, void **memory) {
  return stage->context->backend->allocate(stage->context, bytes ? bytes : 1, memory);
}

static moeflow_status upload(struct stage *stage, void *to, const void *from, size_t bytes) {
  return bytes ? stage->context->backend->upload(stage->context, to, from, bytes) : MOEFLOW_OK;
}

static moeflow_status download(struct stage *stage, void *to, const void *from, size_t bytes) {
  return bytes ? stage->context->backend->download(stage->context, to, from, bytes) : MOEFLOW_OK;
}

static moeflow_status create_stream(struct stage *stage) {
  moeflow_status status = MOEFLOW_OK;
  if (!driver.cuStreamBeginCapture || !driver.cuStreamEndCapture || !driver.cuGraphInstantiate || !driver.cuGraphLaunch ||
      !driver.cuGraphUpload || !driver.cuGraphDestroy || !driver.cuGraphExecDestroy || !driver.cuEventCreate ||
      !driver.cuEventDestroy || !driver.cuEventRecord || !driver.cuEventElapsedTime)
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "the CUDA driver lacks graph or event functions of CUDA 13; install a newer one");
  CHECK_CUDA(cuStreamCreate((CUstream *)&stage->stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 2; i++) CHECK_CUDA(cuEventCreate((CUevent *)&stage->events[i], CU_EVENT_DEFAULT));

cleanup:
  return status;
}

moeflow_status stage_create(moeflow_layer *layer, int tokens_max, int timeout_ms, struct stage *stage) {
  moeflow_status status = MOEFLOW_OK;
  *stage = (struct stage){.context = layer->context, .group = layer->group, .layer = layer, .timeout_ms = timeout_ms};
  stage->cuda = stage->context->backend == &backend_cuda;
  CHECK(allocate(stage, hidden_bytes(stage, tokens_max), &stage->hidden));
  CHECK(allocate(stage, hidden_bytes(stage, tokens_max), &stage->out));
  CHECK(allocate(stage, (size_t)tokens_max * (size_t)spec_of(stage)->experts * sizeof(float), &stage->logits));
  CHECK(allocate(stage, picks(stage, tokens_max) * sizeof(int32_t), &stage->ids32));
  CHECK(allocate(stage, picks(stage, tokens_max) * sizeof(int64_t), &stage->ids64));
  CHECK(allocate(stage, picks(stage, tokens_max) * sizeof(float), &stage->weights));
  if (stage->cuda) CHECK(create_stream(stage));

cleanup:
  if (status != MOEFLOW_OK) stage_destroy(stage);
  return status;
}

void stage_forget_graph(struct stage *stage) {
  if (stage->graph) driver.cuGraphExecDestroy(stage->graph);
  stage->graph = NULL;
}

void stage_destroy(struct stage *stage) {
  void *memory[] = {stage->hidden, stage->out, stage->logits, stage->ids32, stage->ids64, stage->weights};
  if (!stage->context) return;
  stage_forget_graph(stage);
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
    if (memory[i]) stage->context->backend->release(stage->context, memory[i]);
  for (int i = 0; i < 2; i++)
    if (stage->events[i]) driver.cuEventDestroy(stage->events[i]);
  if (stage->stream) driver.cuStreamDestroy(stage->stream);
  memset(stage, 0, sizeof *stage);
}

moeflow_status stage_load(struct stage *stage, int tokens, const uint16_t *hidden, const float *logits) {
  moeflow_status status = upload(stage, stage->hidden, hidden, hidden_bytes(stage, tokens));
  if (status != MOEFLOW_OK || !logits) return status;
  return upload(stage, stage->logits, logits, (size_t)tokens * (size_t)spec_of(stage)->experts * sizeof(float));
}

moeflow_status stage_load_ids(struct stage *stage, int tokens, const int32_t *ids, const float *weights) {
  const size_t count = picks(stage, tokens);
  moeflow_status status = MOEFLOW_OK;
  int64_t *wide = malloc((count + 1) * sizeof *wide);
  if (!wide) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %zu ids", count);
  for (size_t i = 0; i < count; i++) wide[i] = ids[i];
  CHECK(upload(stage, stage->ids32, ids, count * sizeof *ids));
  CHECK(upload(stage, stage->ids64, wide, count * sizeof *wide));
  CHECK(upload(stage, stage->weights, weights, count * sizeof *weights));

cleanup:
  free(wide);
  return status;
}

/* All bits set: NaN in bf16. In the stream's order, so that nobody waits for another rank's work. */
static moeflow_status poison(struct stage *stage, int tokens) {
  const size_t bytes = hidden_bytes(stage, tokens);
  moeflow_status status = MOEFLOW_OK;
  if (!bytes) return MOEFLOW_OK;
  if (!stage->cuda) {
    memset(stage->out, 0xff, bytes);
    return MOEFLOW_OK;
  }
  CHECK_CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)stage->out, 0xff, bytes, stage->stream));

cleanup:
  return status;
}

static moeflow_status forward(struct stage *stage, const struct stage_step *step) {
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = step->tokens;
  args.tokens_max = step->tokens_max;
  args.hidden = stage->hidden;
  args.out = stage->out;
  args.lane = step->lane;
  args.stream = stage->stream;
  args.flags = step->flags;
  if (step->form == STAGE_LOGITS) {
    args.logits = stage->logits;
  } else {
    args.ids = step->form == STAGE_IDS64 ? stage->ids64 : stage->ids32;
    args.ids_dtype = step->form == STAGE_IDS64 ? MOEFLOW_DTYPE_INT64 : MOEFLOW_DTYPE_INT32;
    args.weights = stage->weights;
  }
  return moeflow_forward(stage->layer, &args);
}

/* A step that a peer never joins must not hang us: the stream is watched, never waited for. */
static moeflow_status finish(struct stage *stage) {
  const int64_t deadline = deadline_in(stage->timeout_ms + 1000); /* the group's own bound first: it knows the peer */
  unsigned naps = 0;
  while (stage->cuda) {
    const CUresult result = driver.cuStreamQuery(stage->stream);
    if (result == CUDA_SUCCESS) break;
    if (result != CUDA_ERROR_NOT_READY) return driver_status(result, "cuStreamQuery");
    if (deadline_passed(deadline)) {
      const moeflow_status status = moeflow_poll(stage->group, 0);
      return status != MOEFLOW_OK ? status
                                  : status_set(MOEFLOW_ERROR_TIMEOUT, "a step did not end within %d ms", stage->timeout_ms);
    }
    deadline_nap(&naps);
  }
  return moeflow_poll(stage->group, stage->timeout_ms);
}

moeflow_status stage_run(struct stage *stage, const struct stage_step *step) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(poison(stage, step->tokens));
  CHECK(forward(stage, step));
  CHECK(finish(stage));

cleanup:
  return status;
}

moeflow_status stage_capture(struct stage *stage, const struct stage_step *step) {
  moeflow_status status = MOEFLOW_OK;
  CUgraph graph = NULL;
  stage_forget_graph(stage);
  CHECK_CUDA(cuStreamBeginCapture(stage->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  status = forward(stage, step);
  const CUresult ended = driver.cuStreamEndCapture(stage->stream, &graph);
  if (status == MOEFLOW_OK && ended != CUDA_SUCCESS) status = driver_status(ended, "cuStreamEndCapture");
  CHECK(status);
  CHECK_CUDA(cuGraphInstantiate((CUgraphExec *)&stage->graph, graph, 0));
  CHECK_CUDA(cuGraphUpload(stage->graph, stage->stream)); /* now, and not at a launch while a peer's kernel waits for ours */
  CHECK_CUDA(cuStreamSynchronize(stage->stream));

cleanup:
  if (graph) driver.cuGraphDestroy(graph);
  return status;
}

moeflow_status stage_replay(struct stage *stage, const struct stage_step *step, float *ms) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(poison(stage, step->tokens));
  CHECK_CUDA(cuEventRecord(stage->events[0], stage->stream));
  CHECK_CUDA(cuGraphLaunch(stage->graph, stage->stream));
  CHECK_CUDA(cuEventRecord(stage->events[1], stage->stream));
  CHECK(finish(stage));
  if (ms) CHECK_CUDA(cuEventElapsedTime(ms, stage->events[0], stage->events[1]));

cleanup:
  return status;
}

moeflow_status stage_output(struct stage *stage, int tokens, uint16_t *out) {
  return download(stage, out, stage->out, hidden_bytes(stage, tokens));
}

moeflow_status stage_picks(struct stage *stage, int lane, int tokens, int32_t *ids, float *weights) {
  const struct group_lane *of = &stage->group->lanes[lane];
  const size_t count = picks(stage, tokens);
  moeflow_status status = download(stage, ids, of->ids, count * sizeof *ids);
  return status != MOEFLOW_OK ? status : download(stage, weights, of->weights, count * sizeof *weights);
}
