/* Weighted sums inside the experts kernel: what owner_reduce does, for some rows and columns, by the consumers. The same order
 * and roundings: the parts of an output, times its weight, added in choice order.
 *
 * The last group's sums end the launch, so what counts is how often they wait for memory one after the other: everything but
 * the outputs is fetched before the outputs are there, and all outputs of a row are on their way together. */
#ifndef MOEFLOW_EXPERTS_ROWS_CUH
#define MOEFLOW_EXPERTS_ROWS_CUH

#include "experts_schedule.cuh"
#include "row.cuh"

namespace moeflow {

/* A unit's rows go to `warps` warps in turn; a warp has the columns of a row, four a lane, and adds a few rows at a time. */
template <class Model, class Variant, int warps>
struct RowSums {
  using Return = ReturnRow<Model>;
  static constexpr int rows = MOEFLOW_SUM_ROWS / warps; /* of one warp */
  /* Outputs on their way at a time, of all parts: 64 registers, or 16 where a thread has fewer than 128. */
  static constexpr int loads = (Variant::threads * Variant::residency > 512 ? 4 : 16) / Variant::parts;
  static constexpr int batch = loads < 1 ? 1 : loads < Model::top_k ? loads : Model::top_k; /* choices at a time */
  static constexpr int together = loads / batch >= rows ? rows : loads / batch >= 2 ? 2 : 1; /* rows at a time */
  static_assert(MOEFLOW_SUM_ROWS % (warps * together) == 0, "rows");
  static_assert(MOEFLOW_SUM_COLUMNS == 4 * 32 && MOEFLOW_CHOICES_MAX <= 32, "lanes");

  const moeflow_experts_params &params;
  int first; /* row number */
  int column;
  bool inside; /* the matrix */
  int32_t positions[rows]; /* lane k has choice k's; -1: none here */
  float weights[rows];

  /* thread: 0 .. 32 * warps - 1. Fetches what is known before the outputs are. */
  __device__ __forceinline__ RowSums(const moeflow_experts_params &params_, const Unit &unit, int thread) : params(params_) {
    const int lane = thread % 32;
    first = unit.tile * MOEFLOW_SUM_ROWS + thread / 32;
    column = unit.row + lane * 4;
    inside = column < Model::hidden;
#pragma unroll
    for (int i = 0; i < rows; i++) {
      const int number = first + i * warps;
      positions[i] = -1;
      weights[i] = 0.0f;
      if (lane >= Model::top_k || number >= end()) continue;
      const uint8_t *from = row_in(params.in, number / params.in.rows, number % params.in.rows, Row<Model>::bytes);
      positions[i] = params.positions[static_cast<int64_t>(number) * Model::top_k + lane];
      weights[i] = reinterpret_cast<const float *>(from + Row<Model>::weights)[lane];
    }
  }

  __device__ __forceinline__ int end() const {
    return params.in.ranks * params.in.rows;
  }

  /* The outputs at these positions, part by part. */
  __device__ __forceinline__ void load(const GroupOutputs &outputs, const int32_t (&at)[together][batch],
                                       float4 (&sum)[together][batch]) const {
#pragma unroll
    for (int part = 0; part < Variant::parts; part++) {
      float4 value[together][batch];
      const float *from = outputs.base + part * outputs.part_stride + (column - outputs.first);
#pragma unroll
      for (int i = 0; i < together * batch; i++) {
        const int32_t position = at[i / batch][i % batch];
        value[i / batch][i % batch] = load_l2_if(from + static_cast<int64_t>(position) * outputs.pitch, inside && position >= 0);
      }
#pragma unroll
      for (int i = 0; i < together * batch; i++) {
        float4 &to = sum[i / batch][i % batch];
        to = part == 0 ? value[i / batch][i % batch] : added(to, value[i / batch][i % batch]);
      }
    }
  }

  /* This warp's rows number `from` and following. */
  __device__ __forceinline__ void add(const GroupOutputs &outputs, int from) const {
    float4 sum[together] = {};
    bool any[together] = {};
#pragma unroll 1
    for (int choice = 0; choice < Model::top_k; choice += batch) {
      int32_t at[together][batch];
      float4 value[together][batch];
#pragma unroll
      for (int i = 0; i < together * batch; i++) {
        const int k = choice + i % batch;
        const int32_t position = __shfl_sync(full_warp, positions[from + i / batch], k);
        at[i / batch][i % batch] = k < Model::top_k ? position : -1;
      }
      load(outputs, at, value);
#pragma unroll
      for (int i = 0; i < together * batch; i++) {
        const int row = i / batch;
        const float4 product = scaled(value[row][i % batch], __shfl_sync(full_warp, weights[from + row], choice + i % batch));
        if (at[row][i % batch] < 0) continue;
        sum[row] = any[row] ? added(sum[row], product) : product;
        any[row] = true;
      }
    }
#pragma unroll
    for (int i = 0; i < together; i++) store(first + (from + i) * warps, sum[i], any[i]);
  }

  __device__ __forceinline__ void store(int number, const float4 &sum, bool any) const {
    if (!inside || number >= end()) return;
    if (params.write_empty == MOEFLOW_EMPTY_PLAIN) {
      uint8_t *out = reinterpret_cast<uint8_t *>(const_cast<uint8_t **>(params.out.targets));
      store_four<false>(out + static_cast<int64_t>(number) * Model::hidden * 2, column, sum);
    } else if (any || params.write_empty) {
      uint8_t *out = row_out(params.out, number / params.in.rows, number % params.in.rows, Return::bytes);
      store_four<Return::fp32>(out, column, sum);
    }
  }

  /* The outputs are there. */
  __device__ __forceinline__ void run(const GroupOutputs &outputs) const {
#pragma unroll
    for (int i = 0; i < rows; i += together) {
      if (first + i * warps < end()) add(outputs, i);
    }
  }
};

}  // namespace moeflow
#endif
