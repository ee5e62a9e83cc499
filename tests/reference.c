#include "reference.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_AT_ONCE 64 /* pairs that share one pass over an expert's weights */

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

double reference_from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t reference_to_bf16(double value) {
  if (isnan(value)) return 0x7fc0;
  double rounded = value;
  if (!isinf(value) && value != 0) {
    int exponent; /* value = fraction * 2^exponent, fraction in [0.5, 1): eight bits of it stay, fewer below 2^-126 */
    frexp(value, &exponent);
    const int quantum = exponent - 8 > -133 ? exponent - 8 : -133;
    rounded = ldexp(nearbyint(ldexp(value, -quantum)), quantum);
  }
  const float single = (float)rounded; /* exact, or infinite above the range */
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  return (uint16_t)(bits >> 16);
}

int reference_linear_owner(int experts, int ranks, int expert) {
  int rank = 0;
  while ((int64_t)(rank + 1) * experts / ranks <= expert) rank++;
  return rank;
}

/* ---- Experts ---- */

typedef double doubles __attribute__((vector_size(64), aligned(8), may_alias));

static inline __attribute__((always_inline)) double dot(const double *a, const double *b, int count) {
  doubles sum[4] = {{0}, {0}, {0}, {0}};
  int i = 0;
  for (; i + 32 <= count; i += 32) {
    for (int part = 0; part < 4; part++) {
      sum[part] += *(const doubles *)(a + i + 8 * part) * *(const doubles *)(b + i + 8 * part);
    }
  }
  double total = 0;
  for (; i < count; i++) total += a[i] * b[i];
  const doubles all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (int lane = 0; lane < 8; lane++) total += all[lane];
  return total;
}

/* out[m][row] = sum over columns of matrix[row][column] * inputs[m][column] */
CLONES static void multiply(const uint16_t *matrix, int rows, int columns, const double *inputs, int count, double *scratch,
                            double *out) {
  for (int row = 0; row < rows; row++) {
    const uint16_t *weights = matrix + (size_t)row * columns;
    for (int column = 0; column < columns; column++) {
      union {
        uint32_t bits;
        float value;
      } wide = {(uint32_t)weights[column] << 16};
      scratch[column] = wide.value;
    }
    for (int m = 0; m < count; m++) {
      out[(size_t)m * rows + row] = dot(inputs + (size_t)m * columns, scratch, columns);
    }
  }
}

static double activate(const struct reference_layer *layer, double gate, double up) {
  if (layer->clamp) {
    if (gate > layer->limit) gate = layer->limit;
    if (up > layer->limit) up = layer->limit;
    if (up < -layer->limit) up = -layer->limit;
  }
  return gate / (1.0 + exp(-gate)) * up;
}

struct job {
  const struct reference_layer *layer;
  const uint16_t *hidden;
  const int *begin; /* [experts + 1] into pairs */
  const int *pairs; /* token * K + choice, by expert */
  float *values;    /* [tokens, K, H] */
  atomic_int next;
  atomic_int failed;
};

struct buffers { /* of one thread */
  uint16_t *matrix;
  double *inputs, *products, *activations, *outputs, *scratch;
};

static void buffers_free(struct buffers *buffers) {
  free(buffers->matrix);
  free(buffers->inputs);
  free(buffers->products);
  free(buffers->activations);
  free(buffers->outputs);
  free(buffers->scratch);
}

static int buffers_allocate(const struct reference_layer *layer, struct buffers *buffers) {
  const size_t h = (size_t)layer->hidden, i = (size_t)layer->intermediate;
  buffers->matrix = malloc(2 * i * h * sizeof *buffers->matrix);
  buffers->inputs = malloc(TOKENS_AT_ONCE * h * sizeof(double));
  buffers->products = malloc(TOKENS_AT_ONCE * 2 * i * sizeof(double));
  buffers->activations = malloc(TOKENS_AT_ONCE * i * sizeof(double));
  buffers->outputs = malloc(TOKENS_AT_ONCE * h * sizeof(double));
  buffers->scratch = malloc((h > i ? h : i) * sizeof(double));
  return buffers->matrix && buffers->inputs && buffers->products && buffers->activations && buffers->outputs &&
         buffers->scratch;
}

