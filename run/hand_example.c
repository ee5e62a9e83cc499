#include "hand_example.h"

#include <pthread.h>
#include <string.h>

#include "internal.h"

#define RANKS 2
#define EXPERTS 4
#define H 8
#define I 8
#define K 2
#define C 2 /* capacity */

/* ---- The example: docs/hand-example.md ---- */

struct token { /* A and B are rank 0's, C is rank 1's */
  const char *name;
  float hidden[H];
  int32_t ids[K];
  float weights[K];
};

static const int tokens_of[RANKS] = {2, 1};
static const struct token tokens[RANKS][C] = {
    {{"A", {1, 2, 0, 0, 0, 0, 0, 0}, {0, 3}, {0.5f, 0.25f}}, {"B", {1, 0, 0, 0, 2, 0, 0, -1}, {2, -1}, {1, 0.5f}}},
    {{"C", {1, 1, 1, 1, 0, 0, 0, 2}, {2, 3}, {0.5f, 0.5f}}},
};

/* Expert e: gate = x; up = (e + 1) x[0] in every row; down hands row h the activation h, or h + 1 when e is odd. */
static float weight(int expert, int down, int row, int column) {
  if (down) return column == (row + expert % 2) % I;
  if (row < I) return column == row;
  return column == 0 ? (float)(expert + 1) : 0.0f;
}

/* ---- By hand ----
 * silu(x) = x / (1 + e^-x): silu(1) = 0.7310586, silu(2) = 1.7615942, silu(-1) = -0.2689414. bf16 keeps 8 binary digits. */

#define S1 (187.0 / 256)  /* silu(1) x 1 = 0.7310586 = 187.15 / 256 */
#define S2 (225.0 / 128)  /* silu(2) x 1 = 1.7615942 = 225.48 / 128 */
#define T1 (140.0 / 64)   /* silu(1) x 3 = 2.1931758 = 140.36 / 64 */
#define T2 (169.0 / 32)   /* silu(2) x 3 = 5.2847825 = 169.11 / 32 */
#define TN (-207.0 / 256) /* silu(-1) x 3 = -0.8068243 = -206.55 / 256 */
#define F1 (187.0 / 64)   /* silu(1) x 4 = 2.9242343 = 187.15 / 64 */
#define F2 (225.0 / 32)   /* silu(2) x 4 = 7.0463766 = 225.48 / 32 */

struct received {
  int rank, source, token;
  double header[3], places[K]; /* epoch, rows sent, tokens_max; rank.slot, -1 none */
  int hidden;                  /* the hidden state came along */
};
static const struct received received[] = {
    {0, 0, 0, {1, 2, 2}, {0.0, 1.1}, 1}, {0, 0, 1, {1, 2, 2}, {1.0, -1}, 0}, {0, 1, 0, {1, 1, 2}, {1.0, 1.1}, 0},
    {1, 0, 0, {1, 2, 2}, {0.0, 1.1}, 1}, {1, 0, 1, {1, 2, 2}, {1.0, -1}, 1}, {1, 1, 0, {1, 1, 2}, {1.0, 1.1}, 1},
};

/* Row numbers: A 0, B 1, C 2 (source 1 begins at C = 2). Entry: row number x K + choice. */
static const double offsets[RANKS][3] = {{0, 1, 1}, {0, 2, 4}};
static const double entries[RANKS][4] = {{0}, {2, 4, 1, 5}};

struct position { /* one (token, choice) pair at its owner */
  int rank, position;
  const char *name;
  double gate[I], up, activation[I], output[H];
};
static const struct position positions[] = {
    {0, 0, "A in expert 0", {1, 2, 0, 0, 0, 0, 0, 0}, 1, {S1, S2, 0, 0, 0, 0, 0, 0}, {S1, S2, 0, 0, 0, 0, 0, 0}},
    {1, 0, "B in expert 2", {1, 0, 0, 0, 2, 0, 0, -1}, 3, {T1, 0, 0, 0, T2, 0, 0, TN}, {T1, 0, 0, 0, T2, 0, 0, TN}},
    {1, 1, "C in expert 2", {1, 1, 1, 1, 0, 0, 0, 2}, 3, {T1, T1, T1, T1, 0, 0, 0, T2}, {T1, T1, T1, T1, 0, 0, 0, T2}},
    {1, 2, "A in expert 3", {1, 2, 0, 0, 0, 0, 0, 0}, 4, {F1, F2, 0, 0, 0, 0, 0, 0}, {F2, 0, 0, 0, 0, 0, 0, F1}},
    {1, 3, "C in expert 3", {1, 1, 1, 1, 0, 0, 0, 2}, 4, {F1, F1, F1, F1, 0, 0, 0, F2}, {F1, F1, F1, 0, 0, 0, F2, F1}},
};

