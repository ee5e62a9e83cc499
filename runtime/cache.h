/* The cache directory as its readers see it: where it is, whether it may be trusted, and files read from it without
 * following links. */
#ifndef MOEFLOW_CACHE_H
#define MOEFLOW_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

#define CACHE_PATH_MAX 4096

/* The default or given cache directory as an absolute path: `explicit_path` (may be relative), else MOEFLOW_CACHE_DIR, else
 * $XDG_CACHE_HOME/moeflow, else ~/.cache/moeflow; relative values of the variables are errors. */
moeflow_status cache_path(const char *explicit_path, char *path, size_t path_size);

/* Opens the directory for reading after the trust rules: no link at any component, ours or root's, not group- or
 * world-writable; parents world-writable only if sticky. Returns the descriptor in *fd; -1 and MOEFLOW_ERROR_CACHE else. */
moeflow_status cache_open(const char *path, int *fd);

/* The same, and creates missing components (mode 0700) with `create`; `missing` (may be NULL) says that the directory is
 * just not there. The runtime never creates. */
moeflow_status cache_open_or_create(const char *path, int create, int *fd, int *missing);

/* Opens a directory below the cache, such as "entries/3f", by the same rules; path only serves the message. */
moeflow_status cache_open_below(int cache_fd, const char *path, const char *below, int create, int *fd, int *missing);

/* Reads the whole file `below` ("plans/<name>") below the open cache directory: each folder on the way by the trust rules,
 * the file itself a regular one with one link, ours or root's, not group- or world-writable, at most size_max bytes. *bytes
 * is malloc memory with a NUL behind it. MOEFLOW_ERROR_CACHE else, with *missing (may be NULL) set when it is just absent.
 */
moeflow_status cache_read(int cache_fd, const char *path, const char *below, size_t size_max, uint8_t **bytes, size_t *size,
                          int *missing);
#endif
