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

/* Lane k's choice: K rounds of arg-max over the warp; only the lane that lost its best looks for another. */
template <class Model>
__device__ __forceinline__ int choose(float *values, int lane) {
  int chosen = -1;
  Best mine = lane_best(values, Model::experts, lane);
  for (int k = 0; k < Model::top_k; k++) {
    const Best best = warp_best(mine);
    if (!(best.value > -infinity())) break; /* the same on every lane */
    if (lane == k) chosen = best.id;
    if (lane == best.id % 32) {
      values[best.id] = -infinity();
      mine = lane_best(values, Model::experts, lane);
    }
  }
  return chosen;
}

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

/* A whole warp chooses a token's experts. `values` and `groups` are the warp's own: shared, E floats, and as many as groups. */
template <class Model>
__device__ __forceinline__ Choice route(const moeflow_router_params &params, int token, float *values, float *groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Softmax softmax = softmax_of<Model>(params, token, lane);
  for (int i = lane; i < Model::experts; i += 32) {
    const float value = logit<Model>(params, token, i);
    float score = value > -infinity() ? score_of<Model>(value, softmax) : value;
    if (Model::correction_bias && score > -infinity()) score += params.bias[i];
    values[i] = score > -infinity() ? score : -infinity(); /* a NaN bias excludes as well */
  }
  __syncwarp();
  if constexpr (router_grouped<Model>) limit_groups<Model>(values, groups, lane);
  const int chosen = choose<Model>(values, lane);
  const float score = chosen >= 0 ? score_of<Model>(logit<Model>(params, token, chosen), softmax) : 0.0f;
  return {chosen, weight_of<Model>(score)};
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
  __shared__ float values[warps][Model::experts];
  __shared__ float groups[warps][router_grouped<Model> ? Model::groups : 1];
  if (block_poisoned(params.lane)) return;
  const int warp = threadIdx.x / 32;
  const int token = blockIdx.x * warps + warp;
  if (token >= params.tokens) return;
  store_choice<Model>(params, token, route<Model>(params, token, values[warp], groups[warp]));
}

}  // namespace moeflow
#endif
