/* Source, fused: router, pack and the way out in one launch. A block chooses a token's experts, stores its row straight into the
 * owners' windows and then raises its flags; with more tokens than blocks it takes several, one after the other. */
#ifndef MOEFLOW_DISPATCH_CUH
#define MOEFLOW_DISPATCH_CUH

#include "pack.cuh"
#include "peers.cuh"
#include "router.cuh"

namespace moeflow {

template <class Model>
struct DispatchShared {
  uint4 header[header_vectors<Model>];
  OwnerList owners;
  float values[Model::experts];
  float groups[router_grouped<Model> ? Model::groups : 1];
};

/* Thread k's choice: the router's, made by the first warp, or the one that was given. */
template <class Model>
__device__ __forceinline__ Choice token_choice(const moeflow_dispatch_params &params, int token, DispatchShared<Model> &shared,
                                               int64_t *id) {
  *id = -1;
  if (threadIdx.x >= 32) return {-1, 0.0f};
  if (params.router.logits) {
    const Choice choice = route<Model>(params.router, token, shared.values, shared.groups);
    store_choice<Model>(params.router, token, choice);
    *id = choice.id;
    return choice;
  }
  if (threadIdx.x >= Model::top_k) return {-1, 0.0f};
  const int64_t at = static_cast<int64_t>(token) * Model::top_k + threadIdx.x;
  *id = given_id<Model>(params.pack, at);
  return {0, params.pack.weights[at]};
}

/* One token's row; the hidden state is on its way while the experts are chosen. */
template <class Model, class Variant>
__device__ __forceinline__ void send_token(const moeflow_dispatch_params &params, int token, int tokens,
                                           DispatchShared<Model> &shared) {
  constexpr int vectors = Model::hidden / 8;
  constexpr int rounds = (vectors + Variant::threads - 1) / Variant::threads;
  constexpr int held = rounds < 4 ? rounds : 4; /* of each thread, in registers; what is behind them is read again for each owner */
  const bool live = token < tokens;
  const uint4 *hidden = token_hidden<Model>(params.pack, token);
  uint4 mine[held] = {};
#pragma unroll
  for (int i = 0; i < held; i++) {
    const int j = i * Variant::threads + threadIdx.x;
    if (live && j < vectors) mine[i] = hidden[j];
  }
  int64_t id = -1;
  const Choice choice = live ? token_choice<Model>(params, token, shared, &id) : Choice{-1, 0.0f};
  uint32_t *words = reinterpret_cast<uint32_t *>(shared.header);
  stage_header<Model>(params.pack, false, token, tokens, id, choice.weight, words);
  list_owners<Model::top_k>(reinterpret_cast<const int32_t *>(words + 4), 0, params.pack.ranks, shared.owners);
  for (int owner = 0; owner < shared.owners.count; owner++) {
    uint4 *to = hidden_out<Model>(params.pack, shared.owners.owner[owner], token);
#pragma unroll
    for (int i = 0; i < held; i++) {
      const int j = i * Variant::threads + threadIdx.x;
      if (j < vectors) to[j] = mine[i];
    }
    for (int j = held * Variant::threads + threadIdx.x; j < vectors; j += Variant::threads) to[j] = hidden[j];
  }
  send_header<Model, Variant>(params.pack, token, shared.header);
  __syncthreads(); /* the next token takes the same shared memory; and all of this one is stored */
}

template <class Model, class Variant>
__device__ __forceinline__ void dispatch(const moeflow_dispatch_params &params) {
  __shared__ DispatchShared<Model> shared;
  await_dependencies(); /* nothing that another kernel wrote is read before this, and nothing stored */
  moeflow_lane *lane = params.pack.lane;
  const bool poison = block_poisoned(lane);
  const uint32_t epoch = lane->epoch;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_system(&params.pack.record->started, epoch);
    lane->returning = epoch;
  }
  if (!poison) { /* else peers may still read the last step's rows */
    const int tokens = params.pack.tokens;
    for (int token = blockIdx.x; token < (tokens > 0 ? tokens : 1); token += gridDim.x) {
      send_token<Model, Variant>(params, token, tokens, shared);
    }
  }
  launch_dependents();
  if (threadIdx.x < 32) raise_flags(params.peers, MOEFLOW_PHASE_DISPATCH, epoch, poison ? lane->poison : 0u);
}

}  // namespace moeflow
#endif
