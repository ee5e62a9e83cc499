/* moeflow_poll and moeflow_abort: the host's view of steps that run on the device. Any thread.
 *
 * Kernels write each lane's record: started when a step's first kernel runs, received when the rows are there, finished at
 * its end. A step enqueued outside a capture is also counted, by moeflow_forward and by its last kernel, so that it is
 * waited for before it starts. A replay that has not begun leaves no trace yet: synchronise with the stream, or poll after
 * its first kernel. */
#include <stdio.h>
#include <string.h>

#include "deadline.h"
#include "flight.h"
#include "internal.h"

/* ---- What a record says ---- */

static struct moeflow_record read_record(const struct group_lane *lane) {
  const struct moeflow_record *from = lane->record;
  struct moeflow_record record;
  memset(&record, 0, sizeof record);
#define READ(field) record.field = __atomic_load_n(&from->field, __ATOMIC_ACQUIRE)
  READ(finished); /* first: a step that ended has its poison and marks in place */
  READ(steps);
  READ(poison); /* before what explains it, which the device writes first */
  READ(peer);
  READ(phase);
  READ(step);
  READ(mine);
  READ(theirs);
  READ(failed_peer);
  READ(failed_step);
  READ(received);
  READ(started); /* last: a step that begins meanwhile counts as running */
#undef READ
  return record;
}

static const char *phase_name(uint32_t phase) {
  static const char *const names[] = {[MOEFLOW_PHASE_IDLE] = "idle",
                                      [MOEFLOW_PHASE_DISPATCH] = "dispatch",
                                      [MOEFLOW_PHASE_EXPERTS] = "experts",
                                      [MOEFLOW_PHASE_RETURN] = "return"};
  return phase < sizeof names / sizeof *names ? names[phase] : "unknown";
}

static const struct {
  moeflow_status status;
  const char *text;
  int values; /* `mine` and `theirs` mean something */
} poisons[] = {
    [MOEFLOW_POISON_NONE] = {MOEFLOW_OK, "", 0},
    [MOEFLOW_POISON_PEER] = {MOEFLOW_ERROR_PEER, "the peer's group is poisoned", 0},
    [MOEFLOW_POISON_TOKENS_MAX] = {MOEFLOW_ERROR_PEER, "the ranks called with different tokens_max", 1},
    [MOEFLOW_POISON_EPOCH] = {MOEFLOW_ERROR_PEER, "the ranks are at different steps", 1},
    [MOEFLOW_POISON_TIMEOUT] = {MOEFLOW_ERROR_TIMEOUT, "the peer stayed silent", 0},
    [MOEFLOW_POISON_ABORT] = {MOEFLOW_ERROR_PEER, "moeflow_abort was called", 0},
    [MOEFLOW_POISON_LEND] = {MOEFLOW_ERROR_ARGUMENT, "`lend` returned NULL in place of an expert's weights", 0},
};

static moeflow_status say_poison(const struct moeflow_group *group, int lane, const struct moeflow_record *record) {
  char values[64] = "";
  if (record->poison >= sizeof poisons / sizeof *poisons) {
    return status_set(MOEFLOW_ERROR_INTERNAL, "lane %d is poisoned with unknown code %u", lane, record->poison);
  }
  if (poisons[record->poison].values) {
    snprintf(values, sizeof values, ": %u here, %u there", record->mine, record->theirs);
  }
  return status_set(poisons[record->poison].status,
                    "rank %d, lane %d is poisoned: %s%s (rank %u, %s phase, step %u); destroy the group and create it anew",
                    group->rank, lane, poisons[record->poison].text, values, record->peer, phase_name(record->phase),
                    record->step);
}

/* Wrap-safe: is `a` behind `b`? */
static int behind(uint32_t a, uint32_t b) {
  return (int32_t)(a - b) < 0;
}

static int lane_busy(struct group_lane *lane, const struct moeflow_record *record) {
  return behind(record->finished, record->started) || behind(record->steps, atomic_load(&lane->eager));
}

static moeflow_status say_stuck(const struct moeflow_group *group, struct group_lane *lane,
                                const struct moeflow_record *record, int timeout_ms) {
  const int number = (int)(lane - group->lanes);
  if (!behind(record->finished, record->started)) {
    return status_set(
        MOEFLOW_ERROR_TIMEOUT,
        "rank %d, lane %d: %u step(s) enqueued, %u ended, and none is running after %d ms: the stream is held up",
        group->rank, number, atomic_load(&lane->eager), record->steps, timeout_ms);
  }
  const int arrived = !behind(record->received, record->started);
  return status_set(MOEFLOW_ERROR_TIMEOUT, "rank %d, lane %d: step %u is in the %s phase after %d ms; %s", group->rank,
                    number, record->started, arrived ? "experts or return" : "dispatch", timeout_ms,
                    group->comm->ops->one_sided ? "the wait on the device names the peer when it gives up"
                                                : "NCCL does not tell which rank is silent");
}

