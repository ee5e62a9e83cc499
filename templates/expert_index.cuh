/* Owner, first pass: headers are checked, and each block counts the entries of its chunk of rows per local expert. */
#ifndef MOEFLOW_EXPERT_INDEX_CUH
#define MOEFLOW_EXPERT_INDEX_CUH

#include "header.cuh"

namespace moeflow {

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
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) store_system(&params.record->received, epoch);
  HeaderCheck check = {params.in.ranks, -1};
  for (int source = threadIdx.x; source < params.in.ranks; source += Variant::threads) {
    note_header(check, load_header(row_in(params.in, source, 0, Row<Model>::bytes)), params.in, source, epoch);
  }
  headers_sound<Model>(check, params.in, params.lane, params.record);
}

}  // namespace moeflow
#endif
