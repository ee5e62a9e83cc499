/* The statistics of moeflow-bench on numbers that tables and hand calculations give. */
#include <math.h>

#include "pairing.h"
#include "statistics.h"
#include "test.h"

static void near(const char *what, double got, double want, double tolerance) {
  EXPECT(fabs(got - want) <= tolerance, "%s is %.9g instead of %.9g", what, got, want);
}

static void test_middle(void) {
  const double odd[] = {5, 1, 3}, even[] = {4, 1, 3, 10};
  near("mean", statistics_mean(even, 4), 4.5, 0);
  near("median of three", statistics_median(odd, 3), 3, 0);
  near("median of four", statistics_median(even, 4), 3.5, 0);
  EXPECT(odd[0] == 5, "the samples were moved");
  EXPECT(isnan(statistics_median(NULL, 0)), "a median of nothing");
}

/* Two-sided 95 % and 99 % points of the printed t table. */
static void test_t_table(void) {
  static const struct {
    double p, freedom, t;
  } rows[] = {{0.975, 1, 12.7062},  {0.975, 2, 4.30265},   {0.975, 4, 2.77645}, {0.975, 9, 2.26216},
              {0.975, 29, 2.04523}, {0.975, 199, 1.97196}, {0.995, 4, 4.60409}, {0.95, 10, 1.81246}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    near("t", statistics_t_quantile(rows[i].p, rows[i].freedom), rows[i].t, 1e-4);
    near("P", statistics_t_below(rows[i].t, rows[i].freedom), rows[i].p, 1e-6);
    near("P of the negative", statistics_t_below(-rows[i].t, rows[i].freedom), 1 - rows[i].p, 1e-6);
  }
  near("the middle", statistics_t_below(0, 5), 0.5, 1e-12);
}

/* Mean 3, deviation sqrt(2.5), five values: 3 +- 2.77645 * 0.707107. */
static void test_mean_interval(void) {
  const double values[] = {1, 2, 3, 4, 5}, equal[] = {2, 2, 2};
  const struct interval interval = statistics_mean_interval(values, 5);
  near("half width", statistics_t_half_width(values, 5, 0.05), 1.963243, 1e-5);
  near("half width of one of three", statistics_t_half_width(values, 5, 0.05 / 3), 2.80070, 1e-4); /* 3.96079 */
  near("low", interval.low, 3 - 1.963243, 1e-5);
  near("high", interval.high, 3 + 1.963243, 1e-5);
  near("width of equals", statistics_t_half_width(equal, 3, 0.05), 0, 0);
  EXPECT(isinf(statistics_t_half_width(values, 1, 0.05)), "one value has no interval");
}

/* t = 3 / 0.707107 = 4.24264 with 4 degrees of freedom: p = 0.013236. */
static void test_p(void) {
  const double values[] = {1, 2, 3, 4, 5}, around[] = {-1, 1, -2, 2}, equal[] = {2, 2, 2}, none[] = {0, 0};
  near("p", statistics_mean_p(values, 5), 0.013236, 2e-5);
  near("p of nothing", statistics_mean_p(around, 4), 1, 1e-12);
  near("p of equals", statistics_mean_p(equal, 3), 0, 0);
  near("p of zeros", statistics_mean_p(none, 2), 1, 0);
  near("p of one value", statistics_mean_p(values, 1), 1, 0);
}

static void test_holm(void) {
  const double p[] = {0.01, 0.04, 0.03, 0.005}, large[] = {0.6, 0.9};
  const double want[] = {0.03, 0.06, 0.06, 0.02};
  double adjusted[4];
  statistics_holm(p, 4, adjusted);
  for (int i = 0; i < 4; i++) near("Holm", adjusted[i], want[i], 1e-12);
  statistics_holm(large, 2, adjusted);
  near("at most 1", adjusted[0], 1, 0);
  near("at most 1", adjusted[1], 1, 0);
  statistics_holm(p, 0, adjusted);
}

static void test_verdicts(void) {
  static const struct {
    struct interval interval;
    double p;
    enum verdict want;
  } rows[] = {
      {{-0.004, 0.003}, 0.5, VERDICT_SAME}, {{-0.009, -0.001}, 0.001, VERDICT_SAME},  {{-0.05, -0.03}, 0.001, VERDICT_FAST},
      {{0.03, 0.05}, 0.001, VERDICT_SLOW},  {{0.03, 0.05}, 0.05, VERDICT_AMBG},       {{-0.05, -0.03}, 0.2, VERDICT_AMBG},
      {{-0.02, 0.03}, 0.5, VERDICT_AMBG},   {{-INFINITY, INFINITY}, 1, VERDICT_AMBG}, {{-0.02, -0.005}, 0.01, VERDICT_FAST}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const enum verdict got = statistics_verdict(rows[i].interval, rows[i].p);
    EXPECT(got == rows[i].want, "row %zu: %s instead of %s", i, verdict_names[got], verdict_names[rows[i].want]);
  }
}

/* ---- Turns ---- */

static void test_turns(void) {
  const struct pairing pairing = {.seed = 7, .arms = 5}, other = {.seed = 8, .arms = 5};
  int order[PAIRING_ARMS_MAX], back[PAIRING_ARMS_MAX], differing = 0, seeds = 0;
  for (int round = 0; round < 20; round += 2) {
    int seen = 0;
    pairing_order(&pairing, round, order);
    pairing_order(&pairing, round + 1, back);
    for (int i = 0; i < 5; i++) {
      seen |= 1 << order[i];
      EXPECT(back[i] == order[4 - i], "round %d does not go backwards at %d", round + 1, i);
    }
    EXPECT(seen == 31, "round %d leaves an arm out", round);
    pairing_order(&pairing, round + 2, back);
    differing += memcmp(order, back, 5 * sizeof *order) != 0;
    pairing_order(&other, round, back);
    seeds += memcmp(order, back, 5 * sizeof *order) != 0;
  }
  EXPECT(differing > 5 && seeds > 5, "%d of 10 rounds differ, %d by seed", differing, seeds);
}

/* Each arm is first as often as the other: a drift within a pair falls on both alike. */
static void test_two_arms(void) {
  const struct pairing pairing = {.seed = 1, .arms = 2};
  int order[PAIRING_ARMS_MAX], first = 0;
  for (int round = 0; round < 40; round++) {
    pairing_order(&pairing, round, order);
    first += order[0] == 0;
  }
  EXPECT(first == 20, "arm 0 is first %d times of 40", first);
}

int main(void) {
  test_middle();
  test_t_table();
  test_mean_interval();
  test_p();
  test_holm();
  test_verdicts();
  test_turns();
  test_two_arms();
  TEST_END;
}
