/* Telling peers and awaiting them, over one-sided transports: a lane's flag blocks (abi.h has their layout).
 *
 * A poisoned rank still raises its flags, so that nobody waits for it in vain; it waits for nobody. */
#ifndef MOEFLOW_PEERS_CUH
#define MOEFLOW_PEERS_CUH

#include "lane.cuh"

namespace moeflow {

/* This block's words at every peer. One whole warp, behind a barrier that all of the block have reached with what they stored
 * for the peers. */
__device__ __forceinline__ void raise_flags(const moeflow_peers &peers, int phase, uint32_t epoch, uint32_t poison) {
  const int stride = static_cast<int>(gridDim.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = moeflow_flag_at(phase, peers.rank, peers.ranks, peers.words);
  const uint32_t value = poison ? epoch + MOEFLOW_FLAG_POISONED : epoch;
#pragma unroll 1
  for (int peer = lane; poison && peer < peers.ranks; peer += 32) {
    store_system(peers.peer_flags[peer] + moeflow_mark_at(peers.rank, peers.ranks, peers.words), poison);
  }
  __syncwarp();
  fence_system(); /* whoever sees a flag sees the rows, and the mark */
#pragma unroll 1
  for (int peer = 0; peer < peers.ranks; peer++) {
    uint32_t *flags = peers.peer_flags[peer] + at;
#pragma unroll 1
    for (int word = static_cast<int>(blockIdx.x) + lane * stride; word < peers.words; word += 32 * stride) {
      store_system(flags + word, value);
    }
  }
}

/* What ended a wait. */
enum Wait { wait_arrived, wait_own, wait_ill, wait_timeout, wait_abort };

/* The first look is on its way together with epoch and poison. */
__device__ __forceinline__ Wait await_flag(const moeflow_peers &peers, const uint32_t *flag, uint32_t epoch, bool poison,
                                           uint64_t begin) {
  constexpr int polls_per_look = 64; /* the abort word lies in host memory */
#pragma unroll 1
  for (int polls = 1;; polls++) {
    const int32_t ahead = static_cast<int32_t>(load_acquire_system(flag) - epoch);
    if (poison) return wait_own;
    if (ahead >= 0) return ahead >= MOEFLOW_FLAG_AHEAD ? wait_ill : wait_arrived;
    if (polls % polls_per_look) continue;
    if (peers.abort && load_system(peers.abort)) return wait_abort;
    if (global_timer() - begin > peers.timeout_ns) return wait_timeout;
    sleep_ns(100);
  }
}

/* A wait that did not end well: the lowest peer in the worst trouble is named, one that is ill by a peer of its own only where
 * there is no other. `end` of each thread, and the peer that it waited for. */
template <int threads>
__device__ MOEFLOW_CALL void raise_wait(const moeflow_peers &peers, moeflow_lane *lane, moeflow_record *record, int phase,
                                        uint32_t epoch, Wait end, int peer) {
  __shared__ int worst;
  const int none = 4 * peers.ranks;
  if (threadIdx.x == 0) worst = none;
  __syncthreads();
  if (end == wait_ill) {
    const uint32_t mark = load_system(peers.flags + moeflow_mark_at(peer, peers.ranks, peers.words));
    atomicMin(&worst, (mark == MOEFLOW_POISON_PEER ? peers.ranks : 0) + peer);
  } else if (end == wait_abort || end == wait_timeout) {
    atomicMin(&worst, (end == wait_abort ? 2 : 3) * peers.ranks + peer);
  }
  __syncthreads();
  if (threadIdx.x != 0 || worst == none) return;
  const int kind = worst / peers.ranks;
  const uint32_t poison = kind < 2 ? MOEFLOW_POISON_PEER : kind == 2 ? MOEFLOW_POISON_ABORT : MOEFLOW_POISON_TIMEOUT;
  raise_poison(lane, record, {poison, static_cast<uint32_t>(worst % peers.ranks), static_cast<uint32_t>(phase), epoch, 0});
}

/* Until every source has raised all its words: true. False when the lane is poisoned instead, because it was already (`poison`, to
 * any thread), a peer stayed silent or is poisoned itself, or the group was given up. All `threads` of a block; epoch and poison
 * may still be on their way from memory. Ends with a barrier. */
template <int threads>
__device__ __forceinline__ bool await_peers(const moeflow_peers &peers, moeflow_lane *lane, moeflow_record *record, int phase,
                                            uint32_t epoch, bool poison) {
  const uint32_t *flags = peers.flags + moeflow_flag_at(phase, 0, peers.ranks, peers.words);
  const uint64_t begin = global_timer();
  Wait end = wait_arrived;
  int i = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (; i < peers.ranks * peers.words; i += threads) {
    end = await_flag(peers, flags + i, epoch, poison, begin);
    if (end != wait_arrived) break;
  }
  if (!__syncthreads_or(poison || end != wait_arrived)) return true;
  raise_wait<threads>(peers, lane, record, phase, epoch, end, i / peers.words);
  return false;
}

}  // namespace moeflow
#endif
