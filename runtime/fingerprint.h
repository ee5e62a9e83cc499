/* What ranks must share, compared field by field: an array of 64-bit fields and one of hashes, each with its name. */
#ifndef MOEFLOW_FINGERPRINT_H
#define MOEFLOW_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

#define FINGERPRINT_BYTES_MAX 512 /* what comm_ops.gather carries a rank */

struct fingerprint_field {
  const char *name; /* as messages say it */
  size_t offset;
  int hash;         /* 0: int64_t; 1: char[65], hex digits */
};
#define FINGERPRINT_NUMBER(type, member, name) {name, offsetof(type, member), 0}
#define FINGERPRINT_HASH(type, member, name) {name, offsetof(type, member), 1}

/* all: one struct of `stride` bytes a rank. MOEFLOW_ERROR_MISMATCH with the first differing field, both values and both
 * ranks; the same answer on every rank. */
moeflow_status fingerprint_compare(const void *all, size_t stride, int ranks, const struct fingerprint_field *fields,
                                   size_t field_count);
#endif
