/* Numbers: bf16 bits and FP32, vectors of eight. */
#ifndef MOEFLOW_NUMERIC_CUH
#define MOEFLOW_NUMERIC_CUH

#include "ptx.cuh"

namespace moeflow {

constexpr uint16_t bf16_quiet_nan = 0x7fc0;

__device__ __forceinline__ float infinity() {
  return __uint_as_float(0x7f800000u);
}
__device__ __forceinline__ float largest_finite() {
  return __uint_as_float(0x7f7fffffu);
}
__device__ __forceinline__ float bf16_to_float(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

/* To nearest, ties to even; a NaN stays one, made quiet. In integers, so that every backend agrees on every bit. */
__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(low)) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}

/* Eight values at a time: 16 bytes of bf16 or 32 of FP32, so aligned. */
struct Eight {
  float value[8];
};

__device__ __forceinline__ Eight load_eight_bf16(const void *from) {
  const uint4 words = *static_cast<const uint4 *>(from);
  return {{bf16_to_float(words.x & 0xffffu), bf16_to_float(words.x >> 16), bf16_to_float(words.y & 0xffffu),
           bf16_to_float(words.y >> 16), bf16_to_float(words.z & 0xffffu), bf16_to_float(words.z >> 16),
           bf16_to_float(words.w & 0xffffu), bf16_to_float(words.w >> 16)}};
}
__device__ __forceinline__ Eight load_eight_float(const void *from) {
  const float4 low = static_cast<const float4 *>(from)[0];
  const float4 high = static_cast<const float4 *>(from)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
__device__ __forceinline__ void store_eight_bf16(void *to, const Eight &from) {
  const float *v = from.value;
  const uint4 words = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
  *static_cast<uint4 *>(to) = words;
}
__device__ __forceinline__ void store_eight_float(void *to, const Eight &from) {
  const float *v = from.value;
  const float4 low = {v[0], v[1], v[2], v[3]};
  const float4 high = {v[4], v[5], v[6], v[7]};
  static_cast<float4 *>(to)[0] = low;
  static_cast<float4 *>(to)[1] = high;
}

/* Eight values of a returned row, FP32 or bf16 as the model says. */
template <bool fp32>
__device__ __forceinline__ Eight load_eight(const uint8_t *row, int column) {
  if constexpr (fp32) {
    return load_eight_float(row + static_cast<int64_t>(column) * 4);
  } else {
    return load_eight_bf16(row + static_cast<int64_t>(column) * 2);
  }
}
template <bool fp32>
__device__ __forceinline__ void store_eight(uint8_t *row, int column, const Eight &from) {
  if constexpr (fp32) {
    store_eight_float(row + static_cast<int64_t>(column) * 4, from);
  } else {
    store_eight_bf16(row + static_cast<int64_t>(column) * 2, from);
  }
}

/* Four values: sums of parts and choices, each operation rounded by itself. */
__device__ __forceinline__ float4 added(const float4 &a, const float4 &b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}
__device__ __forceinline__ float4 scaled(const float4 &a, float weight) {
  return {__fmul_rn(weight, a.x), __fmul_rn(weight, a.y), __fmul_rn(weight, a.z), __fmul_rn(weight, a.w)};
}
template <bool fp32>
__device__ __forceinline__ void store_four(uint8_t *row, int column, const float4 &from) {
  if constexpr (fp32) {
    *reinterpret_cast<float4 *>(row + static_cast<int64_t>(column) * 4) = from;
  } else {
    *reinterpret_cast<uint2 *>(row + static_cast<int64_t>(column) * 2) = {pack_bf16(from.x, from.y), pack_bf16(from.z, from.w)};
  }
}

}  // namespace moeflow
#endif
