/* Where NVRTC is and what identifies it, found without loading it: a build in which everything hits must not pay for loading
 * 100 MB. */
#ifndef MOEFLOW_TOOLCHAIN_H
#define MOEFLOW_TOOLCHAIN_H

#include <stddef.h>

#include "moeflow.h"

#define TOOLCHAIN_PATH_MAX 4096
#define TOOLCHAIN_BUILTINS_MAX 4
#define TOOLCHAIN_IDENTITY_MAX 512

struct toolchain {
  char nvrtc[TOOLCHAIN_PATH_MAX];                            /* libnvrtc.so.13 */
  char builtins[TOOLCHAIN_BUILTINS_MAX][TOOLCHAIN_PATH_MAX]; /* libnvrtc-builtins.so.13.0 beside it; ascending */
  int builtins_count;
  char identity[TOOLCHAIN_IDENTITY_MAX]; /* size and GNU build-id of each file: part of every key, no path in it */
};

/* MOEFLOW_NVRTC (the library's path) if set; else libnvrtc.so.13, then .12, in LD_LIBRARY_PATH, the toolkit's and the
 * system's folders and the one seen when MoEFlow was built. MOEFLOW_ERROR_ENVIRONMENT says what was looked for and where. */
moeflow_status toolchain_find(struct toolchain *toolchain);

/* "size=<bytes> build-id=<hex>" of an ELF file, "sha256=<hex>" in place of a missing build-id. */
moeflow_status toolchain_file_identity(const char *path, char *text, size_t text_size);
#endif
