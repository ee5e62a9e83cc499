#include "nccl_comm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "deadline.h"
#include "driver.h"
#include "fingerprint.h"

#define ABORT_MS 1000 /* what moeflow_abort waits for NCCL's part; the waits on the device have ended long before */

/* ---- Giving up ---- */

/* NCCL's own calls wait without bound: both for graphs that were captured with the communicator, destroy also for the other
 * ranks of the host. So each runs in a thread of its own, which is left alone when it does not end in time. */
static void *run_abort(void *comm) {
  nccl.ncclCommAbort(comm);
  return NULL;
}

static void *run_destroy(void *comm) {
  nccl.ncclCommDestroy(comm);
  return NULL;
}

static void close_comm(struct nccl_comm *state, ncclComm_t *comm, void *(*run)(void *)) {
  if (!*comm) return;
  if (pthread_create(&state->closers[state->closing], NULL, run, *comm)) {
    run(*comm);
  } else {
    state->closing++;
  }
  *comm = NULL;
}

static struct timespec in_ms(int timeout_ms) {
  const int64_t at = deadline_in(timeout_ms);
  return (struct timespec){.tv_sec = at / 1000, .tv_nsec = at % 1000 * 1000000};
}

static void await_closers(struct nccl_comm *state, int timeout_ms) {
  const struct timespec end = in_ms(timeout_ms);
  while (state->closing && !pthread_clockjoin_np(state->closers[state->closing - 1], NULL, CLOCK_MONOTONIC, &end)) {
    state->closing--;
  }
}

/* A call that holds the mutex may be blocked by the very steps that abort ends: it is waited for a while, then no longer. An
 * adopted communicator is the caller's to abort. */
void nccl_comm_abort(struct comm *comm) {
  struct nccl_comm *state = nccl_comm_of(comm);
  const struct timespec end = in_ms(ABORT_MS);
  const int locked = !pthread_mutex_clocklock(&state->mutex, CLOCK_MONOTONIC, &end);
  const int first = !atomic_exchange(&state->aborted, 1);
  if (first && !state->adopted) {
    for (int i = 0; i < GROUP_LANES_MAX; i++) close_comm(state, &state->lanes[i], run_abort);
    close_comm(state, &state->control, run_abort);
  }
  if (locked) pthread_mutex_unlock(&state->mutex);
  if (first) await_closers(state, ABORT_MS);
}

static moeflow_status give_up(struct nccl_comm *state, const char *what) {
  group_poison(state->group); /* no exchange moves rows from now on */
  nccl_comm_abort(&state->comm);
  if (state->adopted) state->stuck = 1;
  return status_set(MOEFLOW_ERROR_TIMEOUT,
                    "rank %d of %d: %s within %d ms: a rank did not come, or is gone; NCCL does not tell which",
                    state->group->rank, state->group->ranks, what, state->group->timeout_ms);
}

/* ---- Bounded waits: `look` once, with the mutex held, until it is done ---- */

enum progress { PROGRESS_DONE, PROGRESS_WAITING, PROGRESS_FAILED };

/* The communicator has taken the last call: a non-blocking one reports ncclInProgress until then. */
static enum progress look_comm(struct nccl_comm *state, ncclComm_t comm, moeflow_status *status) {
  ncclResult_t result = ncclSuccess;
  ncclResult_t asked = nccl.ncclCommGetAsyncError(comm, &result);
  (void)state;
  if (asked != ncclSuccess) result = asked;
  if (result == ncclSuccess) return PROGRESS_DONE;
  if (result == ncclInProgress) return PROGRESS_WAITING;
  *status = nccl_status(result, "ncclCommGetAsyncError", comm);
  return PROGRESS_FAILED;
}

/* The stream has run dry, and the communicator did not fail meanwhile. */
static enum progress look_stream(struct nccl_comm *state, ncclComm_t comm, moeflow_status *status) {
  CUresult result = driver.cuStreamQuery(state->stream);
  if (result == CUDA_SUCCESS) return PROGRESS_DONE;
  if (result != CUDA_ERROR_NOT_READY) {
    *status = driver_status(result, "cuStreamQuery");
    return PROGRESS_FAILED;
  }
  return look_comm(state, comm, status) == PROGRESS_FAILED ? PROGRESS_FAILED : PROGRESS_WAITING;
}

