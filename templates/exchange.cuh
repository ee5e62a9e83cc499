/* One-sided transports, stepwise: raise my flags at every peer, await theirs. One block. */
#ifndef MOEFLOW_EXCHANGE_CUH
#define MOEFLOW_EXCHANGE_CUH

#include "peers.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void exchange(const moeflow_exchange_params &params) {
  const uint32_t epoch = params.lane->epoch;
  const uint32_t poison = params.lane->poison; /* each thread's own look: the host may poison the lane at any moment */
  const bool poisoned = __syncthreads_or(poison != MOEFLOW_POISON_NONE);
  if (threadIdx.x < 32) {
    raise_flags(params.peers, params.phase, epoch, poisoned ? params.lane->poison : uint32_t(MOEFLOW_POISON_NONE));
  }
  if (!poisoned) await_peers<Variant::threads>(params.peers, params.lane, params.record, params.phase, epoch);
}

}  // namespace moeflow
#endif
