/* The experts kernel's beginning in the fused pipeline: rows arrive, and every block makes the work lists for itself, so that none
 * waits for another. All blocks store the same lists to the same places, and each reads what it stored itself. The lists are
 * those of expert_index and expert_prepare, entry by entry.
 *
 * This runs once a launch, so what it costs is round trips to memory, barriers, and instructions that no cache holds: loops are
 * not unrolled. */
#ifndef MOEFLOW_EXPERTS_ARRIVAL_CUH
#define MOEFLOW_EXPERTS_ARRIVAL_CUH

#include "header.cuh"
#include "peers.cuh"
#include "scan.cuh"

namespace moeflow {

constexpr int near_tiles = 16; /* the first tiles, which a block keeps near by: its first ticket wants one at once */

/* What a block knows of the lists without reading them. */
struct Lists {
  int tiles; /* -1: the lane is poisoned */
  int entries;
  uint32_t epoch;
  int first_ticket; /* of thread 0 */
};

/* Scratch in dynamic shared memory, moeflow_fused_shared_bytes of it. */
template <class Model, int threads, int tile_tokens>
struct Arrival {
  const moeflow_experts_params &params;
  moeflow_tile *near; /* [near_tiles] */
  int rows;
  int experts;
  int32_t *counts;    /* [experts]: entries of each expert; once more, while they are put down in any order */
  uint32_t *begins;   /* [experts]: first position, and first tile << 16 */
  int16_t *slots;     /* [rows * K]: an entry's local slot, -1 = none of mine */
  uint16_t *unsorted; /* [entries]: by position; those of each expert in any order */
  uint16_t *sorted;   /* [entries] */

  __device__ __forceinline__ Arrival(const moeflow_experts_params &params_, unsigned char *scratch, moeflow_tile *near_)
      : params(params_), near(near_) {
    rows = params.in.ranks * params.in.rows;
    experts = params.local_experts;
    counts = reinterpret_cast<int32_t *>(scratch);
    begins = reinterpret_cast<uint32_t *>(counts + experts);
    slots = reinterpret_cast<int16_t *>(begins + experts);
    unsorted = reinterpret_cast<uint16_t *>(slots + rows * Model::top_k);
    sorted = unsorted + rows * Model::top_k;
  }

  __device__ __forceinline__ void clear_counts() const {
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += threads) counts[e] = 0;
  }

  /* A thread has a row: its header and ids come together. */
  __device__ __forceinline__ HeaderCheck find_slots(uint32_t epoch) const {
    constexpr int vectors = (Model::top_k + 3) / 4; /* what they hold behind the ids are weights */
    HeaderCheck check = {params.in.ranks, -1};
#pragma unroll 1
    for (int row = threadIdx.x; row < rows; row += threads) {
      const int source = row / params.in.rows;
      const int token = row - source * params.in.rows;
      const uint8_t *from = row_in(params.in, source, token, Row<Model>::bytes);
      const moeflow_row_header header = load_header(from);
      uint4 ids[vectors];
#pragma unroll
      for (int i = 0; i < vectors; i++) ids[i] = reinterpret_cast<const uint4 *>(from + Row<Model>::ids)[i];
      const bool live = row_counts(header, token, params.in.rows, epoch);
#pragma unroll
      for (int k = 0; k < Model::top_k; k++) {
        const uint32_t word = k % 4 == 0 ? ids[k / 4].x : k % 4 == 1 ? ids[k / 4].y : k % 4 == 2 ? ids[k / 4].z : ids[k / 4].w;
        const int slot = live ? local_slot(static_cast<int32_t>(word), params.in.rank, experts) : -1;
        slots[row * Model::top_k + k] = static_cast<int16_t>(slot);
        if (slot >= 0) atomicAdd(&counts[slot], 1);
      }
      if (token == 0) note_header(check, header, params.in, source, epoch);
    }
    return check;
  }

