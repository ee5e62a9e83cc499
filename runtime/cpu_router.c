/* Top-k router on the CPU, in FP32: scores, selection on score + bias (within the best groups), weights from the scores. */
#include <float.h>
#include <math.h>

#include "cpu.h"

struct scores { /* of one token */
  float score[SPEC_EXPERTS_MAX];
  float value[SPEC_EXPERTS_MAX]; /* score + bias; -inf: never selected */
};

/* +inf counts as the largest finite value; NaN and -inf come back as -inf, which nothing selects. */
static float clean_logit(const struct moeflow_router_params *p, int64_t at) {
  const float logit = p->logits_bf16 ? cpu_from_bf16(((const uint16_t *)p->logits)[at]) : ((const float *)p->logits)[at];
  if (!(logit > -INFINITY)) return -INFINITY;
  return logit > FLT_MAX ? FLT_MAX : logit;
}

/* The sum goes by 32 partial sums, like a warp's: one running sum over 4096 experts is off by some 3e-5. */
static void softmax(struct scores *s, int experts) {
  float largest = -INFINITY, parts[32] = {0}, sum = 0;
  for (int e = 0; e < experts; e++) largest = s->value[e] > largest ? s->value[e] : largest;
  for (int e = 0; e < experts; e++) {
    s->score[e] = s->value[e] > -INFINITY ? expf(s->value[e] - largest) : 0.0f;
    parts[e % 32] += s->score[e];
  }
  for (int i = 0; i < 32; i++) sum += parts[i];
  for (int e = 0; e < experts && sum > 0; e++) s->score[e] /= sum;
}

static void score_experts(const struct spec *spec, const struct moeflow_router_params *p, int t, struct scores *s) {
  for (int e = 0; e < spec->experts; e++) s->value[e] = clean_logit(p, (int64_t)t * spec->experts + e);
  if (spec->score == SPEC_SOFTMAX) softmax(s, spec->experts);
  for (int e = 0; e < spec->experts; e++) {
    if (!(s->value[e] > -INFINITY)) continue;
    if (spec->score == SPEC_SIGMOID) s->score[e] = 1.0f / (1.0f + expf(-s->value[e]));
    s->value[e] = s->score[e] + (spec->correction_bias && p->bias ? p->bias[e] : 0.0f);
    if (!(s->value[e] > -INFINITY)) s->value[e] = -INFINITY;
  }
}

/* Index of the largest of values, the lower one on a tie; -1 when all are -inf. */
static int largest(const float *values, int count) {
  int best = -1;
  for (int i = 0; i < count; i++) {
    if (values[i] > (best < 0 ? -INFINITY : values[best])) best = i;
  }
  return best;
}

/* A group's score, -inf without a selectable expert; of a group with one, that one is the sum of the two largest. */
static float score_group(const struct spec *spec, float *values, int count) {
  const int first = largest(values, count);
  if (first < 0) return -INFINITY;
  const float best = values[first];
  if (spec->group_score != SPEC_GROUP_TOP2) return best;
  values[first] = -INFINITY;
  const int second = largest(values, count);
  values[first] = best;
  return second < 0 ? best : best + values[second];
}

static void drop_groups(const struct spec *spec, struct scores *s) {
  float groups[SPEC_EXPERTS_MAX];
  char kept[SPEC_EXPERTS_MAX] = {0};
  const int size = spec->experts / spec->groups;
  for (int g = 0; g < spec->groups; g++) groups[g] = score_group(spec, s->value + g * size, size);
  for (int n = 0; n < spec->top_groups; n++) {
    const int best = largest(groups, spec->groups);
    if (best < 0) break;
    kept[best] = 1;
    groups[best] = -INFINITY;
  }
  for (int e = 0; e < spec->experts; e++) {
    if (!kept[e / size]) s->value[e] = -INFINITY;
  }
}

static void scale_weights(const struct spec *spec, float *weights) {
  const float scale = spec->scale_on == SPEC_SCALE_WEIGHTS ? (float)spec->scale : 1.0f;
  float sum = 0, divisor = 1;
  for (int k = 0; k < spec->top_k; k++) sum += weights[k];
  if (spec->renormalize == SPEC_SUM_1E_20) divisor = sum + 1e-20f;
  if (spec->renormalize == SPEC_SUM_1E_6) divisor = sum + 1e-6f;
  if (spec->renormalize == SPEC_MAX_1E_12) divisor = sum > 1e-12f ? sum : 1e-12f;
  for (int k = 0; k < spec->top_k; k++) weights[k] = weights[k] / divisor * scale;
}

moeflow_status cpu_router(const struct cpu_call *call, const void *params) {
  const struct moeflow_router_params *p = params;
  const struct spec *spec = call->spec;
  struct scores scores;
  if (cpu_poisoned(p->lane)) return MOEFLOW_OK;
  for (int t = 0; t < p->tokens; t++) {
    int32_t *ids = p->ids + (int64_t)t * spec->top_k;
    float *weights = p->weights + (int64_t)t * spec->top_k;
    score_experts(spec, p, t, &scores);
    if (spec->groups > 1) drop_groups(spec, &scores);
    for (int k = 0; k < spec->top_k; k++) {
      ids[k] = largest(scores.value, spec->experts);
      weights[k] = ids[k] < 0 ? 0.0f : scores.score[ids[k]];
      if (ids[k] >= 0) scores.value[ids[k]] = -INFINITY;
    }
    scale_weights(spec, weights);
  }
  return MOEFLOW_OK;
}
