/* Source: one block makes one token's output from the returned rows, in FP32 and a fixed order: owners in ascending rank, or
 * with `reduce: choices` weight x value in choice order; or takes over what the transport has added. The last kernel of a step:
 * its block 0 ends the step. */
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
#pragma unroll 1
    for (int i = 0; i < owners.count; i++) {
      const uint8_t *row = returned_row<Model>(params, owners.owner[i], token);
      const Eight value = load_eight<ReturnRow<Model>::fp32>(row, column);
      for (int j = 0; j < 8; j++) sum.value[j] = i == 0 ? value.value[j] : __fadd_rn(sum.value[j], value.value[j]);
    }
    return sum;
  }
};

struct SumAdded { /* the transport has added them: one row */
  static __device__ __forceinline__ int start(const moeflow_combine_params &) {
    return 0;
  }

  template <class Model>
  static __device__ __forceinline__ Eight sum(const moeflow_combine_params &params, const OwnerList &owners, const int32_t *,
                                              int token, int column) {
    if (owners.count == 0) return {};
    return load_eight<ReturnRow<Model>::fp32>(returned_row<Model>(params, 0, token), column);
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

struct CombineShared {
  int32_t places[MOEFLOW_CHOICES_MAX];
  OwnerList owners;
};

/* Who has sent rows for the token. Ends with a barrier. */
template <class Model, class Sum>
__device__ __forceinline__ void find_owners(const moeflow_combine_params &params, int token, CombineShared &shared) {
  int32_t place = MOEFLOW_PLACE_NONE;
  if (threadIdx.x < Model::top_k && token < params.tokens) {
    place = params.token_places[static_cast<int64_t>(token) * Model::top_k + threadIdx.x];
    shared.places[threadIdx.x] = place;
  }
  list_owners(place, Sum::start(params), params.ranks, shared.owners);
}

/* One token's output; a poisoned step gives NaN, never stale data. */
template <class Model, class Variant, class Sum>
__device__ __forceinline__ void combine_token(const moeflow_combine_params &params, int token, bool poison,
                                              const CombineShared &shared) {
  uint8_t *out = params.out + static_cast<int64_t>(token) * Model::hidden * 2;
#pragma unroll 1
  for (int column = threadIdx.x * 8; column < Model::hidden; column += Variant::threads * 8) {
    if (poison) {
      const uint32_t nan = bf16_quiet_nan * 0x10001u;
      *reinterpret_cast<uint4 *>(out + column * 2) = {nan, nan, nan, nan};
    } else {
      const Eight sum = Sum::template sum<Model>(params, shared.owners, shared.places, token, column);
      store_eight<false>(out, column, scaled<Model>(sum));
    }
  }
}

/* A poisoned step ends like any other. */
template <class Model, class Variant, class Sum>
__device__ __forceinline__ void combine_with(const moeflow_combine_params &params) {
  __shared__ CombineShared shared;
  const int token = blockIdx.x;
  const bool poison = block_poisoned(params.lane);
  find_owners<Model, Sum>(params, token, shared);
  if (token < params.tokens) combine_token<Model, Variant, Sum>(params, token, poison, shared);
  if (token == 0 && threadIdx.x == 0) finish_step(params.lane, params.record, params.eager);
}

template <class Model, class Variant>
__device__ __forceinline__ void combine(const moeflow_combine_params &params) {
  if constexpr (Model::reduce_choices) {
    combine_with<Model, Variant, SumChoices>(params);
  } else if (params.added) {
    combine_with<Model, Variant, SumAdded>(params);
  } else {
    combine_with<Model, Variant, SumOwners>(params);
  }
}

}  // namespace moeflow
#endif
