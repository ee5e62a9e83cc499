#include "timer.h"

static moeflow_status check_driver(void) {
  if (driver.cuStreamBeginCapture && driver.cuStreamEndCapture && driver.cuGraphInstantiate && driver.cuGraphLaunch &&
      driver.cuGraphUpload && driver.cuGraphDestroy && driver.cuGraphExecDestroy && driver.cuEventCreate &&
      driver.cuEventDestroy && driver.cuEventRecord && driver.cuEventElapsedTime)
    return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the CUDA driver lacks graph or event functions; install a newer one");
}

static moeflow_status create_gate(struct timer *timer) {
  moeflow_status status = MOEFLOW_OK;
  void *memory = NULL;
  if (!driver.cuStreamWaitValue32) return MOEFLOW_OK;
  CHECK_CUDA(cuMemHostAlloc(&memory, sizeof *timer->gate, CU_MEMHOSTALLOC_DEVICEMAP));
  timer->gate = memory;
  *timer->gate = 0;
  CHECK_CUDA(cuMemHostGetDevicePointer(&timer->gate_device, memory, 0));

cleanup:
  return status;
}

moeflow_status timer_open(struct timer *timer) {
  moeflow_status status = MOEFLOW_OK;
  *timer = (struct timer){.stream = NULL};
  CHECK(check_driver());
  CHECK_CUDA(cuStreamCreate(&timer->stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 2; i++) CHECK_CUDA(cuEventCreate(&timer->events[i], CU_EVENT_DEFAULT));
  CHECK(create_gate(timer));

cleanup:
  if (status != MOEFLOW_OK) timer_close(timer);
  return status;
}

void timer_close(struct timer *timer) {
  for (int i = 0; i < 2; i++)
    if (timer->events[i]) driver.cuEventDestroy(timer->events[i]);
  if (timer->stream) driver.cuStreamDestroy(timer->stream);
  if (timer->gate) driver.cuMemFreeHost(timer->gate);
  *timer = (struct timer){.stream = NULL};
}

moeflow_status timer_capture(struct timer *timer) {
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuStreamBeginCapture(timer->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));

cleanup:
  return status;
}

moeflow_status timer_captured(struct timer *timer, moeflow_status enqueued, CUgraphExec *graph) {
  moeflow_status status = enqueued;
  CUgraph captured = NULL;
  const CUresult ended = driver.cuStreamEndCapture(timer->stream, &captured);
  *graph = NULL;
  if (status == MOEFLOW_OK && ended != CUDA_SUCCESS) status = driver_status(ended, "cuStreamEndCapture");
  CHECK(status);
  CHECK_CUDA(cuGraphInstantiate(graph, captured, 0));
  CHECK_CUDA(cuGraphUpload(*graph, timer->stream));
  CHECK_CUDA(cuStreamSynchronize(timer->stream));

cleanup:
  if (captured) driver.cuGraphDestroy(captured);
  return status;
}

static void close_gate(struct timer *timer) {
  if (!timer->gate) return;
  __atomic_store_n(timer->gate, 0, __ATOMIC_SEQ_CST);
  if (driver.cuStreamWaitValue32(timer->stream, timer->gate_device, 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS) return;
  driver.cuMemFreeHost(timer->gate); /* not on this device */
  timer->gate = NULL;
}

static moeflow_status enqueue_timed(struct timer *timer, timer_enqueue enqueue, void *user) {
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuEventRecord(timer->events[0], timer->stream));
  CHECK(enqueue(user, timer->stream));
  CHECK_CUDA(cuEventRecord(timer->events[1], timer->stream));

cleanup:
  return status;
}

moeflow_status timer_run(struct timer *timer, timer_enqueue enqueue, void *user, double *microseconds) {
  moeflow_status status = MOEFLOW_OK;
  float ms = 0;
  close_gate(timer);
  status = enqueue_timed(timer, enqueue, user);
  if (timer->gate) __atomic_store_n(timer->gate, 1, __ATOMIC_SEQ_CST); /* also after a failure: nothing may wait for ever */
  const CUresult ended = driver.cuStreamSynchronize(timer->stream);
  CHECK(status);
  if (ended != CUDA_SUCCESS) CHECK(driver_status(ended, "cuStreamSynchronize"));
  CHECK_CUDA(cuEventElapsedTime(&ms, timer->events[0], timer->events[1]));
  *microseconds = (double)ms * 1e3;

cleanup:
  return status;
}

static moeflow_status launch_graph(void *user, CUstream stream) {
  moeflow_status status = MOEFLOW_OK;
  CHECK_CUDA(cuGraphLaunch((CUgraphExec)user, stream));

cleanup:
  return status;
}

moeflow_status timer_launch(struct timer *timer, CUgraphExec graph, double *microseconds) {
  return timer_run(timer, launch_graph, graph, microseconds);
}