struct returned {
  int rank, owner, token;
  const char *name;
  double sum[H];
};
static const struct returned returned[] = {
    {0, 0, 0, "A from rank 0", {S1 / 2, S2 / 2, 0, 0, 0, 0, 0, 0}},
    {0, 1, 0, "A from rank 1", {F2 / 4, 0, 0, 0, 0, 0, 0, F1 / 4}},
    {0, 1, 1, "B from rank 1", {T1, 0, 0, 0, T2, 0, 0, TN}},
    /* T1/2 + F1/2 = 163.5/64, a tie: to the even 164; T2/2 + F1/2 = 131.25/32 */
    {1, 1, 0, "C from rank 1", {164.0 / 64, 164.0 / 64, 164.0 / 64, T1 / 2, 0, 0, F2 / 2, 131.0 / 32}},
};

static const double combined[RANKS][C][H] = {
    /* S1/2 + F2/4 = 135.875/64 */
    {{136.0 / 64, S2 / 2, 0, 0, 0, 0, 0, F1 / 4}, {T1, 0, 0, 0, T2, 0, 0, TN}},
    {{164.0 / 64, 164.0 / 64, 164.0 / 64, T1 / 2, 0, 0, F2 / 2, 131.0 / 32}},
};

/* ---- The layer ---- */

struct rank {
  int number;
  const moeflow_unique_id *id;
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  _Alignas(16) uint16_t gate_up[EXPERTS / RANKS][2 * I][H], down[EXPERTS / RANKS][H][I], hidden[C][H], out[C][H];
  moeflow_status status;
  char message[512];
};

static uint16_t to_bf16(float value) { /* all inputs are exact in bf16 */
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static double from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static void fill_matrices(struct rank *rank) {
  for (int slot = 0; slot < EXPERTS / RANKS; slot++) {
    const int expert = rank->number * (EXPERTS / RANKS) + slot;
    for (int row = 0; row < 2 * I; row++) {
      for (int c = 0; c < H; c++) rank->gate_up[slot][row][c] = to_bf16(weight(expert, 0, row, c));
    }
    for (int row = 0; row < H; row++) {
      for (int c = 0; c < I; c++) rank->down[slot][row][c] = to_bf16(weight(expert, 1, row, c));
    }
  }
}

static moeflow_status open_context(struct rank *rank) {
  static const struct spec spec = {.name = "hand-example",
                                   .hidden = H,
                                   .intermediate = I,
                                   .experts = EXPERTS,
                                   .top_k = K,
                                   .groups = 1,
                                   .top_groups = 1,
                                   .scale = 1};
  char text[SPEC_TEXT_MAX];
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  moeflow_status status = spec_write(&spec, text);
  config.backend = MOEFLOW_BACKEND_CPU;
  config.spec = text;
  return status == MOEFLOW_OK ? moeflow_open(&config, &rank->context) : status;
}

static moeflow_status set_up(struct rank *rank) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  config.rank = rank->number;
  config.ranks = RANKS;
  config.capacity = C;
  config.transport = MOEFLOW_TRANSPORT_LOCAL;
  config.unique_id = rank->id;
  weights.gate_up = rank->gate_up;
  weights.down = rank->down;
  fill_matrices(rank);
  CHECK(open_context(rank));
  CHECK(moeflow_group_create(&rank->context, 1, &config, &rank->group));
  CHECK(moeflow_layer_create(rank->group, rank->context, NULL, &rank->layer));
  CHECK(moeflow_layer_bind(rank->layer, &weights));
  CHECK(moeflow_prepare(&rank->layer, 1, 0));
cleanup:
  return status;
}

