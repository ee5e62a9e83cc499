#include "sweep_choice.h"

#include <stdio.h>
#include <string.h>

#include "statistics.h"

#define SCREEN_SLACK 1.01 /* the screening's own noise: slower than the default by more is not worth pairs */

/* ---- What is known ---- */

static int find_arm(const struct sweep_arms *arms, const char *name) {
  for (int i = 0; i < arms->count; i++)
    if (!strcmp(arms->arms[i].name, name)) return i;
  return -1;
}

void sweep_learn(struct sweep_arms *arms, struct sweep_point *points, int count, const struct sweep_record *record) {
  const int arm = find_arm(arms, record->arm);
  if (arm < 0) return;
  for (int i = 0; i < count; i++) {
    struct sweep_result *result = &points[i].results[arm];
    if (record->event == SWEEP_FAILED) result->failed = 1; /* wrong at one size: not to be trusted at another */
    if (points[i].rows != record->rows) continue;
    switch (record->event) {
      case SWEEP_SKIPPED:
        result->skipped = 1;
        break;
      case SWEEP_SCREENED:
        result->screened = 1;
        result->screen = *record;
        break;
      case SWEEP_SKEWED:
        result->skewed = 1;
        result->skew = *record;
        break;
      case SWEEP_PAIRED:
        result->paired = 1;
        result->pair = *record;
        break;
      default:
        break;
    }
  }
}

int sweep_incumbent(const struct sweep_point *point) {
  if (!point->results[point->standard].failed) return point->standard;
  return point->results[SWEEP_PORTABLE].failed ? -1 : SWEEP_PORTABLE;
}

static int is_right(const struct sweep_point *point, int arm) {
  const struct sweep_result *result = &point->results[arm];
  return result->screened && !result->failed && !result->skipped;
}

static double screened_us(const struct sweep_point *point, int arm) {
  return point->results[arm].screen.values[SWEEP_US];
}

static int is_paired(const struct sweep_arms *arms, const struct sweep_point *point, int arm) {
  const int incumbent = sweep_incumbent(point);
  const struct sweep_result *result = &point->results[arm];
  return incumbent >= 0 && is_right(point, arm) && result->paired &&
         !strcmp(result->pair.against, arms->arms[incumbent].name);
}

/* Good on uniform routings alone: it would be a bad surprise on others. */
static int is_marked(const struct sweep_arms *arms, const struct sweep_point *point, int arm) {
  double best = 0;
  for (int i = 0; i < arms->count; i++) {
    const struct sweep_result *result = &point->results[i];
    if (result->skewed && !result->failed && (!best || result->skew.values[SWEEP_US] < best))
      best = result->skew.values[SWEEP_US];
  }
  const struct sweep_result *result = &point->results[arm];
  return result->skewed && result->skew.values[SWEEP_US] > SWEEP_SKEW_SLACK * best;
}

/* The arms that may win, best first: always the best one, and those that are not clearly slower than the default. */
static int finalists(const struct sweep_arms *arms, const struct sweep_point *point, int found[SWEEP_FINALISTS]) {
  const int incumbent = sweep_incumbent(point);
  int count = 0;
  while (incumbent >= 0 && count < SWEEP_FINALISTS) {
    int best = -1;
    for (int arm = 0; arm < arms->count; arm++) {
      int taken = arm == incumbent || !is_right(point, arm);
      for (int i = 0; i < count; i++) taken |= found[i] == arm;
      if (!taken && (best < 0 || screened_us(point, arm) < screened_us(point, best))) best = arm;
    }
    if (best < 0 || (count && screened_us(point, best) > SCREEN_SLACK * screened_us(point, incumbent))) break;
    found[count++] = best;
  }
  return count;
}

/* ---- What next ---- */

static int is_open(const struct sweep_arms *arms, const struct sweep_point *point, int arm) {
  const struct sweep_result *result = &point->results[arm];
  return !arms->arms[arm].refused && !result->failed && !result->skipped && !result->screened;
}

static int count_open(const struct sweep_arms *arms, const struct sweep_point *point) {
  int count = 0;
  for (int i = 0; i < point->order_count; i++) count += is_open(arms, point, point->order[i]);
  return count;
}

