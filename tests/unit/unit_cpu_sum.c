/* CPU kernels identity, owner_reduce, combine, combine_ring and fill, one by one. */
#include "cpu.h"
#include "random.h"
#include "test.h"

#define H 8
#define K 3
#define RANKS 3
#define ROWS 2
#define RETURN_BYTES 128

static struct spec spec = {.hidden = H, .intermediate = 8, .experts = 9, .top_k = K, .scale = 1};
static const struct cpu_call call = {.spec = &spec, .threads = 1};
static struct moeflow_lane lane;
static struct moeflow_record record;
static uint8_t received[RANKS][ROWS][256] __attribute__((aligned(128)));
static uint8_t returned[RANKS][ROWS * K][RETURN_BYTES] __attribute__((aligned(128)));

static const struct moeflow_rows_in in = {&received[0][0][0], sizeof received[0], ROWS, RANKS, 1, ROWS};

static void reset(void) {
  memset(&lane, 0, sizeof lane);
  memset(&record, 0, sizeof record);
  memset(received, 0xff, sizeof received);
  memset(returned, 0xff, sizeof returned);
  lane.epoch = 5;
}

static float value_of(const uint8_t *row, int column) {
  return spec.returned == SPEC_WIRE_FP32 ? ((const float *)row)[column] : cpu_from_bf16(((const uint16_t *)row)[column]);
}

static void test_identity(void) {
  const int32_t entries[3] = {5 * K + 2, 0, 5 * K}, offsets[3] = {0, 2, 3};
  float outputs[4 * H];
  reset();
  memset(outputs, 0, sizeof outputs);
  for (int i = 0; i < H; i++) {
    ((uint16_t *)(received[2][1] + 128))[i] = (uint16_t)(0x3f80 + i);
    ((uint16_t *)(received[0][0] + 128))[i] = (uint16_t)(0xc000 + i);
  }
  const struct moeflow_identity_params p = {&lane, in, entries, offsets, outputs, 2, 0};
  cpu_identity(&call, &p);
  for (int i = 0; i < H; i++) {
    EXPECT(outputs[i] == cpu_from_bf16((uint16_t)(0x3f80 + i)) && outputs[2 * H + i] == outputs[i], "row 5, column %d", i);
    EXPECT(outputs[H + i] == cpu_from_bf16((uint16_t)(0xc000 + i)) && outputs[3 * H + i] == 0, "row 0, column %d", i);
  }
}

/* Row 3 (source 1, token 1): choices 0 and 2 are mine. 1.5 * (1 + i) + 2^-9 * 1, rounded to the return dtype. */
static void test_owner_reduce(int returned_dtype, int reduce) {
  int32_t positions[RANKS * ROWS * K];
  float outputs[2 * H];
  uint8_t *targets[RANKS] = {returned[0][0], returned[0][0], returned[0][0]};
  const float weights[K] = {0x1p-9f, 100, 1.5f};
  spec.returned = returned_dtype;
  spec.reduce = reduce;
  reset();
  memset(positions, 0xff, sizeof positions);
  positions[3 * K] = 1;
  positions[3 * K + 2] = 0;
  for (int i = 0; i < H; i++) outputs[i] = (float)(1 + i) + 0x1p-10f, outputs[H + i] = 1;
  memcpy(received[1][1] + 16 + 4 * K, weights, sizeof weights);
  const struct moeflow_owner_reduce_params p = {&lane, in, positions, outputs, 0, {targets, sizeof returned[0]}, 1, 0};
  cpu_owner_reduce(&call, &p);
  for (int i = 0; i < H; i++) {
    const float sum = 1.5f * outputs[i] + 0x1p-9f, rounded = cpu_from_bf16(cpu_to_bf16(sum));
    const float single = cpu_from_bf16(cpu_to_bf16(outputs[i]));
    if (reduce == SPEC_REDUCE_CHOICES) {
      EXPECT(value_of(returned[1][K], i) == 1, "choice 0, column %d", i);
      EXPECT(value_of(returned[1][K + 2], i) == (returned_dtype == SPEC_WIRE_FP32 ? outputs[i] : single),
             "choice 2, column %d", i);
    } else {
      EXPECT(value_of(returned[1][1], i) == (returned_dtype == SPEC_WIRE_FP32 ? sum : rounded), "column %d", i);
    }
  }
  const int untouched = reduce == SPEC_REDUCE_CHOICES ? K + 1 : 0;
  EXPECT(returned[1][untouched][0] == 0xff && returned[0][1][0] == 0xff && returned[2][1][0] == 0xff, "other rows");
}

/* Three parts of 2^24, 1 and -2^24 in this order are 0 (FP32 has no 2^24 + 1); in any other order, or each weighted alone, 1
 * or something else. Into plain rows, all of which are written. */
