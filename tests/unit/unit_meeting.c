/* Ranks that meet over Unix sockets: threads, and processes where one has to die. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deadline.h"
#include "meeting.h"
#include "sha256.h"
#include "test.h"

#define RANKS 3

struct rank {
  int rank, ranks, timeout_ms, late_ms, gathers;
  moeflow_status status;
  char message[512];
  struct meeting *meeting;
};

static moeflow_unique_id id;
static struct rank ranks[RANKS];

static void wait_ms(int ms) {
  const struct timespec nap = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&nap, NULL);
}

static int open_files(void) {
  DIR *folder = opendir("/proc/self/fd");
  int count = 0;
  while (folder && readdir(folder)) count++;
  if (folder) closedir(folder);
  return count;
}

static void note(struct rank *rank, moeflow_status status) {
  if (rank->status != MOEFLOW_OK) return;
  rank->status = status;
  if (status != MOEFLOW_OK) snprintf(rank->message, sizeof rank->message, "%s", moeflow_last_error());
}

static void gather(struct rank *rank, int round) {
  int mine[2] = {rank->rank, round}, all[RANKS][2];
  note(rank, meeting_gather(rank->meeting, mine, sizeof mine, all));
  for (int r = 0; rank->status == MOEFLOW_OK && r < RANKS; r++) {
    EXPECT(all[r][0] == r && all[r][1] == round, "rank %d, round %d: %d %d", r, round, all[r][0], all[r][1]);
  }
}

static void *live(void *argument) {
  struct rank *rank = argument;
  if (!rank->ranks) return NULL;
  wait_ms(rank->late_ms);
  note(rank, meeting_join(&id, rank->rank, rank->ranks, rank->timeout_ms, &rank->meeting));
  for (int i = 0; i < rank->gathers && rank->status == MOEFLOW_OK; i++) gather(rank, i);
  return NULL;
}

static void prepare(int timeout_ms) {
  id.bytes[0]++;
  for (int r = 0; r < RANKS; r++)
    ranks[r] = (struct rank){.rank = r, .ranks = RANKS, .timeout_ms = timeout_ms, .gathers = 3};
}

static void each(void *(*run)(void *)) {
  pthread_t threads[RANKS];
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run, &ranks[r]);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
}

static void leave(void) {
  for (int r = 0; r < RANKS; r++) {
    meeting_leave(ranks[r].meeting);
    ranks[r].meeting = NULL;
  }
}

static void expect(int rank, moeflow_status status, const char *text) {
  EXPECT(ranks[rank].status == status && strstr(ranks[rank].message, text), "rank %d: %s: '%s', want '%s'", rank,
         moeflow_status_name(ranks[rank].status), ranks[rank].message, text);
}

static void test_gather(int late_rank) {
  prepare(5000);
  if (late_rank >= 0) ranks[late_rank].late_ms = 200;
  each(live);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_OK, "");
  leave();
}

static void test_missing(int missing) {
  prepare(400);
  ranks[missing].ranks = 0;
  const int64_t begin = deadline_now_ms();
  each(live);
  EXPECT(deadline_now_ms() - begin < 3000, "bounded");
  char text[64];
  snprintf(text, sizeof text, "rank %d of 3 did not join the group within 400 ms", missing);
  for (int r = 0; r < RANKS; r++) {
    if (r != missing) expect(r, MOEFLOW_ERROR_TIMEOUT, text);
  }
  leave();
}

static void test_wrong_size(int late_rank) {
  prepare(3000);
  ranks[2].ranks = 4;
  ranks[late_rank].late_ms = 200;
  each(live);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_ERROR_MISMATCH, "rank 2 says 4, rank 0 says 3");
  leave();
}

static void test_twice(void) {
  prepare(1000);
  ranks[2].rank = 1;
  ranks[2].late_ms = 100;
  each(live);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_ERROR_ARGUMENT, "two ranks of the group say they are rank 1");
  leave();
}

/* One rank does not come to a gather that the others are in, and is told so afterwards. */
static void test_silent(int silent) {
  prepare(500);
  ranks[silent].gathers = 2;
  each(live);
  char text[64];
  snprintf(text, sizeof text, "rank %d of 3 did not come to a collective call", silent);
  for (int r = 0; r < RANKS; r++) {
    if (r != silent) expect(r, MOEFLOW_ERROR_TIMEOUT, text);
  }
  expect(silent, MOEFLOW_OK, "");
  if (silent) gather(&ranks[silent], 2);
  if (silent) expect(silent, MOEFLOW_ERROR_TIMEOUT, text);
  leave();
}

