/* Bounded waits: a point in time, and short sleeps until it. */
#ifndef MOEFLOW_DEADLINE_H
#define MOEFLOW_DEADLINE_H

#include <stdint.h>
#include <time.h>

static inline int64_t deadline_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline int64_t deadline_in(int timeout_ms) {
  return deadline_now_ms() + timeout_ms;
}

static inline int deadline_passed(int64_t deadline) {
  return deadline_now_ms() >= deadline;
}

/* Sleeps 20 us at first, then longer and longer up to 1 ms; `naps` counts and begins at 0. */
static inline void deadline_nap(unsigned *naps) {
  long us = 20L << (*naps < 6 ? *naps : 6);
  struct timespec nap = {0, (us < 1000 ? us : 1000) * 1000};
  (*naps)++;
  nanosleep(&nap, NULL);
}
#endif
