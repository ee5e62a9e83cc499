/* Status codes with a thread-local message, and the macros that unwind on the first failure. */
#ifndef MOEFLOW_STATUS_H
#define MOEFLOW_STATUS_H

#include "moeflow.h"

/* Sets this thread's message (control bytes replaced) and returns `status`, so that callers can `return status_set(...)`. */
moeflow_status status_set(moeflow_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "context: " before the present message, keeping the status. */
moeflow_status status_prefix(moeflow_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The exit code that the tools give for a status: 0, 1, 2 (usage), 3 (file), 5 (environment), 6 (cache), 7 (peer). */
int status_exit_code(moeflow_status status);

/* In a function with `moeflow_status status` and a label `cleanup`. */
#define CHECK(call)                            \
  do {                                         \
    status = (call);                           \
    if (status != MOEFLOW_OK) goto cleanup;    \
  } while (0)
#define FAIL(...)                              \
  do {                                         \
    status = status_set(__VA_ARGS__);          \
    goto cleanup;                              \
  } while (0)
#endif
