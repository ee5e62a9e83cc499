/* Test values: what moeflow_random_bf16 says for every element of the listed experts' matrices. */
#ifndef MOEFLOW_FILL_CUH
#define MOEFLOW_FILL_CUH

#include "numeric.cuh"
#include "random.h"

namespace moeflow {

__device__ __forceinline__ uint32_t fill_pair(uint32_t key, int64_t column, int shift) {
  const uint32_t low = moeflow_random_bf16(moeflow_random_bits(key, static_cast<uint32_t>(column)), shift);
  const uint32_t high = moeflow_random_bf16(moeflow_random_bits(key, static_cast<uint32_t>(column + 1)), shift);
  return low | high << 16;
}

template <class Model, class Variant>
__device__ __forceinline__ void fill(const moeflow_fill_params &params) {
  const int64_t rows = params.experts * params.rows;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const uint32_t expert = static_cast<uint32_t>(params.first_expert + row / params.rows);
    const uint32_t key = moeflow_random_row(params.seed, expert, params.matrix, static_cast<uint32_t>(row % params.rows));
    uint16_t *out = params.out + row * params.columns;
    if (params.columns % 8 == 0) {
      for (int64_t i = threadIdx.x * 8; i < params.columns; i += Variant::threads * 8) {
        *reinterpret_cast<uint4 *>(out + i) = {fill_pair(key, i, params.shift), fill_pair(key, i + 2, params.shift),
                                               fill_pair(key, i + 4, params.shift), fill_pair(key, i + 6, params.shift)};
      }
    } else {
      for (int64_t i = threadIdx.x; i < params.columns; i += Variant::threads) {
        out[i] = moeflow_random_bf16(moeflow_random_bits(key, static_cast<uint32_t>(i)), params.shift);
      }
    }
  }
}

}  // namespace moeflow
#endif
