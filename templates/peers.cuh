/* Telling peers and awaiting them, over one-sided transports: a lane's flag blocks (abi.h has their layout). Flags are epochs,
 * compared so that they may wrap.
 *
 * A poisoned rank still raises its flags, behind its mark, so that nobody waits for it in vain; it waits for nobody. */
#ifndef MOEFLOW_PEERS_CUH
#define MOEFLOW_PEERS_CUH

#include "lane.cuh"

namespace moeflow {

/* This block's words at every peer. One whole warp, behind a barrier that all of the block have reached with what they stored
 * for the peers. */
__device__ __forceinline__ void raise_flags(const moeflow_peers &peers, int phase, uint32_t epoch, uint32_t poison) {
  const int stride = static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = moeflow_flag_at(phase, peers.rank, peers.ranks, peers.words);
  fence_system();
  if (poison) {
    for (int peer = lane; peer < peers.ranks; peer += 32) {
      store_system(peers.peer_flags[peer] + moeflow_mark_at(peers.rank, peers.ranks, peers.words), poison);
    }
    __syncwarp();
    fence_system(); /* whoever sees a flag of any lane sees the mark */
  }
  for (int peer = 0; peer < peers.ranks; peer++) {
    uint32_t *flags = peers.peer_flags[peer] + at;
    for (int word = first + lane * stride; word < peers.words; word += 32 * stride) store_system(flags + word, epoch);
  }
}

/* What ended a wait. */
enum Wait { wait_arrived, wait_timeout, wait_abort };

__device__ __forceinline__ Wait await_flag(const moeflow_peers &peers, const uint32_t *flag, uint32_t epoch, uint64_t begin) {
  constexpr int polls_per_look = 64; /* the abort word lies in host memory */
  for (int polls = 1;; polls++) {
    if (static_cast<int32_t>(load_acquire_system(flag) - epoch) >= 0) return wait_arrived;
    if (polls % polls_per_look) continue;
    if (peers.abort && load_system(peers.abort)) return wait_abort;
    if (global_timer() - begin > peers.timeout_ns) return wait_timeout;
    sleep_ns(100);
  }
}

/* Until every source has raised all its words: true. False when the lane is poisoned instead, because a peer stayed silent, is
 * poisoned itself, or the group was given up. All `threads` of a block; begins and ends with a barrier. */
template <int threads>
__device__ __forceinline__ bool await_peers(const moeflow_peers &peers, moeflow_lane *lane, moeflow_record *record, int phase,
                                            uint32_t epoch) {
  __shared__ int late;    /* lowest peer that stayed silent */
  __shared__ int ill;     /* lowest peer that is poisoned; behind them, ranks + peer: by a peer of its own */
  __shared__ int aborted; /* lowest peer that was awaited when the group was given up */
  const int none = peers.ranks;
  if (threadIdx.x == 0) {
    late = aborted = none;
    ill = 2 * none;
  }
  __syncthreads();
  const uint32_t *flags = peers.flags + moeflow_flag_at(phase, 0, peers.ranks, peers.words);
  const uint64_t begin = global_timer();
  for (int i = threadIdx.x; i < peers.ranks * peers.words; i += threads) {
    const Wait end = await_flag(peers, flags + i, epoch, begin);
    if (end == wait_arrived) continue;
    atomicMin(end == wait_timeout ? &late : &aborted, i / peers.words);
    break;
  }
  __syncthreads(); /* a mark can be seen when its source's flags are */
  for (int peer = threadIdx.x; peer < peers.ranks; peer += threads) {
    const uint32_t mark = load_system(peers.flags + moeflow_mark_at(peer, peers.ranks, peers.words));
    if (mark) atomicMin(&ill, mark == MOEFLOW_POISON_PEER ? none + peer : peer);
  }
  __syncthreads();
  const bool arrived = late == none && aborted == none && ill == 2 * none;
  if (threadIdx.x == 0 && !arrived) {
    const uint32_t in = static_cast<uint32_t>(phase);
    if (aborted < none) raise_poison(lane, record, {MOEFLOW_POISON_ABORT, uint32_t(aborted), in, epoch, 0});
    if (ill < 2 * none) raise_poison(lane, record, {MOEFLOW_POISON_PEER, uint32_t(ill % none), in, epoch, 0});
    if (late < none) raise_poison(lane, record, {MOEFLOW_POISON_TIMEOUT, uint32_t(late), in, epoch, 0});
  }
  __syncthreads(); /* the shared words may be used again */
  return arrived;
}

}  // namespace moeflow
#endif
