/* Rows out and in: pack at the source, index and work lists at the owner. */
#include "cpu.h"

/* ---- Source ---- */

struct row { /* what every peer gets of a token, before its hidden state */
  struct moeflow_row_header header;
  int32_t places[MOEFLOW_CHOICES_MAX];
  float weights[MOEFLOW_CHOICES_MAX];
};

/* Where expert `id` lives for token t of this rank; none for ids outside [0, E), and for experts that nobody has. */
static int32_t place_of(const struct spec *spec, const struct moeflow_pack_params *p, int64_t id, int t) {
  if (id < 0 || id >= spec->experts) return MOEFLOW_PLACE_NONE;
  const int32_t *places = p->places + id * p->replicas;
  uint32_t count = 0;
  while (count < (uint32_t)p->replicas && places[count] >= 0) count++;
  if (count == 0) return MOEFLOW_PLACE_NONE;
  const int32_t place = places[moeflow_replica((uint32_t)p->rank, (uint32_t)t, count)];
  return moeflow_place_owner(place) < p->ranks ? place : MOEFLOW_PLACE_NONE;
}

static void place_token(const struct spec *spec, const struct moeflow_pack_params *p, int t, struct row *row) {
  for (int k = 0; k < spec->top_k; k++) {
    const int64_t at = (int64_t)t * spec->top_k + k;
    const int64_t id = p->ids_int64 ? ((const int64_t *)p->ids)[at] : ((const int32_t *)p->ids)[at];
    row->weights[k] = p->weights[at];
    row->places[k] = row->weights[k] == 0.0f ? MOEFLOW_PLACE_NONE : place_of(spec, p, id, t);
    p->token_places[at] = row->places[k];
    p->token_weights[at] = row->weights[k];
  }
}

static int has_owner(const struct spec *spec, const struct row *row, int owner) {
  for (int k = 0; k < spec->top_k; k++) {
    if (row->places[k] >= 0 && moeflow_place_owner(row->places[k]) == owner) return 1;
  }
  return 0;
}

static void write_row(const struct spec *spec, const struct moeflow_pack_params *p, const struct row *row, int t, int body) {
  const size_t choices = 4 * (size_t)spec->top_k, hidden = 2 * (size_t)spec->hidden;
  for (int peer = 0; peer < (p->broadcast ? 1 : p->ranks); peer++) {
    uint8_t *to = p->out.targets[peer] + peer * p->out.block_bytes + t * cpu_row_bytes(spec);
    memcpy(to, &row->header, sizeof row->header);
    if (!body) continue;
    memcpy(to + moeflow_row_ids_offset(), row->places, choices);
    memcpy(to + moeflow_row_weights_offset(spec->top_k), row->weights, choices);
    if (p->broadcast || has_owner(spec, row, peer))
      memcpy(to + moeflow_row_hidden_offset(spec->top_k), p->hidden + t * hidden, hidden);
  }
}

moeflow_status cpu_pack(const struct cpu_call *call, const void *params) {
  const struct moeflow_pack_params *p = params;
  const int poisoned = cpu_poisoned(p->lane) != 0;
  const int tokens = poisoned ? 0 : p->tokens;
  struct row row = {.header = {p->lane->epoch, (uint32_t)tokens, (uint32_t)p->tokens_max, p->flags}};
  if (poisoned) row.header.flags |= MOEFLOW_ROW_POISONED;
  cpu_store(&p->record->started, row.header.epoch);
  if (poisoned && p->out.block_bytes == 0) return MOEFLOW_OK; /* one-sided: peers may still read the last step's row 0 */
  if (tokens == 0) write_row(call->spec, p, &row, 0, 0);
  for (int t = 0; t < tokens; t++) {
    place_token(call->spec, p, t, &row);
    write_row(call->spec, p, &row, t, 1);
  }
  return MOEFLOW_OK;
}

/* ---- Owner ---- */

static struct moeflow_row_header header_of(const uint8_t *row) {
  struct moeflow_row_header header;
  memcpy(&header, row, sizeof header);
  return header;
}

/* Rows beyond those sent, and rows of an earlier, larger step, never count; a hostile rows_sent is bounded by the buffer. */
static int row_counts(const struct spec *spec, const struct moeflow_rows_in *in, uint32_t epoch, int64_t r) {
  const struct moeflow_row_header header = header_of(cpu_row(spec, in, r));
  const uint32_t sent = header.rows_sent < (uint32_t)in->rows ? header.rows_sent : (uint32_t)in->rows;
  return header.epoch == epoch && r % in->rows < sent;
}