static moeflow_status step(struct rank *rank) {
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  int32_t ids[C][K] = {{0}};
  float weights[C][K] = {{0}};
  args.tokens = tokens_of[rank->number];
  for (int t = 0; t < args.tokens; t++) {
    const struct token *token = &tokens[rank->number][t];
    for (int c = 0; c < H; c++) rank->hidden[t][c] = to_bf16(token->hidden[c]);
    memcpy(ids[t], token->ids, sizeof ids[t]);
    memcpy(weights[t], token->weights, sizeof weights[t]);
  }
  args.hidden = rank->hidden;
  args.ids = ids;
  args.weights = &weights[0][0];
  args.out = rank->out;
  const moeflow_status status = moeflow_forward(rank->layer, &args);
  return status == MOEFLOW_OK ? moeflow_poll(rank->group, 60000) : status;
}

static void *run_rank(void *argument) {
  struct rank *rank = argument;
  rank->status = set_up(rank);
  if (rank->status == MOEFLOW_OK) rank->status = step(rank);
  if (rank->status != MOEFLOW_OK) snprintf(rank->message, sizeof rank->message, "%s", moeflow_last_error());
  return NULL;
}

static void tear_down(struct rank *rank) {
  moeflow_layer_destroy(rank->layer);
  moeflow_group_destroy(rank->group);
  moeflow_close(rank->context);
}

/* ---- Stages ---- */

struct printer {
  FILE *out;
  int compared, wrong;
};

static void print_values(FILE *out, const double *values, int count) {
  for (int i = 0; i < count; i++) fprintf(out, " %.9g", values[i]);
}

static void compare(struct printer *printer, const char *label, const double *got, const double *want, int count) {
  int equal = 1;
  for (int i = 0; i < count; i++) equal &= got[i] == want[i];
  fprintf(printer->out, "  %-36s", label);
  print_values(printer->out, got, count);
  if (equal) {
    fprintf(printer->out, "  = by hand\n");
  } else {
    fprintf(printer->out, "  but by hand");
    print_values(printer->out, want, count);
    fputc('\n', printer->out);
  }
  printer->compared += count;
  printer->wrong += !equal;
}

static void print_tokens(struct printer *printer) {
  fprintf(printer->out, "1. Tokens: hidden state, then chosen expert x weight\n");
  for (int r = 0; r < RANKS; r++) {
    for (int t = 0; t < tokens_of[r]; t++) {
      const struct token *token = &tokens[r][t];
      double hidden[H];
      for (int c = 0; c < H; c++) hidden[c] = token->hidden[c];
      fprintf(printer->out, "  rank %d, token %s: %d x %g, %d x %g;", r, token->name, token->ids[0], token->weights[0],
              token->ids[1], token->weights[1]);
      print_values(printer->out, hidden, H);
      fputc('\n', printer->out);
    }
  }
}

static void compare_row(struct printer *printer, const struct rank *ranks, const struct received *want) {
  const struct moeflow_group *group = ranks[want->rank].group;
  const struct token *token = &tokens[want->source][want->token];
  const uint8_t *row =
      group->lanes[0].received + want->source * C * group->row_bytes_max + want->token * group->row_bytes_max;
  const struct moeflow_row_header *header = (const struct moeflow_row_header *)row;
  const int32_t *places = (const int32_t *)(row + moeflow_row_ids_offset());
  const float *weights = (const float *)(row + moeflow_row_weights_offset(K));
  const uint16_t *hidden = (const uint16_t *)(row + moeflow_row_hidden_offset(K));
  double got[3 + 2 * K + H], by_hand[3 + 2 * K + H];
  char label[64];
  got[0] = header->epoch, got[1] = header->rows_sent, got[2] = header->tokens_max;
  memcpy(by_hand, want->header, sizeof want->header);
  for (int k = 0; k < K; k++) {
    got[3 + k] = places[k] < 0 ? -1 : moeflow_place_owner(places[k]) + moeflow_place_slot(places[k]) / 10.0;
    by_hand[3 + k] = want->places[k];
    got[3 + K + k] = weights[k];
    by_hand[3 + K + k] = token->weights[k];
  }
  for (int c = 0; c < H; c++) {
    got[3 + 2 * K + c] = from_bf16(hidden[c]);
    by_hand[3 + 2 * K + c] = want->hidden ? token->hidden[c] : 0;
  }
  snprintf(label, sizeof label, "rank %d has %s of rank %d%s", want->rank, token->name, want->source,
           want->hidden ? "" : ", header only");
  compare(printer, label, got, by_hand, 3 + 2 * K + (want->hidden ? H : 0));
}

