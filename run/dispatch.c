/* The exact part of the check: rows that travelled, without any arithmetic of experts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "random.h"

struct received { /* a row as it lies in the receive buffer */
  struct moeflow_row_header header;
  const uint8_t *ids, *weights, *hidden;
};

struct source { /* what a rank sent: recomputed, or gathered from it */
  int rank, tokens;
  const int32_t *ids;
  const float *weights;
};

static int32_t expected_place(const struct check *check, int32_t id, float weight) {
  const struct setup *setup = check->worker->setup;
  const int experts = setup->model.spec.experts;
  if (id < 0 || id >= experts || weight == 0.0f) return MOEFLOW_PLACE_NONE;
  const int owner = reference_linear_owner(experts, setup->ep, id);
  return moeflow_place(owner, id - (int32_t)((int64_t)owner * experts / setup->ep));
}

static void check_header(struct check *check, const struct source *source, int token, const struct received *row) {
  const struct group_lane *lane = &check->worker->group->lanes[check->step.lane];
  const struct moeflow_row_header *header = &row->header;
  const uint32_t epoch = lane->record->finished;
  if (header->epoch == epoch && header->rows_sent == (uint32_t)source->tokens &&
      header->tokens_max == (uint32_t)check->step.tokens_max && header->flags == 0)
    return;
  check_fail(
      check, &check->result->dispatch_exact,
      "rank %d received token %d of rank %d with a header of step %u, %u rows, tokens_max %u, flags %u instead of %u, %d, "
      "%d, 0",
      check->worker->rank, token, source->rank, header->epoch, header->rows_sent, header->tokens_max, header->flags, epoch,
      source->tokens, check->step.tokens_max);
}

/* Ids and weights of one row; returns whether an expert of this rank is among them. */
static int check_choices(struct check *check, const struct source *source, int token, const struct received *row) {
  const int top_k = check->worker->setup->model.spec.top_k;
  int mine = 0;
  for (int k = 0; k < top_k; k++) {
    const int32_t id = source->ids[(size_t)token * top_k + k];
    const float weight = source->weights[(size_t)token * top_k + k];
    const int32_t place = expected_place(check, id, weight);
    int32_t got_place;
    float got_weight;
    memcpy(&got_place, row->ids + 4 * k, 4);
    memcpy(&got_weight, row->weights + 4 * k, 4);
    if (place != MOEFLOW_PLACE_NONE && moeflow_place_owner(place) == check->worker->rank) mine = 1;
    if (got_place != place)
      check_fail(check, &check->result->dispatch_exact,
                 "rank %d received token %d of rank %d, choice %d, expert %d, with place %#x instead of %#x",
                 check->worker->rank, token, source->rank, k, id, (unsigned)got_place, (unsigned)place);
    if (place != MOEFLOW_PLACE_NONE && memcmp(&got_weight, &weight, sizeof weight) != 0)
      check_fail(check, &check->result->dispatch_exact,
                 "rank %d received token %d of rank %d, choice %d, expert %d, with weight %.9g instead of %.9g",
                 check->worker->rank, token, source->rank, k, id, (double)got_weight, (double)weight);
  }
  return mine;
}

static void check_hidden(struct check *check, const struct source *source, int token, const uint8_t *got, uint16_t *want) {
  const struct setup *setup = check->worker->setup;
  inputs_hidden(&setup->inputs, check->point, source->rank, token, want);
  for (int c = 0; c < setup->model.spec.hidden; c++) {
    uint16_t value;
    memcpy(&value, got + 2 * (size_t)c, sizeof value);
    if (value == want[c]) continue;
    check_fail(check, &check->result->dispatch_exact,
               "rank %d received token %d of rank %d with hidden[%d] = %g instead of %g", check->worker->rank, token,
               source->rank, c, reference_from_bf16(value), reference_from_bf16(want[c]));
    return;
  }
}

static void check_rows(struct check *check, const struct source *source, const uint8_t *block, uint16_t *scratch) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const int64_t row_bytes = spec_row_bytes(spec);
  const int broadcast = check->worker->group->comm->ops->broadcast; /* rows for nobody here are whole as well */
  struct received row;
  for (int t = 0; t < source->tokens || t == 0; t++) { /* row 0 carries a header even without tokens */
    const uint8_t *at = block + t * row_bytes;
    memcpy(&row.header, at, sizeof row.header);
    row.ids = at + moeflow_row_ids_offset();
    row.weights = at + moeflow_row_weights_offset(spec->top_k);
    row.hidden = at + moeflow_row_hidden_offset(spec->top_k);
    check_header(check, source, t, &row);
    if (t >= source->tokens) continue;
    const int mine = check_choices(check, source, t, &row);
    if (mine || broadcast) check_hidden(check, source, t, row.hidden, scratch);
  }
}

