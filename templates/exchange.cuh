/* One-sided transports, stepwise: raise my flags at every peer, await theirs. One block. */
#ifndef MOEFLOW_EXCHANGE_CUH
#define MOEFLOW_EXCHANGE_CUH

#include "peers.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void exchange(const moeflow_exchange_params &params) {
  const uint32_t epoch = params.lane->epoch;
  const bool poisoned = block_poisoned(params.lane);
  if (threadIdx.x < 32) raise_flags(params.peers, params.phase, epoch, poisoned ? params.lane->poison : 0u);
  if (!poisoned) await_peers<Variant::threads>(params.peers, params.lane, params.record, params.phase, epoch, false);
}

}  // namespace moeflow
#endif
