#include "meeting.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "deadline.h"
#include "sha256.h"
#include "status.h"

#define PROTOCOL 0x6d6f6501u
#define GRACE_MS 1000   /* ranks wait so much longer than rank 0, to hear whom it misses */
#define HELLO_MS 1000   /* a process that connects and says nothing does not hold up the others for longer */
#define WAITING_MAX 128 /* connections that have not been accepted */

enum operation { OPERATION_JOIN = 1, OPERATION_GATHER, OPERATION_FDS };

static const char *const deeds[] = {"", "join the group", "come to a collective call", "come to a collective call"};

/* What a rank brings to an operation. Rank 0 answers with one, and behind it the result where all went well. */
struct letter {
  uint32_t protocol, operation;
  int32_t rank, ranks, status;
  uint32_t bytes;
  uint8_t body[MEETING_BYTES_MAX]; /* a rank's bytes; in an answer the reason of a failure */
};

struct meeting {
  int rank, ranks, timeout_ms;
  int *sockets;           /* [ranks]: rank 0 has one to each other rank, and the others one to rank 0; else -1 */
  size_t *arrived;        /* rank 0, [ranks]: bytes of each letter */
  struct letter *letters; /* rank 0, [ranks] */
  moeflow_status broken;
  char why[256];
};

/* ---- Bytes, until a deadline ---- */

enum end { END_DONE, END_LATE, END_GONE };

static enum end await(int socket, short events, int64_t deadline) {
  struct pollfd look = {.fd = socket, .events = events};
  for (;;) {
    const int64_t left = deadline - deadline_now_ms();
    const int ready = poll(&look, 1, left > 0 ? (int)left : 0);
    if (ready > 0) return END_DONE;
    if (ready < 0 && errno != EINTR) return END_GONE;
    if (left <= 0) return END_LATE;
  }
}

/* One message, with at most one descriptor: fd NULL for none. Returns what sendmsg or recvmsg does, -1 with EAGAIN included.
 */
static ssize_t pass(int socket, void *bytes, size_t size, int *fd, int receive) {
  union {
    struct cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
  } control;
  struct iovec part = {bytes, size};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  memset(&control, 0, sizeof control);
  if (fd) {
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
  }
  if (fd && !receive) {
    control.header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(&control.header), fd, sizeof *fd);
  }
  if (!receive) return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const struct cmsghdr *header = got > 0 && fd ? CMSG_FIRSTHDR(&message) : NULL;
  if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    memcpy(fd, CMSG_DATA(header), sizeof *fd);
  }
  return got;
}

