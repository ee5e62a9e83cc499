#include "star.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "status.h"

#define FRAME_MAGIC 0x5254534du /* "MSTR" */

enum frame_kind { FRAME_HELLO = 1, FRAME_GATHER, FRAME_BROADCAST, FRAME_LOST };

struct frame { /* precedes every message; the ranks of one run share a byte order */
  uint32_t magic;
  uint32_t kind;
  uint32_t operation; /* FRAME_LOST: the rank that was lost */
  uint32_t rank;
  uint64_t bytes;
};

struct hello {
  uint32_t protocol;
  uint32_t rank;
  uint32_t size;
  uint32_t reserved;
};

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int left_ms(int64_t deadline) {
  const int64_t left = deadline - now_ms();
  return left > 0 ? (int)left : 0;
}

enum io_result { IO_DONE, IO_ENDED, IO_LATE };

/* Waits until the socket is ready for `events`. */
static enum io_result await(int socket, short events, int64_t deadline) {
  for (;;) {
    struct pollfd wait = {socket, events, 0};
    const int ready = poll(&wait, 1, left_ms(deadline));
    if (ready > 0) return IO_DONE;
    if (ready == 0) return IO_LATE;
    if (errno != EINTR) return IO_ENDED;
  }
}

static enum io_result read_all(int socket, void *data, size_t bytes, int64_t deadline) {
  for (char *at = data; bytes;) {
    const enum io_result ready = await(socket, POLLIN, deadline);
    if (ready != IO_DONE) return ready;
    const ssize_t got = recv(socket, at, bytes, MSG_DONTWAIT);
    if (got == 0) return IO_ENDED;
    if (got < 0 && errno != EINTR && errno != EAGAIN) return IO_ENDED;
    if (got > 0) at += got, bytes -= (size_t)got;
  }
  return IO_DONE;
}

static enum io_result write_all(int socket, const void *data, size_t bytes, int64_t deadline) {
  for (const char *at = data; bytes;) {
    const enum io_result ready = await(socket, POLLOUT, deadline);
    if (ready != IO_DONE) return ready;
    const ssize_t put = send(socket, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && errno != EINTR && errno != EAGAIN) return IO_ENDED;
    if (put > 0) at += put, bytes -= (size_t)put;
  }
  return IO_DONE;
}

static enum io_result write_frame(int socket, const struct frame *frame, const void *data, int64_t deadline) {
  const enum io_result result = write_all(socket, frame, sizeof *frame, deadline);
  return result == IO_DONE ? write_all(socket, data, frame->bytes, deadline) : result;
}

static moeflow_status gone(int rank) {
  return status_set(MOEFLOW_ERROR_PEER, "rank %d is gone: its process ended before the run did", rank);
}

/* What rank 0 may have said before its socket ended. */
static int last_words(const struct star *star) {
  struct frame frame;
  if (star->rank == 0 || read_all(star->sockets[0], &frame, sizeof frame, now_ms()) != IO_DONE) return 0;
  return frame.magic == FRAME_MAGIC && frame.kind == FRAME_LOST ? (int)frame.operation : 0;
}

/* Rank 0 tells all others which rank is lost, without waiting: their sockets are either writable or of no use. */
static moeflow_status lost(struct star *star, int rank, enum io_result how) {
  star->broken = 1;
  if (star->rank == 0) {
    const struct frame frame = {FRAME_MAGIC, FRAME_LOST, (uint32_t)rank, 0, 0};
    for (int peer = 1; peer < star->size; peer++)
      if (peer != rank && star->sockets[peer] >= 0) write_frame(star->sockets[peer], &frame, NULL, now_ms() + 100);
  }
  if (how == IO_LATE)
    return status_set(MOEFLOW_ERROR_TIMEOUT, "rank %d was silent for %d ms; see its own output, or give a longer --timeout",
                      rank, star->timeout_ms);
  return gone(star->rank == 0 ? rank : last_words(star));
}

static moeflow_status out_of_step(struct star *star, int rank, const struct frame *frame) {
  star->broken = 1;
  if (frame->magic == FRAME_MAGIC && frame->kind == FRAME_LOST) return gone((int)frame->operation);
  return status_set(MOEFLOW_ERROR_INTERNAL,
                    "rank %d is out of step: message %u of kind %u with %llu bytes came at message %u", rank,
                    frame->operation, frame->kind, (unsigned long long)frame->bytes, star->operations);
}

