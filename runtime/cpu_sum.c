/* Identity experts, the owner's sum, the source's sum, and test values. Sums are FP32, a product and then an addition each.
 */
#include "cpu.h"
#include "random.h"

moeflow_status cpu_identity(const struct cpu_call *call, const void *params) {
  const struct moeflow_identity_params *p = params;
  const struct spec *spec = call->spec;
  if (cpu_poisoned(p->lane)) return MOEFLOW_OK;
  for (int32_t position = 0; position < p->expert_offsets[p->local_experts]; position++) {
    const uint8_t *row = cpu_row(spec, &p->in, p->entries[position] / spec->top_k);
    const uint16_t *hidden = (const uint16_t *)(row + moeflow_row_hidden_offset(spec->top_k));
    float *out = p->outputs + (int64_t)position * spec->hidden;
    for (int i = 0; i < spec->hidden; i++) out[i] = cpu_from_bf16(hidden[i]);
  }
  return MOEFLOW_OK;
}

/* ---- Returned rows: FP32 or bf16 ---- */

static int returns_fp32(const struct spec *spec) {
  return spec->returned == SPEC_WIRE_FP32;
}

static void store_value(int fp32, uint8_t *row, int column, float value) {
  if (fp32)
    ((float *)row)[column] = value;
  else
    ((uint16_t *)row)[column] = cpu_to_bf16(value);
}

static float load_value(const struct spec *spec, const uint8_t *row, int column) {
  return returns_fp32(spec) ? ((const float *)row)[column] : cpu_from_bf16(((const uint16_t *)row)[column]);
}

/* ---- Owner ---- */

static uint8_t *return_row(const struct spec *spec, const struct moeflow_owner_reduce_params *p, int source, int64_t row) {
  return p->out.targets[source] + source * p->out.block_bytes + row * cpu_return_row_bytes(spec);
}

/* The parts of one output, in order. */
static float output_at(const struct spec *spec, const struct moeflow_owner_reduce_params *p, int32_t position, int column) {
  const float *output = p->outputs + (int64_t)position * spec->hidden + column;
  float sum = output[0];
  for (int part = 1; part < p->parts; part++) sum += output[part * p->part_stride];
  return sum;
}

static void reduce_owner(const struct spec *spec, const struct moeflow_owner_reduce_params *p, int64_t r, int fp32,
                         uint8_t *to) {
  const int32_t *positions = p->positions + r * spec->top_k;
  float weights[MOEFLOW_CHOICES_MAX];
  memcpy(weights, cpu_row(spec, &p->in, r) + moeflow_row_weights_offset(spec->top_k), 4 * (size_t)spec->top_k);
  for (int column = 0; column < spec->hidden; column++) {
    float sum = 0;
    for (int k = 0; k < spec->top_k; k++) {
      if (positions[k] < 0) continue;
      sum += weights[k] * output_at(spec, p, positions[k], column);
    }
    store_value(fp32, to, column, sum);
  }
}

static void return_choices(const struct spec *spec, const struct moeflow_owner_reduce_params *p, int64_t r) {
  const int source = (int)(r / p->in.rows);
  for (int k = 0; k < spec->top_k; k++) {
    const int32_t position = p->positions[r * spec->top_k + k];
    if (position < 0) continue;
    uint8_t *to = return_row(spec, p, source, r % p->in.rows * spec->top_k + k);
    for (int column = 0; column < spec->hidden; column++) {
      store_value(returns_fp32(spec), to, column, output_at(spec, p, position, column));
    }
  }
}

moeflow_status cpu_owner_reduce(const struct cpu_call *call, const void *params) {
  const struct moeflow_owner_reduce_params *p = params;
  const struct spec *spec = call->spec;
  if (cpu_poisoned(p->lane)) return MOEFLOW_OK;
  for (int64_t r = 0; r < (int64_t)p->in.ranks * p->in.rows; r++) {
    int mine = 0;
    for (int k = 0; k < spec->top_k; k++) mine |= p->positions[r * spec->top_k + k] >= 0;
    if (spec->reduce == SPEC_REDUCE_CHOICES)
      return_choices(spec, p, r);
    else if (p->write_empty == MOEFLOW_EMPTY_PLAIN)
      reduce_owner(spec, p, r, 0, (uint8_t *)(uintptr_t)p->out.targets + r * spec->hidden * 2);
    else if (mine || p->write_empty)
      reduce_owner(spec, p, r, returns_fp32(spec), return_row(spec, p, (int)(r / p->in.rows), r % p->in.rows));
  }
  return MOEFLOW_OK;
}