static int again(void) {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static enum end move_all(int socket, void *bytes, size_t size, int *fd, int receive, int64_t deadline) {
  for (size_t done = 0; done < size;) {
    const ssize_t moved = pass(socket, (char *)bytes + done, size - done, done ? NULL : fd, receive);
    if (moved == 0 || (moved < 0 && !again())) return END_GONE;
    if (moved > 0) {
      done += (size_t)moved;
      continue;
    }
    const enum end end = await(socket, receive ? POLLIN : POLLOUT, deadline);
    if (end != END_DONE) return end;
  }
  return END_DONE;
}

/* ---- Failing together ---- */

static moeflow_status broken(const struct meeting *meeting) {
  return status_set(meeting->broken, "%s", meeting->why);
}

/* The first reason stays; rank 0 tells it to all who are there. */
static moeflow_status fail(struct meeting *meeting, moeflow_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static moeflow_status fail(struct meeting *meeting, moeflow_status status, const char *format, ...) {
  struct letter answer = {.protocol = PROTOCOL, .status = (int32_t)status};
  va_list arguments;
  if (meeting->broken != MOEFLOW_OK) return broken(meeting);
  meeting->broken = status;
  va_start(arguments, format);
  vsnprintf(meeting->why, sizeof meeting->why, format, arguments);
  va_end(arguments);
  memcpy(answer.body, meeting->why, sizeof meeting->why);
  for (int r = 1; meeting->rank == 0 && r < meeting->ranks; r++) {
    if (meeting->sockets[r] >= 0) move_all(meeting->sockets[r], &answer, sizeof answer, NULL, 0, deadline_now_ms());
  }
  return broken(meeting);
}

static moeflow_status fail_for_missing(struct meeting *meeting, enum operation operation) {
  char list[128] = "";
  size_t length = 0;
  for (int r = 1; r < meeting->ranks && length < sizeof list - 16; r++) {
    if (meeting->arrived[r] == sizeof(struct letter)) continue;
    length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", length ? ", " : "", r);
  }
  return fail(meeting, MOEFLOW_ERROR_TIMEOUT, "rank %s of %d did not %s within %d ms", list, meeting->ranks,
              deeds[operation], meeting->timeout_ms);
}

static moeflow_status fail_for(struct meeting *meeting, int rank, enum end end, enum operation operation) {
  if (end == END_LATE) {
    return fail(meeting, MOEFLOW_ERROR_TIMEOUT, "rank %d of %d did not %s within %d ms", rank, meeting->ranks,
                deeds[operation], meeting->timeout_ms);
  }
  return fail(meeting, MOEFLOW_ERROR_PEER, "rank %d has left the group, or its process has ended", rank);
}

/* ---- Letters ---- */

static struct letter letter_of(const struct meeting *meeting, enum operation operation, const void *mine, size_t bytes) {
  struct letter letter = {.protocol = PROTOCOL,
                          .operation = operation,
                          .rank = meeting->rank,
                          .ranks = meeting->ranks,
                          .bytes = (uint32_t)bytes};
  if (bytes) memcpy(letter.body, mine, bytes);
  return letter;
}

/* A rank other than 0: its letter out, rank 0's answer in. */
static moeflow_status write_to_first(struct meeting *meeting, struct letter *letter, int *fd, int64_t deadline) {
  const int socket = meeting->sockets[0];
  const enum operation operation = (enum operation)letter->operation;
  enum end end = move_all(socket, letter, sizeof *letter, fd, 0, deadline);
  if (end == END_GONE) { /* perhaps rank 0 said why before it went */
    deadline = deadline_now_ms();
  } else if (end == END_LATE) {
    return fail_for(meeting, 0, end, operation);
  }
  end = move_all(socket, letter, sizeof *letter, NULL, 1, deadline + GRACE_MS);
  if (end != END_DONE) return fail_for(meeting, 0, end, operation);
  letter->body[sizeof meeting->why - 1] = 0;
  if (letter->status != MOEFLOW_OK) return fail(meeting, (moeflow_status)letter->status, "%s", (char *)letter->body);
  return MOEFLOW_OK;
}

/* Rank 0: what has come from rank r, whose socket has something. `fds` may be NULL. */
static moeflow_status read_some(struct meeting *meeting, int r, enum operation operation, int *fds) {
  struct letter *letter = &meeting->letters[r];
  size_t *arrived = &meeting->arrived[r];
  const ssize_t got =
      pass(meeting->sockets[r], (char *)letter + *arrived, sizeof *letter - *arrived, fds && fds[r] < 0 ? &fds[r] : NULL, 1);
  if (got < 0 && again()) return MOEFLOW_OK;
  if (got <= 0) return fail_for(meeting, r, END_GONE, operation);
  *arrived += (size_t)got;
  return MOEFLOW_OK;
}

/* Rank 0: every other rank's letter, and its descriptor where `fds` is given. */
static moeflow_status read_letters(struct meeting *meeting, enum operation operation, int *fds, int64_t deadline) {
  moeflow_status status = MOEFLOW_OK;
  struct pollfd *looks = calloc((size_t)meeting->ranks, sizeof *looks);
  if (!looks) return fail(meeting, MOEFLOW_ERROR_MEMORY, "no memory to hear %d ranks", meeting->ranks);
  memset(meeting->arrived, 0, (size_t)meeting->ranks * sizeof *meeting->arrived);
  for (;;) {
    int waiting = 0;
    for (int r = 0; r < meeting->ranks; r++) {
      const int here = r == 0 || meeting->arrived[r] == sizeof(struct letter);
      looks[r] = (struct pollfd){.fd = here ? -1 : meeting->sockets[r], .events = POLLIN};
      waiting += !here;
    }
    if (!waiting) break;
    const int64_t left = deadline - deadline_now_ms();
    const int ready = poll(looks, (nfds_t)meeting->ranks, left > 0 ? (int)left : 0);
    for (int r = 1; ready > 0 && r < meeting->ranks; r++) {
      if (looks[r].revents) CHECK(read_some(meeting, r, operation, fds));
    }
    if (ready <= 0 && left <= 0) CHECK(fail_for_missing(meeting, operation));
  }
cleanup:
  free(looks);
  return status;
}

static moeflow_status check_letters(struct meeting *meeting, const struct letter *mine, const int *fds) {
  for (int r = 1; r < meeting->ranks; r++) {
    const struct letter *letter = &meeting->letters[r];
    if (letter->operation != mine->operation || letter->bytes != mine->bytes) {
      return fail(meeting, MOEFLOW_ERROR_MISMATCH,
                  "rank %d is in another collective call: the ranks do not make the same calls in the same order", r);
    }
    if (fds && fds[r] < 0) return fail(meeting, MOEFLOW_ERROR_INTERNAL, "rank %d gave no file", r);
  }
  return MOEFLOW_OK;
}

/* Rank 0 to every other rank: all is well, and the result. */
static moeflow_status answer(struct meeting *meeting, const struct letter *mine, void *result, size_t bytes, int *fds,
                             int64_t deadline) {
  for (int r = 1; r < meeting->ranks; r++) {
    struct letter letter = *mine;
    char byte = 0;
    enum end end = move_all(meeting->sockets[r], &letter, sizeof letter, NULL, 0, deadline);
    if (end == END_DONE && bytes) end = move_all(meeting->sockets[r], result, bytes, NULL, 0, deadline);
    for (int i = 0; fds && end == END_DONE && i < meeting->ranks; i++) {
      end = move_all(meeting->sockets[r], &byte, 1, &fds[i], 0, deadline);
    }
    if (end != END_DONE) return fail_for(meeting, r, end, (enum operation)mine->operation);
  }
  return MOEFLOW_OK;
}

/* ---- Joining ---- */

static void name_of(const moeflow_unique_id *id, struct sockaddr_un *address, socklen_t *length) {
  uint8_t digest[32];
  char hex[65];
  sha256(id, sizeof *id, digest);
  sha256_hex(digest, hex);
  memset(address, 0, sizeof *address); /* a name that begins with 0 is abstract: no file */
  address->sun_family = AF_UNIX;
  const int written = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "moeflow-%s", hex);
  *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)written);
}

