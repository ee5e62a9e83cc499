/* The experts on the CPU: gate_up with its activation, and down, over the tiles that expert_prepare listed.
 *
 * A dot product runs in 16 explicit lanes that are added in a fixed tree, so its bits depend neither on the vector unit nor
 * on how many tokens share the pass over the weights. Products of two bf16 values are exact in FP32. */
#include <math.h>
#include <stdatomic.h>

#include "cpu.h"

#define TOKENS_MAX 32 /* positions that share one pass over an expert's weights */
#define TOKENS 4      /* positions per inner kernel: 2 weight rows x 4 tokens are 8 vector accumulators */

typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));

#pragma GCC diagnostic ignored "-Wpsabi" /* no vector crosses a call: every function that takes one is inlined */
#define INLINE static inline __attribute__((always_inline))

INLINE floats load(const uint16_t *from) {
  return (floats)(__builtin_convertvector(*(const halves *)from, words) << 16);
}

INLINE floats load_some(const uint16_t *from, int count) {
  halves some = {0};
  memcpy(&some, from, (size_t)count * sizeof *from);
  return (floats)(__builtin_convertvector(some, words) << 16);
}

INLINE float add_lanes(const floats *sum) {
  float lane[16];
  memcpy(lane, sum, sizeof lane);
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  }
  return lane[0];
}

/* out[row * stride + t] = weights[row] . tokens[t] over `depth` values, for 2 rows and a number of tokens known here. */
INLINE void dot(const uint16_t *const weights[2], const uint16_t *const *tokens, const int count, int depth, float *out,
                int stride) {
  floats sum[2][TOKENS] = {{{0}}};
  int d = 0;
  for (; d + 16 <= depth; d += 16) {
    const floats a = load(weights[0] + d), b = load(weights[1] + d);
    for (int t = 0; t < count; t++) {
      const floats x = load(tokens[t] + d);
      sum[0][t] += a * x;
      sum[1][t] += b * x;
    }
  }
  if (d < depth) {
    const floats a = load_some(weights[0] + d, depth - d), b = load_some(weights[1] + d, depth - d);
    for (int t = 0; t < count; t++) {
      const floats x = load_some(tokens[t] + d, depth - d);
      sum[0][t] += a * x;
      sum[1][t] += b * x;
    }
  }
  for (int t = 0; t < count; t++) {
    out[t] = add_lanes(&sum[0][t]);
    out[stride + t] = add_lanes(&sum[1][t]);
  }
}

CPU_CLONES static void multiply(const uint16_t *const weights[2], const uint16_t *const *tokens, int count, int depth,
                                float *out, int stride) {
  int t = 0;
  for (; t + TOKENS <= count; t += TOKENS) dot(weights, tokens + t, TOKENS, depth, out + t, stride);
  for (; t < count; t++) dot(weights, tokens + t, 1, depth, out + t, stride);
}

/* ---- Tiles ---- */

struct task { /* one launch */
  const struct cpu_call *call;
  const struct moeflow_gate_up_params *gate_up; /* one of the two */
  const struct moeflow_down_params *down;
  const struct moeflow_tile *tiles;
  int32_t tile_count;
  atomic_int lend_failed; /* 1 + the expert */
};

static float activate(const struct spec *spec, float gate, float up) {
  if (spec->activation == SPEC_SWIGLU_CLAMP) { /* comparisons, not fmin: a NaN stays */
    const float limit = (float)spec->activation_limit;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1.0f + expf(-gate)) * up;
}

static void gate_up_tokens(const struct task *task, const uint8_t *matrix, int64_t row_stride, int32_t begin, int count) {
  const struct moeflow_gate_up_params *p = task->gate_up;
  const struct spec *spec = task->call->spec;
  const uint16_t *tokens[TOKENS_MAX];
  float products[2 * TOKENS_MAX];
  for (int t = 0; t < count; t++) {
    const uint8_t *row = cpu_row(spec, &p->in, p->entries[begin + t] / spec->top_k);
    tokens[t] = (const uint16_t *)(row + moeflow_row_hidden_offset(spec->top_k));
  }
  for (int i = 0; i < spec->intermediate; i++) {
    const int64_t step = (int64_t)i * p->row_step;
    const uint16_t *const rows[2] = {(const uint16_t *)(matrix + (p->gate_row + step) * row_stride),
                                     (const uint16_t *)(matrix + (p->up_row + step) * row_stride)};
    multiply(rows, tokens, count, spec->hidden, products, TOKENS_MAX);
    for (int t = 0; t < count; t++) {
      const float value = activate(spec, products[t], products[TOKENS_MAX + t]);
      p->activations[(int64_t)(begin + t) * spec->intermediate + i] = cpu_to_bf16(value);
    }
  }
}

