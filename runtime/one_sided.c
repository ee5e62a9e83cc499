#include "one_sided.h"

#include <stdlib.h>

/* Peer p's rows from me stand in block `rank` of its buffer; group_block_bytes has the one size of a block. */
moeflow_status one_sided_attach(const struct moeflow_group *group, struct group_lane *lane,
                                const struct one_sided_peer *peers) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  void **row = calloc((size_t)group->ranks, sizeof *row);
  const size_t bytes = (size_t)group->ranks * sizeof *row;
  const int64_t out = group->rank * group_block_bytes(group, MOEFLOW_PHASE_DISPATCH);
  const int64_t home = group->rank * group_block_bytes(group, MOEFLOW_PHASE_RETURN);
  if (!row) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the addresses of %d ranks", group->ranks);
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].received + out;
  CHECK(context->backend->upload(context, lane->dispatch_targets, row, bytes));
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].returned + home;
  CHECK(context->backend->upload(context, lane->return_targets, row, bytes));
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].flags;
  CHECK(context->backend->upload(context, lane->peer_flags, row, bytes));
cleanup:
  free(row);
  return status;
}

struct moeflow_peers one_sided_peers(const struct moeflow_group *group, const struct group_lane *lane) {
  return (struct moeflow_peers){
      .peer_flags = lane->peer_flags,
      .flags = lane->flags,
      .abort = group->abort_device,
      .timeout_ns = (uint64_t)group->timeout_ms * 1000000u,
      .words = group->flag_words,
      .rank = group->rank,
      .ranks = group->ranks,
  };
}

/* As raise_flags in templates/peers.cuh: the mark before the words. */
moeflow_status one_sided_give_up(const struct moeflow_group *group, const struct group_lane *lane, uint32_t *flags) {
  static const int phases[] = {MOEFLOW_PHASE_DISPATCH, MOEFLOW_PHASE_RETURN};
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  const uint32_t mark = MOEFLOW_POISON_ABORT;
  const size_t bytes = (size_t)group->flag_words * sizeof(uint32_t);
  uint32_t epoch, *words = malloc(bytes);
  if (!words) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d flag words", group->flag_words);
  CHECK(context->backend->download(context, &epoch, &lane->state->epoch, sizeof epoch));
  for (int i = 0; i < group->flag_words; i++) words[i] = epoch + MOEFLOW_FLAG_POISONED;
  uint32_t *marks = flags + moeflow_mark_at(group->rank, group->ranks, group->flag_words);
  CHECK(context->backend->upload(context, marks, &mark, sizeof mark));
  for (int i = 0; i < 2; i++) {
    uint32_t *to = flags + moeflow_flag_at(phases[i], group->rank, group->ranks, group->flag_words);
    CHECK(context->backend->upload(context, to, words, bytes));
  }
cleanup:
  free(words);
  return status;
}

moeflow_status one_sided_exchange(const struct moeflow_group *group, const struct group_lane *lane, enum moeflow_phase phase,
                                  void *stream) {
  struct moeflow_context *context = group->contexts[0];
  struct moeflow_exchange_params params = {
      .lane = lane->state,
      .record = lane->record_device,
      .peers = one_sided_peers(group, lane),
      .phase = (int32_t)phase,
  };
  const struct launch launch = {.kernel = KERNEL_EXCHANGE, .blocks = 1, .params = &params, .stream = stream};
  return context->backend->launch(context, &launch);
}