static int same_user(int socket) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

static int new_socket(void) {
  return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* Whether `hello` fits the meeting; what does not breaks it. */
static moeflow_status check_hello(struct meeting *meeting, const struct letter *hello) {
  if (meeting->broken != MOEFLOW_OK) return broken(meeting);
  if (hello->ranks != meeting->ranks) {
    return fail(meeting, MOEFLOW_ERROR_MISMATCH, "ranks disagree on ranks: rank %d says %d, rank 0 says %d", hello->rank,
                hello->ranks, meeting->ranks);
  }
  if (hello->rank < 1 || hello->rank >= meeting->ranks || meeting->sockets[hello->rank] >= 0) {
    return fail(meeting, MOEFLOW_ERROR_ARGUMENT, "two ranks of the group say they are rank %d", hello->rank);
  }
  return MOEFLOW_OK;
}

/* Rank 0: takes in one connection, tells it why not, or drops it where it is nobody's of the group. Returns whether it was a
 * rank. */
static int take_in(struct meeting *meeting, int socket, int64_t deadline) {
  struct letter hello;
  const int64_t soon = deadline_in(HELLO_MS);
  const int said =
      same_user(socket) && move_all(socket, &hello, sizeof hello, NULL, 1, soon < deadline ? soon : deadline) == END_DONE;
  const int is_rank = said && hello.protocol == PROTOCOL && hello.operation == OPERATION_JOIN;
  const moeflow_status status = is_rank ? check_hello(meeting, &hello) : MOEFLOW_OK;
  if (is_rank && status == MOEFLOW_OK) {
    meeting->sockets[hello.rank] = socket;
    meeting->arrived[hello.rank] = sizeof hello;
    return 1;
  }
  if (is_rank) {
    struct letter refusal = {.protocol = PROTOCOL, .status = (int32_t)status};
    memcpy(refusal.body, meeting->why, sizeof meeting->why);
    move_all(socket, &refusal, sizeof refusal, NULL, 0, deadline_now_ms());
  }
  close(socket);
  return is_rank;
}

/* A broken meeting goes on for the ranks that come late, to tell them why. */
static moeflow_status listen_for_all(struct meeting *meeting, const struct sockaddr_un *address, socklen_t length,
                                     int64_t deadline) {
  moeflow_status status = MOEFLOW_OK;
  const int listener = new_socket();
  if (listener < 0 || bind(listener, (const struct sockaddr *)address, length) || listen(listener, WAITING_MAX)) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "rank 0 cannot listen on a Unix socket: %s%s", strerror(errno),
         errno == EADDRINUSE ? "; the unique_id is in use by another group" : "");
  }
  for (int came = 1; came < meeting->ranks;) {
    if (await(listener, POLLIN, deadline) != END_DONE) CHECK(fail_for_missing(meeting, OPERATION_JOIN));
    const int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket >= 0) came += take_in(meeting, socket, deadline);
  }
  if (meeting->broken != MOEFLOW_OK) CHECK(broken(meeting));
  const struct letter welcome = letter_of(meeting, OPERATION_JOIN, NULL, 0);
  CHECK(answer(meeting, &welcome, NULL, 0, NULL, deadline + GRACE_MS));
