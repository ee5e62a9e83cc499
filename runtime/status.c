#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_MAX 4096

static _Thread_local char message[MESSAGE_MAX];

/* Messages quote file content: nothing in them may drive a terminal or forge a second line. */
static void replace_control_bytes(char *text) {
  for (; *text; text++) {
    unsigned char byte = (unsigned char)*text;
    if (byte < 0x20 || byte == 0x7f) *text = '?';
  }
}

/* Through a copy: an argument may be the present message. */
static void set_message(const char *prefix, const char *separator, const char *rest) {
  char next[MESSAGE_MAX];
  size_t length = 0;
  const char *parts[3] = {prefix, separator, rest};
  for (int i = 0; i < 3; i++) {
    size_t bytes = strlen(parts[i]);
    if (bytes > MESSAGE_MAX - 1 - length) bytes = MESSAGE_MAX - 1 - length;
    memcpy(next + length, parts[i], bytes);
    length += bytes;
  }
  next[length] = 0;
  replace_control_bytes(next);
  memcpy(message, next, length + 1);
}

moeflow_status status_set(moeflow_status status, const char *format, ...) {
  char text[MESSAGE_MAX];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  set_message("", "", text);
  return status;
}

moeflow_status status_prefix(moeflow_status status, const char *format, ...) {
  char text[MESSAGE_MAX];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  set_message(text, ": ", message);
  return status;
}

static const struct {
  const char *name;
  int exit_code;
} statuses[] = {
    [MOEFLOW_OK] = {"MOEFLOW_OK", 0},
    [MOEFLOW_ERROR_INTERNAL] = {"MOEFLOW_ERROR_INTERNAL", 1},
    [MOEFLOW_ERROR_ARGUMENT] = {"MOEFLOW_ERROR_ARGUMENT", 2},
    [MOEFLOW_ERROR_FORMAT] = {"MOEFLOW_ERROR_FORMAT", 3},
    [MOEFLOW_ERROR_CAPACITY] = {"MOEFLOW_ERROR_CAPACITY", 2},
    [MOEFLOW_ERROR_ENVIRONMENT] = {"MOEFLOW_ERROR_ENVIRONMENT", 5},
    [MOEFLOW_ERROR_CACHE] = {"MOEFLOW_ERROR_CACHE", 6},
    [MOEFLOW_ERROR_TIMEOUT] = {"MOEFLOW_ERROR_TIMEOUT", 7},
    [MOEFLOW_ERROR_PEER] = {"MOEFLOW_ERROR_PEER", 7},
    [MOEFLOW_ERROR_MISMATCH] = {"MOEFLOW_ERROR_MISMATCH", 2},
    [MOEFLOW_ERROR_STATE] = {"MOEFLOW_ERROR_STATE", 1},
    [MOEFLOW_ERROR_MEMORY] = {"MOEFLOW_ERROR_MEMORY", 5},
    [MOEFLOW_ERROR_CUDA] = {"MOEFLOW_ERROR_CUDA", 5},
    [MOEFLOW_ERROR_NCCL] = {"MOEFLOW_ERROR_NCCL", 5},
    [MOEFLOW_ERROR_UNSUPPORTED] = {"MOEFLOW_ERROR_UNSUPPORTED", 2},
};

static int known(moeflow_status status) {
  return (unsigned)status < sizeof statuses / sizeof *statuses;
}

const char *moeflow_status_name(moeflow_status status) {
  return known(status) ? statuses[status].name : "unknown status";
}

int status_exit_code(moeflow_status status) {
  return known(status) ? statuses[status].exit_code : 1;
}

const char *moeflow_last_error(void) {
  return message;
}
