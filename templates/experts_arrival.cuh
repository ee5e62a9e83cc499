/* The experts kernel's beginning in the fused pipeline: rows arrive, and every block makes the work lists for itself, so that none
 * waits for another. All blocks store the same lists to the same places, and each reads what it stored itself. The lists are
 * those of expert_index and expert_prepare, entry by entry. */
#ifndef MOEFLOW_EXPERTS_ARRIVAL_CUH
#define MOEFLOW_EXPERTS_ARRIVAL_CUH

#include "header.cuh"
#include "peers.cuh"
#include "scan.cuh"

namespace moeflow {

/* Scratch in dynamic shared memory, moeflow_fused_shared_bytes of it. Warp w looks after a run of consecutive entries. */
template <class Model, int threads>
struct Arrival {
  static constexpr int warps = threads / 32;
  const moeflow_experts_params &params;
  int entries;
  int experts;
  int16_t *slots;     /* [entries]: local slot, -1 = none of mine */
  uint16_t *counts;   /* [warps][experts]: entries of the warp's run; then of the runs before */
  int32_t *offsets;   /* [experts + 1]: first position */
  int32_t *first_tile;/* [experts] */

  __device__ __forceinline__ Arrival(const moeflow_experts_params &params_, unsigned char *scratch) : params(params_) {
    entries = params.in.ranks * params.in.rows * Model::top_k;
    experts = params.local_experts;
    offsets = reinterpret_cast<int32_t *>(scratch);
    first_tile = offsets + experts + 1;
    slots = reinterpret_cast<int16_t *>(first_tile + experts);
    counts = reinterpret_cast<uint16_t *>(slots + (entries + 1) / 2 * 2);
  }

  __device__ __forceinline__ int run_length() const { /* a multiple of 32 */
    return (entries + threads - 1) / threads * 32;
  }

  /* f(entry or -1, its slot, lanes with the same slot, how many of those are before this one), 32 entries at a time. */
  template <class F>
  __device__ __forceinline__ void for_run(const F &f) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int begin = static_cast<int>(threadIdx.x) / 32 * run_length();
    const int end = begin + run_length() < entries ? begin + run_length() : entries;
    for (int first = begin; first < end; first += 32) {
      const int i = first + lane;
      const int slot = i < end ? slots[i] : -1;
      const unsigned same = __match_any_sync(full_warp, slot);
      f(i < end ? i : -1, slot, __popc(same), __popc(same & ((1u << lane) - 1)));
    }
  }

  __device__ __forceinline__ void find_slots(uint32_t epoch) const {
    for (int i = threadIdx.x; i < entries; i += threads) {
      slots[i] = static_cast<int16_t>(choice_slot<Model>(params.in, i / Model::top_k, i % Model::top_k, epoch, experts));
    }
    for (int i = threadIdx.x; i < warps * experts; i += threads) counts[i] = 0;
    __syncthreads();
  }

  /* Positions of each expert and of each warp's run within. Returns the number of entries here. */
  __device__ __forceinline__ int32_t find_offsets() const {
    uint16_t *mine = counts + static_cast<int>(threadIdx.x) / 32 * experts;
    for_run([&](int, int slot, int same, int before) {
      if (slot >= 0 && before == 0) mine[slot] = static_cast<uint16_t>(mine[slot] + same);
      __syncwarp();
    });
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += threads) {
      int32_t sum = 0;
      for (int w = 0; w < warps; w++) {
        const int32_t count = counts[w * experts + e];
        counts[w * experts + e] = static_cast<uint16_t>(sum);
        sum += count;
      }
      offsets[e] = sum;
    }
    const int32_t total = exclusive_scan<threads>(offsets, experts);
    if (threadIdx.x == 0) {
      offsets[experts] = total;
      *params.entry_count = total;
    }
    __syncthreads();
    return total;
  }

  __device__ __forceinline__ void place_entries() const {
    uint16_t *before_run = counts + static_cast<int>(threadIdx.x) / 32 * experts;
    for_run([&](int entry, int slot, int same, int before) {
      const int32_t position = slot >= 0 ? offsets[slot] + before_run[slot] + before : -1;
      __syncwarp();
      if (slot >= 0 && before == 0) before_run[slot] = static_cast<uint16_t>(before_run[slot] + same);
      __syncwarp();
      if (entry < 0) return;
      params.positions[entry] = position;
      if (position >= 0) params.entries[position] = entry;
    });
  }

  /* Returns their number. */
  __device__ __forceinline__ int32_t list_tiles(int tile_tokens) const {
    for (int e = threadIdx.x; e < experts; e += threads) {
      const int32_t count = offsets[e + 1] - offsets[e];
      first_tile[e] = (count + tile_tokens - 1) / tile_tokens;
      if (params.expert_load && blockIdx.x == 0) params.expert_load[e] += count;
    }
    const int32_t total = exclusive_scan<threads>(first_tile, experts);
    for (int e = threadIdx.x; e < experts; e += threads) {
      const int32_t end = offsets[e + 1];
      int tile = first_tile[e];
      for (int32_t begin = offsets[e]; begin < end; begin += tile_tokens) {
        params.tiles[tile++] = {e, begin, begin + tile_tokens < end ? begin + tile_tokens : end, 0};
      }
    }
    if (threadIdx.x == 0) *params.tile_count = total;
    return total;
  }
};

/* What a block knows of the lists without reading them. */
struct Lists {
  int tiles;   /* -1: the lane is poisoned */
  int entries;
};

/* All threads of every block; begins and ends with a barrier, after which the lists can be read and the scratch is free. A call,
 * so that the kernel's other parts keep their registers. */
template <class Model, int threads>
__device__ MOEFLOW_CALL Lists await_rows(const moeflow_experts_params &params, int tile_tokens, unsigned char *scratch) {
  const uint32_t epoch = params.lane->epoch;
  if (block_poisoned(params.lane)) return {-1, 0};
  if (!await_peers<threads>(params.peers, params.lane, params.record, MOEFLOW_PHASE_DISPATCH, epoch)) return {-1, 0};
  if (!check_headers<Model, threads>(params.in, params.lane, params.record)) return {-1, 0};
  const Arrival<Model, threads> arrival(params, scratch);
  arrival.find_slots(epoch);
  const int32_t entries = arrival.find_offsets();
  arrival.place_entries();
  const int32_t tiles = arrival.list_tiles(tile_tokens);
  __syncthreads();
  return {tiles, entries};
}

}  // namespace moeflow
#endif