typedef enum progress (*look_fn)(struct nccl_comm *state, ncclComm_t comm, moeflow_status *status);

static moeflow_status await(struct nccl_comm *state, look_fn look, const ncclComm_t *comm, int64_t deadline,
                            const char *what) {
  unsigned naps = 0;
  for (;;) {
    moeflow_status status = MOEFLOW_OK;
    enum progress progress = PROGRESS_FAILED;
    pthread_mutex_lock(&state->mutex);
    if (state->aborted) {
      status = status_set(MOEFLOW_ERROR_PEER, "the group was aborted while it waited: %s", what);
    } else {
      progress = look(state, *comm, &status);
    }
    pthread_mutex_unlock(&state->mutex);
    if (progress == PROGRESS_DONE || progress == PROGRESS_FAILED) return status;
    if (deadline_passed(deadline)) return give_up(state, what);
    deadline_nap(&naps);
  }
}

/* ---- Gather ---- */

static moeflow_status enqueue_gather(struct nccl_comm *state) {
  moeflow_status status = MOEFLOW_OK;
  const size_t slot = FINGERPRINT_BYTES_MAX; /* the same on all ranks, whatever they gather */
  uint8_t *mine = state->buffer + (size_t)state->group->ranks * slot;
  pthread_mutex_lock(&state->mutex);
  if (state->aborted) FAIL(MOEFLOW_ERROR_PEER, "the group was aborted");
  ncclResult_t result = nccl.ncclAllGather(mine, state->buffer, slot, ncclInt8, state->control, (cudaStream_t)state->stream);
  if (result != ncclSuccess && result != ncclInProgress) status = nccl_status(result, "ncclAllGather", state->control);
cleanup:
  pthread_mutex_unlock(&state->mutex);
  return status;
}

moeflow_status nccl_comm_gather(struct comm *comm, const void *mine, size_t bytes, void *all) {
  moeflow_status status = MOEFLOW_OK;
  struct nccl_comm *state = nccl_comm_of(comm);
  const int ranks = state->group->ranks;
  const size_t slot = FINGERPRINT_BYTES_MAX;
  const int64_t deadline = deadline_in(state->group->timeout_ms);
  if (bytes > slot) return status_set(MOEFLOW_ERROR_INTERNAL, "a gather of %zu bytes a rank", bytes);
  uint8_t *rows = malloc((size_t)ranks * slot);
  if (!rows) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to gather from %d ranks", ranks);
  CHECK_CUDA(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)(state->buffer + (size_t)ranks * slot), mine, bytes, state->stream));
  CHECK(enqueue_gather(state));
  CHECK(await(state, look_comm, &state->control, deadline, "a gather was not taken"));
  CHECK(await(state, look_stream, &state->control, deadline, "a gather did not end"));
  CHECK_CUDA(cuMemcpyDtoHAsync(rows, (CUdeviceptr)(uintptr_t)state->buffer, (size_t)ranks * slot, state->stream));
  CHECK_CUDA(cuStreamSynchronize(state->stream)); /* only the copy is left */
  for (int r = 0; r < ranks; r++) memcpy((uint8_t *)all + (size_t)r * bytes, rows + (size_t)r * slot, bytes);
cleanup:
  free(rows);
  return status;
}

/* ---- Creation ---- */

static moeflow_status adopt(struct nccl_comm *state, ncclComm_t comm) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = state->group;
  int ranks = 0, rank = 0, device = 0;
  CHECK_NCCL(comm, ncclCommCount(comm, &ranks));
  CHECK_NCCL(comm, ncclCommUserRank(comm, &rank));
  CHECK_NCCL(comm, ncclCommCuDevice(comm, &device));
  if (ranks != group->ranks || rank != group->rank || device != group->contexts[0]->device) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "the communicator is rank %d of %d on device %d; the group is rank %d of %d on device %d",
         rank, ranks, device, group->rank, group->ranks, group->contexts[0]->device);
  }
  state->adopted = 1;
  state->control = state->lanes[0] = comm;
cleanup:
  return status;
}