  /* Positions and tiles of each expert, in one sum: both stay below 2^16. Returns the numbers of all. */
  __device__ __forceinline__ uint32_t find_begins() const {
    uint32_t all = 0;
#pragma unroll 1
    for (int first = 0; first < experts; first += threads) {
      const int e = first + static_cast<int>(threadIdx.x);
      const int32_t count = e < experts ? counts[e] : 0;
      const uint32_t mine = static_cast<uint32_t>(count | (count + tile_tokens - 1) / tile_tokens << 16);
      uint32_t before;
      const uint32_t sum = sum_before<threads>(mine, &before);
      before += all;
      all += sum;
      if (count == 0) continue;
      begins[e] = before;
      counts[e] = 0;
      if (params.expert_load && blockIdx.x == 0) params.expert_load[e] += count;
      int tile = static_cast<int>(before >> 16);
      const int32_t end = static_cast<int32_t>(before & 0xffff) + count;
#pragma unroll 1
      for (int32_t begin = end - count; begin < end; begin += tile_tokens) {
        const moeflow_tile made = {e, begin, begin + tile_tokens < end ? begin + tile_tokens : end, 0};
        if (tile < near_tiles) near[tile] = made;
        params.tiles[tile++] = made;
      }
    }
    if (threadIdx.x == 0) {
      *params.entry_count = static_cast<int32_t>(all & 0xffff);
      *params.tile_count = static_cast<int32_t>(all >> 16);
    }
    __syncthreads();
    return all;
  }

  /* An expert's entries ascend with their positions: each counts how many of them are before it. All blocks store to the same
   * addresses, so they store whole lines. */
  __device__ __forceinline__ void place_entries(int count) const {
    const int all = rows * Model::top_k;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += threads) {
      const int slot = slots[i];
      if (slot >= 0) unsorted[(begins[slot] & 0xffff) + atomicAdd(&counts[slot], 1)] = static_cast<uint16_t>(i);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += threads) {
      const int slot = slots[i];
      int32_t position = -1;
      if (slot >= 0) {
        const int32_t begin = static_cast<int32_t>(begins[slot] & 0xffff), end = begin + counts[slot];
        position = begin;
#pragma unroll 1
        for (int32_t j = begin; j < end; j++) position += unsorted[j] < i;
        sorted[position] = static_cast<uint16_t>(i);
      }
      params.positions[i] = position;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += threads) params.entries[i] = sorted[i];
  }
};

/* All threads of every block; ends with a barrier, after which the lists can be read and the scratch is free. Thread 0 takes
 * its first ticket once it is sure that the block goes on, or others would wait for it for ever. A call, so that the kernel's
 * other parts keep their registers.
 *
 * The kernel may be here while dispatch still runs: its own flags are awaited like any peer's, and what else is read stands
 * since the step before. */
template <class Model, int threads, int tile_tokens, class Control>
__device__ MOEFLOW_CALL Lists await_rows(const moeflow_experts_params &params, unsigned char *scratch, moeflow_tile *near,
                                         const Control &control) {
  const uint32_t epoch = params.lane->epoch;
  const bool poison = poisoned(params.lane);
  const Arrival<Model, threads, tile_tokens> arrival(params, scratch, near);
  arrival.clear_counts();
  if (!await_peers<threads>(params.peers, params.lane, params.record, MOEFLOW_PHASE_DISPATCH, epoch, poison)) {
    return {-1, 0, epoch, 0};
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) store_system(&params.record->received, epoch);
  const HeaderCheck check = arrival.find_slots(epoch);
  if (!headers_sound<Model>(check, params.in, params.lane, params.record)) return {-1, 0, epoch, 0};
  const int first_ticket = threadIdx.x == 0 ? control.take() : 0;
  const uint32_t all = arrival.find_begins();
  arrival.place_entries(static_cast<int>(all & 0xffff));
  __syncthreads();
  return {static_cast<int>(all >> 16), static_cast<int>(all & 0xffff), epoch, first_ticket};
}

}  // namespace moeflow
#endif
