/* moeflow_group_create and _destroy: ranks meet, compare what they must share, and allocate all that the group will ever
 * use. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "fingerprint.h"
#include "group_config.h"
#include "internal.h"
#include "sha256.h"

#define OTHER_LANE_MULTIPROCESSORS 4

/* ---- Sizes ---- */

int64_t group_block_bytes(const struct moeflow_group *group, enum moeflow_phase phase) {
  return group->capacity * (phase == MOEFLOW_PHASE_DISPATCH ? group->row_bytes_max : group->return_bytes_max);
}

static void measure_rows(struct moeflow_group *group) {
  for (int i = 0; i < group->context_count; i++) {
    const struct spec *spec = &group->contexts[i]->plan.spec;
    int64_t row = spec_row_bytes(spec);
    int64_t home = spec_return_row_bytes(spec) * spec_return_rows_per_token(spec);
    if (row > group->row_bytes_max) group->row_bytes_max = row;
    if (home > group->return_bytes_max) group->return_bytes_max = home;
  }
}

/* Over LOCAL, all lanes of all ranks share the multiprocessors, and each has blocks of one kernel waiting at a time.
 * Otherwise a lane's blocks may take them all, but for a few on which the other lane sends the rows that a peer waits for.
 */
int group_waiting_blocks(const struct moeflow_group *group, int residency) {
  const int all = group->contexts[0]->multiprocessors;
  int share = all;
  if (group->ranks == 1) return all * residency; /* nobody to wait for */
  if (group->transport == MOEFLOW_TRANSPORT_LOCAL) {
    share = all / (group->ranks * group->lane_count);
  } else if (group->lane_count > 1) {
    share = all - OTHER_LANE_MULTIPROCESSORS;
  }
  return share < 1 ? 1 : share * residency;
}

static int count_flag_words(const struct moeflow_group *group) {
  int residency = 1;
  for (int i = 0; i < group->context_count; i++) {
    const struct plan *plan = &group->contexts[i]->plan;
    for (int v = 0; v < plan->variant_count; v++) {
      if (plan->variants[v].residency > residency) residency = plan->variants[v].residency;
    }
  }
  return group_waiting_blocks(group, residency);
}

/* ---- Memory ---- */

moeflow_status group_allocate(struct moeflow_group *group, size_t bytes, void **memory) {
  struct moeflow_context *context = group->contexts[0];
  *memory = NULL;
  if (!group->allocator.allocate) return context->backend->allocate(context, bytes, memory);
  *memory = group->allocator.allocate(group->allocator.user, bytes, 256);
  if (!*memory) return status_set(MOEFLOW_ERROR_MEMORY, "the caller's allocator gave no %zu bytes", bytes);
  if (!context->backend->zero) {
    memset(*memory, 0, bytes);
    return MOEFLOW_OK;
  }
  moeflow_status status = context->backend->zero(context, *memory, bytes);
  if (status == MOEFLOW_OK) return status;
  group_release(group, *memory, bytes);
  *memory = NULL;
  return status;
}

void group_release(struct moeflow_group *group, void *memory, size_t bytes) {
  struct moeflow_context *context = group->contexts[0];
  if (!memory) return;
  if (group->allocator.release) {
    group->allocator.release(group->allocator.user, memory, bytes);
  } else {
    context->backend->release(context, memory);
  }
}

/* Another group's activations and outputs in place of own ones. */
static moeflow_status borrow_workspace(struct moeflow_group *group, int number) {
  struct group_lane *lane = &group->lanes[number];
  const struct group_lane *lender = &group->workspace_of->lanes[number];
  if (lender->activations_max < lane->activations_max || lender->outputs_max < lane->outputs_max) {
    return status_set(
        MOEFLOW_ERROR_ARGUMENT,
        "workspace_of has room for %lld activations and %lld outputs a lane, and %lld and %lld are needed: create "
        "that group with the larger capacity",
        (long long)lender->activations_max, (long long)lender->outputs_max, (long long)lane->activations_max,
        (long long)lane->outputs_max);
  }
  lane->activations = lender->activations;
  lane->outputs = lender->outputs;
  return MOEFLOW_OK;
}