/* One message of the present operation from `rank`. */
static moeflow_status receive(struct star *star, int rank, enum frame_kind kind, void *data, size_t bytes,
                              int64_t deadline) {
  struct frame frame;
  enum io_result result = read_all(star->sockets[rank], &frame, sizeof frame, deadline);
  if (result != IO_DONE) return lost(star, rank, result);
  if (frame.magic != FRAME_MAGIC || frame.kind != kind || frame.operation != star->operations || frame.bytes != bytes)
    return out_of_step(star, rank, &frame);
  result = read_all(star->sockets[rank], data, bytes, deadline);
  return result == IO_DONE ? MOEFLOW_OK : lost(star, rank, result);
}

static moeflow_status transmit(struct star *star, int rank, enum frame_kind kind, const void *data, size_t bytes,
                               int64_t deadline) {
  const struct frame frame = {FRAME_MAGIC, (uint32_t)kind, star->operations, (uint32_t)star->rank, bytes};
  const enum io_result result = write_frame(star->sockets[rank], &frame, data, deadline);
  return result == IO_DONE ? MOEFLOW_OK : lost(star, rank, result);
}

static moeflow_status begin(struct star *star) {
  if (star->broken) return status_set(MOEFLOW_ERROR_PEER, "the ranks' connection was lost earlier");
  star->operations++;
  return MOEFLOW_OK;
}

/* Whoever speaks first is read first, so that a dead rank is seen even while a slower one keeps silent. */
static moeflow_status gather_all(struct star *star, size_t bytes, char *all, int64_t deadline) {
  struct pollfd *waits = calloc((size_t)star->size, sizeof *waits);
  moeflow_status status = MOEFLOW_OK;
  if (!waits) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", star->size);
  int pending = star->size - 1;
  for (int rank = 0; rank < star->size; rank++) waits[rank] = (struct pollfd){star->sockets[rank], POLLIN, 0};
  waits[0].fd = -1;
  while (pending && status == MOEFLOW_OK) {
    const int ready = poll(waits, (nfds_t)star->size, left_ms(deadline));
    if (ready < 0 && errno == EINTR) continue;
    for (int rank = 1; rank < star->size && status == MOEFLOW_OK; rank++) {
      if (waits[rank].fd < 0) continue;
      if (ready <= 0) status = lost(star, rank, IO_LATE);
      if (ready <= 0 || !waits[rank].revents) continue;
      status = receive(star, rank, FRAME_GATHER, all + (size_t)rank * bytes, bytes, deadline);
      waits[rank].fd = -1;
      pending--;
    }
  }
  free(waits);
  return status;
}

moeflow_status star_gather(struct star *star, const void *mine, size_t bytes, void *all) {
  moeflow_status status = begin(star);
  if (status != MOEFLOW_OK) return status;
  const int64_t deadline = now_ms() + star->timeout_ms;
  if (star->rank != 0) return transmit(star, 0, FRAME_GATHER, mine, bytes, deadline);
  memcpy(all, mine, bytes);
  return gather_all(star, bytes, all, deadline);
}

moeflow_status star_broadcast(struct star *star, void *data, size_t bytes) {
  moeflow_status status = begin(star);
  if (status != MOEFLOW_OK) return status;
  const int64_t deadline = now_ms() + star->timeout_ms;
  if (star->rank != 0) return receive(star, 0, FRAME_BROADCAST, data, bytes, deadline);
  for (int rank = 1; rank < star->size && status == MOEFLOW_OK; rank++)
    status = transmit(star, rank, FRAME_BROADCAST, data, bytes, deadline);
  return status;
}

struct verdict {
  int32_t status;
  int32_t rank;
  char message[STAR_MESSAGE_MAX];
};

/* To the cause: who only lost a peer has less to say than who failed. */
static int closeness(int32_t status) {
  return status == MOEFLOW_OK ? 0 : status == MOEFLOW_ERROR_PEER || status == MOEFLOW_ERROR_TIMEOUT ? 1 : 2;
}

