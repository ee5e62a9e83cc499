/* Owner, second pass: counts become offsets, and each block places the entries of its chunk of rows in expert-major order,
 * ascending within an expert. Every block adds up the counts of all chunks for itself, which saves a launch. Block 0 also
 * lists offsets, tiles and load. Atomics only count; they decide no order. */
#ifndef MOEFLOW_EXPERT_PREPARE_CUH
#define MOEFLOW_EXPERT_PREPARE_CUH

#include "lane.cuh"
#include "row.cuh"
#include "scan.cuh"

namespace moeflow {

/* offsets[e]: first position of expert e; next[e]: first position of the chunk's entries for e. Both shared. */
template <int threads>
__device__ __forceinline__ void find_offsets(const moeflow_expert_prepare_params &params, int32_t *offsets, int32_t *next) {
  const int experts = params.local_experts;
  for (int e = threadIdx.x; e < experts; e += threads) offsets[e] = next[e] = 0;
  __syncthreads();
  const int counts = static_cast<int>(gridDim.x) * experts;
  const int before = static_cast<int>(blockIdx.x) * experts; /* counts of the chunks before this one */
  for (int i = threadIdx.x; i < counts; i += threads) {
    const int32_t count = params.chunk_counts[i];
    if (count == 0) continue;
    atomicAdd(&offsets[i % experts], count);
    if (i < before) atomicAdd(&next[i % experts], count);
  }
  const int32_t total = exclusive_scan<threads>(offsets, experts);
  if (threadIdx.x == 0) offsets[experts] = total;
  for (int e = threadIdx.x; e < experts; e += threads) next[e] += offsets[e];
  __syncthreads();
}

/* One warp gives out positions, 32 entries at a time, so that they ascend with the entries. slots[i] (-1 = none) becomes the
 * position of the chunk's entry i. */
__device__ __forceinline__ void place_entries(int32_t *slots, int count, int32_t *next) {
  const int lane = threadIdx.x;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const int slot = i < count ? slots[i] : -1;
    const unsigned same = __match_any_sync(full_warp, slot);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (slot >= 0) slots[i] = next[slot] + rank;
    __syncwarp();
    if (slot >= 0 && rank == 0) next[slot] += __popc(same);
    __syncwarp();
  }
}

/* tile_begins is scratch: it becomes the number of each expert's first tile. */
template <int threads>
__device__ __forceinline__ void list_tiles(const moeflow_expert_prepare_params &params, const int32_t *offsets,
                                           int32_t *tile_begins) {
  const int experts = params.local_experts;
  for (int e = threadIdx.x; e < experts; e += threads) {
    const int32_t entries = offsets[e + 1] - offsets[e];
    tile_begins[e] = (entries + params.tile_tokens - 1) / params.tile_tokens;
    if (params.expert_load) params.expert_load[e] += entries;
  }
  const int32_t count = exclusive_scan<threads>(tile_begins, experts);
  if (threadIdx.x == 0) *params.tile_count = count;
  for (int i = threadIdx.x; i < count; i += threads) {
    int low = 0; /* the last expert whose first tile is not after tile i: experts without tiles share their successor's */
    int high = experts - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tile_begins[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int32_t begin = offsets[low] + (i - tile_begins[low]) * params.tile_tokens;
    const int32_t end = begin + params.tile_tokens;
    params.tiles[i] = {low, begin, end < offsets[low + 1] ? end : offsets[low + 1], 0};
  }
}

template <class Model, class Variant>
__device__ __forceinline__ void expert_prepare(const moeflow_expert_prepare_params &params) {
  constexpr int chunk_entries = MOEFLOW_CHUNK_ROWS * Model::top_k;
  __shared__ int32_t offsets[local_experts_max + 1];
  __shared__ int32_t next[local_experts_max];
  __shared__ int32_t slots[chunk_entries];
  if (block_poisoned(params.lane)) return;
  launch_dependents(); /* the experts kernel sets itself up meanwhile */
  const uint32_t epoch = params.lane->epoch;
  const int first_row = blockIdx.x * MOEFLOW_CHUNK_ROWS;
  for (int i = threadIdx.x; i < chunk_entries; i += Variant::threads) {
    slots[i] = choice_slot<Model>(params.in, first_row + i / Model::top_k, i % Model::top_k, epoch, params.local_experts);
  }
  find_offsets<Variant::threads>(params, offsets, next);
  if (threadIdx.x < 32) place_entries(slots, chunk_entries, next);
  __syncthreads();

  const int rows = params.in.ranks * params.in.rows - first_row;
  const int entries = rows < MOEFLOW_CHUNK_ROWS ? rows * Model::top_k : chunk_entries;
  for (int i = threadIdx.x; i < entries; i += Variant::threads) {
    const int32_t entry = first_row * Model::top_k + i;
    params.positions[entry] = slots[i];
    if (slots[i] >= 0) params.entries[slots[i]] = entry;
  }
  if (blockIdx.x != 0) return;
  for (int e = threadIdx.x; e <= params.local_experts; e += Variant::threads) params.expert_offsets[e] = offsets[e];
  list_tiles<Variant::threads>(params, offsets, next);
}

}  // namespace moeflow
#endif