static void test_parts(void) {
  const float parts[3] = {0x1p24f, 1, -0x1p24f}, weights[K] = {3, 0.5f, 1};
  float outputs[3 * (2 * H + 4)];
  int32_t positions[RANKS * ROWS * K];
  uint16_t plain[RANKS * ROWS + 1][H];
  uint8_t *targets[RANKS] = {returned[0][0], returned[0][0], returned[0][0]};
  spec.returned = SPEC_WIRE_FP32;
  spec.reduce = SPEC_REDUCE_OWNER;
  reset();
  memset(positions, 0xff, sizeof positions);
  memset(plain, 0xff, sizeof plain);
  positions[3 * K] = 0;
  positions[3 * K + 1] = 1;
  for (int part = 0; part < 3; part++) {
    for (int i = 0; i < H; i++) {
      outputs[part * (2 * H + 4) + i] = parts[part];
      outputs[part * (2 * H + 4) + H + i] = (float)(part + i);
    }
  }
  memcpy(received[1][1] + 16 + 4 * K, weights, sizeof weights);
  struct moeflow_owner_reduce_params p = {&lane, in, positions, outputs, 2 * H + 4, {targets, sizeof returned[0]}, 3, 0};
  cpu_owner_reduce(&call, &p);
  for (int i = 0; i < H; i++) {
    const float want = 0.5f * (float)(3 + 3 * i), got = value_of(returned[1][1], i);
    EXPECT(got == want, "column %d: %g, want %g", i, got, want);
  }
  p.out = (struct moeflow_rows_out){(uint8_t *const *)plain, 0};
  p.write_empty = MOEFLOW_EMPTY_PLAIN;
  cpu_owner_reduce(&call, &p);
  for (int i = 0; i < RANKS * ROWS * H; i++) {
    const float want = i / H == 3 ? 0.5f * (float)(3 + 3 * (i % H)) : 0;
    EXPECT(cpu_from_bf16(plain[i / H][i % H]) == want, "plain row %d, column %d", i / H, i % H);
  }
  EXPECT(plain[RANKS * ROWS][0] == 0xffff, "one row too many");
  p.out = (struct moeflow_rows_out){targets, sizeof returned[0]};
  p.write_empty = MOEFLOW_EMPTY_ZERO;
  memset(returned, 0xff, sizeof returned);
  cpu_owner_reduce(&call, &p);
  for (int r = 0; r < RANKS * ROWS; r++) {
    const float want = r == 3 ? 0.5f * 3 : 0, got = value_of(returned[r / ROWS][r % ROWS], 0);
    EXPECT(got == want, "row %d: %g, want %g", r, got, want);
  }
  p.write_empty = MOEFLOW_EMPTY_SKIPPED;
  spec.reduce = SPEC_REDUCE_CHOICES;
  cpu_owner_reduce(&call, &p);
  for (int i = 0; i < H; i++) {
    EXPECT(value_of(returned[1][K], i) == 0 && value_of(returned[1][K + 1], i) == (float)(3 + 3 * i), "choices, column %d",
           i);
  }
}

static void put_return(int owner, int row, float value) {
  for (int i = 0; i < H; i++) {
    if (spec.returned == SPEC_WIRE_FP32)
      ((float *)returned[owner][row])[i] = value;
    else
      ((uint16_t *)returned[owner][row])[i] = cpu_to_bf16(value);
  }
}

static float combined(cpu_kernel kernel, const int32_t *places, const float *weights, int rank, uint16_t *out) {
  const struct moeflow_combine_params p = {
      &lane, &record, places, weights, returned[0][0], sizeof returned[0], (uint8_t *)out, 2, rank, RANKS, 1, 0, 0};
  memset(out, 0x55, 3 * H * sizeof *out);
  kernel(&call, &p);
  EXPECT(out[0] == out[H - 1] && out[2 * H] == 0x5555, "all columns, two tokens");
  return cpu_from_bf16(out[0]);
}

/* Owners hold 256, 1.5 and 1.25. Ascending in FP32: 258.75, which bf16 (steps of 2 up here) makes 258. The ring of rank 0
 * begins at owner 1: 1.5 + 1.25 = 2.75, + 256 = 258.75 -> 258; that of rank 1 at owner 2: 1.25 + 256 = 257.25 -> 258 (257 is
 * a step of 2 too fine), + 1.5 = 259.5 -> 260. */
static void test_combine_owners(void) {
  const int32_t places[2 * K] = {2 << 16, 0, 1 << 16 | 3, -1, -1, -1};
  const float weights[2 * K] = {7, 7, 7, 7, 7, 7};
  uint16_t out[3 * H];
  spec.returned = SPEC_WIRE_BF16;
  spec.reduce = SPEC_REDUCE_OWNER;
  reset();
  put_return(0, 0, 256);
  put_return(1, 0, 1.5f);
  put_return(2, 0, 1.25f);
  EXPECT(combined(cpu_combine, places, weights, 0, out) == 258, "ascending %g", cpu_from_bf16(out[0]));
  EXPECT(out[H] == 0, "a token without owners is zero, though its rows are garbage");
  EXPECT(lane.epoch == 6 && record.finished == 5 && record.steps == 1, "the step ended");
  EXPECT(combined(cpu_combine_ring, places, weights, 0, out) == 258, "ring of 0 %g", cpu_from_bf16(out[0]));
  EXPECT(combined(cpu_combine_ring, places, weights, 1, out) == 260, "ring of 1 %g", cpu_from_bf16(out[0]));
  spec.scale = 0.5;
  EXPECT(combined(cpu_combine, places, weights, 0, out) == 258, "the scale is in the weights");
  spec.scale_on = SPEC_SCALE_OUTPUT; /* 258.75 / 2 = 129.375 -> 129 */
  EXPECT(combined(cpu_combine, places, weights, 0, out) == 129, "scaled before the only rounding: %g",
         cpu_from_bf16(out[0]));
  spec.scale = 1;
  spec.scale_on = SPEC_SCALE_WEIGHTS;
}

