/* Source, fused: awaits the owners' return rows, then combine. The last kernel of a step.
 *
 * It may be here while the experts kernel still runs: its own flags are awaited like any peer's, and what else is read was
 * written by dispatch, which has ended. */
#ifndef MOEFLOW_RETURN_COMBINE_CUH
#define MOEFLOW_RETURN_COMBINE_CUH

#include "combine.cuh"
#include "peers.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void return_combine(const moeflow_return_combine_params &params) {
  __shared__ CombineShared shared;
  moeflow_lane *lane = params.combine.lane;
  const uint32_t epoch = lane->returning;
  const bool own = poisoned(lane);
  int token = blockIdx.x;
  find_owners<Model, SumOwners>(params.combine, token, shared);
  const bool poison =
      !await_peers<Variant::threads>(params.peers, lane, params.combine.record, MOEFLOW_PHASE_RETURN, epoch, own);
  launch_dependents();
#pragma unroll 1
  while (token < params.combine.tokens) {
    combine_token<Model, Variant, SumOwners>(params.combine, token, poison, shared);
    token += gridDim.x;
    __syncthreads();
    if (token < params.combine.tokens) find_owners<Model, SumOwners>(params.combine, token, shared);
  }
  await_dependencies(); /* so that who waits for this kernel waits for the step's others */
  if (blockIdx.x == 0 && threadIdx.x == 0) finish_step(lane, params.combine.record, params.combine.eager);
}

}  // namespace moeflow
#endif
