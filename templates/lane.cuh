/* A lane's state in device memory and its record in host memory, which moeflow_poll reads. */
#ifndef MOEFLOW_LANE_CUH
#define MOEFLOW_LANE_CUH

#include "ptx.cuh"

namespace moeflow {

__device__ __forceinline__ bool poisoned(const moeflow_lane *lane) {
  return lane->poison != MOEFLOW_POISON_NONE;
}

/* One answer for the block, whose threads all ask: the host may poison the lane at any moment, and with two answers some
 * threads would go on with shared memory that others never filled. */
__device__ __forceinline__ bool block_poisoned(const moeflow_lane *lane) {
  return __syncthreads_or(poisoned(lane));
}

struct Cause {
  uint32_t poison; /* enum moeflow_poison */
  uint32_t peer;
  uint32_t phase;
  uint32_t mine;
  uint32_t theirs;
};

/* The first cause wins; the host sees record->poison only after the fields that explain it. */
__device__ __forceinline__ void raise_poison(moeflow_lane *lane, moeflow_record *record, const Cause &cause) {
  if (atomicCAS(&lane->poison, static_cast<uint32_t>(MOEFLOW_POISON_NONE), cause.poison) != MOEFLOW_POISON_NONE) return;
  store_system(&record->peer, cause.peer);
  store_system(&record->phase, cause.phase);
  store_system(&record->step, lane->epoch);
  store_system(&record->mine, cause.mine);
  store_system(&record->theirs, cause.theirs);
  fence_system();
  store_system(&record->poison, cause.poison);
}

/* Ends a step: one thread of the last kernel. Steps are counted in device memory, since reading the record would cross PCIe.
 */
__device__ __forceinline__ void finish_step(moeflow_lane *lane, moeflow_record *record, bool eager) {
  const uint32_t epoch = lane->epoch;
  const uint32_t steps = lane->steps + eager;
  lane->steps = steps;
  store_system(&record->steps, steps);
  fence_system();
  store_system(&record->finished, epoch);
  lane->epoch = epoch + 1;
}

}  // namespace moeflow
#endif
