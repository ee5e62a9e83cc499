#include "fingerprint.h"

#include <string.h>

#include "status.h"

static moeflow_status report(const struct fingerprint_field *field, const char *first, const char *other, int rank) {
  if (field->hash) {
    return status_set(MOEFLOW_ERROR_MISMATCH, "ranks disagree on %s: rank 0 has %.16s, rank %d has %.16s", field->name,
                      first, rank, other);
  }
  int64_t values[2];
  memcpy(&values[0], first, sizeof *values);
  memcpy(&values[1], other, sizeof *values);
  return status_set(MOEFLOW_ERROR_MISMATCH, "ranks disagree on %s: rank 0 has %lld, rank %d has %lld", field->name,
                    (long long)values[0], rank, (long long)values[1]);
}

moeflow_status fingerprint_compare(const void *all, size_t stride, int ranks, const struct fingerprint_field *fields,
                                   size_t field_count) {
  const char *base = all;
  for (size_t i = 0; i < field_count; i++) {
    const char *first = base + fields[i].offset;
    size_t bytes = fields[i].hash ? 65 : sizeof(int64_t);
    for (int rank = 1; rank < ranks; rank++) {
      const char *other = first + (size_t)rank * stride;
      if (memcmp(first, other, bytes)) return report(&fields[i], first, other, rank);
    }
  }
  return MOEFLOW_OK;
}