static int ask(const struct sweep_point *point, enum sweep_task task, int arm, struct sweep_request *request) {
  *request = (struct sweep_request){.task = task, .tokens = point->tokens, .arm = arm, .against = sweep_incumbent(point)};
  request->skew = task == SWEEP_SKEW ? SWEEP_SKEWED_ROUTING : 0;
  request->count = task == SWEEP_PAIR ? SWEEP_PAIRS : SWEEP_SCREEN_LAUNCHES;
  return 1;
}

static int next_final(const struct sweep_arms *arms, const struct sweep_point *point, struct sweep_request *request) {
  int found[SWEEP_FINALISTS];
  const int count = finalists(arms, point, found), incumbent = sweep_incumbent(point);
  if (count && !point->results[incumbent].skewed) return ask(point, SWEEP_SKEW, incumbent, request);
  for (int i = 0; i < count; i++)
    if (!point->results[found[i]].skewed) return ask(point, SWEEP_SKEW, found[i], request);
  for (int i = 0; i < count; i++)
    if (!is_paired(arms, point, found[i]) && !is_marked(arms, point, found[i]))
      return ask(point, SWEEP_PAIR, found[i], request);
  return 0;
}

int sweep_next(const struct sweep_arms *arms, const struct sweep_point *point, enum sweep_phase phase,
               struct sweep_request *request) {
  const int incumbent = sweep_incumbent(point);
  if (phase == SWEEP_OVER || incumbent < 0 || point->results[incumbent].skipped) return 0;
  if (!point->results[incumbent].screened) return ask(point, SWEEP_SCREEN, incumbent, request);
  for (int i = 0; phase == SWEEP_OPEN && i < point->order_count; i++)
    if (is_open(arms, point, point->order[i])) return ask(point, SWEEP_SCREEN, point->order[i], request);
  return next_final(arms, point, request);
}

int sweep_left(const struct sweep_arms *arms, const struct sweep_point *point, enum sweep_phase phase) {
  int found[SWEEP_FINALISTS], left = 0;
  const int incumbent = sweep_incumbent(point), count = finalists(arms, point, found);
  const int screens = phase == SWEEP_OPEN ? count_open(arms, point) : 0;
  if (phase == SWEEP_OVER || incumbent < 0 || point->results[incumbent].skipped) return 0;
  for (int i = 0; i < count; i++)
    left += !point->results[found[i]].skewed + (!is_paired(arms, point, found[i]) && !is_marked(arms, point, found[i]));
  if (screens && count < SWEEP_FINALISTS)
    left += 2 * (screens < SWEEP_FINALISTS - count ? screens : SWEEP_FINALISTS - count);
  return left + screens + !point->results[incumbent].screened + !point->results[incumbent].skewed;
}

/* ---- A record of an answer ---- */

/* Up to SWEEP_FINALISTS intervals of a point are looked at, and the best one counts: by Bonferroni all of them hold at once.
 */
static void judge_pairs(const struct sweep_answer *answer, struct sweep_record *record) {
  double differences[SWEEP_PAIRS_MAX];
  const double arm_us = statistics_mean(answer->arm_us, answer->pairs);
  const double default_us = statistics_mean(answer->against_us, answer->pairs);
  for (int i = 0; i < answer->pairs; i++) differences[i] = 100 * (answer->against_us[i] - answer->arm_us[i]) / default_us;
  const double gap = statistics_mean(differences, answer->pairs);
  const double half = statistics_t_half_width(differences, answer->pairs, STATISTICS_LEVEL / SWEEP_FINALISTS);
  record->values[SWEEP_US] = arm_us;
  record->values[SWEEP_DEFAULT_US] = default_us;
  record->values[SWEEP_GAP] = gap;
  record->values[SWEEP_GAP_LOW] = gap - half;
  record->values[SWEEP_GAP_HIGH] = gap + half;
}

void sweep_judge(const struct sweep_arms *arms, const struct sweep_point *point, const struct sweep_request *request,
                 const struct sweep_answer *answer, struct sweep_record *record) {
  static const enum sweep_event events[] = {
      [SWEEP_SCREEN] = SWEEP_SCREENED, [SWEEP_SKEW] = SWEEP_SKEWED, [SWEEP_PAIR] = SWEEP_PAIRED};
  *record = (struct sweep_record){.event = SWEEP_FAILED, .rows = point->rows};
  snprintf(record->arm, sizeof record->arm, "%s", arms->arms[request->arm].name);
  snprintf(record->why, sizeof record->why, "%s", answer->why);
  if (answer->outcome == SWEEP_SHORT) record->event = SWEEP_SKIPPED;
  if (answer->outcome != SWEEP_DONE) return;
  record->event = events[request->task];
  record->values[SWEEP_REL_L2] = answer->rel_l2;
  record->values[SWEEP_US] = answer->us;
  if (request->task != SWEEP_PAIR) return;
  snprintf(record->against, sizeof record->against, "%s", arms->arms[request->against].name);
  judge_pairs(answer, record);
}

