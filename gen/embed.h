/* The templates as bytes, made by cmake/embed.cmake; the last element's name is NULL. */
#ifndef MOEFLOW_EMBED_H
#define MOEFLOW_EMBED_H

#include <stddef.h>

struct embedded_file {
  const char *name; /* "gate_up.cuh" */
  const unsigned char *bytes; /* followed by a NUL that `size` does not count */
  size_t size;
};
extern const struct embedded_file embedded_files[];
#endif
