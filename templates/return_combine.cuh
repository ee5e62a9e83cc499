/* Source, fused: awaits the owners' return rows, then combine. The last kernel of a step. */
#ifndef MOEFLOW_RETURN_COMBINE_CUH
#define MOEFLOW_RETURN_COMBINE_CUH

#include "combine.cuh"
#include "peers.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void return_combine(const moeflow_return_combine_params &params) {
  await_dependencies();
  moeflow_lane *lane = params.combine.lane;
  const bool poison = block_poisoned(lane) || !await_peers<Variant::threads>(params.peers, lane, params.combine.record,
                                                                             MOEFLOW_PHASE_RETURN, lane->returning);
  launch_dependents();
  for (int token = blockIdx.x; token < params.combine.tokens; token += gridDim.x) {
    combine_token<Model, Variant, SumOwners>(params.combine, token, poison);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) finish_step(lane, params.combine.record, params.combine.eager);
}

}  // namespace moeflow
#endif