/* ---- The choice ---- */

static int beats(const struct sweep_arms *arms, const struct sweep_point *point, int arm) {
  const double *values = point->results[arm].pair.values;
  if (!is_paired(arms, point, arm) || is_marked(arms, point, arm)) return 0;
  return values[SWEEP_GAP_LOW] > 0 &&
         (arms->arms[arm].kernel != KERNEL_EXPERTS_STREAM || values[SWEEP_GAP] >= SWEEP_STREAM_GAP);
}

/* The paired arm with the largest gap, only among those that beat the default or among all. */
static int best_paired(const struct sweep_arms *arms, const struct sweep_point *point, int winners, int but) {
  int best = -1;
  for (int arm = 0; arm < arms->count; arm++) {
    if (arm == but || !(winners ? beats(arms, point, arm) : is_paired(arms, point, arm))) continue;
    if (best < 0 || point->results[arm].pair.values[SWEEP_GAP] > point->results[best].pair.values[SWEEP_GAP]) best = arm;
  }
  return best;
}

static int count_skipped(const struct sweep_arms *arms, const struct sweep_point *point) {
  int count = 0;
  for (int arm = 0; arm < arms->count; arm++) count += point->results[arm].skipped && !point->results[arm].failed;
  return count;
}

/* The default stays only if all others had their chance. An arm of the shortlist that is open may be the better one; and
 * once none is, the best of them is a finalist, so nothing is left only if it was compared, or none is right. Where memory
 * was short for all of them, nothing was compared. */
static int is_decided(const struct sweep_arms *arms, const struct sweep_point *point, int incumbent) {
  struct sweep_request request;
  int found[SWEEP_FINALISTS];
  if (!is_right(point, incumbent) || count_open(arms, point) || next_final(arms, point, &request)) return 0;
  return finalists(arms, point, found) || !count_skipped(arms, point);
}

static void copy_pair(const struct sweep_point *point, int arm, struct sweep_choice *choice) {
  const double *values = point->results[arm].pair.values;
  choice->compared = 1;
  choice->us = values[SWEEP_US];
  choice->default_us = values[SWEEP_DEFAULT_US];
  choice->gap = values[SWEEP_GAP];
  choice->low = values[SWEEP_GAP_LOW];
  choice->high = values[SWEEP_GAP_HIGH];
}

void sweep_choose(const struct sweep_arms *arms, const struct sweep_point *point, struct sweep_choice *choice) {
  const int incumbent = sweep_incumbent(point);
  *choice = (struct sweep_choice){.reason = SWEEP_NO_DEFAULT, .arm = -1, .runner_up = -1};
  for (int arm = 0; arm < arms->count; arm++) choice->failed += point->results[arm].failed;
  for (int i = 0; i < point->order_count; i++) {
    const int arm = point->order[i];
    if (arms->arms[arm].refused) continue;
    choice->shortlist++;
    choice->screened += !is_open(arms, point, arm) && !point->results[arm].skipped;
  }
  choice->skipped = count_skipped(arms, point);
  if (incumbent < 0) return;
  const int winner = best_paired(arms, point, 1, -1);
  choice->arm = winner >= 0 ? winner : incumbent;
  choice->runner_up = best_paired(arms, point, 0, winner);
  choice->reason = winner >= 0 ? SWEEP_WINS : is_decided(arms, point, incumbent) ? SWEEP_KEPT : SWEEP_UNDECIDED;
  if (winner >= 0) {
    copy_pair(point, winner, choice);
    if (choice->runner_up < 0 || point->results[choice->runner_up].pair.values[SWEEP_GAP] < 0) choice->runner_up = incumbent;
    return;
  }
  if (choice->runner_up >= 0) copy_pair(point, choice->runner_up, choice);
  choice->us = choice->compared ? choice->default_us : screened_us(point, incumbent);
  choice->default_us = choice->us;
}
