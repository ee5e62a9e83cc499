/* Self-test in place of gate_up and down: each entry's output is the hidden state it came with. */
#ifndef MOEFLOW_IDENTITY_CUH
#define MOEFLOW_IDENTITY_CUH

#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void identity(const moeflow_identity_params &params) {
  if (poisoned(params.lane)) return;
  const int count = params.expert_offsets[params.local_experts];
  for (int position = blockIdx.x; position < count; position += gridDim.x) {
    const uint8_t *hidden = entry_hidden<Model>(params.in, params.entries[position]);
    uint8_t *out = reinterpret_cast<uint8_t *>(params.outputs + static_cast<int64_t>(position) * Model::hidden);
    for (int i = threadIdx.x * 8; i < Model::hidden; i += Variant::threads * 8) {
      store_eight<true>(out, i, load_eight<false>(hidden, i));
    }
  }
}

}  // namespace moeflow
#endif
