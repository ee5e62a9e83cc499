/* The router against sorting in double precision. Logits lie on a grid of 1/64: equal ones tie exactly, others are told
 * apart by FP32 as well. */
#include "emulated.h"
#include "router.cuh"
#include "spec.h"

static_assert(int{SPEC_SOFTMAX} == int{moeflow::score_softmax} && int{SPEC_SIGMOID} == int{moeflow::score_sigmoid},
              "scores");
static_assert(int{SPEC_GROUP_MAX} == int{moeflow::group_max} && int{SPEC_GROUP_TOP2} == int{moeflow::group_top2}, "groups");
static_assert(int{SPEC_RENORMALIZE_NONE} == int{moeflow::renormalize_none} &&
                  int{SPEC_SUM_1E_20} == int{moeflow::renormalize_sum_1e_20} &&
                  int{SPEC_SUM_1E_6} == int{moeflow::renormalize_sum_1e_6} &&
                  int{SPEC_MAX_1E_12} == int{moeflow::renormalize_max_1e_12},
              "guards");

namespace {

struct Softmax { /* plain softmax; other models change what they need */
  static constexpr int experts = 33;
  static constexpr int top_k = 4;
  static constexpr int score = SPEC_SOFTMAX;
  static constexpr int correction_bias = 0;
  static constexpr int groups = 1;
  static constexpr int top_groups = 1;
  static constexpr int group_score = SPEC_GROUP_MAX;
  static constexpr int renormalize = SPEC_RENORMALIZE_NONE;
  static constexpr float scale = 1.0f;
};
struct Sigmoid : Softmax {
  static constexpr int experts = 288;
  static constexpr int top_k = 8;
  static constexpr int score = SPEC_SIGMOID;
  static constexpr int correction_bias = 1;
  static constexpr int renormalize = SPEC_SUM_1E_20;
  static constexpr float scale = 2.5f;
};
struct SigmoidPlain : Softmax {
  static constexpr int score = SPEC_SIGMOID;
  static constexpr int renormalize = SPEC_SUM_1E_6;
};
struct TwoOfGroup : Sigmoid {
  static constexpr int experts = 256;
  static constexpr int groups = 8;
  static constexpr int top_groups = 4;
  static constexpr int group_score = SPEC_GROUP_TOP2;
};
struct MaxOfGroup : Softmax {
  static constexpr int experts = 99; /* groups of 33: a group's lanes wrap */
  static constexpr int top_k = 6;
  static constexpr int groups = 3;
  static constexpr int top_groups = 1;
  static constexpr int renormalize = SPEC_MAX_1E_12;
};
struct GroupsOfNine : MaxOfGroup {
  static constexpr int experts = 45;
  static constexpr int groups = 5;
  static constexpr int top_groups = 2;
  static constexpr int group_score = SPEC_GROUP_TOP2;
};
struct GroupsOfOne : Softmax {
  static constexpr int experts = 8;
  static constexpr int top_k = 3;
  static constexpr int groups = 8;
  static constexpr int top_groups = 3;
  static constexpr int group_score = SPEC_GROUP_TOP2;
};
struct AllOfFive : Softmax {
  static constexpr int experts = 5;
  static constexpr int top_k = 5;
  static constexpr int renormalize = SPEC_SUM_1E_20;
};
struct OneOf257 : Softmax {
  static constexpr int experts = 257;
  static constexpr int top_k = 1;
  static constexpr float scale = 2.5f;
};
struct Of512 : Sigmoid {
  static constexpr int experts = 512;
  static constexpr int top_k = 10;
};
struct Of1025 : Sigmoid {
  static constexpr int experts = 1025;
  static constexpr int top_k = 32;
};
struct Of4096 : Softmax {
  static constexpr int experts = 4096;
  static constexpr int top_k = 32;
};

template <class Model>
struct Variant {
  static constexpr int threads = Model::experts > 1024 ? 32 : 128;
};

enum Kind {
  plain,
  winners_last,
  sprinkled,
  all_nan,
  all_minus_infinity,
  all_equal,
  very_negative,
  one_left,
  infinities,
  kinds
};

float make_logit(Kind kind, int experts, int expert, Random &random) {
  const float value = static_cast<float>(random.below(1024) - 512) / 64; /* exact in bf16 below 4, rounded above */
  switch (kind) {
    case winners_last:
      return expert >= experts - 40 ? 9 + value / 64 : value / 4;
    case sprinkled:
      return random.below(3) ? value : random.below(2) ? not_a_number : -infinite;
    case all_nan:
      return not_a_number;
    case all_minus_infinity:
      return -infinite;
    case all_equal:
      return 0;
    case very_negative:
      return -200;
    case one_left:
      return expert == experts / 2 ? value : -infinite;
    case infinities:
      return random.below(4) ? -20 : infinite;
    default:
      return value;
  }
}

enum BiasKind { bias_random, bias_minus_five, bias_tiny, bias_ill, bias_kinds };

float make_bias(BiasKind kind, int expert, Random &random) {
  switch (kind) {
    case bias_minus_five:
      return -5;
    case bias_tiny:
      return 1e-4f * static_cast<float>(expert * 7 % 31);
    case bias_ill:
      return random.below(4) ? 0.25f : random.below(2) ? not_a_number : -infinite;
    default:
      return random.normal() / 4;
  }
}

struct Candidate {
  double value;
  int id;
};

/* Best first, ties to the lower id; what cannot be chosen is left out. */
std::vector<Candidate> sorted(std::vector<Candidate> all) {
  all.erase(std::remove_if(all.begin(), all.end(), [](const Candidate &c) { return !(c.value > -HUGE_VAL); }), all.end());
  std::stable_sort(all.begin(), all.end(), [](const Candidate &a, const Candidate &b) { return a.value > b.value; });
  return all;
}

template <class Model>
std::vector<double> scores_of(const std::vector<float> &logits) {
  std::vector<double> scores(Model::experts, -HUGE_VAL);
  double largest = -HUGE_VAL, sum = 0;
  auto finite = [](float logit) { return logit == infinite ? 3.4028234663852886e38 : static_cast<double>(logit); };
  for (float logit : logits) {
    if (logit > -infinite) largest = std::max(largest, finite(logit));
  }
  for (size_t e = 0; e < logits.size(); e++) {
    if (!(logits[e] > -infinite)) continue;
    scores[e] =
        Model::score == SPEC_SOFTMAX ? std::exp(finite(logits[e]) - largest) : 1 / (1 + std::exp(-finite(logits[e])));
    sum += scores[e];
  }
  for (double &score : scores) {
    if (Model::score == SPEC_SOFTMAX && score > -HUGE_VAL) score /= sum;
  }
  return scores;
}

template <class Model>
void limit_groups(std::vector<double> &values) {
  constexpr int members = Model::experts / Model::groups;
  std::vector<Candidate> groups;
  for (int g = 0; g < Model::groups; g++) {
    std::vector<Candidate> of_group;
    for (int i = 0; i < members; i++) of_group.push_back({values[static_cast<size_t>(g * members + i)], i});
    of_group = sorted(of_group);
    if (of_group.empty()) continue;
    const bool two = Model::group_score == SPEC_GROUP_TOP2 && of_group.size() > 1;
    groups.push_back({of_group[0].value + (two ? of_group[1].value : 0), g});
  }
  groups = sorted(groups);
  std::vector<bool> kept(Model::groups);
  for (size_t i = 0; i < groups.size() && i < Model::top_groups; i++) kept[static_cast<size_t>(groups[i].id)] = true;
  for (int e = 0; e < Model::experts; e++) {
    if (!kept[static_cast<size_t>(e / members)]) values[static_cast<size_t>(e)] = -HUGE_VAL;
  }
}

template <class Model>
void check_token(const std::vector<float> &logits, const float *bias, const int32_t *ids, const float *weights) {
  const std::vector<double> scores = scores_of<Model>(logits);
  std::vector<double> values = scores;
  for (size_t e = 0; e < values.size(); e++) {
    if (Model::correction_bias) values[e] = std::isnan(bias[e]) ? -HUGE_VAL : values[e] + static_cast<double>(bias[e]);
  }
  if (Model::groups > 1) limit_groups<Model>(values);
  std::vector<Candidate> best;
  for (int e = 0; e < Model::experts; e++) best.push_back({values[static_cast<size_t>(e)], e});
  best = sorted(best);
  double sum = 0;
  for (size_t k = 0; k < Model::top_k && k < best.size(); k++) sum += scores[static_cast<size_t>(best[k].id)];
  for (size_t k = 0; k < Model::top_k; k++) {
    if (k >= best.size()) {
      EXPECT(ids[k] == -1 && bits_of(weights[k]) == 0, "choice %zu: id %d weight %g, not -1 and 0", k, ids[k],
             static_cast<double>(weights[k]));
      continue;
    }
    double want = scores[static_cast<size_t>(best[k].id)];
    if (Model::renormalize == SPEC_SUM_1E_20) want /= sum + 1e-20;
    if (Model::renormalize == SPEC_SUM_1E_6) want /= sum + 1e-6;
    if (Model::renormalize == SPEC_MAX_1E_12) want /= std::max(sum, 1e-12);
    want *= static_cast<double>(Model::scale);
    EXPECT(ids[k] == best[k].id, "E %d choice %zu: id %d, not %d", Model::experts, k, ids[k], best[k].id);
    EXPECT(std::fabs(static_cast<double>(weights[k]) - want) <= 2e-6 * want + 1e-38, "E %d choice %zu: weight %g, not %g",
           Model::experts, k, static_cast<double>(weights[k]), want);
  }
}

template <class Model>
void run(Kind kind, BiasKind bias_kind, int tokens, bool bf16, unsigned schedule) {
  Random random(static_cast<uint64_t>(Model::experts * 64 + kind * 8 + bias_kind));
  const size_t count = static_cast<size_t>(tokens) * Model::experts;
  Buffer<float> wide(bf16 ? 0 : count);
  Buffer<uint16_t> narrow(bf16 ? count : 0);
  std::vector<std::vector<float>> logits(static_cast<size_t>(tokens));
  for (size_t t = 0; t < logits.size(); t++) {
    for (int e = 0; e < Model::experts; e++) {
      float value = make_logit(kind, Model::experts, e, random);
      const size_t at = t * Model::experts + static_cast<size_t>(e);
      if (bf16) {
        narrow[at] = to_bf16(value);
        value = from_bf16(narrow[at]);
      } else {
        wide[at] = value;
      }
      logits[t].push_back(value);
    }
  }
  Buffer<float> bias(Model::correction_bias ? Model::experts : 0);
  for (size_t e = 0; e < bias.size(); e++) bias[e] = make_bias(bias_kind, static_cast<int>(e), random);
  Buffer<int32_t> ids(static_cast<size_t>(tokens) * Model::top_k);
  Buffer<float> weights(static_cast<size_t>(tokens) * Model::top_k);
  moeflow_lane lane = lane_at(7);
  moeflow_router_params params = {};
  params.lane = &lane;
  params.logits = bf16 ? static_cast<const void *>(narrow.data()) : wide.data();
  params.bias = Model::correction_bias ? bias.data() : nullptr;
  params.ids = ids.data();
  params.weights = weights.data();
  params.tokens = tokens;
  params.logits_bf16 = bf16;
  constexpr int warps = Variant<Model>::threads / 32;
  emulator::schedule = schedule;
  emulator::launch(static_cast<unsigned>((tokens + warps - 1) / warps), Variant<Model>::threads, 0,
                   [&] { moeflow::router<Model, Variant<Model>>(params); });
  for (size_t t = 0; t < logits.size(); t++) {
    check_token<Model>(logits[t], bias.data(), &ids[t * Model::top_k], &weights[t * Model::top_k]);
  }
}

template <class Model>
void model() {
  for (int kind = 0; kind < kinds; kind++) {
    run<Model>(static_cast<Kind>(kind), bias_random, 5, kind % 2, schedules[kind % 3]);
  }
  if (!Model::correction_bias) return;
  for (int kind = 0; kind < bias_kinds; kind++) {
    run<Model>(plain, static_cast<BiasKind>(kind), 3, false, 0);
    run<Model>(all_equal, static_cast<BiasKind>(kind), 3, true, 1);
    run<Model>(very_negative, static_cast<BiasKind>(kind), 1, true, 1);
  }
}

/* A bias of -5 on all experts changes nothing. */
void common_bias() {
  Random random(1);
  Buffer<float> logits(288), bias(288), weights(16);
  Buffer<int32_t> ids(16);
  for (size_t e = 0; e < 288; e++) logits[e] = static_cast<float>(random.below(256)) / 64;
  for (int with = 0; with < 2; with++) {
    for (size_t e = 0; e < 288; e++) bias[e] = with ? -5 : 0;
    moeflow_lane lane = lane_at(1);
    moeflow_router_params params = {
        &lane, logits.data(), bias.data(), &ids[static_cast<size_t>(with) * 8], &weights[static_cast<size_t>(with) * 8], 1,
        0};
    emulator::launch(1, 128, 0, [&] { moeflow::router<Sigmoid, Variant<Sigmoid>>(params); });
  }
  EXPECT(!memcmp(&ids[0], &ids[8], 32) && !memcmp(&weights[0], &weights[8], 32), "bias -5");
}

void poisoned_lane() {
  moeflow_lane lane = lane_at(1);
  lane.poison = MOEFLOW_POISON_ABORT;
  moeflow_router_params params = {};
  params.lane = &lane;
  params.tokens = 4;
  emulator::launch(1, 128, 0, [&] { moeflow::router<Sigmoid, Variant<Sigmoid>>(params); });
}

}  // namespace

int main() {
  model<Softmax>();
  model<Sigmoid>();
  model<SigmoidPlain>();
  model<TwoOfGroup>();
  model<MaxOfGroup>();
  model<GroupsOfNine>();
  model<GroupsOfOne>();
  model<AllOfFive>();
  model<OneOf257>();
  model<Of512>();
  model<Of1025>();
  model<Of4096>();
  common_bias();
  poisoned_lane();
  TEST_END;
}