/* The local slot of choice k of a row, -1 when it is not mine. */
static int32_t slot_of(const uint8_t *row, int k, int rank, int local_experts) {
  int32_t place;
  memcpy(&place, row + moeflow_row_ids_offset() + 4 * (int64_t)k, sizeof place);
  if (place < 0 || moeflow_place_owner(place) != rank) return -1;
  const int32_t slot = moeflow_place_slot(place);
  return slot < local_experts ? slot : -1;
}

static void check_headers(const struct moeflow_expert_index_params *p) {
  const uint32_t epoch = p->lane->epoch, tokens_max = (uint32_t)p->in.tokens_max;
  for (int s = 0; s < p->in.ranks; s++) {
    const struct moeflow_row_header header = header_of(p->in.base + s * p->in.block_bytes);
    const enum moeflow_phase phase = MOEFLOW_PHASE_DISPATCH;
    if (header.epoch != epoch) {
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_EPOCH, (uint32_t)s, phase, epoch, header.epoch);
    } else if (header.tokens_max != tokens_max) {
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_TOKENS_MAX, (uint32_t)s, phase, tokens_max, header.tokens_max);
    } else if (header.flags & MOEFLOW_ROW_POISONED) {
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_PEER, (uint32_t)s, phase, 0, 0);
    } else if (header.flags & MOEFLOW_ROW_FAILED) {
      cpu_store(&p->record->failed_step, epoch);
      cpu_store(&p->record->failed_peer, (uint32_t)s + 1);
    }
  }
}

moeflow_status cpu_expert_index(const struct cpu_call *call, const void *params) {
  const struct moeflow_expert_index_params *p = params;
  const int64_t rows = (int64_t)p->in.ranks * p->in.rows;
  const int64_t chunks = (rows + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS;
  if (cpu_poisoned(p->lane)) return MOEFLOW_OK;
  cpu_store(&p->record->received, p->lane->epoch);
  check_headers(p);
  memset(p->chunk_counts, 0, (size_t)(chunks * p->local_experts) * sizeof *p->chunk_counts);
  for (int64_t r = 0; r < rows; r++) {
    if (!row_counts(call->spec, &p->in, p->lane->epoch, r)) continue;
    int32_t *counts = p->chunk_counts + r / MOEFLOW_CHUNK_ROWS * p->local_experts;
    for (int k = 0; k < call->spec->top_k; k++) {
      const int32_t slot = slot_of(cpu_row(call->spec, &p->in, r), k, p->in.rank, p->local_experts);
      if (slot >= 0) counts[slot]++;
    }
  }
  return MOEFLOW_OK;
}

static void list_tiles(const struct moeflow_expert_prepare_params *p) {
  int32_t count = 0;
  for (int e = 0; e < p->local_experts; e++) {
    const int32_t end = p->expert_offsets[e + 1];
    for (int32_t begin = p->expert_offsets[e]; begin < end; begin += p->tile_tokens) {
      const int32_t last = begin + p->tile_tokens;
      p->tiles[count++] = (struct moeflow_tile){e, begin, last < end ? last : end, 0};
    }
    if (p->expert_load) p->expert_load[e] += end - p->expert_offsets[e];
  }
  *p->tile_count = count;
}

moeflow_status cpu_expert_prepare(const struct cpu_call *call, const void *params) {
  const struct moeflow_expert_prepare_params *p = params;
  const int64_t rows = (int64_t)p->in.ranks * p->in.rows;
  const int64_t chunks = (rows + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS;
  const int top_k = call->spec->top_k;
  if (cpu_poisoned(p->lane)) return MOEFLOW_OK;
  int32_t sum = 0;
  for (int e = 0; e < p->local_experts; e++) { /* offsets[e + 1]: where expert e begins, and then its next free position */
    p->expert_offsets[e + 1] = sum;
    for (int64_t chunk = 0; chunk < chunks; chunk++) sum += p->chunk_counts[chunk * p->local_experts + e];
  }
  p->expert_offsets[0] = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int counts = row_counts(call->spec, &p->in, p->lane->epoch, r);
    for (int k = 0; k < top_k; k++) {
      const int32_t slot = counts ? slot_of(cpu_row(call->spec, &p->in, r), k, p->in.rank, p->local_experts) : -1;
      const int64_t entry = r * top_k + k;
      p->positions[entry] = slot < 0 ? -1 : p->expert_offsets[slot + 1]++;
      if (slot >= 0) p->entries[p->positions[entry]] = (int32_t)entry;
    }
  }
  list_tiles(p);
  return MOEFLOW_OK;
}
