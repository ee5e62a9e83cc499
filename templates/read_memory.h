/* What the kernels that only read memory are told: read_memory.cuh, and bench/ which launches them. */
#ifndef MOEFLOW_READ_MEMORY_H
#define MOEFLOW_READ_MEMORY_H

#include "abi.h"

struct moeflow_read_memory_params {
  uint8_t *data;    /* filled in by moeflow_read_fill; 16-byte aligned */
  int64_t bytes;    /* a multiple of 16; of `chunk` for bulk copies */
  uint32_t *digest; /* the xor of the words that were looked at is xored into it */
  int32_t chunk;    /* moeflow_read_bulk: bytes of a copy; moeflow_read_check: looks at a word of so many bytes */
  int32_t stages;   /* moeflow_read_bulk: copies in flight */
};
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_read_memory_params) == 32, "read_memory");

#define MOEFLOW_READ_STAGES_MAX 32
#define MOEFLOW_READ_FILL_SHIFT 6 /* values about 2^-6: also what the dense rate multiplies */
#endif