moeflow_status star_agree(struct star *star, moeflow_status mine, int *culprit) {
  struct verdict verdict = {.status = (int32_t)mine, .rank = star->rank};
  struct verdict *all = NULL;
  moeflow_status status = MOEFLOW_OK;
  if (culprit) *culprit = -1;
  if (mine != MOEFLOW_OK) snprintf(verdict.message, sizeof verdict.message, "%s", moeflow_last_error());
  if (star->rank == 0) {
    all = calloc((size_t)star->size, sizeof *all);
    if (!all) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", star->size);
  }
  CHECK(star_gather(star, &verdict, sizeof verdict, all));
  for (int rank = 1; star->rank == 0 && rank < star->size; rank++)
    if (closeness(all[rank].status) > closeness(verdict.status)) verdict = all[rank];
  CHECK(star_broadcast(star, &verdict, sizeof verdict));
  verdict.message[STAR_MESSAGE_MAX - 1] = 0;
  if (verdict.status != MOEFLOW_OK) {
    if (culprit) *culprit = verdict.rank;
    status = status_set((moeflow_status)verdict.status, "rank %d: %s", verdict.rank, verdict.message);
  }

cleanup:
  free(all);
  return status;
}

static void close_socket(int *socket) {
  if (*socket >= 0) close(*socket);
  *socket = -1;
}

void star_close(struct star *star) {
  if (!star->sockets) return;
  const int count = star->rank == 0 ? star->size : 1;
  for (int i = 0; i < count; i++) close_socket(&star->sockets[i]);
  free(star->sockets);
  star->sockets = NULL;
}

static moeflow_status star_new(struct star *star, int rank, int size, int timeout_ms) {
  const int count = rank == 0 ? size : 1;
  *star = (struct star){.rank = rank, .size = size, .timeout_ms = timeout_ms};
  star->sockets = malloc((size_t)count * sizeof *star->sockets);
  if (!star->sockets) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", size);
  for (int i = 0; i < count; i++) star->sockets[i] = -1;
  return MOEFLOW_OK;
}

moeflow_status star_pairs(int size, int timeout_ms, struct star *stars) {
  moeflow_status status = MOEFLOW_OK;
  memset(stars, 0, (size_t)size * sizeof *stars);
  for (int rank = 0; rank < size; rank++) {
    int pair[2];
    CHECK(star_new(&stars[rank], rank, size, timeout_ms));
    if (rank == 0) continue;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
      FAIL(MOEFLOW_ERROR_ENVIRONMENT, "no socket pair for rank %d: %s", rank, strerror(errno));
    stars[0].sockets[rank] = pair[0];
    stars[rank].sockets[0] = pair[1];
  }
  return MOEFLOW_OK;

cleanup:
  for (int rank = 0; rank < size; rank++) star_close(&stars[rank]);
  return status;
}

void star_keep(struct star *stars, int size, int rank) {
  for (int other = 0; other < size; other++)
    if (other != rank) star_close(&stars[other]);
}

/* ---- TCP ---- */

static moeflow_status resolve(const char *host, int port, int passive, struct addrinfo **found) {
  char service[16];
  const struct addrinfo hints = {.ai_flags = passive ? AI_PASSIVE : 0, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  snprintf(service, sizeof service, "%d", port);
  const int error = getaddrinfo(passive ? NULL : host, service, &hints, found);
  if (error)
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot resolve %s:%d: %s; give --rendezvous HOST:PORT", host, port,
                      gai_strerror(error));
  return MOEFLOW_OK;
}

