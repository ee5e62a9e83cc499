/* Local transport: raise my flag at every peer, await theirs. One block, peers in parallel over its threads.
 *
 * A poisoned rank still raises its flags, after its mark in the peers' third block of words, so that nobody waits for it in
 * vain; it waits for nobody. Flags are epochs, compared so that they may wrap. */
#ifndef MOEFLOW_EXCHANGE_CUH
#define MOEFLOW_EXCHANGE_CUH

#include "lane.cuh"

namespace moeflow {

/* What ended a wait. */
enum Wait { wait_arrived, wait_timeout, wait_abort };

__device__ __forceinline__ Wait await_flag(const moeflow_exchange_params &params, const uint32_t *flag, uint32_t epoch,
                                           uint64_t begin) {
  constexpr int polls_per_look = 64; /* the abort word lies in host memory */
  for (int polls = 1;; polls++) {
    if (static_cast<int32_t>(load_acquire_system(flag) - epoch) >= 0) return wait_arrived;
    if (polls % polls_per_look) continue;
    if (params.abort && load_system(params.abort)) return wait_abort;
    if (global_timer() - begin > params.timeout_ns) return wait_timeout;
    sleep_ns(100);
  }
}

__device__ __forceinline__ uint32_t *flag_of(uint32_t *flags, int block, int source, int ranks) {
  return flags + static_cast<int64_t>(block) * ranks + source;
}

template <class Model, class Variant>
__device__ __forceinline__ void exchange(const moeflow_exchange_params &params) {
  __shared__ int late;    /* lowest peer that stayed silent */
  __shared__ int ill;     /* lowest peer that is poisoned; behind them, ranks + peer: by a peer of its own */
  __shared__ int aborted; /* lowest peer that was awaited when the group was given up */
  const int none = params.ranks;
  const int block = params.phase == MOEFLOW_PHASE_RETURN;
  const uint32_t epoch = params.lane->epoch;
  const uint32_t poison = params.lane->poison;
  if (threadIdx.x == 0) {
    late = aborted = none;
    ill = 2 * none;
  }
  for (int peer = threadIdx.x; peer < params.ranks; peer += Variant::threads) {
    uint32_t *flags = params.peer_flags[peer];
    if (poison) store_system(flag_of(flags, 2, params.rank, params.ranks), poison);
    fence_system();
    store_release_system(flag_of(flags, block, params.rank, params.ranks), epoch);
  }
  if (__syncthreads_or(poison != MOEFLOW_POISON_NONE)) return;

  const uint64_t begin = global_timer();
  for (int peer = threadIdx.x; peer < params.ranks; peer += Variant::threads) {
    const Wait end = await_flag(params, flag_of(params.flags, block, peer, params.ranks), epoch, begin);
    if (end == wait_timeout) atomicMin(&late, peer);
    if (end == wait_abort) atomicMin(&aborted, peer);
    const uint32_t mark = load_system(flag_of(params.flags, 2, peer, params.ranks));
    if (mark) atomicMin(&ill, mark == MOEFLOW_POISON_PEER ? none + peer : peer);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t phase = params.phase;
  if (aborted < none) raise_poison(params.lane, params.record, {MOEFLOW_POISON_ABORT, uint32_t(aborted), phase, epoch, 0});
  if (ill < 2 * none) raise_poison(params.lane, params.record, {MOEFLOW_POISON_PEER, uint32_t(ill % none), phase, epoch, 0});
  if (late < none) raise_poison(params.lane, params.record, {MOEFLOW_POISON_TIMEOUT, uint32_t(late), phase, epoch, 0});
}

}  // namespace moeflow
#endif