/* One expert for all of its pairs: gate_up for every block of them, then down, so that each matrix is fetched once when the
 * pairs fit one block. */
static void run_pairs(const struct job *job, int expert, const int *pairs, int count, struct buffers *buffers) {
  const struct reference_layer *layer = job->layer;
  const int h = layer->hidden, i = layer->intermediate;
  for (int m = 0; m < count; m++) {
    const uint16_t *row = job->hidden + (size_t)(pairs[m] / layer->top_k) * h;
    for (int c = 0; c < h; c++) buffers->inputs[(size_t)m * h + c] = reference_from_bf16(row[c]);
  }
  const double *outputs = buffers->inputs;
  if (!layer->identity) {
    layer->weights(layer->weights_user, expert, 0, buffers->matrix);
    multiply(buffers->matrix, 2 * i, h, buffers->inputs, count, buffers->scratch, buffers->products);
    for (int m = 0; m < count; m++) {
      const double *product = buffers->products + (size_t)m * 2 * i;
      for (int c = 0; c < i; c++) {
        const double value = activate(layer, product[c], product[i + c]);
        buffers->activations[(size_t)m * i + c] = reference_from_bf16(reference_to_bf16(value));
      }
    }
    layer->weights(layer->weights_user, expert, 1, buffers->matrix);
    multiply(buffers->matrix, h, i, buffers->activations, count, buffers->scratch, buffers->outputs);
    outputs = buffers->outputs;
  }
  for (int m = 0; m < count; m++) {
    for (int c = 0; c < h; c++) job->values[(size_t)pairs[m] * h + c] = (float)outputs[(size_t)m * h + c];
  }
}

static void *work(void *argument) {
  struct job *job = argument;
  struct buffers buffers = {0};
  if (!buffers_allocate(job->layer, &buffers)) job->failed = 1;
  int expert;
  while (!job->failed && (expert = atomic_fetch_add(&job->next, 1)) < job->layer->experts) {
    for (int p = job->begin[expert]; p < job->begin[expert + 1]; p += TOKENS_AT_ONCE) {
      const int left = job->begin[expert + 1] - p;
      run_pairs(job, expert, job->pairs + p, left < TOKENS_AT_ONCE ? left : TOKENS_AT_ONCE, &buffers);
    }
  }
  buffers_free(&buffers);
  return NULL;
}

static int skipped(const struct reference_layer *layer, int32_t id, float weight) {
  return id < 0 || id >= layer->experts || weight == 0.0f;
}

/* Pairs in the order of their experts. begin has experts + 1 elements, zero at first. */
static void sort_pairs(const struct reference_layer *layer, int count, const int32_t *ids, const float *weights, int *begin,
                       int *pairs) {
  for (int pass = 0; pass < 2; pass++) {
    for (int pair = 0; pair < count; pair++) {
      if (skipped(layer, ids[pair], weights[pair])) continue;
      if (pass == 0)
        begin[ids[pair] + 1]++;
      else
        pairs[begin[ids[pair]]++] = pair;
    }
    if (pass == 0) {
      for (int e = 0; e < layer->experts; e++) begin[e + 1] += begin[e];
    }
  }
  for (int e = layer->experts; e > 0; e--) begin[e] = begin[e - 1];
  begin[0] = 0;
}

static void run_threads(struct job *job, int threads) {
  pthread_t helpers[256];
  int started = 0;
  if (threads > 256) threads = 256;
  while (started < threads - 1 && pthread_create(&helpers[started], NULL, work, job) == 0) started++;
  work(job);
  for (int t = 0; t < started; t++) pthread_join(helpers[t], NULL);
}

/* ---- The way home: FP32, as the table of roundings has it. Double holds the products exactly and a sum of two floats
 * closely enough that the cast rounds once. ---- */

static double round_returned(const struct reference_layer *layer, double value) {
  return layer->return_fp32 ? (double)(float)value : reference_from_bf16(reference_to_bf16(value));
}

struct token {           /* what combining one token needs */
  const int32_t *owners; /* [K], -1 skipped */
  const float *weights;  /* [K] */
  const float *values;   /* [K, H] */
  int source;
};