static moeflow_status allocate_window(struct moeflow_group *group, struct group_lane *lane) {
  const struct comm_ops *ops = group->comm->ops;
  if (ops->window_allocate) return ops->window_allocate(group->comm, lane->window_bytes, &lane->window);
  return group_allocate(group, lane->window_bytes, &lane->window);
}

static moeflow_status allocate_lane(struct moeflow_group *group, int number) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  struct group_lane *lane = &group->lanes[number];
  const struct moeflow_lane start = {.epoch = 1};
  CHECK(arena_measure(group, lane));
  CHECK(allocate_window(group, lane));
  CHECK(group_allocate(group, lane->arena_bytes, &lane->arena));
  arena_assign(group, lane);
  if (group->workspace_of) CHECK(borrow_workspace(group, number));
  CHECK(context->backend->upload(context, lane->state, &start, sizeof start));
  context_log(context, MOEFLOW_LOG_INFO, "rank %d: lane %d takes %zu + %zu bytes for %d ranks x %d tokens", group->rank,
              number, lane->window_bytes, lane->arena_bytes, group->ranks, group->capacity);
cleanup:
  if (status == MOEFLOW_ERROR_MEMORY) {
    status_prefix(status, "lane %d of %d needs %zu + %zu bytes for %d ranks x capacity %d", number, group->lane_count,
                  lane->window_bytes, lane->arena_bytes, group->ranks, group->capacity);
  }
  return status;
}

static moeflow_status allocate_lanes(struct moeflow_group *group) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  void *device = NULL;
  CHECK(context->backend->allocate_record(context, sizeof *group->shared, (void **)&group->shared, &device));
  group->abort = &group->shared->abort;
  group->abort_device = &((struct group_shared *)device)->abort;
  for (int i = 0; i < group->lane_count; i++) {
    group->lanes[i].record = &group->shared->records[i];
    group->lanes[i].record_device = &((struct group_shared *)device)->records[i];
    CHECK(allocate_lane(group, i));
  }
cleanup:
  return status;
}

/* Everything that create made, in reverse; each part may be missing. The transport goes before the memory that it may still
 * be writing to. */
static void tear_down(struct moeflow_group *group) {
  struct moeflow_context *context = group->contexts ? group->contexts[0] : NULL;
  const struct comm_ops *ops = group->comm ? group->comm->ops : NULL;
  int entered = context && context_enter(context) == MOEFLOW_OK;
  for (int i = 0; ops && ops->window_release && i < group->lane_count; i++) {
    if (group->lanes[i].window) ops->window_release(group->comm, group->lanes[i].window, group->lanes[i].window_bytes);
    group->lanes[i].window = NULL;
  }
  if (ops) ops->destroy(group->comm);
  for (int i = 0; i < group->lane_count; i++) {
    group_release(group, group->lanes[i].window, group->lanes[i].window_bytes);
    group_release(group, group->lanes[i].arena, group->lanes[i].arena_bytes);
  }
  if (group->shared) context->backend->release_record(context, group->shared);
  if (entered) context_leave(context);
  if (group->workspace_of) atomic_fetch_sub(&group->workspace_of->borrowers, 1);
  for (int i = 0; i < group->context_count; i++) atomic_fetch_sub(&group->contexts[i]->groups, 1);
  free(group->flight);
  free(group->contexts);
  handle_destroy(group, HANDLE_GROUP);
}

/* ---- Agreement ---- */

struct vote {
  int32_t status;
  char message[FINGERPRINT_BYTES_MAX - sizeof(int32_t)];
};

moeflow_status group_agree(struct moeflow_group *group, moeflow_status mine) {
  moeflow_status status = MOEFLOW_OK;
  struct vote vote = {.status = (int32_t)mine};
  struct vote *all = calloc((size_t)group->ranks, sizeof *all);
  char message[1024] = "";
  if (mine != MOEFLOW_OK) {
    snprintf(message, sizeof message, "%s", moeflow_last_error());
    snprintf(vote.message, sizeof vote.message, "%.500s", message);
  }
  if (!all) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to hear the %d ranks", group->ranks);
  status = group->comm->ops->gather(group->comm, &vote, sizeof vote, all);
  if (mine != MOEFLOW_OK) FAIL(mine, "%s", message); /* whatever became of the others */
  if (status != MOEFLOW_OK) goto cleanup;
  for (int rank = 0; rank < group->ranks; rank++) {
    if (all[rank].status == MOEFLOW_OK) continue;
    all[rank].message[sizeof all->message - 1] = 0;
    FAIL(MOEFLOW_ERROR_PEER, "rank %d failed: %s", rank, all[rank].message);
  }
cleanup:
  free(all);
  return status;
}

