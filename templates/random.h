/* Counter-based test values: any process, on host or device, can recompute any element of any matrix, bit for bit.
 * Used by moeflow-run, the tests and the `fill` kernel; the layer itself draws nothing at random. */
#ifndef MOEFLOW_RANDOM_H
#define MOEFLOW_RANDOM_H

#include "abi.h"

enum moeflow_random_matrix { /* the `matrix` coordinate */
  MOEFLOW_RANDOM_GATE_UP = 0, /* expert e: [2I, H], gate rows first */
  MOEFLOW_RANDOM_DOWN = 1,    /* expert e: [H, I] */
  MOEFLOW_RANDOM_HIDDEN = 2,  /* "expert" is the rank: [tokens, H] */
  MOEFLOW_RANDOM_LOGITS = 3,  /* "expert" is the rank: Gumbel noise [tokens, E] */
  MOEFLOW_RANDOM_POPULARITY = 4,
  MOEFLOW_RANDOM_BIAS = 5
};

/* A bijective 32-bit mix with low bias (the constants of Chris Wellons' lowbias32, public domain). */
MOEFLOW_FN uint32_t moeflow_random_mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

/* One key a row; an element is then one mix of key and column, which compilers vectorise. */
MOEFLOW_FN uint32_t moeflow_random_row(uint64_t seed, uint32_t expert, uint32_t matrix, uint32_t row) {
  return moeflow_random_mix(
      moeflow_random_mix(moeflow_random_mix((uint32_t)seed ^ moeflow_random_mix((uint32_t)(seed >> 32) + 0x9e3779b9u)) +
                         expert * 8u + matrix) + row);
}
MOEFLOW_FN uint32_t moeflow_random_bits(uint32_t row_key, uint32_t column) {
  return moeflow_random_mix(row_key ^ (column * 0x9e3779b9u));
}

/* bf16 from hash bits: random sign and mantissa, exponent 0, -1 or -2 (odds 2:1:1) below 2^-shift: never zero, NaN or
 * subnormal; standard deviation 1.16 * 2^-shift. */
MOEFLOW_FN uint16_t moeflow_random_bf16(uint32_t bits, int32_t shift) {
  const uint32_t b = (bits >> 16) & 3u;
  const uint32_t drop = b > 1u ? b - 1u : 0u;
  return (uint16_t)((bits >> 31) << 15 | (127u - (uint32_t)shift - drop) << 7 | ((bits >> 8) & 0x7fu));
}

/* Shift that gives about 1 / sqrt(fan_in): half the bit length of fan_in, rounded up. */
MOEFLOW_FN int32_t moeflow_random_shift(int64_t fan_in) {
  int32_t bits = 0;
  while (fan_in > 1) {
    fan_in /= 2;
    bits++;
  }
  return (bits + 1) / 2;
}
#endif