static int owner_takes_part(const struct reference_layer *layer, const struct token *token, int owner) {
  for (int k = 0; k < layer->top_k; k++) {
    if (token->owners[k] == owner) return 1;
  }
  return 0;
}

static double owner_sum(const struct reference_layer *layer, const struct token *token, int owner, int column) {
  double sum = 0;
  for (int k = 0; k < layer->top_k; k++) {
    if (token->owners[k] != owner) continue;
    sum = (float)(sum + (float)((double)token->weights[k] * token->values[(size_t)k * layer->hidden + column]));
  }
  return round_returned(layer, sum);
}

static double combine_choices(const struct reference_layer *layer, const struct token *token, int column) {
  double sum = 0;
  for (int k = 0; k < layer->top_k; k++) {
    if (token->owners[k] < 0) continue;
    sum =
        (float)(sum + (float)(token->weights[k] * round_returned(layer, token->values[(size_t)k * layer->hidden + column])));
  }
  return sum;
}

static double combine_owners(const struct reference_layer *layer, const struct token *token, int column) {
  double sum = 0;
  int first = 1;
  for (int step = 0; step < layer->ranks; step++) {
    const int owner = layer->ring ? (token->source + 1 + step) % layer->ranks : step;
    if (!owner_takes_part(layer, token, owner)) continue;
    const double value = owner_sum(layer, token, owner, column);
    if (layer->ring && !first)
      sum = reference_from_bf16(reference_to_bf16((float)(sum + value)));
    else
      sum = (float)(sum + value);
    first = 0;
  }
  return sum;
}

static void combine_token(const struct reference_layer *layer, const struct token *token, uint16_t *out) {
  for (int c = 0; c < layer->hidden; c++) {
    const double sum = layer->choices ? combine_choices(layer, token, c) : combine_owners(layer, token, c);
    out[c] = reference_to_bf16((float)(sum * (float)layer->output_scale));
  }
}

static void find_owners(const struct reference_layer *layer, int t, const int32_t *ids, const float *weights,
                        int32_t *owners) {
  for (int k = 0; k < layer->top_k; k++) {
    if (skipped(layer, ids[k], weights[k]))
      owners[k] = -1;
    else if (layer->owner)
      owners[k] = layer->owner(layer->owner_user, ids[k], t);
    else
      owners[k] = reference_linear_owner(layer->experts, layer->ranks, ids[k]);
  }
}

static void combine_all(const struct reference_layer *layer, int tokens, const int32_t *ids, const float *weights,
                        const int32_t *sources, const float *values, int32_t *owners, uint16_t *out) {
  for (int t = 0; t < tokens; t++) {
    const size_t first = (size_t)t * layer->top_k;
    find_owners(layer, t, ids + first, weights + first, owners);
    const struct token token = {owners, weights + first, values + first * layer->hidden, sources ? sources[t] : 0};
    combine_token(layer, &token, out + (size_t)t * layer->hidden);
  }
}

int reference_run(const struct reference_layer *layer, int tokens, const uint16_t *hidden, const int32_t *ids,
                  const float *weights, const int32_t *sources, uint16_t *out, float *values, int threads) {
  const size_t count = (size_t)tokens * layer->top_k;
  int *begin = calloc((size_t)layer->experts + 1, sizeof *begin);
  int *pairs = malloc((count + 1) * sizeof *pairs);
  int32_t *owners = malloc((size_t)layer->top_k * sizeof *owners);
  float *kept = values ? values : malloc((count * layer->hidden + 1) * sizeof *kept);
  int result = -1;
  if (begin && pairs && owners && kept) {
    memset(kept, 0, count * layer->hidden * sizeof *kept);
    sort_pairs(layer, (int)count, ids, weights, begin, pairs);
    struct job job = {layer, hidden, begin, pairs, kept, 0, 0};
    run_threads(&job, threads);
    if (!job.failed) {
      combine_all(layer, tokens, ids, weights, sources, kept, owners, out);
      result = 0;
    }
  }
  if (!values) free(kept);
  free(owners);
  free(pairs);
  free(begin);
  return result;
}

/* ---- What roundings on the edge allow ---- */