static void down_tokens(const struct task *task, const uint8_t *matrix, int64_t row_stride, int32_t begin, int count) {
  const struct moeflow_down_params *p = task->down;
  const struct spec *spec = task->call->spec;
  const uint16_t *tokens[TOKENS_MAX];
  float products[2 * TOKENS_MAX];
  for (int t = 0; t < count; t++) tokens[t] = p->activations + (int64_t)(begin + t) * spec->intermediate;
  for (int row = 0; row < spec->hidden; row += 2) { /* the width is even */
    const uint16_t *const rows[2] = {(const uint16_t *)(matrix + row * row_stride),
                                     (const uint16_t *)(matrix + (row + 1) * row_stride)};
    multiply(rows, tokens, count, spec->intermediate, products, TOKENS_MAX);
    for (int t = 0; t < count; t++) {
      float *out = p->outputs + (int64_t)(begin + t) * spec->hidden + row;
      out[0] = products[t];
      out[1] = products[TOKENS_MAX + t];
    }
  }
}

static const uint8_t *expert_matrix(const struct task *task, int32_t expert, int64_t *row_stride) {
  const struct moeflow_layer *layer = task->call->layer;
  const struct moeflow_matrix *matrix = task->down ? &task->down->weights : &task->gate_up->weights;
  if (layer && layer->lend) {
    *row_stride = 2 * (int64_t)(task->down ? task->call->spec->intermediate : task->call->spec->hidden);
    return layer->lend(layer->lend_user, expert, task->down != NULL);
  }
  *row_stride = matrix->row_stride;
  return matrix->experts ? matrix->experts[expert] : matrix->base + expert * matrix->expert_stride;
}

/* A unit is a tile; the first tile of an expert does all of that expert's, so that a lent matrix is asked for once. */
static void run_tiles(void *argument, int64_t unit) {
  struct task *task = argument;
  const int32_t expert = task->tiles[unit].expert;
  if (unit > 0 && task->tiles[unit - 1].expert == expert) return;
  int64_t row_stride;
  const uint8_t *matrix = expert_matrix(task, expert, &row_stride);
  if (!matrix) {
    task->lend_failed = 1 + expert;
    return;
  }
  int64_t last = unit; /* positions of one expert are contiguous, so its tiles are one run */
  while (last + 1 < task->tile_count && task->tiles[last + 1].expert == expert) last++;
  const int32_t end = task->tiles[last].end;
  for (int32_t begin = task->tiles[unit].begin; begin < end; begin += TOKENS_MAX) {
    const int count = end - begin < TOKENS_MAX ? end - begin : TOKENS_MAX;
    if (task->down) {
      down_tokens(task, matrix, row_stride, begin, count);
    } else {
      gate_up_tokens(task, matrix, row_stride, begin, count);
    }
  }
}

static struct moeflow_record *record_of(const struct moeflow_layer *layer, const struct moeflow_lane *lane) {
  const struct moeflow_group *group = layer->group;
  for (int i = 0; group && i < group->lane_count; i++) {
    if (group->lanes[i].state == lane) return group->lanes[i].record;
  }
  return NULL;
}

/* Without weights the step has no result. The lane is poisoned, so that nobody takes stale sums for one, and the step goes
 * on, so that the peers learn of it; combine then reports what happened (cpu_lend_failure). */
static moeflow_status run_task(struct task *task, struct moeflow_lane *lane) {
  struct moeflow_record unread;
  if (cpu_poisoned(lane)) return MOEFLOW_OK;
  cpu_pool_run(task->call->pool, task->call->threads, task->tile_count, run_tiles, task);
  if (!task->lend_failed) return MOEFLOW_OK;
  struct moeflow_record *record = record_of(task->call->layer, lane);
  const uint32_t rank = task->call->layer->group ? (uint32_t)task->call->layer->group->rank : 0;
  cpu_poison(lane, record ? record : &unread, MOEFLOW_POISON_LEND, rank, MOEFLOW_PHASE_EXPERTS,
             (uint32_t)task->lend_failed - 1, task->down != NULL);
  return MOEFLOW_OK;
}

moeflow_status cpu_lend_failure(const struct moeflow_lane *lane, const struct moeflow_record *record) {
  if (record->poison != MOEFLOW_POISON_LEND || record->step != lane->epoch) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT,
                    "`lend` returned NULL for the %s matrix of local expert %u; the group is poisoned and the output NaN",
                    record->theirs ? "down" : "gate_up", record->mine);
}

moeflow_status cpu_gate_up(const struct cpu_call *call, const void *params) {
  const struct moeflow_gate_up_params *p = params;
  struct task task = {call, p, NULL, p->tiles, *p->tile_count, 0};
  return run_task(&task, p->lane);
}

moeflow_status cpu_down(const struct cpu_call *call, const void *params) {
  const struct moeflow_down_params *p = params;
  struct task task = {call, NULL, p, p->tiles, *p->tile_count, 0};
  return run_task(&task, p->lane);
}