static moeflow_status open_control(struct nccl_comm *state, const moeflow_unique_id *id) {
  const struct moeflow_group *group = state->group;
  const int64_t deadline = deadline_in(group->timeout_ms);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId unique;
  memcpy(&unique, id, sizeof unique);
  config.blocking = 0;
  config.minCTAs = config.maxCTAs = 1; /* a gather of a few hundred bytes */
  ncclResult_t result = nccl.ncclCommInitRankConfig(&state->control, group->ranks, unique, group->rank, &config);
  if (result != ncclSuccess && result != ncclInProgress) return nccl_status(result, "ncclCommInitRankConfig", NULL);
  return await(state, look_comm, &state->control, deadline, "not all ranks joined the group");
}

/* A blocking creation, which cannot be stopped: when it does not end in time, the thread keeps the job and is left alone. */
struct job {
  struct moeflow_context *context;
  ncclUniqueId id;
  int rank, ranks;
  ncclComm_t comm;
  ncclResult_t result;
};

static void *create_lane(void *argument) {
  struct job *job = argument;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (context_enter(job->context) != MOEFLOW_OK) return job;
  job->result = nccl.ncclCommInitRankConfig(&job->comm, job->ranks, job->id, job->rank, &config);
  context_leave(job->context);
  return job;
}

static moeflow_status open_lane(struct nccl_comm *state, const ncclUniqueId *id, ncclComm_t *comm) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = state->group;
  pthread_t thread;
  const struct timespec end = in_ms(group->timeout_ms);
  struct job *job = calloc(1, sizeof *job);
  if (!job) return status_set(MOEFLOW_ERROR_MEMORY, "no memory to create a communicator");
  *job = (struct job){
      .context = group->contexts[0], .id = *id, .rank = group->rank, .ranks = group->ranks, .result = ncclInternalError};
  if (pthread_create(&thread, NULL, create_lane, job)) {
    free(job);
    return status_set(MOEFLOW_ERROR_MEMORY, "no thread to create a communicator");
  }
  if (pthread_clockjoin_np(thread, NULL, CLOCK_MONOTONIC, &end)) {
    pthread_detach(thread);
    return give_up(state, "all ranks were there, then the communicator of a lane was not ready");
  }
  if (job->result != ncclSuccess) status = nccl_status(job->result, "ncclCommInitRankConfig", NULL);
  *comm = job->comm;
  free(job);
  return status;
}

struct lane_ids { /* rank 0's count */
  int32_t failed;
  ncclUniqueId ids[GROUP_LANES_MAX];
};

static moeflow_status open_lanes(struct nccl_comm *state) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = state->group;
  struct lane_ids mine;
  struct lane_ids *all = calloc((size_t)group->ranks, sizeof *all);
  memset(&mine, 0, sizeof mine);
  for (int i = 0; group->rank == 0 && i < group->lane_count && !mine.failed; i++) {
    mine.failed = nccl.ncclGetUniqueId(&mine.ids[i]) != ncclSuccess;
  }
  if (!all) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the ids of %d ranks", group->ranks);
  CHECK(nccl_comm_gather(&state->comm, &mine, sizeof mine, all));
  if (all[0].failed) FAIL(MOEFLOW_ERROR_NCCL, "ncclGetUniqueId failed on rank 0");
  for (int i = 0; i < group->lane_count; i++) CHECK(open_lane(state, &all[0].ids[i], &state->lanes[i]));
cleanup:
  free(all);
  return status;
}

moeflow_status nccl_comm_create(const struct comm_ops *ops, struct moeflow_group *group, const moeflow_group_config *config,
                                struct comm **comm) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  struct nccl_comm *state;
  *comm = NULL;
  CHECK(nccl_load());
  state = calloc(1, sizeof *state);
  if (!state) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the %s transport", ops->name);
  state->comm.ops = ops;
  state->group = group;
  pthread_mutex_init(&state->mutex, NULL);
  *comm = &state->comm; /* the group destroys it, also after a failure */
  CHECK_CUDA(cuStreamCreate(&state->stream, CU_STREAM_NON_BLOCKING));
  CHECK(context->backend->allocate(context, ((size_t)group->ranks + 1) * FINGERPRINT_BYTES_MAX, (void **)&state->buffer));
  if (config->nccl_comm) {
    CHECK(adopt(state, config->nccl_comm));
  } else {
    CHECK(open_control(state, config->unique_id));
    CHECK(open_lanes(state));
  }
  context_log(context, MOEFLOW_LOG_INFO, "rank %d: NCCL %d from %s", group->rank, nccl.version, nccl.path);
cleanup:
  return status;
}