struct range { /* of one choice's unweighted output, [H] */
  float *low, *high;
};

static double root_mean_square(const double *values, int count) {
  double square = 0;
  for (int i = 0; i < count; i++) square += values[i] * values[i];
  return sqrt(square / count);
}

/* The lowest and the highest bf16 that an activation may round to, with gate and up off by `off` either way. */
static void activation_range(const struct reference_layer *layer, double gate, double up, double off, double *low,
                             double *high) {
  *low = *high = reference_from_bf16(reference_to_bf16(activate(layer, gate, up)));
  for (int corner = 0; corner < 4; corner++) {
    const double value = activate(layer, gate + (corner & 1 ? off : -off), up + (corner & 2 ? off : -off));
    const double rounded = reference_from_bf16(reference_to_bf16(value));
    *low = fmin(*low, rounded);
    *high = fmax(*high, rounded);
  }
}

static void expert_range(const struct reference_layer *layer, const uint16_t *hidden, int expert, struct buffers *buffers,
                         const struct range *range) {
  const int h = layer->hidden, i = layer->intermediate;
  double *low = buffers->activations, *high = buffers->activations + i; /* the buffers hold TOKENS_AT_ONCE rows */
  for (int c = 0; c < h; c++) buffers->inputs[c] = reference_from_bf16(hidden[c]);
  layer->weights(layer->weights_user, expert, 0, buffers->matrix);
  multiply(buffers->matrix, 2 * i, h, buffers->inputs, 1, buffers->scratch, buffers->products);
  const double off = REFERENCE_SUM_ERROR * root_mean_square(buffers->products, 2 * i);
  for (int c = 0; c < i; c++)
    activation_range(layer, buffers->products[c], buffers->products[i + c], off, &low[c], &high[c]);
  layer->weights(layer->weights_user, expert, 1, buffers->matrix);
  multiply(buffers->matrix, h, i, low, 1, buffers->scratch, buffers->outputs);
  const double spread = REFERENCE_SUM_ERROR * root_mean_square(buffers->outputs, h);
  for (int row = 0; row < h; row++) {
    double below = buffers->outputs[row], above = below;
    for (int c = 0; c < i; c++) {
      if (low[c] == high[c]) continue;
      const double change = reference_from_bf16(buffers->matrix[(size_t)row * i + c]) * (high[c] - low[c]);
      below += fmin(change, 0);
      above += fmax(change, 0);
    }
    range->low[row] = (float)(below - spread);
    range->high[row] = (float)(above + spread);
  }
}

/* Sums and roundings keep the order of their inputs: with every choice at its lower end, then at its upper end, the way home
 * gives the ends of the result. */
static int fill_ranges(const struct reference_layer *layer, const uint16_t *hidden, const int32_t *ids, const float *weights,
                       float *const ends[2]) {
  struct buffers buffers = {0};
  const int allocated = buffers_allocate(layer, &buffers);
  for (int k = 0; k < layer->top_k && allocated; k++) {
    const size_t at = (size_t)k * layer->hidden;
    const int turned = weights[k] < 0; /* a negative weight turns the range around */
    const struct range range = {ends[turned] + at, ends[!turned] + at};
    if (!skipped(layer, ids[k], weights[k])) expert_range(layer, hidden, ids[k], &buffers, &range);
  }
  buffers_free(&buffers);
  return allocated;
}

int reference_allow(const struct reference_layer *layer, const uint16_t *hidden, const int32_t *ids, const float *weights,
                    int32_t source, const uint16_t *got, uint16_t *want) {
  const size_t h = (size_t)layer->hidden, values = (size_t)layer->top_k * h;
  float *ends[2] = {calloc(values, sizeof(float)), calloc(values, sizeof(float))};
  uint16_t *bounds[2] = {malloc(h * sizeof(uint16_t)), malloc(h * sizeof(uint16_t))};
  int32_t *owners = malloc((size_t)layer->top_k * sizeof *owners);
  int result = -1;
  if (ends[0] && ends[1] && bounds[0] && bounds[1] && owners && fill_ranges(layer, hidden, ids, weights, ends)) {
    find_owners(layer, 0, ids, weights, owners);
    for (int end = 0; end < 2; end++) {
      const struct token token = {owners, weights, ends[end], source};
      combine_token(layer, &token, bounds[end]);
    }
    for (size_t c = 0; c < h; c++) {
      const double value = reference_from_bf16(got[c]), low = reference_from_bf16(bounds[0][c]),
                   high = reference_from_bf16(bounds[1][c]);
      if (value < low || value > high)
        want[c] = bounds[value > high][c];
      else if (value >= low)
        want[c] = got[c]; /* not a NaN */
    }
    result = 0;
  }
  for (int end = 0; end < 2; end++) {
    free(ends[end]);
    free(bounds[end]);
  }
  free(owners);
  return result;
}

