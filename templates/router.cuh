/* Router: a warp chooses one token's K experts, in FP32. NaN and -inf logits are never chosen, +inf counts as the largest
 * finite value, ties go to the lower id; with fewer than K to choose from, id -1 and weight 0 fill up. Selection is by score
 * plus correction bias, weights are the scores. */
#ifndef MOEFLOW_ROUTER_CUH
#define MOEFLOW_ROUTER_CUH

#include "lane.cuh"
#include "numeric.cuh"

namespace moeflow {

/* The numbers of the spec's enums. */
enum { score_softmax = 0, score_sigmoid = 1 };
enum { group_max = 0, group_top2 = 1 };
enum { renormalize_none = 0, renormalize_sum_1e_20 = 1, renormalize_sum_1e_6 = 2, renormalize_max_1e_12 = 3 };

struct Best {
  float value; /* -inf: nothing to choose */
  int id;
};

__device__ __forceinline__ bool better(const Best &a, const Best &b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/* A float as a number that orders like it; both zeros are the same one. */
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ Best warp_best(const Best &mine) {
  const uint32_t value = ordered(mine.value);
  const uint32_t most = __reduce_max_sync(full_warp, value);
  const uint32_t id = value == most ? static_cast<uint32_t>(mine.id) : ~0u;
  return {__uint_as_float(most & 0x80000000u ? most & 0x7fffffffu : ~most), static_cast<int>(__reduce_min_sync(full_warp, id))};
}
__device__ __forceinline__ float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(full_warp, value, distance));
  }
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(full_warp, value, distance);
  return value;
}

/* The best of the values that this lane looks after: lane, lane + 32, ... */
__device__ __forceinline__ Best lane_best(const float *values, int count, int lane) {
  Best best = {-infinity(), count};
  for (int i = lane; i < count; i += 32) {
    const Best other = {values[i], i};
    if (better(other, best)) best = other;
  }
  return best;
}

/* Logit of an expert, -inf where it must not be chosen. */
template <class Model>
__device__ __forceinline__ float logit(const moeflow_router_params &params, int token, int expert) {
  const int64_t i = static_cast<int64_t>(token) * Model::experts + expert;
  const float value = params.logits_bf16 ? bf16_to_float(static_cast<const uint16_t *>(params.logits)[i])
                                         : static_cast<const float *>(params.logits)[i];
  if (!(value > -infinity())) return -infinity(); /* NaN too */
  return value < largest_finite() ? value : largest_finite();
}

struct Softmax { /* over all logits that may be chosen */
  float largest;
  float sum;
};

template <class Model>
__device__ __forceinline__ Softmax softmax_of(const moeflow_router_params &params, int token, int lane) {
  Softmax softmax = {-infinity(), 0.0f};
  if constexpr (Model::score == score_softmax) {
    for (int i = lane; i < Model::experts; i += 32) softmax.largest = fmaxf(softmax.largest, logit<Model>(params, token, i));
    softmax.largest = warp_max(softmax.largest);
    for (int i = lane; i < Model::experts; i += 32) {
      const float value = logit<Model>(params, token, i);
      if (value > -infinity()) softmax.sum += expf(value - softmax.largest);
    }
    softmax.sum = warp_sum(softmax.sum);
  }
  return softmax;
}

template <class Model>
__device__ __forceinline__ float score_of(float logit, const Softmax &softmax) {
  if constexpr (Model::score == score_softmax) {
    return expf(logit - softmax.largest) / softmax.sum;
  } else {
    return 1.0f / (1.0f + expf(-logit));
  }
}

/* A group's score: the largest of its values, or the sum of its two largest (of its one, where no second may be chosen). */
template <class Model>
__device__ __forceinline__ float group_score_of(const float *values) {
  float first = -infinity();
  float second = -infinity();
  for (int i = 0; i < Model::experts / Model::groups; i++) {
    const float value = values[i];
    if (value > first) {
      second = first;
      first = value;
    } else if (value > second) {
      second = value;
    }
  }
  if (Model::group_score == group_max || !(second > -infinity())) return first;
  return first + second;
}

/* Experts outside the best top_groups groups can no longer be chosen. `scores` and `values` are this warp's. */
template <class Model>
__device__ __forceinline__ void limit_groups(float *values, float *scores, int lane) {
  constexpr int members = Model::experts / Model::groups;
  for (int group = lane; group < Model::groups; group += 32) scores[group] = group_score_of<Model>(values + group * members);
  __syncwarp();
  for (int round = 0; round < Model::top_groups; round++) {
    const Best best = warp_best(lane_best(scores, Model::groups, lane));
    if (best.value > -infinity() && lane == best.id % 32) scores[best.id] = __uint_as_float(0x7fc00000u); /* NaN: kept */
    __syncwarp();
  }
  for (int i = lane; i < Model::experts; i += 32) {
    if (scores[i / members] == scores[i / members]) values[i] = -infinity();
  }
  __syncwarp();
}

