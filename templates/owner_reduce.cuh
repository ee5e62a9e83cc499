/* Owner, last: blocks turn the outputs of one received row's entries into its return row: their weighted sum in choice
 * order, or with `reduce: choices` each by itself and unweighted. An output that came in parts is their sum, in order, before
 * anything else. Rows without an entry here send nothing, or are zero when asked to be written. */
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
                                             int64_t number, RowEntries &list) {
  const int k = threadIdx.x;
  if (k < 32) {
    const int32_t *positions = params.positions + number * Model::top_k;
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

/* MOEFLOW_EMPTY_PLAIN: row `number` of [ranks * rows, H] bf16, whose address stands in the place of the targets'. */
__device__ __forceinline__ uint8_t *plain_out(const moeflow_rows_out &out, int number, int hidden) {
  return reinterpret_cast<uint8_t *>(const_cast<uint8_t **>(out.targets)) + static_cast<int64_t>(number) * hidden * 2;
}

/* How many entries' outputs are on their way from memory at a time. */
constexpr int reduce_batch = 4;

/* Outputs of up to reduce_batch entries from the list's number `first` on, at eight columns. */
template <class Model>
__device__ __forceinline__ void load_outputs(const moeflow_owner_reduce_params &params, const RowEntries &list, int first,
                                             int column, Eight (&sum)[reduce_batch]) {
  for (int part = 0; part < params.parts; part++) {
    const float *outputs = params.outputs + part * params.part_stride + column;
    Eight value[reduce_batch];
#pragma unroll
    for (int i = 0; i < reduce_batch; i++) {
      if (first + i < list.count) {
        value[i] = load_eight_float(outputs + static_cast<int64_t>(list.position[first + i]) * Model::hidden);
      }
    }
#pragma unroll
    for (int i = 0; i < reduce_batch; i++) {
      if (first + i < list.count) {
        for (int j = 0; j < 8; j++) {
          sum[i].value[j] = part == 0 ? value[i].value[j] : __fadd_rn(sum[i].value[j], value[i].value[j]);
        }
      }
    }
  }
}

template <class Model>
__device__ __forceinline__ Eight weighted_sum(const moeflow_owner_reduce_params &params, const RowEntries &list,
                                              int column) {
  Eight sum = {};
  for (int first = 0; first < list.count; first += reduce_batch) {
    Eight value[reduce_batch];
    load_outputs<Model>(params, list, first, column, value);
#pragma unroll
    for (int i = 0; i < reduce_batch; i++) {
      if (first + i < list.count) {
        for (int j = 0; j < 8; j++) {
          const float product = __fmul_rn(list.weight[first + i], value[i].value[j]);
          sum.value[j] = first + i == 0 ? product : __fadd_rn(sum.value[j], product);
        }
      }
    }
  }
  return sum;
}

/* The grid is a multiple of the received rows: block b does columns of row b % rows, with those that share it. */
template <class Model, class Variant>
__device__ __forceinline__ void owner_reduce(const moeflow_owner_reduce_params &params) {
  using Return = ReturnRow<Model>;
  __shared__ RowEntries list;
  if (block_poisoned(params.lane)) return;
  const int rows = params.in.ranks * params.in.rows;
  const int number = static_cast<int>(blockIdx.x) % rows;
  const int source = number / params.in.rows;
  const int token = number % params.in.rows;
  const int start = (static_cast<int>(blockIdx.x) / rows * Variant::threads + static_cast<int>(threadIdx.x)) * 8;
  const int step = static_cast<int>(gridDim.x) / rows * Variant::threads * 8;
  list_entries<Model>(params, row_in(params.in, source, token, Row<Model>::bytes), number, list);
  if constexpr (Model::reduce_choices) {
    for (int column = start; column < Model::hidden; column += step) {
      for (int first = 0; first < list.count; first += reduce_batch) {
        Eight value[reduce_batch];
        load_outputs<Model>(params, list, first, column, value);
#pragma unroll
        for (int i = 0; i < reduce_batch; i++) {
          if (first + i < list.count) {
            uint8_t *to = row_out(params.out, source, token * Model::top_k + list.choice[first + i], Return::bytes);
            store_eight<Return::fp32>(to, column, value[i]);
          }
        }
      }
    }
  } else if (params.write_empty == MOEFLOW_EMPTY_PLAIN) {
    uint8_t *to = plain_out(params.out, number, Model::hidden);
    for (int column = start; column < Model::hidden; column += step) {
      store_eight<false>(to, column, weighted_sum<Model>(params, list, column));
    }
  } else if (list.count > 0 || params.write_empty) {
    uint8_t *to = row_out(params.out, source, token, Return::bytes);
    for (int column = start; column < Model::hidden; column += step) {
      store_eight<Return::fp32>(to, column, weighted_sum<Model>(params, list, column));
    }
  }
}

}  // namespace moeflow
#endif
