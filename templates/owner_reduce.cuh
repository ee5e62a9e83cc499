/* Owner, last: one block turns the outputs of one received row's entries into its return row: their weighted sum in choice
 * order, or with `reduce: choices` each by itself and unweighted. Rows without an entry here send nothing. */
#ifndef MOEFLOW_OWNER_REDUCE_CUH
#define MOEFLOW_OWNER_REDUCE_CUH

#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

/* One received row's entries on this rank, in choice order. */
struct RowEntries {
  int count;
  int choice[MOEFLOW_CHOICES_MAX];
  int32_t position[MOEFLOW_CHOICES_MAX];
  float weight[MOEFLOW_CHOICES_MAX];
};

/* Positions are -1 for stale rows, so none of their bytes are read. */
template <class Model>
__device__ __forceinline__ void list_entries(const moeflow_owner_reduce_params &params, const uint8_t *row,
                                             RowEntries &list) {
  const int k = threadIdx.x;
  if (k < 32) {
    const int32_t *positions = params.positions + static_cast<int64_t>(blockIdx.x) * Model::top_k;
    const int32_t position = k < Model::top_k ? positions[k] : -1;
    const unsigned present = __ballot_sync(full_warp, position >= 0);
    const int i = __popc(present & ((1u << k) - 1));
    if (position >= 0) {
      list.choice[i] = k;
      list.position[i] = position;
      list.weight[i] = reinterpret_cast<const float *>(row + Row<Model>::weights)[k];
    }
    if (k == 0) list.count = __popc(present);
  }
  __syncthreads();
}

template <class Model>
__device__ __forceinline__ Eight weighted_sum(const moeflow_owner_reduce_params &params, const RowEntries &list,
                                              int column) {
  Eight sum = {};
  for (int i = 0; i < list.count; i++) {
    const Eight value = load_eight_float(params.outputs + static_cast<int64_t>(list.position[i]) * Model::hidden + column);
    for (int j = 0; j < 8; j++) {
      const float product = __fmul_rn(list.weight[i], value.value[j]);
      sum.value[j] = i == 0 ? product : __fadd_rn(sum.value[j], product);
    }
  }
  return sum;
}

template <class Model, class Variant>
__device__ __forceinline__ void owner_reduce(const moeflow_owner_reduce_params &params) {
  using Return = ReturnRow<Model>;
  __shared__ RowEntries list;
  if (block_poisoned(params.lane)) return;
  const int source = blockIdx.x / params.in.rows;
  const int token = blockIdx.x % params.in.rows;
  list_entries<Model>(params, row_in(params.in, source, token, Row<Model>::bytes), list);
  if (list.count == 0) return;
  if constexpr (Model::reduce_choices) {
    for (int i = 0; i < list.count; i++) {
      const float *from = params.outputs + static_cast<int64_t>(list.position[i]) * Model::hidden;
      uint8_t *to = row_out(params.out, source, token * Model::top_k + list.choice[i], Return::bytes);
      for (int column = threadIdx.x * 8; column < Model::hidden; column += Variant::threads * 8) {
        store_eight<Return::fp32>(to, column, load_eight_float(from + column));
      }
    }
  } else {
    uint8_t *to = row_out(params.out, source, token, Return::bytes);
    for (int column = threadIdx.x * 8; column < Model::hidden; column += Variant::threads * 8) {
      store_eight<Return::fp32>(to, column, weighted_sum<Model>(params, list, column));
    }
  }
}

}  // namespace moeflow
#endif
