/* Accessors of packed rows, and what makes a received row and a place count. All byte offsets are 64-bit. */
#ifndef MOEFLOW_ROW_CUH
#define MOEFLOW_ROW_CUH

#include "numeric.cuh"

namespace moeflow {

/* Most local slots of a rank: their counts stand in shared memory. */
constexpr int local_experts_max = MOEFLOW_LOCAL_EXPERTS_MAX;

template <class Model>
struct Row { /* a dispatched row, bf16 */
  static constexpr int64_t ids = moeflow_row_ids_offset();
  static constexpr int64_t weights = moeflow_row_weights_offset(Model::top_k);
  static constexpr int64_t hidden = moeflow_row_hidden_offset(Model::top_k);
  static constexpr int64_t bytes = moeflow_row_bytes(Model::top_k, Model::hidden, 2, 0);
};

template <class Model>
struct ReturnRow {
  static constexpr bool fp32 = Model::return_fp32 != 0;
  static constexpr int per_token = Model::reduce_choices ? Model::top_k : 1;
  static constexpr int64_t bytes = moeflow_return_row_bytes(Model::hidden, fp32 ? 4 : 2);
};

__device__ __forceinline__ const uint8_t *row_in(const moeflow_rows_in &in, int source, int token, int64_t row_bytes) {
  return in.base + source * in.block_bytes + token * row_bytes;
}
__device__ __forceinline__ uint8_t *row_out(const moeflow_rows_out &out, int peer, int row, int64_t row_bytes) {
  return out.targets[peer] + peer * out.block_bytes + row * row_bytes;
}

__device__ __forceinline__ moeflow_row_header load_header(const uint8_t *row) {
  const uint4 words = *reinterpret_cast<const uint4 *>(row);
  return {words.x, words.y, words.z, words.w};
}

/* Rows of an earlier step and rows beyond those sent never count; a hostile rows_sent is bounded by the buffer. */
__device__ __forceinline__ bool row_counts(const moeflow_row_header &header, int token, int rows, uint32_t epoch) {
  const uint32_t sent = header.rows_sent < static_cast<uint32_t>(rows) ? header.rows_sent : static_cast<uint32_t>(rows);
  return header.epoch == epoch && static_cast<uint32_t>(token) < sent;
}

/* The local slot that a received id asks for, -1 = none of mine. */
__device__ __forceinline__ int local_slot(int32_t place, int rank, int local_experts) {
  const int slot = moeflow_place_slot(place);
  return moeflow_place_owner(place) == rank && slot < local_experts ? slot : -1;
}

/* The local slot that choice k of received row number `row` asks for, -1 = none of mine. */
template <class Model>
__device__ __forceinline__ int choice_slot(const moeflow_rows_in &in, int row, int k, uint32_t epoch, int local_experts) {
  if (row >= in.ranks * in.rows) return -1;
  const int token = row % in.rows;
  const uint8_t *bytes = row_in(in, row / in.rows, token, Row<Model>::bytes);
  if (!row_counts(load_header(bytes), token, in.rows, epoch)) return -1;
  return local_slot(reinterpret_cast<const int32_t *>(bytes + Row<Model>::ids)[k], in.rank, local_experts);
}

/* The hidden state of the row that an entry (row number * K + choice) belongs to. */
template <class Model>
__device__ __forceinline__ const uint8_t *entry_hidden(const moeflow_rows_in &in, int32_t entry) {
  const int row = entry / Model::top_k;
  return row_in(in, row / in.rows, row % in.rows, Row<Model>::bytes) + Row<Model>::hidden;
}

/* Distinct owners of a token's choices, in ring order from rank `start`. */
struct OwnerList {
  int32_t owner[MOEFLOW_CHOICES_MAX];
  int32_t count;
};

/* The first warp lists; place: its lane k's choice k, -1 = none. All threads of the block; ends with a barrier. */
__device__ __forceinline__ void list_owners(int32_t place, int start, int ranks, OwnerList &list) {
  if (threadIdx.x < 32) {
    const int owner = place >= 0 ? moeflow_place_owner(place) : -1;
    const unsigned same = __match_any_sync(full_warp, owner);
    const bool first = owner >= 0 && (same & ((1u << threadIdx.x) - 1)) == 0;
    const unsigned firsts = __ballot_sync(full_warp, first);
    const int distance = owner < start ? owner - start + ranks : owner - start;
    int before = 0;
#pragma unroll 1
    for (unsigned rest = firsts; rest != 0; rest &= rest - 1) before += __shfl_sync(full_warp, distance, __ffs(rest) - 1) < distance;
    if (first) list.owner[before] = owner;
    if (threadIdx.x == 0) list.count = __popc(firsts);
  }
  __syncthreads();
}

}  // namespace moeflow
#endif
