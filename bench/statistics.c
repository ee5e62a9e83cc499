#include "statistics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const verdict_names[] = {"SAME", "FAST", "SLOW", "AMBG"};

double statistics_mean(const double *values, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += values[i];
  return sum / count;
}

static int by_value(const void *a, const void *b) {
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* A sorted copy; NULL without values or memory. */
static double *sorted(const double *values, int count) {
  double *copy = count > 0 ? malloc((size_t)count * sizeof *copy) : NULL;
  if (!copy) return NULL;
  memcpy(copy, values, (size_t)count * sizeof *copy);
  qsort(copy, (size_t)count, sizeof *copy, by_value);
  return copy;
}

double statistics_median(const double *values, int count) {
  double *ordered = sorted(values, count);
  const double median = ordered ? (ordered[(count - 1) / 2] + ordered[count / 2]) / 2 : NAN;
  free(ordered);
  return median;
}

/* ---- Student's t ---- */

/* The continued fraction of the incomplete beta function, by the modified method of Lentz. */
static double beta_fraction(double x, double a, double b) {
  const double tiny = 1e-300;
  double c = 1, d = 1 - (a + b) * x / (a + 1), result;
  d = 1 / (fabs(d) < tiny ? tiny : d);
  result = d;
  for (int m = 1; m < 1000; m++) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double step = 1;
    for (int half = 0; half < 2; half++) {
      const double term = half ? odd : even;
      d = 1 + term * d;
      d = 1 / (fabs(d) < tiny ? tiny : d);
      c = 1 + term / c;
      if (fabs(c) < tiny) c = tiny;
      step = c * d;
      result *= step;
    }
    if (fabs(step - 1) < 1e-15) break;
  }
  return result;
}

/* The regularised incomplete beta function I_x(a, b). */
static double incomplete_beta(double x, double a, double b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - incomplete_beta(1 - x, b, a);
  return exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a * beta_fraction(x, a, b);
}

double statistics_t_below(double t, double freedom) {
  if (isinf(t)) return t > 0;
  const double tail = incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2;
  return t > 0 ? 1 - tail : tail;
}

double statistics_t_quantile(double p, double freedom) {
  double low = -1, high = 1;
  while (statistics_t_below(low, freedom) > p) low *= 2;
  while (statistics_t_below(high, freedom) < p) high *= 2;
  for (int i = 0; i < 200 && high - low > 1e-12 * (1 + fabs(low)); i++) {
    const double middle = (low + high) / 2;
    *(statistics_t_below(middle, freedom) < p ? &low : &high) = middle;
  }
  return (low + high) / 2;
}

/* Standard error of the mean. */
static double error_of_mean(const double *values, int count) {
  const double mean = statistics_mean(values, count);
  double squares = 0;
  for (int i = 0; i < count; i++) squares += (values[i] - mean) * (values[i] - mean);
  return sqrt(squares / (count - 1) / count);
}

double statistics_t_half_width(const double *values, int count, double level) {
  if (count < 2) return INFINITY;
  return statistics_t_quantile(1 - level / 2, count - 1) * error_of_mean(values, count);
}

struct interval statistics_mean_interval(const double *values, int count) {
  const double mean = statistics_mean(values, count), half = statistics_t_half_width(values, count, STATISTICS_LEVEL);
  return (struct interval){mean - half, mean + half};
}

double statistics_mean_p(const double *values, int count) {
  if (count < 2) return 1;
  const double mean = statistics_mean(values, count), error = error_of_mean(values, count);
  if (error == 0) return mean == 0;
  return 2 * statistics_t_below(-fabs(mean / error), count - 1);
}

/* ---- Others ---- */

/* The smallest p counts `count` times, the next one `count - 1` times, and none less than one before it. */
void statistics_holm(const double *p, int count, double *adjusted) {
  double most = 0;
  for (int i = 0; i < count; i++) adjusted[i] = -1;
  for (int rank = 0; rank < count; rank++) {
    int next = -1;
    for (int i = 0; i < count; i++)
      if (adjusted[i] < 0 && (next < 0 || p[i] < p[next])) next = i;
    const double scaled = p[next] * (count - rank);
    if (scaled > most) most = scaled < 1 ? scaled : 1;
    adjusted[next] = most;
  }
}

enum verdict statistics_verdict(struct interval difference, double p) {
  if (difference.low > -STATISTICS_MARGIN && difference.high < STATISTICS_MARGIN) return VERDICT_SAME;
  if (p >= STATISTICS_LEVEL) return VERDICT_AMBG;
  if (difference.high < 0) return VERDICT_FAST;
  return difference.low > 0 ? VERDICT_SLOW : VERDICT_AMBG;
}
