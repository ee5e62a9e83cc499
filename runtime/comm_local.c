/* The local transport: all ranks are threads of this process, on one GPU or on the CPU. One-sided: kernels store straight
 * into the peers' receive buffers and the `exchange` kernel raises and awaits flags.
 *
 * On a GPU the ranks run in streams of one device. A waiting exchange kernel keeps one block of 128 threads resident per
 * rank and lane, at most 64 in all, so that every kernel which others wait for finds room; group_config.c checks that the
 * streams do not share a hardware queue. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "hub.h"
#include "internal.h"

#define LOCAL_MARK "moeflow local id" /* NCCL's ids begin with bytes of a random number and an address */

struct comm_local {
  struct comm comm;
  struct moeflow_group *group;
  struct hub *hub;
};

static struct comm_local *local_of(struct comm *comm) {
  return (struct comm_local *)comm;
}

moeflow_status comm_local_unique_id(moeflow_unique_id *id) {
  const size_t mark = sizeof LOCAL_MARK - 1;
  memset(id, 0, sizeof *id);
  memcpy(id->bytes, LOCAL_MARK, mark);
  if (getrandom(id->bytes + mark, 32, 0) == 32) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_INTERNAL, "the system gave no random bytes for a unique id");
}

int comm_local_made(const moeflow_unique_id *id) {
  return !memcmp(id->bytes, LOCAL_MARK, sizeof LOCAL_MARK - 1);
}

/* ---- Creation ---- */

/* As the last to leave, with this rank's backend: all ranks are on one device. */
static void release_kept(void *user, const struct hub_memory *memory) {
  const struct comm_local *local = user;
  struct moeflow_context *context = local->group->contexts[0];
  if (memory->allocator.release) {
    memory->allocator.release(memory->allocator.user, memory->memory, memory->bytes);
  } else {
    context->backend->release(context, memory->memory);
  }
}

static void local_destroy(struct comm *comm) {
  struct comm_local *local = local_of(comm);
  if (!local) return;
  hub_leave(local->hub, release_kept, local);
  free(local);
}

static moeflow_status local_create(struct moeflow_group *group, const moeflow_group_config *config, struct comm **comm) {
  struct comm_local *local = calloc(1, sizeof *local);
  *comm = NULL;
  if (!local) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the local transport");
  local->comm.ops = &comm_local;
  local->group = group;
  *comm = &local->comm; /* the group destroys it, also after a failure */
  return hub_join(group->ranks > 1 ? config->unique_id : NULL, group->rank, group->ranks, group->timeout_ms, &local->hub);
}

static moeflow_status local_gather(struct comm *comm, const void *mine, size_t bytes, void *all) {
  struct comm_local *local = local_of(comm);
  return hub_gather(local->hub, local->group->rank, mine, bytes, all, local->group->timeout_ms);
}

static void local_keep(struct comm *comm, void *memory, size_t bytes) {
  struct comm_local *local = local_of(comm);
  struct hub_memory kept = {.memory = memory, .bytes = bytes, .allocator = local->group->allocator};
  if (local->hub) {
    hub_keep(local->hub, &kept);
  } else {
    release_kept(local, &kept);
  }
}

/* ---- Where the peers' buffers are ---- */

struct addresses {
  uint8_t *received, *returned;
  uint32_t *flags;
};

/* Peer p's rows from me stand in block `rank` of its buffer; group_block_bytes has the one size of a block. */
static moeflow_status upload_targets(struct moeflow_group *group, struct group_lane *lane, const struct addresses *peers,
                                     void **row) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  const size_t bytes = (size_t)group->ranks * sizeof *row;
  const int64_t out = group->rank * group_block_bytes(group, MOEFLOW_PHASE_DISPATCH);
  const int64_t home = group->rank * group_block_bytes(group, MOEFLOW_PHASE_RETURN);
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].received + out;
  CHECK(context->backend->upload(context, lane->dispatch_targets, row, bytes));
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].returned + home;
  CHECK(context->backend->upload(context, lane->return_targets, row, bytes));
  for (int p = 0; p < group->ranks; p++) row[p] = peers[p].flags;
  CHECK(context->backend->upload(context, lane->peer_flags, row, bytes));
cleanup:
  return status;
}

static moeflow_status local_attach(struct comm *comm, struct group_lane *lane) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_group *group = local_of(comm)->group;
  const struct addresses mine = {lane->received, lane->returned, lane->flags};
  struct addresses *peers = calloc((size_t)group->ranks, sizeof *peers);
  void **row = calloc((size_t)group->ranks, sizeof *row);
  if (!peers || !row) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the addresses of %d ranks", group->ranks);
  CHECK(local_gather(comm, &mine, sizeof mine, peers));
  CHECK(upload_targets(group, lane, peers, row));
cleanup:
  free(peers);
  free(row);
  return status;
}

/* ---- A step ---- */

static moeflow_status local_exchange(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                                     int64_t row_bytes, void *stream) {
  struct moeflow_group *group = local_of(comm)->group;
  struct moeflow_context *context = group->contexts[0];
  struct moeflow_exchange_params params = {
      .lane = lane->state,
      .record = lane->record_device,
      .peer_flags = lane->peer_flags,
      .flags = lane->flags,
      .abort = group->abort_device,
      .timeout_ns = (uint64_t)group->timeout_ms * 1000000u,
      .phase = (int32_t)phase,
      .rank = group->rank,
      .ranks = group->ranks,
  };
  const struct launch launch = {.kernel = KERNEL_EXCHANGE, .blocks = 1, .params = &params, .stream = stream};
  (void)rows; /* the kernels before have stored them */
  (void)row_bytes;
  return context->backend->launch(context, &launch);
}

static moeflow_status local_health(struct comm *comm) {
  (void)comm; /* whatever happens is in the lanes' records */
  return MOEFLOW_OK;
}

static void local_abort(struct comm *comm) {
  (void)comm; /* the abort word, which moeflow_abort has set, ends the waits; the exchange kernel tells the peers */
}

const struct comm_ops comm_local = {
    .name = "local",
    .one_sided = 1,
    .create = local_create,
    .destroy = local_destroy,
    .gather = local_gather,
    .attach = local_attach,
    .exchange = local_exchange,
    .health = local_health,
    .abort = local_abort,
    .keep = local_keep,
};