/* IPv6 first where there is any, taking IPv4 too; else IPv4. A loopback host is listened on as such. */
static moeflow_status listen_on(const char *host, int port, int backlog, int *listener) {
  struct addrinfo *found = NULL;
  const int loopback = strcmp(host, "127.0.0.1") == 0 || strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0;
  moeflow_status status = resolve(host, port, !loopback, &found);
  int error = 0;
  *listener = -1;
  for (int family = loopback ? AF_UNSPEC : AF_INET6; status == MOEFLOW_OK && *listener < 0; family = AF_INET) {
    for (const struct addrinfo *at = found; at && *listener < 0; at = at->ai_next) {
      const int on = 1, off = 0;
      if (family != AF_UNSPEC && at->ai_family != family) continue;
      int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (fd < 0) continue;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (at->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      if (!bind(fd, at->ai_addr, at->ai_addrlen) && !listen(fd, backlog)) {
        *listener = fd;
      } else {
        error = errno;
        close(fd);
      }
    }
    if (family != AF_INET6) break;
  }
  if (found) freeaddrinfo(found);
  if (status == MOEFLOW_OK && *listener < 0)
    status = status_set(MOEFLOW_ERROR_ENVIRONMENT,
                        "rank 0 cannot listen on port %d: %s; give --rendezvous HOST:PORT with a free "
                        "port",
                        port, strerror(error));
  return status;
}

/* Takes one connection and its hello; a stranger's is dropped, a wrong size or protocol is an error. */
static moeflow_status admit(struct star *star, int fd, int64_t deadline, int *admitted) {
  struct frame frame;
  struct hello hello;
  const int64_t soon = now_ms() + 2000;
  const int64_t until = soon < deadline ? soon : deadline;
  *admitted = 0;
  if (read_all(fd, &frame, sizeof frame, until) != IO_DONE || frame.magic != FRAME_MAGIC || frame.kind != FRAME_HELLO ||
      frame.bytes != sizeof hello || read_all(fd, &hello, sizeof hello, until) != IO_DONE) {
    close(fd);
    return MOEFLOW_OK;
  }
  if (hello.protocol != STAR_PROTOCOL || hello.size != (uint32_t)star->size || hello.rank == 0 ||
      hello.rank >= (uint32_t)star->size || star->sockets[hello.rank] >= 0) {
    close(fd);
    return status_set(MOEFLOW_ERROR_MISMATCH,
                      "a process says it is rank %u of %u (protocol %u), rank 0 expects ranks 1 to %d, "
                      "each once (protocol %d); is another run using this port?",
                      hello.rank, hello.size, hello.protocol, star->size - 1, STAR_PROTOCOL);
  }
  star->sockets[hello.rank] = fd;
  *admitted = 1;
  return MOEFLOW_OK;
}

static moeflow_status accept_all(struct star *star, const char *host, int port, int64_t deadline) {
  int listener = -1, admitted;
  moeflow_status status = listen_on(host, port, star->size, &listener);
  for (int here = 1; status == MOEFLOW_OK && here < star->size;) {
    if (await(listener, POLLIN, deadline) != IO_DONE) {
      int missing = 1;
      while (missing < star->size && star->sockets[missing] >= 0) missing++;
      status = status_set(MOEFLOW_ERROR_TIMEOUT, "%d of %d ranks came to port %d within %d ms; rank %d did not", here,
                          star->size, port, star->timeout_ms, missing);
      break;
    }
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) continue;
    status = admit(star, fd, deadline, &admitted);
    here += admitted;
  }
  close_socket(&listener);
  return status;
}

static int connect_once(const struct addrinfo *found) {
  for (const struct addrinfo *at = found; at; at = at->ai_next) {
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    if (!connect(fd, at->ai_addr, at->ai_addrlen)) return fd;
    close(fd);
  }
  return -1;
}

static moeflow_status say_hello(struct star *star, const char *host, int port, int64_t deadline) {
  const struct frame frame = {FRAME_MAGIC, FRAME_HELLO, 0, (uint32_t)star->rank, sizeof(struct hello)};
  const struct hello hello = {STAR_PROTOCOL, (uint32_t)star->rank, (uint32_t)star->size, 0};
  struct addrinfo *found = NULL;
  moeflow_status status = resolve(host, port, 0, &found);
  if (status != MOEFLOW_OK) return status;
  while ((star->sockets[0] = connect_once(found)) < 0 && left_ms(deadline)) {
    const struct timespec nap = {0, 50 * 1000000};
    nanosleep(&nap, NULL);
  }
  freeaddrinfo(found);
  if (star->sockets[0] < 0)
    return status_set(MOEFLOW_ERROR_TIMEOUT, "rank %d: rank 0 did not listen on %s:%d within %d ms", star->rank, host, port,
                      star->timeout_ms);
  const enum io_result result = write_frame(star->sockets[0], &frame, &hello, deadline);
  return result == IO_DONE ? MOEFLOW_OK : lost(star, 0, result);
}

moeflow_status star_connect(int rank, int size, const char *host, int port, int timeout_ms, struct star *star) {
  const int64_t deadline = now_ms() + timeout_ms;
  moeflow_status status = star_new(star, rank, size, timeout_ms);
  if (status != MOEFLOW_OK) return status;
  status = rank == 0 ? accept_all(star, host, port, deadline) : say_hello(star, host, port, deadline);
  for (int i = 0; status == MOEFLOW_OK && i < (rank == 0 ? size : 1); i++) {
    const int on = 1;
    if (star->sockets[i] >= 0) setsockopt(star->sockets[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  if (status != MOEFLOW_OK) star_close(star);
  return status;
}