moeflow_status check_dispatch(struct check *check, const int32_t *all_ids, const float *all_weights) {
  struct worker *worker = check->worker;
  const struct setup *setup = worker->setup;
  const struct spec *spec = &setup->model.spec;
  const int rows = layer_rows(worker->group, check->step.tokens_max);
  const int64_t block = layer_block_bytes(worker->layer, MOEFLOW_PHASE_DISPATCH, rows);
  const size_t bytes = (size_t)block * (size_t)setup->ep;
  const size_t picks = (size_t)check->step.tokens_max * (size_t)spec->top_k;
  moeflow_status status = MOEFLOW_OK;
  uint8_t *received = malloc(bytes);
  uint16_t *scratch = malloc((size_t)spec->hidden * sizeof *scratch);
  if (!received || !scratch) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu bytes of received rows", bytes);
  CHECK(
      worker->context->backend->download(worker->context, received, worker->group->lanes[check->step.lane].received, bytes));
  for (int rank = 0; rank < setup->ep; rank++) {
    const struct source source = {rank, options_tokens(&setup->options.points[check->point], rank), all_ids + rank * picks,
                                  all_weights + rank * picks};
    check_rows(check, &source, received + rank * block, scratch);
  }

cleanup:
  free(received);
  free(scratch);
  return status;
}

/* ---- Identity ---- */

/* Choice t mod K of token t goes to a drawn expert with weight 1, the others nowhere. */
static void one_choice(const struct check *check, int32_t *ids, float *weights) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const uint32_t key = moeflow_random_mix((uint32_t)check->point * 4099u + (uint32_t)check->worker->rank);
  for (int t = 0; t < check->step.tokens; t++) {
    for (int k = 0; k < spec->top_k; k++) {
      const size_t at = (size_t)t * spec->top_k + k;
      ids[at] = k == t % spec->top_k ? (int32_t)(moeflow_random_bits(key, (uint32_t)t) % (uint32_t)spec->experts) : -1;
      weights[at] = 1.0f; /* of the dead choices as well: they are skipped, not multiplied */
    }
  }
}

void check_returned(struct check *check, const int32_t *ids) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const float scale = spec->scale_on == SPEC_SCALE_OUTPUT ? (float)spec->scale : 1.0f;
  for (int t = 0; t < check->step.tokens; t++) {
    for (int c = 0; c < spec->hidden; c++) {
      const size_t at = (size_t)t * spec->hidden + c;
      const double sent = reference_from_bf16(check->hidden[at]);
      const uint16_t want = scale == 1.0f ? check->hidden[at] : reference_to_bf16((float)sent * scale);
      if (check->scratch[at] == want) continue;
      check_fail(check, &check->result->dispatch_exact,
                 "identity: rank %d token %d through expert %d came home with value %d = %g instead of %g",
                 check->worker->rank, t, ids[(size_t)t * spec->top_k + t % spec->top_k], c,
                 reference_from_bf16(check->scratch[at]), reference_from_bf16(want));
      return;
    }
  }
}

moeflow_status check_identity(struct check *check) {
  const struct spec *spec = &check->worker->setup->model.spec;
  const size_t picks = (size_t)check->step.tokens * (size_t)spec->top_k;
  struct stage_step step = check->step;
  moeflow_status status = MOEFLOW_OK;
  int32_t *ids = malloc((picks + 1) * sizeof *ids);
  float *weights = malloc((picks + 1) * sizeof *weights);
  if (!ids || !weights) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu choices", picks);
  one_choice(check, ids, weights);
  step.form = STAGE_IDS32;
  step.flags = MOEFLOW_FORWARD_IDENTITY;
  CHECK(stage_load_ids(&check->worker->stage, step.tokens, ids, weights));
  CHECK(stage_run(&check->worker->stage, &step));
  CHECK(stage_output(&check->worker->stage, step.tokens, check->scratch));
  check_returned(check, ids);

cleanup:
  free(ids);
  free(weights);
  return status;
}
