#include "fake_nccl.h"

#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define RANKS_MAX 8

#ifdef FAKE_NCCL_OLD
static struct fake_nccl fake = {.version = 21905};
#else
static struct fake_nccl fake = {.version = NCCL_VERSION_CODE};
#endif

EXPORT struct fake_nccl *fake_nccl(void);
struct fake_nccl *fake_nccl(void) {
  return &fake;
}

struct post {
  const char *send;
  char *receive;
  size_t bytes;
  struct fake_stream *stream;
};

struct meeting { /* the ranks of one unique id */
  struct meeting *next;
  ncclUniqueId id;
  int ranks, joined, leaving, left, posted, all_to_all;
  struct post posts[RANKS_MAX];
};

struct ncclComm {
  struct meeting *meeting;
  int rank, ranks, blocking, device;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct meeting *meetings;

static struct meeting *meet(const ncclUniqueId *id, int ranks) {
  struct meeting *meeting = meetings;
  while (meeting && memcmp(&meeting->id, id, sizeof *id)) meeting = meeting->next;
  if (meeting) return meeting;
  meeting = calloc(1, sizeof *meeting);
  meeting->id = *id;
  meeting->ranks = ranks;
  meeting->next = meetings;
  meetings = meeting;
  return meeting;
}

EXPORT ncclResult_t ncclGetVersion(int *version) {
  *version = fake.version;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static atomic_int next;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "fake nccl id %d", atomic_fetch_add(&next, 1));
  return ncclSuccess;
}

static int everybody_came(struct ncclComm *comm) {
  pthread_mutex_lock(&mutex);
  int all = comm->meeting->joined == comm->ranks && !fake.init_never;
  pthread_mutex_unlock(&mutex);
  return all;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  if (fake.fail_init) return ncclSystemError;
  struct ncclComm *comm = calloc(1, sizeof *comm);
  pthread_mutex_lock(&mutex);
  comm->meeting = meet(&id, ranks);
  comm->meeting->joined++;
  pthread_mutex_unlock(&mutex);
  comm->rank = rank;
  comm->ranks = ranks;
  comm->blocking = config->blocking != 0;
  *out = comm;
  atomic_fetch_add(&fake.live, 1);
  const struct timespec nap = {0, 1000000};
  while (comm->blocking && !everybody_came(comm)) nanosleep(&nap, NULL);
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

/* The posts of a communicator that goes away never complete; its streams are free again. */
static void leave(struct ncclComm *comm) {
  pthread_mutex_lock(&mutex);
  struct meeting *meeting = comm->meeting;
  struct post *post = &meeting->posts[comm->rank];
  if (post->stream) {
    atomic_fetch_sub(&post->stream->pending, 1);
    meeting->posted--;
  }
  post->stream = NULL;
  if (++meeting->left == meeting->ranks) {
    struct meeting **at = &meetings;
    while (*at != meeting) at = &(*at)->next;
    *at = meeting->next;
    free(meeting);
  }
  pthread_mutex_unlock(&mutex);
  free(comm);
  atomic_fetch_sub(&fake.live, 1);
}

static void await_graphs(void) {
  const struct timespec nap = {0, 1000000};
  while (fake.graphs) nanosleep(&nap, NULL);
}

static void meet_again(struct meeting *meeting) {
  const struct timespec nap = {0, 1000000};
  pthread_mutex_lock(&mutex);
  meeting->leaving++;
  while (fake.destroy_meets && meeting->leaving < meeting->ranks) {
    pthread_mutex_unlock(&mutex);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&mutex);
  }
  pthread_mutex_unlock(&mutex);
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  await_graphs();
  meet_again(comm->meeting);
  atomic_fetch_add(&fake.destroyed, 1);
  leave(comm);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  atomic_fetch_add(&fake.aborted, 1);
  await_graphs();
  leave(comm);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
  *result = everybody_came(comm) ? ncclSuccess : ncclInProgress;
  if (fake.fail_async) *result = ncclRemoteError;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  *count = comm->ranks;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  *device = comm->device;
  return ncclSuccess;
}