struct fingerprint {
  int64_t protocol, transport, nccl, ranks, capacity, lanes, flag_words, row_bytes, return_bytes, local_experts_max,
      contexts, device;
  char specs[65];
};

static const struct fingerprint_field fields[] = {
    FINGERPRINT_NUMBER(struct fingerprint, protocol, "protocol"),
    FINGERPRINT_NUMBER(struct fingerprint, transport, "transport"),
    FINGERPRINT_NUMBER(struct fingerprint, nccl, "NCCL version"),
    FINGERPRINT_NUMBER(struct fingerprint, ranks, "ranks"),
    FINGERPRINT_NUMBER(struct fingerprint, capacity, "capacity"),
    FINGERPRINT_NUMBER(struct fingerprint, lanes, "lanes"),
    FINGERPRINT_NUMBER(struct fingerprint, flag_words, "flag words (by multiprocessors and cubins)"),
    FINGERPRINT_NUMBER(struct fingerprint, row_bytes, "row bytes"),
    FINGERPRINT_NUMBER(struct fingerprint, return_bytes, "return row bytes"),
    FINGERPRINT_NUMBER(struct fingerprint, local_experts_max, "local_experts_max"),
    FINGERPRINT_NUMBER(struct fingerprint, contexts, "number of models"),
    FINGERPRINT_NUMBER(struct fingerprint, device, "device"),
    FINGERPRINT_HASH(struct fingerprint, specs, "models (hash of their specs)"),
};

static void take_fingerprint(const struct moeflow_group *group, struct fingerprint *mine) {
  struct sha256 hash;
  uint8_t digest[32];
  memset(mine, 0, sizeof *mine);
  mine->protocol = MOEFLOW_PROTOCOL;
  mine->transport = group->transport;
  mine->nccl = group->comm->ops->over_nccl ? comm_nccl_version() : 0;
  mine->ranks = group->ranks;
  mine->capacity = group->capacity;
  mine->lanes = group->lane_count;
  mine->flag_words = group->comm->ops->one_sided ? group->flag_words : 0;
  mine->row_bytes = group->row_bytes_max;
  mine->return_bytes = group->return_bytes_max;
  mine->local_experts_max = group->local_experts_max;
  mine->contexts = group->context_count;
  mine->device = group->transport == MOEFLOW_TRANSPORT_LOCAL ? group->contexts[0]->device : 0; /* one for all ranks */
  sha256_begin(&hash);
  for (int i = 0; i < group->context_count; i++) sha256_add(&hash, group->contexts[i]->spec_hash, 64);
  sha256_end(&hash, digest);
  sha256_hex(digest, mine->specs);
}

static moeflow_status compare(struct moeflow_group *group) {
  moeflow_status status = MOEFLOW_OK;
  struct fingerprint mine;
  struct fingerprint *all = calloc((size_t)group->ranks, sizeof *all);
  if (!all) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d fingerprints", group->ranks);
  take_fingerprint(group, &mine);
  CHECK(group->comm->ops->gather(group->comm, &mine, sizeof mine, all));
  CHECK(fingerprint_compare(all, sizeof *all, group->ranks, fields, sizeof fields / sizeof *fields));
cleanup:
  free(all);
  return status;
}

/* ---- Create and destroy ---- */

static const struct comm_ops *const transports[] = {
    [MOEFLOW_TRANSPORT_NCCL] = &comm_nccl,
    [MOEFLOW_TRANSPORT_WINDOW] = &comm_window,
    [MOEFLOW_TRANSPORT_ALLGATHER] = &comm_allgather,
    [MOEFLOW_TRANSPORT_LOCAL] = &comm_local,
};

