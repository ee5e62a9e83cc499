/* The fake GPU with graphs, events and waits on a word, which libfake_cuda.so does not have: put into the driver's table, and
 * written down in `seen`. */
#ifndef MOEFLOW_FAKE_GRAPH_H
#define MOEFLOW_FAKE_GRAPH_H

#include "driver.h"
#include "fake_world.h"

#define SEEN_MAX 512

static __typeof__(driver.cuLaunchKernel) fake_launch;
static struct {
  int capturing, captured, graphs; /* launches in the last capture, graphs that live */
  int replays;
  int events;
  char kernel[SEEN_MAX][48]; /* of the last capture */
  unsigned blocks[SEEN_MAX];
  unsigned char params[SEEN_MAX][384];
  volatile uint32_t *gate;
  void (*launched)(const char *kernel, void *params); /* may be NULL: in place of what the kernel does */
} seen;

static CUresult graph_kernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                             unsigned shared, CUstream stream, void **params, void **extra) {
  cuda->call_count = 0;
  const CUresult result = fake_launch(function, x, y, z, tx, ty, tz, shared, stream, params, extra);
  const struct fake_call *call = &cuda->calls[0];
  if (seen.launched) seen.launched(call->kernel, params[0]);
  if (!seen.capturing || seen.captured == SEEN_MAX) return result;
  memcpy(seen.kernel[seen.captured], call->kernel, sizeof call->kernel);
  memcpy(seen.params[seen.captured], call->params, sizeof call->params);
  seen.blocks[seen.captured++] = x;
  return result;
}

static CUresult graph_begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  (void)stream, (void)mode;
  cuda->capturing = seen.capturing = 1;
  seen.captured = 0;
  return CUDA_SUCCESS;
}
static CUresult graph_end_capture(CUstream stream, CUgraph *graph) {
  (void)stream;
  cuda->capturing = seen.capturing = 0;
  *graph = (CUgraph)&seen;
  return CUDA_SUCCESS;
}
static CUresult graph_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  (void)graph, (void)flags;
  *exec = (CUgraphExec)&seen;
  seen.graphs++;
  return CUDA_SUCCESS;
}
static CUresult graph_launch_graph(CUgraphExec exec, CUstream stream) {
  (void)exec, (void)stream;
  EXPECT(seen.gate && !*seen.gate, "the gate is open while the host still enqueues");
  seen.replays++;
  return CUDA_SUCCESS;
}
static CUresult graph_upload_graph(CUgraphExec exec, CUstream stream) {
  (void)exec, (void)stream;
  return CUDA_SUCCESS;
}
static CUresult graph_destroy_graph(CUgraph graph) {
  (void)graph;
  return CUDA_SUCCESS;
}
static CUresult graph_destroy_exec(CUgraphExec exec) {
  (void)exec;
  seen.graphs--;
  return CUDA_SUCCESS;
}
static CUresult graph_create_event(CUevent *event, unsigned flags) {
  (void)flags;
  *event = (CUevent)&seen;
  seen.events++;
  return CUDA_SUCCESS;
}
static CUresult graph_destroy_event(CUevent event) {
  (void)event;
  seen.events--;
  return CUDA_SUCCESS;
}
static CUresult graph_record_event(CUevent event, CUstream stream) {
  (void)event, (void)stream;
  return CUDA_SUCCESS;
}
static CUresult graph_elapsed(float *ms, CUevent begin, CUevent end) {
  (void)begin, (void)end;
  *ms = 1.6f;
  return CUDA_SUCCESS;
}
static CUresult graph_wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  (void)stream, (void)flags;
  seen.gate = (volatile uint32_t *)(uintptr_t)address;
  return value == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* After fake_load. Every replay takes 1.6 ms. */
static void fake_graphs(void) {
  EXPECT_OK(driver_load());
  fake_launch = driver.cuLaunchKernel;
  driver.cuLaunchKernel = graph_kernel;
  driver.cuLaunchKernelEx = NULL; /* all launches by one way, the hooked one */
  driver.cuStreamBeginCapture = graph_begin_capture;
  driver.cuStreamEndCapture = graph_end_capture;
  driver.cuGraphInstantiate = graph_instantiate;
  driver.cuGraphLaunch = graph_launch_graph;
  driver.cuGraphUpload = graph_upload_graph;
  driver.cuGraphDestroy = graph_destroy_graph;
  driver.cuGraphExecDestroy = graph_destroy_exec;
  driver.cuEventCreate = graph_create_event;
  driver.cuEventDestroy = graph_destroy_event;
  driver.cuEventRecord = graph_record_event;
  driver.cuEventElapsedTime = graph_elapsed;
  driver.cuStreamWaitValue32 = graph_wait_value;
}
#endif