static void complete(struct meeting *meeting) {
  for (int to = 0; to < meeting->ranks; to++) {
    for (int from = 0; from < meeting->ranks; from++) {
      const struct post *source = &meeting->posts[from];
      const char *send = source->send + (meeting->all_to_all ? (size_t)to * source->bytes : 0);
      if (source->stream && meeting->posts[to].stream) {
        memcpy(meeting->posts[to].receive + (size_t)from * source->bytes, send, source->bytes);
      }
    }
  }
  for (int rank = 0; rank < meeting->ranks; rank++) {
    if (meeting->posts[rank].stream) atomic_fetch_sub(&meeting->posts[rank].stream->pending, 1);
    meeting->posts[rank].stream = NULL;
  }
  meeting->posted = 0;
}

static struct fake_stream legacy;

/* Blocks while this rank's last post still waits: one collective at a time is enough here. */
static ncclResult_t post(ncclComm_t comm, const void *send, void *receive, size_t bytes, int all_to_all,
                         cudaStream_t stream) {
  struct meeting *meeting = comm->meeting;
  const struct timespec nap = {0, 1000000};
  pthread_mutex_lock(&mutex);
  while (meeting->posts[comm->rank].stream) {
    pthread_mutex_unlock(&mutex);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&mutex);
  }
  struct fake_stream *busy = stream ? (struct fake_stream *)stream : &legacy;
  meeting->posts[comm->rank] = (struct post){send, receive, bytes, busy};
  meeting->all_to_all = all_to_all;
  atomic_fetch_add(&busy->pending, 1);
  if (++meeting->posted == meeting->ranks) complete(meeting);
  pthread_mutex_unlock(&mutex);
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  atomic_fetch_add(&fake.gathers, 1);
  return type == ncclInt8 ? post(comm, send, receive, count, 0, stream) : ncclInvalidArgument;
}

#ifndef FAKE_NCCL_OLD
EXPORT ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
  const struct timespec nap = {0, 1000000};
  atomic_fetch_add(&fake.all_to_alls, 1);
  if (fake.all_to_all_blocks) {
    while (!fake.aborted) nanosleep(&nap, NULL);
    return ncclSuccess;
  }
  return type == ncclInt8 ? post(comm, send, receive, count, 1, stream) : ncclInvalidArgument;
}
#endif

/* A group of sends and receives is taken for an all-to-all: rank 0's addresses come first. */
static _Thread_local struct {
  const void *send;
  void *receive;
  size_t bytes;
  ncclComm_t comm;
  cudaStream_t stream;
  int sends, receives;
} grouped;

EXPORT ncclResult_t ncclGroupStart(void) {
  memset(&grouped, 0, sizeof grouped);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  atomic_fetch_add(&fake.sends, 1);
  if (type != ncclInt8 || peer != grouped.sends) return ncclInvalidArgument;
  if (grouped.sends++ == 0) grouped.send = send;
  if ((const char *)grouped.send + (size_t)peer * count != (const char *)send) return ncclInvalidArgument;
  grouped.bytes = count;
  grouped.comm = comm;
  grouped.stream = stream;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  (void)comm, (void)stream;
  atomic_fetch_add(&fake.receives, 1);
  if (type != ncclInt8 || peer != grouped.receives) return ncclInvalidArgument;
  if (grouped.receives++ == 0) grouped.receive = receive;
  return (char *)grouped.receive + (size_t)peer * count == (char *)receive ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
  if (grouped.sends != grouped.receives || !grouped.comm || grouped.sends != grouped.comm->ranks) return ncclInvalidUsage;
  return post(grouped.comm, grouped.send, grouped.receive, grouped.bytes, 1, grouped.stream);
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote error" : "made to fail";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return "fake detail";
}
