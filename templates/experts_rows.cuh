/* Weighted sums inside the experts kernel: what owner_reduce does, for some rows and columns, by the warps that gather. The same
 * order and roundings: the parts of an output, times its weight, added in choice order. */
#ifndef MOEFLOW_EXPERTS_ROWS_CUH
#define MOEFLOW_EXPERTS_ROWS_CUH

#include "experts_schedule.cuh"
#include "row.cuh"

namespace moeflow {

/* Half a warp has the columns of one row, eight a lane. */
template <class Model, class Variant>
struct RowSums {
  using Return = ReturnRow<Model>;
  static constexpr int lanes = MOEFLOW_SUM_COLUMNS / 8;
  static constexpr int batch = Variant::parts > 2 ? 1 : 4 / Variant::parts; /* choices whose outputs are on their way at a time */
  const moeflow_experts_params &params;
  const GroupOutputs &outputs;

  /* The outputs of `batch` choices, part by part; choices without a position have none. */
  __device__ __forceinline__ void load(const int32_t (&position)[batch], int column, Eight (&sum)[batch]) const {
#pragma unroll
    for (int part = 0; part < Variant::parts; part++) {
      Eight value[batch];
      const float *at = outputs.base + part * outputs.part_stride + (column - outputs.first);
#pragma unroll
      for (int i = 0; i < batch; i++) {
        value[i] = load_eight_l2_if(at + static_cast<int64_t>(position[i]) * outputs.pitch, position[i] >= 0);
      }
#pragma unroll
      for (int i = 0; i < batch; i++) {
        for (int j = 0; j < 8; j++) {
          sum[i].value[j] = part == 0 ? value[i].value[j] : __fadd_rn(sum[i].value[j], value[i].value[j]);
        }
      }
    }
  }

  /* True when the row has an entry here. */
  __device__ __forceinline__ bool add(const int32_t *positions, const float *weights, int column, Eight &sum) const {
    bool any = false;
#pragma unroll 2
    for (int first = 0; first < Model::top_k; first += batch) { /* all of them at once would spill for some shapes */
      int32_t position[batch];
      float weight[batch];
      Eight value[batch];
#pragma unroll
      for (int i = 0; i < batch; i++) {
        position[i] = first + i < Model::top_k ? positions[first + i] : -1;
        weight[i] = first + i < Model::top_k ? weights[first + i] : 0.0f;
      }
      load(position, column, value);
#pragma unroll
      for (int i = 0; i < batch; i++) {
        const bool present = position[i] >= 0;
        for (int j = 0; j < 8; j++) {
          const float product = __fmul_rn(weight[i], value[i].value[j]);
          const float added = any ? __fadd_rn(sum.value[j], product) : product;
          sum.value[j] = present ? added : sum.value[j];
        }
        any = any || present;
      }
    }
    return any;
  }

  __device__ __forceinline__ void row(int number, int column) const {
    const int source = number / params.in.rows;
    const int token = number % params.in.rows;
    const uint8_t *from = row_in(params.in, source, token, Row<Model>::bytes);
    Eight sum = {};
    const bool any = add(params.positions + static_cast<int64_t>(number) * Model::top_k,
                         reinterpret_cast<const float *>(from + Row<Model>::weights), column, sum);
    if (params.write_empty) {
      uint8_t *out = reinterpret_cast<uint8_t *>(const_cast<uint8_t **>(params.out.targets));
      store_eight<false>(out + static_cast<int64_t>(number) * Model::hidden * 2, column, sum);
    } else if (any) {
      store_eight<Return::fp32>(row_out(params.out, source, token, Return::bytes), column, sum);
    }
  }

  /* What is known before the outputs are: thread i fetches the positions and weights of row i. */
  template <int threads>
  __device__ __forceinline__ void prefetch(const Unit &unit, int thread) const {
    const int number = unit.tile * MOEFLOW_SUM_ROWS + thread;
    if (thread >= MOEFLOW_SUM_ROWS || number >= params.in.ranks * params.in.rows) return;
    prefetch_line(params.positions + static_cast<int64_t>(number) * Model::top_k);
    prefetch_line(row_in(params.in, number / params.in.rows, number % params.in.rows, Row<Model>::bytes) + Row<Model>::weights);
  }

  /* thread: 0 .. threads - 1 */
  template <int threads>
  __device__ __forceinline__ void run(const Unit &unit, int thread) const {
    const int column = unit.row + thread % lanes * 8;
    const int end = params.in.ranks * params.in.rows;
    if (column >= Model::hidden) return;
    for (int i = thread / lanes; i < MOEFLOW_SUM_ROWS; i += threads / lanes) {
      const int number = unit.tile * MOEFLOW_SUM_ROWS + i;
      if (number < end) row(number, column);
    }
  }
};

}  // namespace moeflow
#endif
