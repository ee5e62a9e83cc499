/* Captured graphs and how long they take: the work between two events of one stream, which begins only when the host has
 * enqueued all of it, so that launching costs nothing inside the interval. */
#ifndef MOEFLOW_BENCH_TIMER_H
#define MOEFLOW_BENCH_TIMER_H

#include <stdint.h>

#include "driver.h"

struct timer {
  CUstream stream;
  CUevent events[2];
  uint32_t *gate; /* host memory that the stream waits on; NULL: this driver cannot, and launching is counted */
  CUdeviceptr gate_device;
};

/* With the device's context current. MOEFLOW_ERROR_ENVIRONMENT: the driver lacks graphs. */
moeflow_status timer_open(struct timer *timer);
void timer_close(struct timer *timer);

/* What is enqueued on the stream in between becomes a graph, uploaded and ready. `enqueued`: the status of that; a failure
 * is returned, and the capture ended all the same. */
moeflow_status timer_capture(struct timer *timer);
moeflow_status timer_captured(struct timer *timer, moeflow_status enqueued, CUgraphExec *graph);

/* Something to time in place of a graph. */
typedef moeflow_status (*timer_enqueue)(void *user, CUstream stream);

/* Launches, waits, and says how many microseconds lay between the events. */
moeflow_status timer_launch(struct timer *timer, CUgraphExec graph, double *microseconds);
moeflow_status timer_run(struct timer *timer, timer_enqueue enqueue, void *user, double *microseconds);
#endif
