/* The decode experts on Hopper: gate_up, activation, down and the rows' weighted sums, all tiles, in one persistent kernel that
 * reads weights at the rate of the memory. One warpgroup fills the ring (experts_ring.cuh), the others compute
 * (experts_sums.cuh); the order of work is in experts_schedule.cuh. */
#ifndef MOEFLOW_EXPERTS_CUH
#define MOEFLOW_EXPERTS_CUH

#include "experts_arrival.cuh"
#include "experts_sums.cuh"
#include "lane.cuh"

namespace moeflow {

/* Stepwise: the lists are there. One thread answers for the block, since the host may poison the lane at any moment; and a block
 * that takes a ticket goes on, or others would wait for it for ever. */
__device__ __forceinline__ Lists lists_given(const moeflow_experts_params &params, const Control &control) {
  Lists lists = {0, 0, 0, 0};
  if (threadIdx.x == 0) {
    lists.tiles = poisoned(params.lane) ? -1 : 0;
    if (lists.tiles == 0) lists.first_ticket = control.take();
  }
  if (threadIdx.x == 32) {
    lists.tiles = *params.tile_count;
    lists.entries = *params.entry_count;
  }
  return lists;
}

template <class Model, class Variant>
__device__ __forceinline__ void experts(const moeflow_experts_params &params) {
  using Ring = moeflow::Ring<Model, Variant>;
  __shared__ typename Ring::Shared shared;
  __shared__ Schedule<Model, Variant> schedule;
  __shared__ moeflow_tile near[near_tiles];
  const Ring ring(&shared);
  if (threadIdx.x == 0) ring.init();
  if (!params.fused) await_dependencies(); /* nothing that another kernel wrote is read before this */
  const Control control(params.control, params.tiles_max);
  const Lists lists = params.fused
                          ? await_rows<Model, Variant::threads, Variant::tile_tokens>(params, dynamic_shared(),
                                                                                          near, control)
                          : lists_given(params, control);
  if (params.fused) await_dependencies(); /* so that who waits for this kernel waits for dispatch too */
  if (threadIdx.x == 32) {
    schedule.init(lists.tiles, static_cast<int>(gridDim.x), params.sum ? params.in.ranks * params.in.rows : 0, lists.entries);
  }
  if (__syncthreads_or(lists.tiles < 0)) {
    if (params.fused && threadIdx.x < 32) raise_flags(params.peers, MOEFLOW_PHASE_RETURN, lists.epoch, params.lane->poison);
    return;
  }
  fence_async_shared(); /* bulk copies will write where lists were made */
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    if (warp == 0) {
      Loader<Model, Variant>{params, ring, schedule, control, near, params.fused ? near_tiles : 0, threadIdx.x == 0, policy_evict_first()}.run(lists.first_ticket);
    } else {
      Gatherer<Model, Variant>{params, ring, schedule, control, static_cast<int>(threadIdx.x) - 32}.run(RowsPresent());
    }
    control.template clear_next<128>(params.tiles_max);
  } else {
    const Consumer<Model, Variant> consumer = {params, ring, schedule, control, warp / 4 - 1};
    consumer.run();
    if (!params.fused) return;
    named_barrier(Consumer<Model, Variant>::barrier, Consumer<Model, Variant>::threads); /* all rows are stored */
    if (warp == 4) raise_flags(params.peers, MOEFLOW_PHASE_RETURN, lists.epoch, 0);
  }
}

}  // namespace moeflow
#endif
