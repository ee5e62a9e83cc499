/* What every public handle begins with. A destroyed handle's memory is kept and reused, oldest first, so that a stale pointer
 * is recognised instead of read after free; the memory in use stays bounded by the most handles that ever lived at once. */
#ifndef MOEFLOW_HANDLE_H
#define MOEFLOW_HANDLE_H

#include <stdatomic.h>
#include <stdint.h>

#include "moeflow.h"

enum handle_kind { HANDLE_CONTEXT, HANDLE_GROUP, HANDLE_LAYER, HANDLE_KINDS };

struct handle {
  atomic_uint magic;
  int64_t process; /* getpid() at creation */
  struct handle *next;
};

/* Zero-filled memory for one handle of this kind; NULL when there is none. All handles of a kind have the same size. */
void *handle_create(enum handle_kind kind, size_t size);
void handle_destroy(void *handle, enum handle_kind kind);

/* MOEFLOW_ERROR_ARGUMENT for NULL; MOEFLOW_ERROR_STATE for a destroyed handle, one of another kind, or use after fork. */
moeflow_status handle_check(const void *handle, enum handle_kind kind);

/* Copies a size-first struct of the public header into `to`, which holds the defaults. An older caller's shorter struct
 * leaves the rest at its default; a longer one must be zero beyond what this library knows. */
moeflow_status config_read(const void *from, void *to, size_t to_size, const char *name);
#endif