/* ---- Router ---- */

struct candidates { /* per expert; [experts] each, one allocation */
  float *scores;    /* what weights are made of */
  float *values;    /* score + bias: what is compared */
  float *logits;    /* as compared: +inf is the largest finite value */
  char *allowed;    /* selectable and in a kept group */
};

static int finite_or_large(float value) {
  return !isnan(value) && value != -INFINITY;
}

static void score_experts(const struct reference_router *router, const float *logits, struct candidates *c) {
  float largest = -INFINITY;
  double sum = 0;
  for (int e = 0; e < router->experts; e++) {
    c->allowed[e] = (char)finite_or_large(logits[e]);
    c->logits[e] = logits[e] == INFINITY ? FLT_MAX : logits[e];
    if (c->allowed[e] && c->logits[e] > largest) largest = c->logits[e];
  }
  for (int e = 0; e < router->experts; e++) {
    if (!c->allowed[e]) continue;
    c->scores[e] = router->softmax ? expf(c->logits[e] - largest) : 1.0f / (1.0f + expf(-c->logits[e]));
    sum += c->scores[e];
  }
  for (int e = 0; e < router->experts; e++) {
    if (!c->allowed[e]) continue;
    if (router->softmax) c->scores[e] /= (float)sum;
    c->values[e] = router->bias ? c->scores[e] + router->bias[e] : c->scores[e];
    if (!finite_or_large(c->values[e])) c->allowed[e] = 0;
  }
}

/* The gap between two values in units of the last place of the larger of their terms. */
static double gap(float a, float b, float terms) {
  double unit = fmax(fmax(fabs(a), fabs(b)), terms);
  if (unit < FLT_MIN) unit = FLT_MIN;
  return fabs((double)a - b) / (unit * FLT_EPSILON);
}

static double candidate_gap(const struct reference_router *router, const struct candidates *c, int a, int b) {
  const float bias_a = router->bias ? router->bias[a] : 0, bias_b = router->bias ? router->bias[b] : 0;
  if (c->logits[a] == c->logits[b] && bias_a == bias_b) return INFINITY; /* a true tie, or the same expert */
  return gap(c->values[a], c->values[b], fmaxf(fabsf(bias_a), fabsf(bias_b)));
}

/* The best allowed candidate among [begin, end) that `taken` does not mark, -1 if there is none. */
static int best(const struct candidates *c, const char *taken, int begin, int end) {
  int found = -1;
  for (int e = begin; e < end; e++) {
    if (c->allowed[e] && !taken[e] && (found < 0 || c->values[e] > c->values[found])) found = e;
  }
  return found;
}

/* Keeps the best top_groups groups; a group with nothing selectable is never kept. Of a group with one selectable expert,
 * that one is the whole sum. */
static double keep_groups(const struct reference_router *router, struct candidates *c, char *taken) {
  const int size = router->experts / router->groups;
  float *scores = calloc((size_t)router->groups, sizeof *scores);
  char *usable = calloc((size_t)router->groups, 1), *kept = calloc((size_t)router->groups, 1);
  double margin = INFINITY;
  float lowest = INFINITY;
  for (int g = 0; g < router->groups; g++) {
    const int first = best(c, taken, g * size, (g + 1) * size);
    if (first < 0) continue;
    usable[g] = 1;
    scores[g] = c->values[first];
    if (!router->group_top2) continue;
    taken[first] = 1;
    const int second = best(c, taken, g * size, (g + 1) * size);
    taken[first] = 0;
    if (second >= 0) scores[g] += c->values[second];
  }
  for (int n = 0; n < router->top_groups; n++) {
    int found = -1;
    for (int g = 0; g < router->groups; g++) {
      if (usable[g] && !kept[g] && (found < 0 || scores[g] > scores[found])) found = g;
    }
    if (found < 0) break;
    kept[found] = 1;
    lowest = scores[found];
  }
  for (int g = 0; g < router->groups; g++) {
    if (kept[g]) continue;
    if (usable[g]) margin = fmin(margin, gap(lowest, scores[g], 1));
    for (int e = g * size; e < (g + 1) * size; e++) c->allowed[e] = 0;
  }
  free(kept);
  free(usable);
  free(scores);
  return margin;
}

