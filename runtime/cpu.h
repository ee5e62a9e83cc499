/* The CPU backend's kernels: C functions over the same parameter structs, packed rows and work lists as the CUDA kernels,
 * one per kernel_id, with the same order of sums. Results depend on neither the number of threads nor a token's batch mates.
 */
#ifndef MOEFLOW_CPU_H
#define MOEFLOW_CPU_H

#include <string.h>

#include "cpu_pool.h"
#include "internal.h"

/* Versions of a function for wider vector units, picked when the library is loaded. Sums keep their order: vector code here
 * is written with explicit lanes and compiled without contraction, so all versions give the same bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CPU_CLONES
#endif

struct cpu_call {
  const struct spec *spec;
  const struct moeflow_layer *layer;
  struct cpu_pool *pool; /* NULL: the calling thread works alone */
  int threads;           /* at most this many, the caller included */
};

typedef moeflow_status (*cpu_kernel)(const struct cpu_call *call, const void *params);

moeflow_status cpu_router(const struct cpu_call *call, const void *params);
moeflow_status cpu_pack(const struct cpu_call *call, const void *params);
moeflow_status cpu_exchange(const struct cpu_call *call, const void *params);
moeflow_status cpu_expert_index(const struct cpu_call *call, const void *params);
moeflow_status cpu_expert_prepare(const struct cpu_call *call, const void *params);
moeflow_status cpu_gate_up(const struct cpu_call *call, const void *params);
moeflow_status cpu_down(const struct cpu_call *call, const void *params);
moeflow_status cpu_identity(const struct cpu_call *call, const void *params);
moeflow_status cpu_owner_reduce(const struct cpu_call *call, const void *params);
moeflow_status cpu_combine(const struct cpu_call *call, const void *params);
moeflow_status cpu_combine_ring(const struct cpu_call *call, const void *params);
moeflow_status cpu_fill(const struct cpu_call *call, const void *params);

/* What combine returns for a step whose weights were not lent; MOEFLOW_OK for any other. */
moeflow_status cpu_lend_failure(const struct moeflow_lane *lane, const struct moeflow_record *record);

static inline float cpu_from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* To nearest, ties to even; a NaN stays one, made quiet. */
static inline uint16_t cpu_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline uint32_t cpu_poisoned(const struct moeflow_lane *lane) {
  return __atomic_load_n(&lane->poison, __ATOMIC_ACQUIRE);
}

/* Into a record, which other threads may be reading. */
static inline void cpu_store(uint32_t *to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

/* The first cause stays; the record's `poison` is written after the fields that explain it. */
static inline void cpu_poison(struct moeflow_lane *lane, struct moeflow_record *record, enum moeflow_poison why,
                              uint32_t peer, enum moeflow_phase phase, uint32_t mine, uint32_t theirs) {
  uint32_t none = MOEFLOW_POISON_NONE;
  if (!__atomic_compare_exchange_n(&lane->poison, &none, (uint32_t)why, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
  cpu_store(&record->peer, peer);
  cpu_store(&record->phase, (uint32_t)phase);
  cpu_store(&record->step, lane->epoch);
  cpu_store(&record->mine, mine);
  cpu_store(&record->theirs, theirs);
  cpu_store(&record->poison, (uint32_t)why);
}

static inline int64_t cpu_row_bytes(const struct spec *spec) {
  return moeflow_row_bytes(spec->top_k, spec->hidden, 2, 0);
}

static inline int64_t cpu_return_row_bytes(const struct spec *spec) {
  return moeflow_return_row_bytes(spec->hidden, spec->returned == SPEC_WIRE_FP32 ? 4 : 2);
}

/* The received row with number r = source * rows + token. */
static inline const uint8_t *cpu_row(const struct spec *spec, const struct moeflow_rows_in *in, int64_t r) {
  return in->base + r / in->rows * in->block_bytes + r % in->rows * cpu_row_bytes(spec);
}
#endif
