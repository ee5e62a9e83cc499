/* CPU kernels gate_up and down: against plain sums in double, in every weight layout; bits that depend on neither threads
 * nor batch mates. */
#include "cpu.h"

#include <math.h>

#include "random.h"
#include "test.h"

#define EXPERTS 3
#define ROWS 40
#define K 2
#define H_MAX 72
#define I_MAX 40
#define POSITIONS (ROWS * K)

static struct spec spec;
static struct moeflow_layer layer;
static struct cpu_call call = {.spec = &spec, .layer = &layer, .threads = 1};
static struct moeflow_lane lane;
static uint8_t received[ROWS * (128 + 256)] __attribute__((aligned(128)));
static int32_t entries[POSITIONS], tile_count;
static struct moeflow_tile tiles[POSITIONS + EXPERTS];
static uint16_t activations[POSITIONS * I_MAX];
static float outputs[POSITIONS * H_MAX];
static uint16_t weights[2][EXPERTS * (2 * I_MAX + 3) * (H_MAX + 8)]; /* gate_up, down; room for strides */
static const void *experts[2][EXPERTS];

static uint16_t element(int expert, int matrix, int row, int column) {
  const uint32_t key = moeflow_random_row(3, (uint32_t)expert, (uint32_t)matrix, (uint32_t)row);
  return moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)column), 2);
}

static uint16_t hidden_of(int row, int column) {
  return element(row, MOEFLOW_RANDOM_HIDDEN, 0, column);
}

static uint16_t *row_hidden(int row) {
  return (uint16_t *)(received + row * moeflow_row_bytes(K, spec.hidden, 2, 0) + moeflow_row_hidden_offset(K));
}

static int columns_of(int matrix) {
  return matrix ? spec.intermediate : spec.hidden;
}

/* Where row `row` (gate rows first) of a gate_up matrix stands; down matrices have one order only. */
static int stored_row(int matrix, moeflow_gate_up_order order, int row) {
  const int i = spec.intermediate, up = row >= i;
  if (matrix || order == MOEFLOW_GATE_UP) return row;
  return order == MOEFLOW_UP_GATE ? (up ? row - i : row + i) : (up ? 2 * (row - i) + 1 : 2 * row);
}

/* Elements between rows and experts; `pad` makes both larger than the matrix, and the padding holds NaN. */
static void fill_weights(moeflow_gate_up_order order, int pad, struct moeflow_matrix *matrices) {
  memset(weights, 0xff, sizeof weights);
  for (int m = 0; m < 2; m++) {
    const int rows = m ? spec.hidden : 2 * spec.intermediate, row_stride = columns_of(m) + 8 * pad;
    const int expert_stride = (rows + 3 * pad) * row_stride;
    matrices[m] = (struct moeflow_matrix){(const uint8_t *)weights[m], NULL, 2 * expert_stride, 2 * row_stride};
    for (int e = 0; e < EXPERTS; e++) {
      experts[m][e] = weights[m] + e * expert_stride;
      for (int i = 0; i < rows * columns_of(m); i++) {
        const int row = i / columns_of(m), column = i % columns_of(m);
        weights[m][e * expert_stride + stored_row(m, order, row) * row_stride + column] = element(e, m, row, column);
      }
    }
  }
}

/* Expert 0 gets `first` positions, expert 1 none, expert 2 the rest; tiles of `tile_tokens`. */
static void fill_lists(int first, int total, int tile_tokens) {
  tile_count = 0;
  for (int position = 0; position < total; position++) entries[position] = (position * 7) % POSITIONS;
  for (int e = 0; e < EXPERTS; e += 2) {
    const int end = e ? total : first;
    for (int at = e ? first : 0; at < end; at += tile_tokens) {
      tiles[tile_count++] = (struct moeflow_tile){e, at, at + tile_tokens < end ? at + tile_tokens : end, 0};
    }
  }
}

static void fill_rows(void) {
  memset(received, 0xff, sizeof received);
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < spec.hidden; i++) row_hidden(row)[i] = hidden_of(row, i);
  }
}

