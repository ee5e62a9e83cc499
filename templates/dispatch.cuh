/* Source, fused: router, pack and the way out in one launch. A block chooses a token's experts, stores its row straight into the
 * owners' windows and then raises its flags; with more tokens than blocks it takes several, one after the other. */
#ifndef MOEFLOW_DISPATCH_CUH
#define MOEFLOW_DISPATCH_CUH

#include "pack.cuh"
#include "peers.cuh"
#include "router.cuh"

namespace moeflow {

constexpr int near_places = 1024; /* places that are copied near by before they are wanted */

template <class Model>
struct DispatchShared {
  uint4 header[header_vectors<Model>];
  OwnerList owners;
  RouterShared<Model> router;
  int32_t places[near_places];
};

/* The layer's places, which no kernel writes: while the kernel before still runs. A barrier must pass before they are read. */
template <class Model, int threads>
__device__ __forceinline__ const int32_t *fetch_places(const moeflow_pack_params &params, DispatchShared<Model> &shared) {
  const int count = Model::experts * params.replicas;
  if (count > near_places) return params.places;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += threads) shared.places[i] = params.places[i];
  return shared.places;
}

struct GivenChoice { /* thread k's */
  int64_t id;
  float weight;
};

/* The router's choice, made by the first warp, or the one that was given. All threads; with logits, a barrier. */
template <class Model, int threads>
__device__ __forceinline__ GivenChoice token_choice(const moeflow_dispatch_params &params, int token,
                                                    DispatchShared<Model> &shared) {
  if (params.router.logits) {
    score_experts<Model, threads>(params.router, token, threadIdx.x, shared.router);
    __syncthreads();
    if (threadIdx.x >= 32) return {-1, 0.0f};
    const Choice choice = choose_experts<Model>(shared.router);
    store_choice<Model>(params.router, token, choice);
    return {choice.id, choice.weight};
  }
  if (threadIdx.x >= Model::top_k) return {-1, 0.0f};
  const int64_t at = static_cast<int64_t>(token) * Model::top_k + threadIdx.x;
  return {given_id<Model>(params.pack, at), params.pack.weights[at]};
}

/* One token's row; the hidden state is on its way while the experts are chosen. A thread that finds the lane poisoned stores
 * nothing, since peers may still read the last step's rows. True when any did. */
template <class Model, class Variant>
__device__ __forceinline__ bool send_token(const moeflow_dispatch_params &params, const int32_t *places, uint32_t epoch,
                                           bool poison, int token, int tokens, DispatchShared<Model> &shared) {
  constexpr int vectors = Model::hidden / 8;
  constexpr int rounds = (vectors + Variant::threads - 1) / Variant::threads;
  constexpr int held = rounds < 4 ? rounds : 4; /* of each thread, in registers; what is behind them is read for each owner */
  const bool live = token < tokens;
  const uint4 *hidden = token_hidden<Model>(params.pack, token);
  uint4 mine[held] = {};
#pragma unroll
  for (int i = 0; i < held; i++) {
    const int j = i * Variant::threads + threadIdx.x;
    if (live && j < vectors) mine[i] = hidden[j];
  }
  GivenChoice choice = {-1, 0.0f};
  if (live) choice = token_choice<Model, Variant::threads>(params, token, shared);
  const int32_t place = stage_header<Model>(params.pack, places, epoch, false, token, tokens, choice.id, choice.weight,
                                            reinterpret_cast<uint32_t *>(shared.header));
  list_owners(place, 0, params.pack.ranks, shared.owners);
#pragma unroll 1
  for (int i = 0; !poison && i < shared.owners.count; i++) {
    uint4 *to = hidden_out<Model>(params.pack, shared.owners.owner[i], token);
#pragma unroll
    for (int k = 0; k < held; k++) {
      const int j = k * Variant::threads + threadIdx.x;
      if (j < vectors) to[j] = mine[k];
    }
#pragma unroll 1
    for (int j = held * Variant::threads + threadIdx.x; j < vectors; j += Variant::threads) to[j] = hidden[j];
  }
  if (!poison) send_header<Model, Variant>(params.pack, token, shared.header);
  return __syncthreads_or(poison); /* all of this token is stored, and the next one takes the same shared memory */
}

template <class Model, class Variant>
__device__ __forceinline__ void dispatch(const moeflow_dispatch_params &params) {
  __shared__ DispatchShared<Model> shared;
  const int32_t *places = fetch_places<Model, Variant::threads>(params.pack, shared);
  await_dependencies(); /* nothing that another kernel wrote is read before this, and nothing stored */
  __syncthreads();      /* the places are there */
  moeflow_lane *lane = params.pack.lane;
  const uint32_t epoch = lane->epoch;
  bool poison = poisoned(lane);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_system(&params.pack.record->started, epoch);
    lane->returning = epoch;
  }
  const int tokens = params.pack.tokens;
#pragma unroll 1
  for (int token = blockIdx.x; token < (tokens > 0 ? tokens : 1); token += gridDim.x) {
    poison = send_token<Model, Variant>(params, places, epoch, poison, token, tokens, shared);
  }
  launch_dependents();
  if (threadIdx.x < 32) raise_flags(params.peers, MOEFLOW_PHASE_DISPATCH, epoch, poison ? lane->poison : 0u);
}

}  // namespace moeflow
#endif