cleanup:
  if (listener >= 0) close(listener);
  return status;
}

static moeflow_status connect_to_first(struct meeting *meeting, const struct sockaddr_un *address, socklen_t length,
                                       int64_t deadline) {
  unsigned naps = 0;
  struct letter hello = letter_of(meeting, OPERATION_JOIN, NULL, 0);
  int *socket = &meeting->sockets[0];
  *socket = new_socket();
  if (*socket < 0) return fail(meeting, MOEFLOW_ERROR_ENVIRONMENT, "no Unix socket: %s", strerror(errno));
  while (connect(*socket, (const struct sockaddr *)address, length)) { /* refused while rank 0 is not there */
    if (deadline_passed(deadline)) {
      return fail(meeting, MOEFLOW_ERROR_TIMEOUT,
                  "rank 0 of %d did not join the group within %d ms (%s); all ranks must be on one host, in one network "
                  "namespace",
                  meeting->ranks, meeting->timeout_ms, strerror(errno));
    }
    deadline_nap(&naps);
  }
  if (!same_user(*socket)) return fail(meeting, MOEFLOW_ERROR_ENVIRONMENT, "rank 0 runs as another user");
  return write_to_first(meeting, &hello, NULL, deadline);
}

static struct meeting *meeting_new(int rank, int ranks, int timeout_ms) {
  struct meeting *meeting = calloc(1, sizeof *meeting);
  if (!meeting) return NULL;
  meeting->rank = rank;
  meeting->ranks = ranks;
  meeting->timeout_ms = timeout_ms;
  meeting->sockets = calloc((size_t)ranks, sizeof *meeting->sockets);
  meeting->arrived = calloc((size_t)ranks, sizeof *meeting->arrived);
  meeting->letters = calloc(rank == 0 ? (size_t)ranks : 1, sizeof *meeting->letters);
  for (int r = 0; meeting->sockets && r < ranks; r++) meeting->sockets[r] = -1;
  if (meeting->sockets && meeting->arrived && meeting->letters) return meeting;
  meeting_leave(meeting);
  return NULL;
}

moeflow_status meeting_join(const moeflow_unique_id *id, int rank, int ranks, int timeout_ms, struct meeting **meeting_out) {
  moeflow_status status = MOEFLOW_OK;
  struct sockaddr_un address;
  socklen_t length;
  const int64_t deadline = deadline_in(timeout_ms);
  struct meeting *meeting = meeting_new(rank, ranks, timeout_ms);
  *meeting_out = NULL;
  if (!meeting) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks to meet", ranks);
  if (ranks > 1) {
    name_of(id, &address, &length);
    CHECK(rank ? connect_to_first(meeting, &address, length, deadline)
               : listen_for_all(meeting, &address, length, deadline));
  }
  *meeting_out = meeting;
  return MOEFLOW_OK;
cleanup:
  meeting_leave(meeting);
  return status;
}

