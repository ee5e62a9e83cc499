/* Owner, first pass: headers are checked, and each block counts the entries of its chunk of rows per local expert. */
#ifndef MOEFLOW_EXPERT_INDEX_CUH
#define MOEFLOW_EXPERT_INDEX_CUH

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

/* Row 0's header of every source: the lowest source at fault poisons the lane, the highest one that failed is recorded. */
template <class Model, class Variant>
__device__ __forceinline__ void check_headers(const moeflow_expert_index_params &params) {
  __shared__ int faulty;
  __shared__ int failed;
  const moeflow_rows_in &in = params.in;
  const uint32_t epoch = params.lane->epoch;
  if (threadIdx.x == 0) {
    faulty = in.ranks;
    failed = -1;
    store_system(&params.record->received, epoch);
  }
  __syncthreads();
  for (int source = threadIdx.x; source < in.ranks; source += Variant::threads) {
    const moeflow_row_header header = load_header(row_in(in, source, 0, Row<Model>::bytes));
    if (header_fault(header, epoch, in.tokens_max)) {
      atomicMin(&faulty, source);
    } else if (header.flags & MOEFLOW_ROW_FAILED) {
      atomicMax(&failed, source);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (failed >= 0) {
    store_system(&params.record->failed_step, epoch);
    fence_system();
    store_system(&params.record->failed_peer, failed + 1);
  }
  if (faulty < in.ranks) {
    const moeflow_row_header header = load_header(row_in(in, faulty, 0, Row<Model>::bytes));
    raise_header_fault(params.lane, params.record, header, faulty, in.tokens_max);
  }
}

template <class Model, class Variant>
__device__ __forceinline__ void expert_index(const moeflow_expert_index_params &params) {
  __shared__ int32_t counts[local_experts_max];
  if (block_poisoned(params.lane)) return; /* block 0 may poison it meanwhile */
  const uint32_t epoch = params.lane->epoch;
  for (int i = threadIdx.x; i < params.local_experts; i += Variant::threads) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < MOEFLOW_CHUNK_ROWS * Model::top_k; i += Variant::threads) {
    const int row = blockIdx.x * MOEFLOW_CHUNK_ROWS + i / Model::top_k;
    const int slot = choice_slot<Model>(params.in, row, i % Model::top_k, epoch, params.local_experts);
    if (slot >= 0) atomicAdd(&counts[slot], 1);
  }
  __syncthreads();
  int32_t *out = params.chunk_counts + static_cast<int64_t>(blockIdx.x) * params.local_experts;
  for (int i = threadIdx.x; i < params.local_experts; i += Variant::threads) out[i] = counts[i];
  if (blockIdx.x == 0) check_headers<Model, Variant>(params);
}

}  // namespace moeflow
#endif
