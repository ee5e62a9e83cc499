/* The local transport: all ranks are threads of this process, on one GPU or on the CPU. One-sided: kernels store straight
 * into the peers' receive buffers and the `exchange` kernel raises and awaits flags.
 *
 * On a GPU the ranks run in streams of one device. A waiting exchange kernel keeps one block of 128 threads resident per
 * rank and lane, at most 64 in all, so that every kernel which others wait for finds room; group_config.c checks that the
 * streams do not share a hardware queue. */
#include <stdlib.h>

#include "hub.h"
#include "internal.h"
#include "one_sided.h"
#include "unique_id.h"

#define LOCAL_MARK "moeflow local id"

struct comm_local {
  struct comm comm;
  struct moeflow_group *group;
  struct hub *hub;
};

static struct comm_local *local_of(struct comm *comm) {
  return (struct comm_local *)comm;
}

moeflow_status comm_local_unique_id(moeflow_unique_id *id) {
  return unique_id_make(id, LOCAL_MARK);
}

int comm_local_made(const moeflow_unique_id *id) {
  return unique_id_has(id, LOCAL_MARK);
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

/* Peers may still store into it when this rank has left. */
static void local_window_release(struct comm *comm, void *memory, size_t bytes) {
  struct comm_local *local = local_of(comm);
  struct hub_memory kept = {.memory = memory, .bytes = bytes, .allocator = local->group->allocator};
  if (local->hub) {
    hub_keep(local->hub, &kept);
  } else {
    release_kept(local, &kept);
  }
}

/* ---- Where the peers' buffers are ---- */

static moeflow_status local_attach(struct comm *comm, struct group_lane *lane) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_group *group = local_of(comm)->group;
  const struct one_sided_peer mine = {lane->received, lane->returned, lane->flags};
  struct one_sided_peer *peers = calloc((size_t)group->ranks, sizeof *peers);
  if (!peers) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the addresses of %d ranks", group->ranks);
  CHECK(local_gather(comm, &mine, sizeof mine, peers));
  CHECK(one_sided_attach(group, lane, peers));
cleanup:
  free(peers);
  return status;
}

/* ---- A step ---- */

static moeflow_status local_exchange(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                                     int64_t row_bytes, void *stream) {
  (void)rows; /* the kernels before have stored them */
  (void)row_bytes;
  return one_sided_exchange(local_of(comm)->group, lane, phase, stream);
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
    .window_release = local_window_release,
};