static void weigh(const struct reference_router *router, int picked, float *weights) {
  static const float guards[] = {0, 1e-20f, 1e-6f, 0};
  float sum = 0;
  for (int k = 0; k < picked; k++) sum += weights[k];
  sum += guards[router->renormalize];
  if (router->renormalize == 3 && !(sum > 1e-12f)) sum = 1e-12f;
  for (int k = 0; k < picked; k++) {
    if (router->renormalize) weights[k] /= sum;
    weights[k] *= router->scale;
  }
}

double reference_route(const struct reference_router *router, const float *logits, int32_t *ids, float *weights) {
  const size_t count = (size_t)router->experts;
  struct candidates c = {calloc(count, sizeof(float)), calloc(count, sizeof(float)), calloc(count, sizeof(float)),
                         calloc(count, 1)};
  char *taken = calloc(count, 1);
  double margin = INFINITY;
  int picked = 0, before = -1;
  score_experts(router, logits, &c);
  if (router->groups > 1) margin = keep_groups(router, &c, taken);
  for (int k = 0; k <= router->top_k; k++) { /* one more than wanted, for the margin at the edge */
    const int found = best(&c, taken, 0, router->experts);
    if (found >= 0 && before >= 0) margin = fmin(margin, candidate_gap(router, &c, before, found));
    before = found;
    if (k == router->top_k) break;
    ids[k] = found;
    weights[k] = found < 0 ? 0 : c.scores[found];
    if (found < 0) continue;
    taken[found] = 1;
    picked++;
  }
  weigh(router, picked, weights);
  free(taken);
  free(c.allowed);
  free(c.logits);
  free(c.values);
  free(c.scores);
  return margin;
}

/* ---- Comparison ---- */

static double element_difference(double got, double want) {
  if (isnan(got) && isnan(want)) return 0;
  if (got == want) return 0; /* infinities too */
  return isfinite(got) && isfinite(want) ? fabs(got - want) : INFINITY;
}

static double over(double difference, double size) {
  return difference == 0 ? 0 : size > 0 ? difference / size : INFINITY;
}

void reference_compare(const uint16_t *got, const uint16_t *want, int rows, int columns,
                       struct reference_difference *difference) {
  memset(difference, 0, sizeof *difference);
  for (int r = 0; r < rows; r++) {
    double square = 0, size = 0, worst = -1, largest = 0;
    int column = 0;
    for (int c = 0; c < columns; c++) {
      const size_t at = (size_t)r * columns + c;
      const double value = reference_from_bf16(want[at]);
      const double off = element_difference(reference_from_bf16(got[at]), value);
      square += off * off;
      if (isfinite(value)) {
        size += value * value;
        largest = fmax(largest, fabs(value));
      }
      if (off > worst) {
        worst = off;
        column = c;
      }
    }
    const double l2 = over(sqrt(square), sqrt(size)), element = over(worst, largest);
    if (r == 0 || l2 > difference->l2) {
      difference->l2 = l2;
      difference->l2_row = r;
    }
    if (r == 0 || element > difference->element) {
      difference->element = element;
      difference->row = r;
      difference->column = column;
      difference->got = reference_from_bf16(got[(size_t)r * columns + column]);
      difference->want = reference_from_bf16(want[(size_t)r * columns + column]);
    }
  }
}

int reference_close(const struct reference_difference *difference) {
  return difference->l2 <= REFERENCE_L2_MAX && difference->element <= REFERENCE_ELEMENT_MAX;
}
