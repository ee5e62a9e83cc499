/* What a received row 0 says of its source as a whole: the step, tokens_max, and whether it failed or is poisoned. */
#ifndef MOEFLOW_HEADER_CUH
#define MOEFLOW_HEADER_CUH

#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

__device__ __forceinline__ uint32_t header_fault(const moeflow_row_header &header, uint32_t epoch, int tokens_max) {
  if (header.epoch != epoch) return MOEFLOW_POISON_EPOCH;
  if (header.tokens_max != static_cast<uint32_t>(tokens_max)) return MOEFLOW_POISON_TOKENS_MAX;
  if (header.flags & MOEFLOW_ROW_POISONED) return MOEFLOW_POISON_PEER;
  return MOEFLOW_POISON_NONE;
}

__device__ __forceinline__ void raise_header_fault(moeflow_lane *lane, moeflow_record *record,
                                                   const moeflow_row_header &header, int source, int tokens_max) {
  Cause cause = {header_fault(header, lane->epoch, tokens_max), static_cast<uint32_t>(source), MOEFLOW_PHASE_DISPATCH, 0, 0};
  if (cause.poison == MOEFLOW_POISON_EPOCH) {
    cause.mine = lane->epoch;
    cause.theirs = header.epoch;
  } else if (cause.poison == MOEFLOW_POISON_TOKENS_MAX) {
    cause.mine = tokens_max;
    cause.theirs = header.tokens_max;
  }
  raise_poison(lane, record, cause);
}

/* What one thread has seen of the sources' first rows: the lowest source at fault (ranks = none), the highest that failed (-1 =
 * none). */
struct HeaderCheck {
  int faulty;
  int failed;
};

/* Adds what the first row of `source` says; the caller's sources ascend. */
__device__ __forceinline__ void note_header(HeaderCheck &check, const moeflow_row_header &header, const moeflow_rows_in &in,
                                            int source, uint32_t epoch) {
  if (header_fault(header, epoch, in.tokens_max)) {
    if (check.faulty == in.ranks) check.faulty = source;
  } else if (header.flags & MOEFLOW_ROW_FAILED) {
    check.failed = source;
  }
}

/* A source failed, which is recorded, or is at fault, which poisons the lane: false. */
template <class Model>
__device__ MOEFLOW_CALL bool settle_headers(const HeaderCheck &check, const moeflow_rows_in &in, moeflow_lane *lane,
                                            moeflow_record *record) {
  __shared__ int faulty;
  __shared__ int failed;
  if (threadIdx.x == 0) {
    faulty = in.ranks;
    failed = -1;
  }
  __syncthreads();
  atomicMin(&faulty, check.faulty);
  atomicMax(&failed, check.failed);
  __syncthreads();
  const bool sound = faulty == in.ranks;
  if (threadIdx.x == 0 && blockIdx.x == 0 && failed >= 0) {
    store_system(&record->failed_step, lane->epoch);
    fence_system();
    store_system(&record->failed_peer, failed + 1);
  }
  if (threadIdx.x == 0 && !sound) {
    const moeflow_row_header header = load_header(row_in(in, faulty, 0, Row<Model>::bytes));
    raise_header_fault(lane, record, header, faulty, in.tokens_max);
  }
  return sound;
}

/* The block's verdict, and a barrier. Block 0 writes the record. */
template <class Model>
__device__ __forceinline__ bool headers_sound(const HeaderCheck &check, const moeflow_rows_in &in, moeflow_lane *lane,
                                              moeflow_record *record) {
  if (!__syncthreads_or(check.faulty < in.ranks || check.failed >= 0)) return true;
  return settle_headers<Model>(check, in, lane, record);
}

}  // namespace moeflow
#endif