/* ---- Poll ---- */

/* A peer's error mark is told once. */
static moeflow_status look_failed(const struct moeflow_group *group, struct group_lane *lane,
                                  const struct moeflow_record *record) {
  if (!record->failed_peer) return MOEFLOW_OK;
  if (atomic_exchange(&lane->failed_told, record->failed_step) == record->failed_step) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_PEER, "rank %u joined step %u of lane %d with 0 rows after an error of its own",
                    record->failed_peer - 1, record->failed_step, (int)(lane - group->lanes));
}

/* Once; the verdict stays what it is, whatever becomes of the record. */
static void fly(struct moeflow_group *group) {
  struct moeflow_context *context = group->contexts[0];
  char verdict[1024];
  if (!group->flight || !group->comm->ops->one_sided || atomic_exchange(&group->flown, 1)) return;
  snprintf(verdict, sizeof verdict, "%s", moeflow_last_error());
  moeflow_status status = context_enter(context);
  if (status == MOEFLOW_OK) {
    status = flight_write(group, group->flight);
    context_leave(context);
  }
  if (status == MOEFLOW_OK) {
    context_log(context, MOEFLOW_LOG_ERROR,
                "rank %d: what is known of the peers' last steps is in %s; moeflow-run "
                "--explain-hang %s reads it aloud",
                group->rank, group->flight, group->flight);
  } else {
    context_log(context, MOEFLOW_LOG_ERROR, "rank %d: %s", group->rank, moeflow_last_error());
  }
  status_set(MOEFLOW_ERROR_PEER, "%s", verdict);
}

/* *stuck: the first lane that is still busy, NULL when none is. */
static moeflow_status look(struct moeflow_group *group, struct group_lane **stuck, struct moeflow_record *stuck_record) {
  *stuck = NULL;
  for (int i = 0; i < group->lane_count; i++) {
    struct moeflow_record record = read_record(&group->lanes[i]);
    if (record.poison) {
      moeflow_status poisoned = say_poison(group, i, &record);
      fly(group);
      return poisoned;
    }
    moeflow_status status = look_failed(group, &group->lanes[i], &record);
    if (status != MOEFLOW_OK) return status;
    if (*stuck || !lane_busy(&group->lanes[i], &record)) continue;
    *stuck = &group->lanes[i];
    *stuck_record = record;
  }
  if (atomic_load(&group->aborted)) {
    return status_set(
        MOEFLOW_ERROR_PEER,
        "rank %d was aborted, by moeflow_abort or after a call that failed; destroy the group and create it anew",
        group->rank);
  }
  return group->comm->ops->health(group->comm);
}

moeflow_status moeflow_poll(moeflow_group *group, int timeout_ms) {
  struct group_lane *stuck;
  struct moeflow_record record = {0};
  unsigned naps = 0;
  moeflow_status status = handle_check(group, HANDLE_GROUP);
  if (status != MOEFLOW_OK) return status;
  if (timeout_ms < 0) return status_set(MOEFLOW_ERROR_ARGUMENT, "timeout_ms is %d", timeout_ms);
  const int64_t deadline = deadline_in(timeout_ms);
  for (;;) {
    status = look(group, &stuck, &record);
    if (status != MOEFLOW_OK || !stuck) return status;
    if (deadline_passed(deadline)) return say_stuck(group, stuck, &record, timeout_ms);
    deadline_nap(&naps);
  }
}

/* ---- Abort ---- */

void group_poison(struct moeflow_group *group) {
  struct moeflow_context *context = group->contexts[0];
  const uint32_t poison = MOEFLOW_POISON_ABORT;
  atomic_store(&group->aborted, 1);
  if (group->abort) __atomic_store_n(group->abort, 1u, __ATOMIC_RELEASE); /* NULL while the group is being created */
  for (int i = 0; i < group->lane_count; i++) { /* the record keeps the first cause; the word only has to be set */
    if (!group->lanes[i].state) continue;
    uint32_t *word = &group->lanes[i].state->poison;
    if (context->backend == &backend_cpu) {
      __atomic_store_n(word, poison, __ATOMIC_RELEASE); /* other threads may be reading it */
    } else {
      context->backend->upload(context, word, &poison, sizeof poison);
    }
  }
}

moeflow_status moeflow_abort(moeflow_group *group) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(handle_check(group, HANDLE_GROUP));
  struct moeflow_context *context = group->contexts[0];
  CHECK(context_enter(context));
  group_poison(group);
  group->comm->ops->abort(group->comm);
  context_leave(context);
cleanup:
  return status;
}