static void compare_lists(struct printer *printer, const struct rank *ranks) {
  fprintf(printer->out,
          "3. Work lists: where each local expert's entries begin, and the entries (row number x K + choice)\n");
  for (int r = 0; r < RANKS; r++) {
    const struct group_lane *lane = &ranks[r].group->lanes[0];
    const int count = (int)offsets[r][2];
    double got[4];
    char label[64];
    for (int e = 0; e < 3; e++) got[e] = lane->expert_offsets[e];
    snprintf(label, sizeof label, "rank %d, offsets", r);
    compare(printer, label, got, offsets[r], 3);
    for (int i = 0; i < count; i++) got[i] = lane->entries[i];
    snprintf(label, sizeof label, "rank %d, entries", r);
    compare(printer, label, got, entries[r], count);
  }
}

static void compare_experts(struct printer *printer, const struct rank *ranks) {
  const int count = sizeof positions / sizeof *positions;
  fprintf(printer->out, "4. Gate and up (by hand: the layer keeps only what follows), activation = bf16(silu(gate) x up)\n");
  for (int i = 0; i < count; i++) {
    const struct position *want = &positions[i];
    const uint16_t *activation = ranks[want->rank].group->lanes[0].activations + want->position * I;
    double got[I];
    for (int c = 0; c < I; c++) got[c] = from_bf16(activation[c]);
    fprintf(printer->out, "  %-36s gate", want->name);
    print_values(printer->out, want->gate, I);
    fprintf(printer->out, ", up %g in every row\n", want->up);
    compare(printer, "  activation", got, want->activation, I);
  }
  fprintf(printer->out, "5. Down, FP32\n");
  for (int i = 0; i < count; i++) {
    const struct position *want = &positions[i];
    const float *output = ranks[want->rank].group->lanes[0].outputs + want->position * H;
    double got[H];
    for (int c = 0; c < H; c++) got[c] = output[c];
    compare(printer, want->name, got, want->output, H);
  }
}

static void compare_sums(struct printer *printer, const struct rank *ranks) {
  fprintf(printer->out, "6. Owner's sum of weight x output, rounded to bf16, as it returns\n");
  for (size_t i = 0; i < sizeof returned / sizeof *returned; i++) {
    const struct returned *want = &returned[i];
    const struct moeflow_group *group = ranks[want->rank].group;
    const uint8_t *row = group->lanes[0].returned + (want->owner * C + want->token) * group->return_bytes_max;
    double got[H];
    for (int c = 0; c < H; c++) got[c] = from_bf16(((const uint16_t *)row)[c]);
    compare(printer, want->name, got, want->sum, H);
  }
  fprintf(printer->out, "7. Combine: owners in ascending rank, rounded to bf16\n");
  for (int r = 0; r < RANKS; r++) {
    for (int t = 0; t < tokens_of[r]; t++) {
      double got[H];
      for (int c = 0; c < H; c++) got[c] = from_bf16(ranks[r].out[t][c]);
      compare(printer, tokens[r][t].name, got, combined[r][t], H);
    }
  }
}

static int compare_all(FILE *out, const struct rank *ranks) {
  struct printer printer = {out, 0, 0};
  print_tokens(&printer);
  fprintf(out, "2. Rows received: epoch, rows sent, tokens_max; places (rank.slot, -1 none); weights; hidden state\n");
  for (size_t i = 0; i < sizeof received / sizeof *received; i++) compare_row(&printer, ranks, &received[i]);
  compare_lists(&printer, ranks);
  compare_experts(&printer, ranks);
  compare_sums(&printer, ranks);
  fprintf(out, "%d numbers compared, %d lines differ\n", printer.compared, printer.wrong);
  return printer.wrong ? 4 : 0;
}

int hand_example_print(FILE *out) {
  static struct rank ranks[RANKS];
  pthread_t threads[RANKS];
  moeflow_unique_id id;
  int started = 0;
  int code = status_exit_code(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));
  memset(ranks, 0, sizeof ranks);
  for (; !code && started < RANKS; started++) {
    ranks[started].number = started;
    ranks[started].id = &id;
    if (pthread_create(&threads[started], NULL, run_rank, &ranks[started])) code = 1;
    if (code) break;
  }
  for (int r = 0; r < started; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < started; r++) {
    if (ranks[r].status == MOEFLOW_OK) continue;
    fprintf(out, "rank %d: %s\n", r, ranks[r].message);
    code = status_exit_code(ranks[r].status);
  }
  if (!code) code = compare_all(out, ranks);
  for (int r = 0; r < started; r++) tear_down(&ranks[r]);
  return code;
}