static moeflow_status make(moeflow_context *const *contexts, int context_count, const moeflow_group_config *config,
                           struct moeflow_group **group_out) {
  struct moeflow_group *group = handle_create(HANDLE_GROUP, sizeof *group);
  if (!group) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a group of %zu bytes", sizeof *group);
  group->contexts = calloc((size_t)context_count, sizeof *group->contexts);
  if (!group->contexts) {
    handle_destroy(group, HANDLE_GROUP);
    return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the list of %d contexts", context_count);
  }
  for (int i = 0; i < context_count; i++) {
    group->contexts[i] = contexts[i];
    atomic_fetch_add(&contexts[i]->groups, 1);
  }
  group->context_count = context_count;
  group->rank = config->rank;
  group->ranks = config->ranks;
  group->capacity = config->capacity;
  group->lane_count = config->lanes;
  group->timeout_ms = config->timeout_ms;
  group->local_experts_max = config->local_experts_max;
  group->transport = config->transport;
  group->workspace_of = config->workspace_of;
  if (group->workspace_of) atomic_fetch_add(&group->workspace_of->borrowers, 1);
  if (config->allocator) group->allocator = *config->allocator;
  measure_rows(group);
  group->flag_words = count_flag_words(group);
  *group_out = group;
  return MOEFLOW_OK;
}

/* Every lane, whatever became of the one before: the peers meet this rank in each. */
static moeflow_status attach(struct moeflow_group *group) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 0; i < group->lane_count; i++) {
    moeflow_status lane_status = group->comm->ops->attach(group->comm, &group->lanes[i]);
    if (status == MOEFLOW_OK) status = lane_status;
  }
  return status;
}

moeflow_status moeflow_group_create(moeflow_context *const *contexts, int context_count,
                                    const moeflow_group_config *config_given, moeflow_group **group_out) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  struct moeflow_group *group = NULL;
  int entered = 0;
  if (!group_out) return status_set(MOEFLOW_ERROR_ARGUMENT, "the place for the group is NULL");
  *group_out = NULL;
  CHECK(config_read(config_given, &config, sizeof config, "moeflow_group_config"));
  CHECK(group_config_check(contexts, context_count, &config));
  CHECK(make(contexts, context_count, &config, &group));
  if (config.flight && !(group->flight = strdup(config.flight))) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for a path");
  CHECK(context_enter(contexts[0]));
  entered = 1;
  CHECK(transports[config.transport]->create(group, &config, &group->comm));
  CHECK(compare(group));
  CHECK(group_agree(group, allocate_lanes(group)));
  CHECK(group_agree(group, attach(group)));
  *group_out = group;
cleanup:
  if (status != MOEFLOW_OK && group) {
    char message[2048];
    snprintf(message, sizeof message, "%s", moeflow_last_error());
    tear_down(group);
    status_set(status, "%s", message);
  }
  if (entered) context_leave(contexts[0]);
  return status;
}

moeflow_status moeflow_group_destroy(moeflow_group *group) {
  if (!group) return MOEFLOW_OK;
  moeflow_status status = handle_check(group, HANDLE_GROUP);
  if (status != MOEFLOW_OK) return status;
  int layers = atomic_load(&group->layers);
  if (layers) return status_set(MOEFLOW_ERROR_STATE, "%d layer(s) of the group still live; destroy them first", layers);
  int borrowers = atomic_load(&group->borrowers);
  if (borrowers) {
    return status_set(MOEFLOW_ERROR_STATE, "%d group(s) use this group's workspace; destroy them first", borrowers);
  }
  tear_down(group);
  return MOEFLOW_OK;
}

moeflow_status moeflow_get_unique_id(moeflow_transport transport, moeflow_unique_id *id) {
  if (!id) return status_set(MOEFLOW_ERROR_ARGUMENT, "the place for the unique id is NULL");
  switch (transport) {
    case MOEFLOW_TRANSPORT_NCCL:
    case MOEFLOW_TRANSPORT_ALLGATHER:
      return comm_nccl_unique_id(id);
    case MOEFLOW_TRANSPORT_WINDOW:
      return comm_window_unique_id(id);
    case MOEFLOW_TRANSPORT_LOCAL:
      return comm_local_unique_id(id);
    case MOEFLOW_TRANSPORT_AUTO: /* NCCL's serves both, where there is one */
      return comm_nccl_unique_id(id) == MOEFLOW_OK ? MOEFLOW_OK : comm_local_unique_id(id);
    default:
      return status_set(MOEFLOW_ERROR_ARGUMENT, "transport %d does not exist", (int)transport);
  }
}
