/* Source, for comparison: partial sums added as a ring reduction would, from this rank's successor around to itself, the
 * first taken as it is and each sum rounded to bf16. Only with `reduce: owner`. */
#ifndef MOEFLOW_COMBINE_RING_CUH
#define MOEFLOW_COMBINE_RING_CUH

#include "combine.cuh"

namespace moeflow {

struct SumRing {
  static __device__ __forceinline__ int start(const moeflow_combine_params &params) {
    return (params.rank + 1) % params.ranks;
  }

  template <class Model>
  static __device__ __forceinline__ Eight sum(const moeflow_combine_params &params, const OwnerList &owners, const int32_t *,
                                              int token, int column) {
    Eight sum = {};
    for (int i = 0; i < owners.count; i++) {
      const uint8_t *row = returned_row<Model>(params, owners.owner[i], token);
      const Eight value = load_eight<ReturnRow<Model>::fp32>(row, column);
      for (int j = 0; j < 8; j++) {
        sum.value[j] = i == 0 ? value.value[j] : bf16_to_float(float_to_bf16(__fadd_rn(sum.value[j], value.value[j])));
      }
    }
    return sum;
  }
};

template <class Model, class Variant>
__device__ __forceinline__ void combine_ring(const moeflow_combine_params &params) {
  static_assert(!Model::reduce_choices, "the ring adds owners' sums; there are none with reduce: choices");
  combine_with<Model, Variant, SumRing>(params);
}

}  // namespace moeflow
#endif