/* Lane k's choice: K rounds of arg-max over the warp. Lanes hold their values in registers, as numbers that order like them. */
template <class Model>
__device__ __forceinline__ int choose_held(const float *values, int lane) {
  constexpr int held = (Model::experts + 31) / 32;
  uint32_t mine[held];
#pragma unroll
  for (int i = 0; i < held; i++) {
    const float value = i * 32 + lane < Model::experts ? values[i * 32 + lane] : -infinity();
    mine[i] = value > -infinity() ? ordered(value) : 0;
  }
  int chosen = -1;
#pragma unroll 1
  for (int k = 0; k < Model::top_k; k++) {
    uint32_t most = mine[0];
#pragma unroll
    for (int i = 1; i < held; i++) most = mine[i] > most ? mine[i] : most;
    most = __reduce_max_sync(full_warp, most);
    if (most == 0) break;
    uint32_t equal = 0; /* bit i: mine[i] is one of the largest */
#pragma unroll
    for (int i = 0; i < held; i++) equal |= mine[i] == most ? 1u << i : 0;
    const uint32_t id = __reduce_min_sync(full_warp, equal ? static_cast<uint32_t>((__ffs(equal) - 1) * 32 + lane) : ~0u);
    if (lane == k) chosen = static_cast<int>(id);
#pragma unroll
    for (int i = 0; i < held; i++) mine[i] = id == static_cast<uint32_t>(i * 32 + lane) ? 0 : mine[i];
  }
  return chosen;
}

/* The same where there are too many: they are looked through again each time. */
template <class Model>
__device__ __forceinline__ int choose_many(float *values, int lane) {
  int chosen = -1;
#pragma unroll 1
  for (int k = 0; k < Model::top_k; k++) {
    const Best best = warp_best(lane_best(values, Model::experts, lane));
    if (!(best.value > -infinity())) break; /* the same on every lane */
    if (lane == k) chosen = best.id;
    if (lane == best.id % 32) values[best.id] = -infinity();
    __syncwarp();
  }
  return chosen;
}

constexpr int experts_held = 512;

/* Lane k's weight, from its score and those of the other lanes. */
template <class Model>
__device__ __forceinline__ float weight_of(float score) {
  float sum = 0.0f;
  for (int k = 0; k < Model::top_k; k++) sum += __shfl_sync(full_warp, score, k);
  if constexpr (Model::renormalize == renormalize_sum_1e_20) score = score / (sum + 1e-20f);
  if constexpr (Model::renormalize == renormalize_sum_1e_6) score = score / (sum + 1e-6f);
  if constexpr (Model::renormalize == renormalize_max_1e_12) score = score / fmaxf(sum, 1e-12f);
  return score * Model::scale;
}

struct Choice { /* lane k's */
  int id;       /* -1: none */
  float weight; /* then 0 */
};

template <class Model>
constexpr bool router_grouped = Model::groups > 1 && Model::top_groups < Model::groups;

template <class Model>
struct RouterShared { /* of one token */
  float scores[Model::experts];
  float values[Model::experts]; /* what selection goes by; -inf: not to be chosen */
  float groups[router_grouped<Model> ? Model::groups : 1];
};

/* Thread number `thread` of the `threads` that share the work, whole warps. */
template <class Model, int threads>
__device__ __forceinline__ void score_experts(const moeflow_router_params &params, int token, int thread,
                                              RouterShared<Model> &shared) {
  constexpr int together = (Model::experts + threads - 1) / threads < 4 ? (Model::experts + threads - 1) / threads : 4;
  const Softmax softmax = softmax_of<Model>(params, token, thread % 32);
#pragma unroll 1
  for (int first = thread; first < Model::experts; first += together * threads) {
    float value[together], bias[together];
#pragma unroll
    for (int k = 0; k < together; k++) { /* all on their way at a time */
      const int i = first + k * threads;
      value[k] = i < Model::experts ? logit<Model>(params, token, i) : 0.0f;
      bias[k] = Model::correction_bias && i < Model::experts ? params.bias[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < together; k++) {
      const int i = first + k * threads;
      if (i >= Model::experts) continue;
      const float score = value[k] > -infinity() ? score_of<Model>(value[k], softmax) : value[k];
      const float selected = Model::correction_bias && score > -infinity() ? score + bias[k] : score;
      shared.scores[i] = score;
      shared.values[i] = selected > -infinity() ? selected : -infinity(); /* a NaN bias excludes as well */
    }
  }
}

/* A whole warp, when all scores are there. */
template <class Model>
__device__ __forceinline__ Choice choose_experts(RouterShared<Model> &shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (router_grouped<Model>) limit_groups<Model>(shared.values, shared.groups, lane);
  int chosen;
  if constexpr (Model::experts <= experts_held) {
    chosen = choose_held<Model>(shared.values, lane);
  } else {
    chosen = choose_many<Model>(shared.values, lane);
  }
  return {chosen, weight_of<Model>(chosen >= 0 ? shared.scores[chosen] : 0.0f)};
}

template <class Model>
__device__ __forceinline__ void store_choice(const moeflow_router_params &params, int token, const Choice &choice) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane >= Model::top_k) return;
  const int64_t at = static_cast<int64_t>(token) * Model::top_k + lane;
  params.ids[at] = choice.id;
  params.weights[at] = choice.weight;
}

template <class Model, class Variant>
__device__ __forceinline__ void router(const moeflow_router_params &params) {
  constexpr int warps = Variant::threads / 32;
  __shared__ RouterShared<Model> shared[warps];
  if (block_poisoned(params.lane)) return;
  const int warp = threadIdx.x / 32;
  const int token = blockIdx.x * warps + warp;
  if (token >= params.tokens) return;
  score_experts<Model, 32>(params, token, threadIdx.x % 32, shared[warp]);
  __syncwarp();
  store_choice<Model>(params, token, choose_experts<Model>(shared[warp]));
}

}  // namespace moeflow
#endif