static moeflow_status run(const struct moeflow_matrix *matrices, moeflow_gate_up_order order) {
  const int i = spec.intermediate;
  const int32_t gate = order == MOEFLOW_UP_GATE ? i : 0, up = order == MOEFLOW_GATE_UP ? i : order == MOEFLOW_INTERLEAVED;
  const struct moeflow_rows_in in = {received, 0, ROWS, 1, 0, ROWS};
  const struct moeflow_gate_up_params p = {
      &lane, in, entries, tiles, &tile_count, matrices[0], gate, up, order == MOEFLOW_INTERLEAVED ? 2 : 1, 0, activations};
  const struct moeflow_down_params q = {&lane, activations, tiles, &tile_count, matrices[1], outputs};
  memset(activations, 0xff, sizeof activations);
  memset(outputs, 0xff, sizeof outputs);
  const moeflow_status status = cpu_gate_up(&call, &p);
  return status ? status : cpu_down(&call, &q);
}

static double plain_activation(int expert, int row, int i) {
  double gate = 0, up = 0;
  for (int h = 0; h < spec.hidden; h++) {
    gate += (double)cpu_from_bf16(element(expert, 0, i, h)) * cpu_from_bf16(hidden_of(row, h));
    up += (double)cpu_from_bf16(element(expert, 0, spec.intermediate + i, h)) * cpu_from_bf16(hidden_of(row, h));
  }
  if (spec.activation == SPEC_SWIGLU_CLAMP) {
    gate = fmin(gate, spec.activation_limit);
    up = fmax(fmin(up, spec.activation_limit), -spec.activation_limit);
  }
  return gate / (1 + exp(-gate)) * up;
}

static void expect_results(const char *what) {
  for (int t = 0; t < tile_count; t++) {
    for (int position = tiles[t].begin; position < tiles[t].end; position++) {
      const uint16_t *activation = activations + position * spec.intermediate;
      for (int i = 0; i < spec.intermediate; i++) {
        const double want = plain_activation(tiles[t].expert, entries[position] / K, i), got = cpu_from_bf16(activation[i]);
        EXPECT(fabs(got - want) <= 0x1p-8 * fabs(want) + 1e-6, "%s: activation %d of %d: %g, want %g", what, i, position,
               got, want);
      }
      for (int h = 0; h < spec.hidden; h++) {
        double want = 0, size = 0;
        for (int i = 0; i < spec.intermediate; i++) {
          const double product = (double)cpu_from_bf16(activation[i]) * cpu_from_bf16(element(tiles[t].expert, 1, h, i));
          want += product;
          size += fabs(product);
        }
        const float got = outputs[position * spec.hidden + h];
        EXPECT(fabs(got - want) <= 1e-6 * size, "%s: output %d of %d: %g, want %g", what, h, position, got, want);
      }
    }
  }
}

static void set_shape(int hidden, int intermediate, int clamp) {
  spec = (struct spec){.hidden = hidden,
                       .intermediate = intermediate,
                       .experts = EXPERTS,
                       .top_k = K,
                       .activation = clamp ? SPEC_SWIGLU_CLAMP : SPEC_SWIGLU,
                       .activation_limit = 0.25};
  fill_rows();
}

static void test_layouts(void) {
  struct moeflow_matrix matrices[2];
  for (int order = 0; order < 3; order++) {
    for (int pad = 0; pad < 2; pad++) {
      set_shape(72, 40, order == 1);
      fill_weights((moeflow_gate_up_order)order, pad, matrices);
      fill_lists(37, 50, 32);
      EXPECT(run(matrices, (moeflow_gate_up_order)order) == MOEFLOW_OK, "run");
      expect_results(pad ? "padded" : "packed");
      EXPECT(outputs[50 * spec.hidden] != outputs[50 * spec.hidden], "nothing beyond the positions"); /* NaN still */
      for (int m = 0; m < 2; m++) {
        matrices[m].base = NULL;
        matrices[m].experts = (const uint8_t *const *)experts[m];
      }
      run(matrices, (moeflow_gate_up_order)order);
      expect_results("pointers");
    }
  }
  set_shape(8, 8, 0);
  fill_weights(MOEFLOW_GATE_UP, 0, matrices);
  fill_lists(1, 2, 8);
  run(matrices, MOEFLOW_GATE_UP);
  expect_results("smallest");
}

