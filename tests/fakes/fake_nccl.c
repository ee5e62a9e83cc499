#include "fake_nccl.h"

#include <nccl.h>
#include <pthread.h>
#include <stdint.h>
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

enum kind { GATHER, ALL_TO_ALL, REDUCE_SCATTER };

struct post {
  const char *send;
  char *receive;
  size_t bytes; /* of a rank's block */
  struct fake_stream *stream;
};

struct meeting { /* the ranks of one unique id */
  struct meeting *next;
  ncclUniqueId id;
  int ranks, joined, leaving, left, posted;
  enum kind kind;
  ncclDataType_t type;
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

static float value_at(ncclDataType_t type, const char *from, size_t i) {
  float value;
  if (type == ncclFloat32) return ((const float *)from)[i];
  const uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Sums that are no bf16 are cut off. */
static void store_at(ncclDataType_t type, char *to, size_t i, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (type == ncclFloat32)
    ((float *)to)[i] = value;
  else
    ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
}

static void add_blocks(const struct meeting *meeting, int to) {
  const struct post *mine = &meeting->posts[to];
  const size_t count = mine->bytes / (meeting->type == ncclFloat32 ? 4 : 2);
  for (size_t i = 0; i < count; i++) {
    float sum = 0;
    for (int from = 0; from < meeting->ranks; from++) {
      sum += value_at(meeting->type, meeting->posts[from].send + (size_t)to * mine->bytes, i);
    }
    store_at(meeting->type, mine->receive, i, sum);
  }
}

static void complete(struct meeting *meeting) {
  for (int to = 0; to < meeting->ranks; to++) {
    if (meeting->kind == REDUCE_SCATTER) add_blocks(meeting, to);
    for (int from = 0; meeting->kind != REDUCE_SCATTER && from < meeting->ranks; from++) {
      const struct post *source = &meeting->posts[from];
      const char *send = source->send + (meeting->kind == ALL_TO_ALL ? (size_t)to * source->bytes : 0);
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

static size_t bytes_of(ncclDataType_t type) {
  return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

static int fails(const char *name) {
  const char *wanted = fake.fail_collective;
  return wanted && !strcmp(name, wanted) && atomic_exchange(&fake.fail_collective, NULL) != NULL;
}

/* Blocks while this rank's last post still waits: one collective at a time is enough here. */
static ncclResult_t post(ncclComm_t comm, const struct fake_collective *call, enum kind kind) {
  struct meeting *meeting = comm->meeting;
  const struct timespec nap = {0, 1000000};
  pthread_mutex_lock(&mutex);
  while (meeting->posts[comm->rank].stream) {
    pthread_mutex_unlock(&mutex);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&mutex);
  }
  struct fake_stream *busy = call->stream ? (struct fake_stream *)call->stream : &legacy;
  const size_t bytes = call->count * bytes_of((ncclDataType_t)call->type);
  if (fake.collective_count < FAKE_COLLECTIVES_MAX) fake.collectives[fake.collective_count++] = *call;
  meeting->posts[comm->rank] = (struct post){call->send, call->receive, bytes, busy};
  meeting->kind = kind;
  meeting->type = (ncclDataType_t)call->type;
  atomic_fetch_add(&busy->pending, 1);
  if (++meeting->posted == meeting->ranks) complete(meeting);
  pthread_mutex_unlock(&mutex);
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

static struct fake_collective called(const char *name, const void *send, void *receive, size_t count, ncclDataType_t type,
                                     ncclComm_t comm, cudaStream_t stream) {
  struct fake_collective call = {.rank = comm->rank,
                                 .type = (int)type,
                                 .at = fake.clock ? *fake.clock : 0,
                                 .count = count,
                                 .send = send,
                                 .receive = receive,
                                 .stream = stream};
  snprintf(call.name, sizeof call.name, "%s", name);
  return call;
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  const struct fake_collective call = called("ncclAllGather", send, receive, count, type, comm, stream);
  atomic_fetch_add(&fake.gathers, 1);
  if (fails(call.name)) return ncclSystemError;
  return type == ncclInt8 ? post(comm, &call, GATHER) : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  const struct fake_collective call = called("ncclReduceScatter", send, receive, count, type, comm, stream);
  if (fails(call.name)) return ncclSystemError;
  if (op != ncclSum || (type != ncclFloat32 && type != ncclBfloat16)) return ncclInvalidArgument;
  return post(comm, &call, REDUCE_SCATTER);
}

#ifndef FAKE_NCCL_OLD
EXPORT ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
  const struct timespec nap = {0, 1000000};
  const struct fake_collective call = called("ncclAlltoAll", send, receive, count, type, comm, stream);
  atomic_fetch_add(&fake.all_to_alls, 1);
  if (fails(call.name)) return ncclSystemError;
  if (fake.all_to_all_blocks) {
    while (!fake.aborted) nanosleep(&nap, NULL);
    return ncclSuccess;
  }
  return type == ncclInt8 ? post(comm, &call, ALL_TO_ALL) : ncclInvalidArgument;
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
  const struct fake_collective call =
      called("ncclSend", grouped.send, grouped.receive, grouped.bytes, ncclInt8, grouped.comm, grouped.stream);
  return post(grouped.comm, &call, ALL_TO_ALL);
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote error" : "made to fail";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return "fake detail";
}
