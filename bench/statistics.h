/* The few statistics that a comparison rests on. Samples are paired: value i of one arm and value i of another were taken
 * one right after the other. */
#ifndef MOEFLOW_BENCH_STATISTICS_H
#define MOEFLOW_BENCH_STATISTICS_H

#define STATISTICS_LEVEL 0.05  /* of all intervals and verdicts: 95 % */
#define STATISTICS_MARGIN 0.01 /* differences within it are a tie */

struct interval {
  double low, high;
};

double statistics_mean(const double *values, int count);
double statistics_median(const double *values, int count); /* NaN for none */

/* Interval of the mean by Student's t, for values that are near normal and independent, such as means or medians of
 * launches: half its width, of which `level` is the chance to miss the mean, and the whole of the 95 % one. One value:
 * without bounds. */
double statistics_t_half_width(const double *values, int count, double level);
struct interval statistics_mean_interval(const double *values, int count);

/* Two-sided p of "the mean is 0" by Student's t; 1 with fewer than two values. */
double statistics_mean_p(const double *values, int count);

/* Student's t: P(T <= t) and its inverse. */
double statistics_t_below(double t, double freedom);
double statistics_t_quantile(double p, double freedom);

/* Holm's correction of a family of p values: as many comparisons as a table makes. Input order is kept. */
void statistics_holm(const double *p, int count, double *adjusted);

enum verdict {
  VERDICT_SAME, /* the whole interval lies within the margin */
  VERDICT_FAST, /* the difference is below zero, beyond chance */
  VERDICT_SLOW,
  VERDICT_AMBG /* these samples do not tell */
};
extern const char *const verdict_names[]; /* "SAME", "FAST", ... */

/* Of a relative difference of times, (mine - theirs) / theirs, and its p after Holm's correction. */
enum verdict statistics_verdict(struct interval difference, double p);
#endif