/* What the transport has added is taken as it is, in the place of owner 0's; scaled, and zero where nobody has a share. */
static void test_combine_added(void) {
  const int32_t places[2 * K] = {2 << 16, -1, 1 << 16 | 3, -1, -1, -1};
  const float weights[2 * K] = {7, 7, 7, 7, 7, 7};
  uint16_t out[3 * H];
  struct moeflow_combine_params p = {
      &lane, &record, places, weights, returned[0][0], sizeof returned[0], (uint8_t *)out, 2, 1, RANKS, 1, 1, 0};
  spec.returned = SPEC_WIRE_BF16;
  spec.reduce = SPEC_REDUCE_OWNER;
  reset();
  put_return(0, 0, 1.5f);
  spec.scale = 0.5;
  spec.scale_on = SPEC_SCALE_OUTPUT;
  cpu_combine(&call, &p);
  EXPECT(cpu_from_bf16(out[0]) == 0.75f && cpu_from_bf16(out[H - 1]) == 0.75f, "%g", cpu_from_bf16(out[0]));
  EXPECT(out[H] == 0 && out[2 * H - 1] == 0, "a token without owners");
  spec.scale = 1;
  spec.scale_on = SPEC_SCALE_WEIGHTS;
}

/* Choice order 0, 1, 2: (1 * 2^24 + 0.5 * 2) - 1 * 2^24: FP32 keeps 2^24 + 1 as 2^24, so 0; any other order gives 1. */
static void test_combine_choices(void) {
  const int32_t places[2 * K] = {2 << 16, 0, 1 << 16 | 3, -1, 1 << 16, -1};
  const float weights[2 * K] = {1, 0.5f, -1, 1, 3, 1};
  uint16_t out[3 * H];
  spec.returned = SPEC_WIRE_FP32;
  spec.reduce = SPEC_REDUCE_CHOICES;
  reset();
  put_return(2, 0, 0x1p24f);
  put_return(0, 1, 2);
  put_return(1, 2, 0x1p24f);
  put_return(1, K + 1, 2);
  EXPECT(combined(cpu_combine, places, weights, 0, out) == 0, "choice order: %g", cpu_from_bf16(out[0]));
  EXPECT(cpu_from_bf16(out[H]) == 6, "second token %g", cpu_from_bf16(out[H]));
}

static void test_poisoned(void) {
  const int32_t places[2 * K] = {-1, -1, -1, -1, -1, -1};
  const float weights[2 * K] = {0};
  uint16_t out[3 * H];
  reset();
  lane.poison = MOEFLOW_POISON_PEER;
  combined(cpu_combine, places, weights, 0, out);
  EXPECT(out[0] == 0x7fc0 && out[2 * H - 1] == 0x7fc0 && lane.epoch == 6 && record.finished == 5, "NaN, and the step ends");
  const struct moeflow_owner_reduce_params p = {&lane, in, NULL, NULL, 0, {NULL, 0}, 1, 0};
  cpu_owner_reduce(&call, &p); /* would crash if it did not return at once */
  const struct moeflow_identity_params q = {&lane, in, NULL, NULL, NULL, 1, 0};
  cpu_identity(&call, &q);
}

static void test_fill(void) {
  uint16_t out[2 * 3 * 4 + 1] = {0};
  const struct moeflow_fill_params p = {out, 42, 3, 4, 5, 2, MOEFLOW_RANDOM_DOWN, 3};
  cpu_fill(&call, &p);
  for (int i = 0; i < 24; i++) {
    const uint32_t key = moeflow_random_row(42, 5 + (uint32_t)i / 12, MOEFLOW_RANDOM_DOWN, (uint32_t)i / 4 % 3);
    EXPECT(out[i] == moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)i % 4), 3), "element %d", i);
  }
  EXPECT(out[24] == 0, "no more than asked");
}

int main(void) {
  test_identity();
  test_owner_reduce(SPEC_WIRE_BF16, SPEC_REDUCE_OWNER);
  test_owner_reduce(SPEC_WIRE_FP32, SPEC_REDUCE_OWNER);
  test_owner_reduce(SPEC_WIRE_BF16, SPEC_REDUCE_CHOICES);
  test_owner_reduce(SPEC_WIRE_FP32, SPEC_REDUCE_CHOICES);
  test_parts();
  test_combine_owners();
  test_combine_added();
  test_combine_choices();
  test_poisoned();
  test_fill();
  TEST_END;
}
