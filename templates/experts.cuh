/* The decode experts on Hopper: gate_up, activation, down and the rows' weighted sums, all tiles, in one persistent kernel that
 * reads weights at the rate of the memory. One warpgroup fills the ring (experts_ring.cuh), the others compute
 * (experts_sums.cuh); the order of work is in experts_schedule.cuh. */
#ifndef MOEFLOW_EXPERTS_CUH
#define MOEFLOW_EXPERTS_CUH

#include "experts_sums.cuh"
#include "lane.cuh"

namespace moeflow {

template <class Model, class Variant>
__device__ __forceinline__ void experts(const moeflow_experts_params &params) {
  using Ring = moeflow::Ring<Model, Variant>;
  __shared__ typename Ring::Shared shared;
  __shared__ Schedule<Model, Variant> schedule;
  const Ring ring(&shared);
  if (threadIdx.x == 0) ring.init();
  await_dependencies(); /* nothing that another kernel wrote is read before this */
  const Control control(params.control, params.tiles_max);
  /* One thread answers for the block, since the host may poison the lane at any moment; and a block that takes a ticket goes on,
   * or others would wait for it for ever. */
  const bool stop = threadIdx.x == 0 && poisoned(params.lane);
  const int first_ticket = threadIdx.x == 0 && !stop ? control.take() : 0;
  if (threadIdx.x == 32) {
    const int rows = params.sum ? params.in.ranks * params.in.rows : 0;
    schedule.init(*params.tile_count, static_cast<int>(gridDim.x), rows, *params.entry_count);
  }
  if (__syncthreads_or(stop)) return;
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (warp == 0) {
      Loader<Model, Variant>{params, ring, schedule, control, threadIdx.x == 0, policy_evict_first()}.run(first_ticket);
    } else {
      Gatherer<Model, Variant>{params, ring, schedule, control, static_cast<int>(threadIdx.x) - 32}.run(RowsPresent());
    }
    control.template clear_next<128>(params.tiles_max);
  } else {
    Consumer<Model, Variant>{params, ring, schedule, control, warp / 4 - 1}.run();
  }
}

}  // namespace moeflow
#endif
