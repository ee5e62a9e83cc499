/* The decode experts on Hopper: gate_up, activation, down and the rows' weighted sums, all tiles, in one persistent kernel that
 * reads weights at the rate of the memory. One warpgroup fills the ring (experts_ring.cuh), the others compute
 * (experts_sums.cuh); the order of work is in experts_schedule.cuh. */
#ifndef MOEFLOW_EXPERTS_CUH
#define MOEFLOW_EXPERTS_CUH

#include "experts_arrival.cuh"
#include "experts_sums.cuh"
#include "lane.cuh"

namespace moeflow {

/* Fused: whatever became of this block's work, its peers are told. The first warp of the consumers, or of a block that stops. */
__device__ __forceinline__ void tell_peers(const moeflow_experts_params &params) {
  const uint32_t poison = params.lane->poison;
  raise_flags(params.peers, MOEFLOW_PHASE_RETURN, params.lane->epoch, __reduce_max_sync(full_warp, poison));
}

template <class Model, class Variant>
__device__ __forceinline__ void experts(const moeflow_experts_params &params) {
  using Ring = moeflow::Ring<Model, Variant>;
  __shared__ typename Ring::Shared shared;
  __shared__ Schedule<Model, Variant> schedule;
  const Ring ring(&shared);
  if (threadIdx.x == 0) ring.init();
  await_dependencies(); /* nothing that another kernel wrote is read before this */
  const Control control(params.control, params.tiles_max);
  Lists lists = {0, 0};
  if (params.fused) {
    lists = await_rows<Model, Variant::threads>(params, Variant::tile_tokens, dynamic_shared());
    fence_async_shared(); /* bulk copies will write where the lists were made */
  }
  /* One thread answers for the block, since the host may poison the lane at any moment; and a block that takes a ticket goes on,
   * or others would wait for it for ever. */
  const bool stop = threadIdx.x == 0 && (poisoned(params.lane) || lists.tiles < 0);
  const int first_ticket = threadIdx.x == 0 && !stop ? control.take() : 0;
  if (threadIdx.x == 32) {
    const int rows = params.sum ? params.in.ranks * params.in.rows : 0;
    if (params.fused) {
      schedule.init(lists.tiles, static_cast<int>(gridDim.x), rows, lists.entries);
    } else {
      schedule.init(*params.tile_count, static_cast<int>(gridDim.x), rows, *params.entry_count);
    }
  }
  if (__syncthreads_or(stop)) {
    if (params.fused && threadIdx.x < 32) tell_peers(params);
    return;
  }
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (warp == 0) {
      Loader<Model, Variant>{params, ring, schedule, control, threadIdx.x == 0, policy_evict_first()}.run(first_ticket);
    } else {
      Gatherer<Model, Variant>{params, ring, schedule, control, static_cast<int>(threadIdx.x) - 32}.run(RowsPresent());
    }
    control.template clear_next<128>(params.tiles_max);
  } else {
    const Consumer<Model, Variant> consumer = {params, ring, schedule, control, warp / 4 - 1};
    consumer.run();
    if (!params.fused) return;
    named_barrier(Consumer<Model, Variant>::barrier, Consumer<Model, Variant>::threads); /* all rows are stored */
    if (warp == 4) tell_peers(params);
  }
}

}  // namespace moeflow
#endif