static void *other_call(void *argument) {
  struct rank *rank = argument;
  char bytes[16] = {0}, all[RANKS][16];
  live(rank);
  note(rank, meeting_gather(rank->meeting, bytes, rank->rank == 2 ? 16 : 8, all));
  return NULL;
}

static void test_other_call(void) {
  prepare(2000);
  each(other_call);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_ERROR_MISMATCH, "rank 2 is in another collective call");
  leave();
}

/* Each rank's file is the read end of a pipe in which its number waits. */
static void *share(void *argument) {
  struct rank *rank = argument;
  int ends[2], all[RANKS];
  char byte = (char)rank->rank;
  live(rank);
  EXPECT(pipe(ends) == 0 && write(ends[1], &byte, 1) == 1);
  note(rank, meeting_fds(rank->meeting, ends[0], all));
  char mark;
  note(rank, meeting_gather(rank->meeting, &byte, 0, &mark));
  for (int r = 0; rank->status == MOEFLOW_OK && r < RANKS; r++) {
    EXPECT(fcntl(all[r], F_GETFD) & FD_CLOEXEC, "rank %d's file outlives an exec", r);
    if (r == (rank->rank + 1) % RANKS) EXPECT(read(all[r], &byte, 1) == 1 && byte == r, "another rank's file");
    close(all[r]);
  }
  close(ends[0]);
  close(ends[1]);
  return NULL;
}

static void test_fds(void) {
  prepare(3000);
  each(share);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_OK, "");
  leave();
}

/* A process that is no rank connects and says nothing, or nonsense. */
static void *intrude(void *argument) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  uint8_t digest[32];
  char hex[65];
  sha256(&id, sizeof id, digest);
  sha256_hex(digest, hex);
  const int written = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "moeflow-%s", hex);
  const int from = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)written);
  while (connect(from, (struct sockaddr *)&address, length)) wait_ms(1);
  if (argument) EXPECT(write(from, argument, strlen(argument)) > 0);
  close(from);
  return NULL;
}

static void test_intruder(void) {
  pthread_t intruder[2];
  prepare(5000);
  ranks[2].late_ms = 300;
  pthread_create(&intruder[0], NULL, intrude, NULL);
  pthread_create(&intruder[1], NULL, intrude, "nonsense");
  each(live);
  for (int i = 0; i < 2; i++) pthread_join(intruder[i], NULL);
  for (int r = 0; r < RANKS; r++) expect(r, MOEFLOW_OK, "");
  leave();
}

/* One rank, a process of its own, is killed after a gather: the others are told at once, and which. */
static void test_dead(int dead) {
  char text[64];
  pid_t children[RANKS];
  prepare(20000);
  snprintf(text, sizeof text, "rank %d has left the group, or its process has ended", dead);
  fflush(NULL);
  const int64_t begin = deadline_now_ms();
  for (int r = 0; r < RANKS; r++) {
    children[r] = fork();
    if (children[r]) continue;
    test_failures = 0;
    live(&ranks[r]);
    if (r == dead) raise(SIGKILL);
    gather(&ranks[r], 3);
    expect(r, MOEFLOW_ERROR_PEER, text);
    gather(&ranks[r], 4);
    expect(r, MOEFLOW_ERROR_PEER, text);
    fflush(NULL);
    _exit(test_failures != 0);
  }
  for (int r = 0; r < RANKS; r++) {
    int result;
    waitpid(children[r], &result, 0);
    EXPECT(r == dead ? WIFSIGNALED(result) : result == 0, "dead %d: rank %d ends with %d", dead, r, result);
  }
  EXPECT(deadline_now_ms() - begin < 10000, "not at once");
}

static void test_alone(void) {
  struct meeting *meeting;
  int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), all = -1, seven = 7, back = 0;
  EXPECT(meeting_join(NULL, 0, 1, 100, &meeting) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(meeting_gather(meeting, &seven, sizeof seven, &back) == MOEFLOW_OK && back == 7);
  EXPECT(meeting_fds(meeting, fd, &all) == MOEFLOW_OK && all >= 0 && all != fd);
  close(all);
  close(fd);
  meeting_leave(meeting);
  meeting_leave(NULL);
}

int main(void) {
  const int files = open_files();
  test_alone();
  for (int late = -1; late < RANKS; late++) test_gather(late);
  for (int missing = 0; missing < RANKS; missing++) test_missing(missing);
  test_wrong_size(1);
  test_wrong_size(2);
  test_twice();
  test_silent(0);
  test_silent(2);
  test_other_call();
  test_fds();
  test_intruder();
  for (int dead = 0; dead < RANKS; dead++) test_dead(dead);
  EXPECT(open_files() == files, "%d files are left open", open_files() - files);
  TEST_END;
}