/* ---- Operations ---- */

moeflow_status meeting_gather(struct meeting *meeting, const void *mine, size_t bytes, void *all) {
  moeflow_status status = MOEFLOW_OK;
  const int64_t deadline = deadline_in(meeting->timeout_ms);
  if (bytes > MEETING_BYTES_MAX) return status_set(MOEFLOW_ERROR_INTERNAL, "a gather of %zu bytes a rank", bytes);
  if (meeting->broken != MOEFLOW_OK) return broken(meeting);
  struct letter letter = letter_of(meeting, OPERATION_GATHER, mine, bytes);
  if (meeting->rank) {
    CHECK(write_to_first(meeting, &letter, NULL, deadline));
    const enum end end = move_all(meeting->sockets[0], all, (size_t)meeting->ranks * bytes, NULL, 1, deadline + GRACE_MS);
    if (end != END_DONE) status = fail_for(meeting, 0, end, OPERATION_GATHER);
    goto cleanup;
  }
  CHECK(read_letters(meeting, OPERATION_GATHER, NULL, deadline));
  CHECK(check_letters(meeting, &letter, NULL));
  meeting->letters[0] = letter;
  for (int r = 0; r < meeting->ranks; r++) memcpy((char *)all + (size_t)r * bytes, meeting->letters[r].body, bytes);
  CHECK(answer(meeting, &letter, all, (size_t)meeting->ranks * bytes, NULL, deadline + GRACE_MS));
cleanup:
  return status;
}

static moeflow_status receive_fds(struct meeting *meeting, int *all, int64_t deadline) {
  for (int r = 0; r < meeting->ranks; r++) {
    char byte;
    const enum end end = move_all(meeting->sockets[0], &byte, 1, &all[r], 1, deadline);
    if (end != END_DONE) return fail_for(meeting, 0, end, OPERATION_FDS);
    if (all[r] < 0)
      return fail(meeting, MOEFLOW_ERROR_ENVIRONMENT, "the file of rank %d did not arrive: too many are open", r);
  }
  return MOEFLOW_OK;
}

moeflow_status meeting_fds(struct meeting *meeting, int mine, int *all) {
  moeflow_status status = MOEFLOW_OK;
  const int64_t deadline = deadline_in(meeting->timeout_ms);
  struct letter letter = letter_of(meeting, OPERATION_FDS, NULL, 0);
  for (int r = 0; r < meeting->ranks; r++) all[r] = -1;
  if (meeting->broken != MOEFLOW_OK) return broken(meeting);
  if (meeting->rank) {
    CHECK(write_to_first(meeting, &letter, &mine, deadline));
    CHECK(receive_fds(meeting, all, deadline + GRACE_MS));
    return MOEFLOW_OK;
  }
  all[0] = fcntl(mine, F_DUPFD_CLOEXEC, 0);
  if (all[0] < 0) CHECK(fail(meeting, MOEFLOW_ERROR_ENVIRONMENT, "rank 0's file cannot be shared: %s", strerror(errno)));
  CHECK(read_letters(meeting, OPERATION_FDS, all, deadline));
  CHECK(check_letters(meeting, &letter, all));
  CHECK(answer(meeting, &letter, NULL, 0, all, deadline + GRACE_MS));
cleanup:
  for (int r = 0; status != MOEFLOW_OK && r < meeting->ranks; r++) {
    if (all[r] >= 0) close(all[r]);
    all[r] = -1;
  }
  return status;
}

void meeting_leave(struct meeting *meeting) {
  if (!meeting) return;
  for (int r = 0; meeting->sockets && r < meeting->ranks; r++) {
    if (meeting->sockets[r] >= 0) close(meeting->sockets[r]);
  }
  free(meeting->sockets);
  free(meeting->arrived);
  free(meeting->letters);
  free(meeting);
}
