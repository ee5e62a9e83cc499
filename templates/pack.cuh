/* Sender: one block packs one token into a row for each peer. The header (with ids and weights) goes to all peers, the
 * hidden state only to owners of a choice; or one row, with everything, serves all of them. Row 0 is written even with no
 * tokens, since its header speaks for the whole source. */
#ifndef MOEFLOW_PACK_CUH
#define MOEFLOW_PACK_CUH

#include "lane.cuh"
#include "row.cuh"

namespace moeflow {

/* What the caller gave for the token's choice k. */
template <class Model>
__device__ __forceinline__ int64_t given_id(const moeflow_pack_params &params, int64_t choice) {
  return params.ids_int64 ? static_cast<const int64_t *>(params.ids)[choice] : static_cast<const int32_t *>(params.ids)[choice];
}

/* Where a choice goes, -1 = nowhere: a bad id, a weight of exactly 0, or an expert that nobody owns. `places`: params.places, or
 * what is the same nearer by. */
template <class Model>
__device__ __forceinline__ int32_t choice_place(const moeflow_pack_params &params, const int32_t *places, int token, int64_t id,
                                                float weight) {
  if (id < 0 || id >= Model::experts || weight == 0.0f) return MOEFLOW_PLACE_NONE;
  const int32_t *replicas = places + id * params.replicas;
  int32_t place = replicas[0];
  if (params.replicas > 1 && place >= 0) {
    uint32_t count = 1;
#pragma unroll 1
    while (count < static_cast<uint32_t>(params.replicas) && replicas[count] >= 0) count++;
    place = replicas[moeflow_replica(params.rank, token, count)];
  }
  if (place < 0) return MOEFLOW_PLACE_NONE;
  return moeflow_place_owner(place) < params.ranks ? place : MOEFLOW_PLACE_NONE;
}

template <class Model>
constexpr int header_words = 4 + 2 * Model::top_k;
template <class Model>
constexpr int header_vectors = (header_words<Model> + 3) / 4;

/* Header, ids and weights into shared `words`, padded with zeros to whole vectors; places and weights kept for combine. Thread k
 * brings choice k of a token that is live, and gets its place. */
template <class Model>
__device__ __forceinline__ int32_t stage_header(const moeflow_pack_params &params, const int32_t *places, uint32_t epoch,
                                                bool poison, int token, int tokens, int64_t id, float weight, uint32_t *words) {
  const int i = threadIdx.x;
  if (i == 0) {
    words[0] = epoch;
    words[1] = tokens;
    words[2] = params.tokens_max;
    words[3] = poison ? params.flags | MOEFLOW_ROW_POISONED : params.flags;
  }
  if (i < header_vectors<Model> * 4 - header_words<Model>) words[header_words<Model> + i] = 0;
  if (i >= Model::top_k) return MOEFLOW_PLACE_NONE;
  const bool live = token < tokens;
  const int32_t place = live ? choice_place<Model>(params, places, token, id, weight) : MOEFLOW_PLACE_NONE;
  words[4 + i] = static_cast<uint32_t>(place);
  words[4 + Model::top_k + i] = __float_as_uint(live ? weight : 0.0f);
  if (live) {
    const int64_t choice = static_cast<int64_t>(token) * Model::top_k + i;
    params.token_places[choice] = place;
    params.token_weights[choice] = weight;
  }
  return place;
}

/* The header to all peers, or into the one row. */
template <class Model, class Variant>
__device__ __forceinline__ void send_header(const moeflow_pack_params &params, int token, const uint4 *header) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int peer = threadIdx.x / 32; peer < (params.broadcast ? 1 : params.ranks); peer += Variant::threads / 32) {
    uint4 *to = reinterpret_cast<uint4 *>(row_out(params.out, peer, token, Row<Model>::bytes));
    if (lane < header_vectors<Model>) to[lane] = header[lane];
  }
}

template <class Model>
__device__ __forceinline__ const uint4 *token_hidden(const moeflow_pack_params &params, int token) {
  return reinterpret_cast<const uint4 *>(params.hidden) + static_cast<int64_t>(token) * (Model::hidden / 8);
}
/* Where the hidden state goes for an owner. */
template <class Model>
__device__ __forceinline__ uint4 *hidden_out(const moeflow_pack_params &params, int owner, int token) {
  return reinterpret_cast<uint4 *>(row_out(params.out, owner, token, Row<Model>::bytes) + Row<Model>::hidden);
}

template <class Model, class Variant>
__device__ __forceinline__ void send_hidden(const moeflow_pack_params &params, int owner, int token) {
  const uint4 *hidden = token_hidden<Model>(params, token);
  uint4 *to = hidden_out<Model>(params, owner, token);
  for (int j = threadIdx.x; j < Model::hidden / 8; j += Variant::threads) to[j] = hidden[j];
}

template <class Model, class Variant>
__device__ __forceinline__ void pack(const moeflow_pack_params &params) {
  __shared__ uint4 header[header_vectors<Model>];
  __shared__ OwnerList owners;
  const int token = blockIdx.x;
  const bool poison = block_poisoned(params.lane);
  const int tokens = poison ? 0 : params.tokens;
  if (token > 0 && token >= tokens) return;
  if (token == 0 && threadIdx.x == 0) store_system(&params.record->started, params.lane->epoch);
  if (poison && params.out.block_bytes == 0) return; /* one-sided: peers may still read the last step's row 0 */

  uint32_t *words = reinterpret_cast<uint32_t *>(header);
  const int64_t choice = static_cast<int64_t>(token) * Model::top_k + threadIdx.x;
  const bool brings = threadIdx.x < Model::top_k && token < tokens;
  const int32_t place =
      stage_header<Model>(params, params.places, params.lane->epoch, poison, token, tokens,
                          brings ? given_id<Model>(params, choice) : -1, brings ? params.weights[choice] : 0.0f, words);
  list_owners(place, 0, params.ranks, owners);
  send_header<Model, Variant>(params, token, header);
  if (params.broadcast) {
    if (token < tokens) send_hidden<Model, Variant>(params, 0, token);
  } else {
    for (int i = 0; i < owners.count; i++) send_hidden<Model, Variant>(params, owners.owner[i], token);
  }
}

}  // namespace moeflow
#endif