/* ---- Source ---- */

static const uint8_t *returned_row(const struct spec *spec, const struct moeflow_combine_params *p, int owner, int64_t row) {
  return p->returned + owner * p->block_bytes + row * cpu_return_row_bytes(spec);
}

/* The returned rows that make up token t, in the order in which they are added, and their weights. Returns how many. */
static int list_rows(const struct spec *spec, const struct moeflow_combine_params *p, int t, int first_owner,
                     const uint8_t **rows, float *weights) {
  const int32_t *places = p->token_places + (int64_t)t * spec->top_k;
  int count = 0;
  if (spec->reduce == SPEC_REDUCE_CHOICES) {
    for (int k = 0; k < spec->top_k; k++) {
      if (places[k] < 0) continue;
      weights[count] = p->token_weights[(int64_t)t * spec->top_k + k];
      rows[count++] = returned_row(spec, p, moeflow_place_owner(places[k]), (int64_t)t * spec->top_k + k);
    }
    return count;
  }
  if (p->added) {
    weights[0] = 1.0f;
    rows[0] = returned_row(spec, p, 0, t);
    for (int k = 0; k < spec->top_k && !count; k++) count = places[k] >= 0;
    return count;
  }
  for (int step = 0; step < p->ranks; step++) {
    const int owner = (first_owner + step) % p->ranks;
    int k = 0;
    while (k < spec->top_k && (places[k] < 0 || moeflow_place_owner(places[k]) != owner)) k++;
    if (k == spec->top_k) continue;
    weights[count] = 1.0f;
    rows[count++] = returned_row(spec, p, owner, t);
  }
  return count;
}

static void combine_token(const struct spec *spec, const struct moeflow_combine_params *p, int t, int ring) {
  const uint8_t *rows[MOEFLOW_CHOICES_MAX];
  float weights[MOEFLOW_CHOICES_MAX];
  const int count = list_rows(spec, p, t, ring ? (p->rank + 1) % p->ranks : 0, rows, weights);
  const float scale = spec->scale_on == SPEC_SCALE_OUTPUT ? (float)spec->scale : 1.0f;
  uint16_t *out = (uint16_t *)p->out + (int64_t)t * spec->hidden;
  for (int column = 0; column < spec->hidden; column++) {
    float sum = 0;
    for (int i = 0; i < count; i++) {
      sum += weights[i] * load_value(spec, rows[i], column);
      if (ring && i > 0) sum = cpu_from_bf16(cpu_to_bf16(sum));
    }
    out[column] = cpu_to_bf16(sum * scale);
  }
}

/* The last kernel of a step: the output is NaN if the group is poisoned, and the step ends in any case. */
static moeflow_status combine(const struct cpu_call *call, const struct moeflow_combine_params *p, int ring) {
  const struct spec *spec = call->spec;
  if (cpu_poisoned(p->lane)) {
    for (int64_t i = 0; i < (int64_t)p->tokens * spec->hidden; i++) ((uint16_t *)p->out)[i] = 0x7fc0;
  } else {
    for (int t = 0; t < p->tokens; t++) combine_token(spec, p, t, ring);
  }
  const moeflow_status status = cpu_lend_failure(p->lane, p->record);
  p->lane->steps += p->eager != 0;
  cpu_store(&p->record->steps, p->lane->steps);
  cpu_store(&p->record->finished, p->lane->epoch);
  p->lane->epoch++;
  return status;
}

moeflow_status cpu_combine(const struct cpu_call *call, const void *params) {
  return combine(call, params, 0);
}

moeflow_status cpu_combine_ring(const struct cpu_call *call, const void *params) {
  return combine(call, params, 1);
}

moeflow_status cpu_fill(const struct cpu_call *call, const void *params) {
  const struct moeflow_fill_params *p = params;
  (void)call;
  for (int e = 0; e < p->experts; e++) {
    for (int64_t row = 0; row < p->rows; row++) {
      const uint32_t key = moeflow_random_row(p->seed, (uint32_t)(p->first_expert + e), (uint32_t)p->matrix, (uint32_t)row);
      uint16_t *out = p->out + (e * p->rows + row) * p->columns;
      for (int64_t c = 0; c < p->columns; c++) out[c] = moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)c), p->shift);
    }
  }
  return MOEFLOW_OK;
}
