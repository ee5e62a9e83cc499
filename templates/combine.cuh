/* Source: one block makes one token's output from the returned rows, in FP32 and a fixed order: owners in ascending rank, or
 * with `reduce: choices` weight x value in choice order. The last kernel of a step: its block 0 ends the step. */
#ifndef MOEFLOW_COMBINE_CUH
#define MOEFLOW_COMBINE_CUH

#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

template <class Model>
__device__ __forceinline__ const uint8_t *returned_row(const moeflow_combine_params &params, int owner, int row) {
  return params.returned + owner * params.block_bytes + row * ReturnRow<Model>::bytes;
}

template <class Model>
__device__ __forceinline__ Eight scaled(Eight sum) {
  if constexpr (Model::output_scale != 1.0f) {
    for (int j = 0; j < 8; j++) sum.value[j] = __fmul_rn(sum.value[j], Model::output_scale);
  }
  return sum;
}

struct SumOwners { /* owners in ascending rank */
  static __device__ __forceinline__ int start(const moeflow_combine_params &) {
    return 0;
  }

  template <class Model>
  static __device__ __forceinline__ Eight sum(const moeflow_combine_params &params, const OwnerList &owners, const int32_t *,
                                              int token, int column) {
    Eight sum = {};
    for (int i = 0; i < owners.count; i++) {
      const uint8_t *row = returned_row<Model>(params, owners.owner[i], token);
      const Eight value = load_eight<ReturnRow<Model>::fp32>(row, column);
      for (int j = 0; j < 8; j++) sum.value[j] = i == 0 ? value.value[j] : __fadd_rn(sum.value[j], value.value[j]);
    }
    return sum;
  }
};

struct SumChoices { /* choices in order, weighted here */
  static __device__ __forceinline__ int start(const moeflow_combine_params &) {
    return 0;
  }

  template <class Model>
  static __device__ __forceinline__ Eight sum(const moeflow_combine_params &params, const OwnerList &, const int32_t *places,
                                              int token, int column) {
    Eight sum = {};
    bool first = true;
    for (int k = 0; k < Model::top_k; k++) {
      if (places[k] < 0) continue;
      const int choice = token * Model::top_k + k;
      const uint8_t *row = returned_row<Model>(params, moeflow_place_owner(places[k]), choice);
      const Eight value = load_eight<ReturnRow<Model>::fp32>(row, column);
      for (int j = 0; j < 8; j++) {
        const float product = __fmul_rn(params.token_weights[choice], value.value[j]);
        sum.value[j] = first ? product : __fadd_rn(sum.value[j], product);
      }
      first = false;
    }
    return sum;
  }
};

/* One token's output. A poisoned step gives NaN, never stale data. All threads of a block; with several tokens, their barriers
 * keep the shared words apart. */
template <class Model, class Variant, class Sum>
__device__ __forceinline__ void combine_token(const moeflow_combine_params &params, int token, bool poison) {
  __shared__ int32_t places[Model::top_k];
  __shared__ OwnerList owners;
  uint8_t *out = params.out + static_cast<int64_t>(token) * Model::hidden * 2;
  if (poison) {
    const uint32_t nan = bf16_quiet_nan * 0x10001u;
    for (int i = threadIdx.x; i < Model::hidden / 8; i += Variant::threads) {
      reinterpret_cast<uint4 *>(out)[i] = {nan, nan, nan, nan};
    }
    return;
  }
  __syncthreads();
  if (threadIdx.x < Model::top_k) {
    places[threadIdx.x] = params.token_places[static_cast<int64_t>(token) * Model::top_k + threadIdx.x];
  }
  list_owners<Model::top_k>(places, Sum::start(params), params.ranks, owners);
  for (int column = threadIdx.x * 8; column < Model::hidden; column += Variant::threads * 8) {
    store_eight<false>(out, column, scaled<Model>(Sum::template sum<Model>(params, owners, places, token, column)));
  }
}

/* A poisoned step ends like any other. */
template <class Model, class Variant, class Sum>
__device__ __forceinline__ void combine_with(const moeflow_combine_params &params) {
  const int token = blockIdx.x;
  const bool poison = block_poisoned(params.lane);
  if (token < params.tokens) combine_token<Model, Variant, Sum>(params, token, poison);
  if (token == 0 && threadIdx.x == 0) finish_step(params.lane, params.record, params.eager);
}

template <class Model, class Variant>
__device__ __forceinline__ void combine(const moeflow_combine_params &params) {
  if constexpr (Model::reduce_choices) {
    combine_with<Model, Variant, SumChoices>(params);
  } else {
    combine_with<Model, Variant, SumOwners>(params);
  }
}

}  // namespace moeflow
#endif