struct lender {
  int asked[2][EXPERTS];
  int refuse;
};

static const void *lend(void *user, int expert, int down) {
  struct lender *lender = user;
  __atomic_fetch_add(&lender->asked[down][expert], 1, __ATOMIC_RELAXED);
  return lender->refuse == expert ? NULL : experts[down][expert];
}

static void test_lend(void) {
  struct moeflow_matrix matrices[2], none[2] = {{NULL, NULL, 0, 0}, {NULL, NULL, 0, 0}};
  struct lender lender = {.refuse = -1};
  set_shape(24, 16, 0);
  fill_weights(MOEFLOW_GATE_UP, 0, matrices);
  fill_lists(30, 60, 8);
  layer.lend = lend;
  layer.lend_user = &lender;
  EXPECT(run(none, MOEFLOW_GATE_UP) == MOEFLOW_OK, "run");
  expect_results("lent");
  for (int m = 0; m < 2; m++) {
    EXPECT(lender.asked[m][0] == 1 && lender.asked[m][1] == 0 && lender.asked[m][2] == 1, "asked once an expert with work");
  }
  lender.refuse = 2;
  EXPECT(run(none, MOEFLOW_GATE_UP) == MOEFLOW_OK && lane.poison == MOEFLOW_POISON_LEND, "refused: %u", lane.poison);
  EXPECT(run(none, MOEFLOW_GATE_UP) == MOEFLOW_OK && activations[0] == 0xffff, "a poisoned lane computes nothing");
  layer.lend = NULL;
  lane.poison = 0;
}

/* Position 4 alone, then among 50 and on several threads: the same bits. */
static void test_bits(void) {
  struct moeflow_matrix matrices[2];
  uint16_t activation[I_MAX];
  float output[H_MAX];
  set_shape(72, 40, 0);
  fill_weights(MOEFLOW_GATE_UP, 0, matrices);
  fill_lists(1, 1, 8);
  entries[0] = 4 * 7;
  run(matrices, MOEFLOW_GATE_UP);
  memcpy(activation, activations, sizeof activation);
  memcpy(output, outputs, sizeof output);
  cpu_pool_create(3, &call.pool);
  for (int threads = 1; threads <= 4; threads++) {
    for (int tile_tokens = 1; tile_tokens < 64; tile_tokens += 6) {
      call.threads = threads;
      fill_lists(41, 50, tile_tokens);
      run(matrices, MOEFLOW_GATE_UP);
      EXPECT(!memcmp(activation, activations + 4 * I_MAX, sizeof activation), "%d threads, tiles of %d", threads,
             tile_tokens);
      EXPECT(!memcmp(output, outputs + 4 * H_MAX, sizeof output), "%d threads, tiles of %d", threads, tile_tokens);
    }
  }
  cpu_pool_destroy(call.pool);
  call.pool = NULL;
  call.threads = 1;
}

/* gate = 0 gives 0 whatever up is; NaN in one row stays in its own position. */
static void test_values(void) {
  struct moeflow_matrix matrices[2];
  set_shape(16, 8, 1);
  fill_weights(MOEFLOW_GATE_UP, 0, matrices);
  for (int e = 0; e < EXPERTS; e++) memset(weights[0] + e * 16 * 16, 0, 8 * 16 * sizeof(uint16_t));
  fill_lists(6, 6, 8);
  row_hidden(entries[2] / K)[5] = 0x7fc0;
  run(matrices, MOEFLOW_GATE_UP);
  for (int position = 0; position < 6; position++) {
    const float value = cpu_from_bf16(activations[position * 8]);
    EXPECT(entries[position] / K == entries[2] / K ? isnan(value) : value == 0, "position %d: %g", position, value);
  }
}

int main(void) {
  test_layouts();
  test_lend();
  test_bits();
  test_values();
  TEST_END;
}