static void close_comms(struct nccl_comm *state) {
  moeflow_status status = MOEFLOW_OK;
  if (state->adopted || state->aborted) return;
  for (int i = 0; i < GROUP_LANES_MAX; i++) {
    if (!state->lanes[i]) continue;
    const int well = look_comm(state, state->lanes[i], &status) == PROGRESS_DONE;
    close_comm(state, &state->lanes[i], well ? run_destroy : run_abort);
  }
  close_comm(state, &state->control, run_abort); /* idle; a non-blocking one would be destroyed in the background */
}

void nccl_comm_destroy(struct comm *comm) {
  struct nccl_comm *state = nccl_comm_of(comm);
  if (!state) return;
  close_comms(state);
  await_closers(state, state->group->timeout_ms);
  for (int i = 0; i < state->closing; i++) pthread_detach(state->closers[i]);
  if (!state->stuck) {
    if (state->buffer) state->group->contexts[0]->backend->release(state->group->contexts[0], state->buffer);
    if (state->stream) driver.cuStreamDestroy(state->stream);
  }
  pthread_mutex_destroy(&state->mutex);
  free(state);
}

moeflow_status nccl_comm_attach(struct comm *comm, struct group_lane *lane) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_group *group = nccl_comm_of(comm)->group;
  struct moeflow_context *context = group->contexts[0];
  const size_t bytes = (size_t)group->ranks * sizeof(uint8_t *);
  uint8_t **row = calloc((size_t)group->ranks, sizeof *row);
  if (!row) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d addresses", group->ranks);
  for (int p = 0; p < group->ranks; p++) row[p] = lane->send;
  CHECK(context->backend->upload(context, lane->dispatch_targets, row, bytes));
  for (int p = 0; p < group->ranks; p++) row[p] = lane->return_send;
  CHECK(context->backend->upload(context, lane->return_targets, row, bytes));
cleanup:
  free(row);
  return status;
}

/* ---- A step ---- */

moeflow_status nccl_comm_exchange(struct comm *comm, const struct group_lane *lane, const struct nccl_exchange *exchange,
                                  void *stream) {
  moeflow_status status = MOEFLOW_OK;
  struct nccl_comm *state = nccl_comm_of(comm);
  const ncclComm_t *lane_comm = &state->lanes[lane - state->group->lanes];
  ncclResult_t result = ncclSuccess;
  pthread_mutex_lock(&state->mutex);
  if (!state->aborted) { /* else the lane is poisoned and the kernels around this call do nothing */
    result = exchange->enqueue(exchange, *lane_comm, (cudaStream_t)stream);
    if (result != ncclSuccess && result != ncclInProgress) status = nccl_status(result, exchange->name, *lane_comm);
  }
  pthread_mutex_unlock(&state->mutex);
  if (result != ncclInProgress) return status;
  return await(state, look_comm, lane_comm, deadline_in(state->group->timeout_ms), "an exchange was not taken");
}

moeflow_status nccl_comm_connect(struct comm *comm, struct group_lane *lane, int rows) {
  moeflow_status status = MOEFLOW_OK;
  struct nccl_comm *state = nccl_comm_of(comm);
  const struct moeflow_group *group = state->group;
  const int64_t deadline = deadline_in(group->timeout_ms);
  const ncclComm_t *lane_comm = &state->lanes[lane - group->lanes];
  CHECK(comm->ops->exchange(comm, lane, MOEFLOW_PHASE_DISPATCH, rows, group->row_bytes_max, state->stream));
  CHECK(comm->ops->exchange(comm, lane, MOEFLOW_PHASE_RETURN, rows, group->return_bytes_max, state->stream));
  CHECK(await(state, look_stream, lane_comm, deadline, "the first exchange did not end"));
cleanup:
  return status;
}

moeflow_status nccl_comm_health(struct comm *comm) {
  struct nccl_comm *state = nccl_comm_of(comm);
  moeflow_status status = MOEFLOW_OK;
  if (pthread_mutex_trylock(&state->mutex)) return MOEFLOW_OK; /* a call is under way, perhaps for long */
  for (int i = 0; i < GROUP_LANES_MAX && !state->aborted && status == MOEFLOW_OK; i++) {
    if (state->lanes[i]) look_comm(state, state->lanes[i], &status);
  }
  pthread_mutex_unlock(&state->mutex);
  return status;
}
