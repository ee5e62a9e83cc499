/* The store under everything that goes wrong around it: many processes, killed holders, damage, no room, no right to write.
 */
#include "store.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "scratch.h"
#include "status.h"
#include "test.h"

static struct key make_key(const char *kernel) {
  struct compile_options options;
  struct templates none = {.count = 0};
  struct key key;
  compile_options_for("sm_90a", 0, &options);
  struct key_parts parts = {kernel, "sm_90a", &options, "nvrtc test", "unit text", &none, NULL, 0};
  EXPECT(key_build(&parts, &key) == MOEFLOW_OK);
  return key;
}

static void path_of(const struct key *key, char path[1200]) {
  snprintf(path, 1200, "%s/cache/entries/%.2s/%s", scratch, key->hash, key->hash);
}

struct maker {
  int pause_ms;
  size_t bytes;
  moeflow_status status;
};

/* Counts its calls over all processes: a byte in a file for each. */
static moeflow_status fake_make(void *user, struct entry_header *facts, uint8_t **cubin, size_t *cubin_bytes) {
  const struct maker *maker = user;
  struct timespec pause = {0, maker->pause_ms * 1000000L};
  int fd = open(scratch_path("counter"), O_WRONLY | O_CREAT | O_APPEND, 0666);
  if (write(fd, "x", 1) != 1) abort();
  close(fd);
  nanosleep(&pause, NULL);
  if (maker->status != MOEFLOW_OK) return status_set(maker->status, "made to fail");
  strcpy(facts->symbol, "moeflow_fake");
  *cubin_bytes = maker->bytes ? maker->bytes : 100;
  *cubin = calloc(1, *cubin_bytes);
  return MOEFLOW_OK;
}

static long made(void) {
  struct stat info;
  return stat(scratch_path("counter"), &info) == 0 ? (long)info.st_size : 0;
}

static struct store open_store(void) {
  struct store store;
  EXPECT(store_open(scratch_path("cache"), &store) == MOEFLOW_OK, "%s", moeflow_last_error());
  return store;
}

/* Files in tmp/, damaged ones aside. */
static int temporaries(void) {
  struct store store = open_store();
  struct store_names names;
  int count = 0;
  EXPECT(store_list(&store, "tmp", &names) == MOEFLOW_OK);
  for (int i = 0; i < names.count; i++) count += !strstr(names.names[i], "damaged-");
  store_names_free(&names);
  store_close(&store);
  return count;
}

static moeflow_status obtain(const struct key *key, struct maker *maker, struct store_outcome *outcome) {
  struct store store = open_store();
  moeflow_status status = store_obtain(&store, key, fake_make, maker, 30, outcome);
  store_close(&store);
  return status;
}

static void one_process(void) {
  struct key key = make_key("one");
  struct maker maker = {0}, failing = {.status = MOEFLOW_ERROR_FORMAT};
  struct store_outcome outcome;
  struct store store = open_store();
  struct entry entry;
  EXPECT(store.fd < 0, "no directory before the first write");
  EXPECT(store_find(&store, &key, &entry) == STORE_MISSING);
  EXPECT(access(scratch_path("cache"), F_OK) != 0, "looking wrote something");
  EXPECT(obtain(&key, &failing, &outcome) == MOEFLOW_ERROR_FORMAT && !outcome.made, "%s", moeflow_last_error());
  EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && outcome.made, "%s", moeflow_last_error());
  EXPECT(strcmp(outcome.header.symbol, "moeflow_fake") == 0 && outcome.header.cubin_bytes == 100);
  long calls = made();
  EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && !outcome.made && made() == calls, "the second is a hit");
  EXPECT(strcmp(outcome.header.symbol, "moeflow_fake") == 0);
  EXPECT(temporaries() == 0, "%d files left in tmp/", temporaries());
  char path[1200];
  struct stat info;
  path_of(&key, path);
  EXPECT(stat(path, &info) == 0 && (info.st_mode & 07777) == 0600 && info.st_nlink == 1);
  EXPECT(stat(scratch_path("cache"), &info) == 0 && (info.st_mode & 07777) == 0700);
}

static pid_t start(const struct key *key, struct maker *maker) {
  pid_t child = fork();
  if (child == 0) {
    struct store_outcome outcome;
    _exit(obtain(key, maker, &outcome) == MOEFLOW_OK && strcmp(outcome.header.symbol, "moeflow_fake") == 0 ? 0 : 1);
  }
  return child;
}

static void many_processes(void) {
  struct maker maker = {.pause_ms = 100};
  for (int round = 0; round < 3; round++) {
    char name[24];
    pid_t children[16];
    snprintf(name, sizeof name, "many%d", round);
    struct key key = make_key(name);
    long before = made();
    for (int i = 0; i < 16; i++) children[i] = start(&key, &maker);
    for (int i = 0; i < 16; i++) {
      int how;
      EXPECT(waitpid(children[i], &how, 0) == children[i] && WIFEXITED(how) && WEXITSTATUS(how) == 0, "process %d", i);
    }
    EXPECT(made() - before == 1, "16 processes made it %ld times", made() - before);
    EXPECT(temporaries() == 0);
  }
}

static moeflow_status lonely_make(void *user, struct entry_header *facts, uint8_t **cubin, size_t *cubin_bytes) {
  (void)user, (void)facts, (void)cubin, (void)cubin_bytes;
  int fd = open(scratch_path("inside"), O_WRONLY | O_CREAT | O_EXCL, 0600);
  if (fd < 0) return status_set(MOEFLOW_ERROR_INTERNAL, "two makers at once");
  usleep(5000);
  close(fd);
  unlink(scratch_path("inside"));
  return status_set(MOEFLOW_ERROR_FORMAT, "made to fail");
}

/* Makers that fail leave no entry, so each of the waiting ones has its turn; never two at once, though lock files come and
 * go. */
static void failing_makers_take_turns(void) {
  struct key key = make_key("turns");
  pid_t children[12];
  for (int i = 0; i < 12; i++) {
    children[i] = fork();
    if (children[i]) continue;
    for (int turn = 0; turn < 10; turn++) {
      struct store_outcome outcome;
      struct store store = open_store();
      if (store_obtain(&store, &key, lonely_make, NULL, 30, &outcome) != MOEFLOW_ERROR_FORMAT) _exit(1);
      store_close(&store);
    }
    _exit(0);
  }
  for (int i = 0; i < 12; i++) {
    int how;
    EXPECT(waitpid(children[i], &how, 0) == children[i] && WIFEXITED(how) && WEXITSTATUS(how) == 0, "process %d", i);
  }
  EXPECT(temporaries() == 0);
}

static void killed_holder(void) {
  struct key key = make_key("killed");
  struct maker slow = {.pause_ms = 900}, maker = {0};
  struct store_outcome outcome;
  long before = made();
  pid_t child = start(&key, &slow);
  while (made() == before) usleep(1000);
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
  EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && outcome.made, "the lock died with its holder");
  EXPECT(temporaries() == 0);
}

/* A lock that never comes free holds nobody for longer than the bound, and the loser takes what is there. */
static void lock_out_of_reach(void) {
  struct key key = make_key("locked");
  struct maker maker = {0};
  struct store_outcome outcome;
  char name[128];
  snprintf(name, sizeof name, "cache/tmp/%s.lock", key.hash);
  int fd = open(scratch_path(name), O_RDWR | O_CREAT, 0600);
  EXPECT(fd >= 0 && flock(fd, LOCK_EX) == 0);
  struct store store = open_store();
  time_t begin = time(NULL);
  EXPECT(store_obtain(&store, &key, fake_make, &maker, 1, &outcome) == MOEFLOW_OK && outcome.made);
  EXPECT(time(NULL) - begin <= 3);
  store_close(&store);
  close(fd);
  unlink(scratch_path(name));
}

static void overwrite(const char *path, const void *bytes, size_t size) {
  scratch_write(path, bytes, size, 0600);
}

enum damage { CUT_TO_0, CUT_TO_HALF, FLIPPED, DIRECTORY, LINK, FOREIGN_MODE, DAMAGES };

static void damage_file(const char *path, enum damage damage) {
  uint8_t bytes[4096];
  FILE *file = fopen(path, "rb");
  size_t size = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  switch (damage) {
    case CUT_TO_0:
      overwrite(path, bytes, 0);
      break;
    case CUT_TO_HALF:
      overwrite(path, bytes, size / 2);
      break;
    case FLIPPED:
      bytes[size - 5] ^= 1;
      overwrite(path, bytes, size);
      break;
    case DIRECTORY:
      unlink(path);
      mkdir(path, 0700);
      break;
    case LINK:
      unlink(path);
      EXPECT(symlink("/etc/passwd", path) == 0);
      break;
    case FOREIGN_MODE:
      chmod(path, 0666);
      break;
    default:
      break;
  }
}

static void damaged_entries(void) {
  for (int damage = 0; damage < DAMAGES; damage++) {
    char name[24], path[1200];
    struct maker maker = {0};
    struct store_outcome outcome;
    struct entry entry;
    snprintf(name, sizeof name, "damage%d", damage);
    struct key key = make_key(name);
    EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && outcome.made && !outcome.damaged);
    path_of(&key, path);
    damage_file(path, damage);
    struct store store = open_store();
    EXPECT(store_find(&store, &key, &entry) == STORE_DAMAGED, "damage %d", damage);
    store_close(&store);
    EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && outcome.made && outcome.damaged, "damage %d: %s", damage,
           moeflow_last_error());
    EXPECT(outcome.warning[0], "one warning");
    EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && !outcome.made && !outcome.damaged && !outcome.warning[0]);
  }
  EXPECT(temporaries() == 0);
}

static void read_only(void) {
  struct key there = make_key("one"), absent = make_key("absent");
  struct maker maker = {0};
  struct store_outcome outcome;
  if (geteuid() != 0) {
    puts("not root: the read-only cache of another user is not tried");
    return;
  }
  chmod(scratch, 0755);
  chmod(scratch_path("cache"), 0755);
  chmod(scratch_path("cache/entries"), 0755);
  char path[1200];
  path_of(&there, path);
  chmod(path, 0644);
  *strrchr(path, '/') = 0;
  chmod(path, 0755);
  chmod(scratch_path("counter"), 0666);
  EXPECT(seteuid(12345) == 0);
  EXPECT(obtain(&there, &maker, &outcome) == MOEFLOW_OK && !outcome.made, "a hit needs no right to write: %s",
         moeflow_last_error());
  EXPECT(obtain(&absent, &maker, &outcome) == MOEFLOW_ERROR_CACHE, "a miss is an error that says why");
  EXPECT(strstr(moeflow_last_error(), "cache"), "%s", moeflow_last_error());
  EXPECT(seteuid(0) == 0);
  chmod(scratch_path("cache"), 0700);
}

static void no_room(void) {
  struct key key = make_key("large");
  char path[1200];
  path_of(&key, path);
  pid_t child = fork();
  if (child == 0) {
    struct rlimit limit = {65536, 65536};
    struct maker maker = {.bytes = 200000};
    struct store_outcome outcome;
    setrlimit(RLIMIT_FSIZE, &limit);
    moeflow_status status = obtain(&key, &maker, &outcome);
    _exit(status == MOEFLOW_ERROR_CACHE && strstr(moeflow_last_error(), "space") && !outcome.made ? 0 : 1);
  }
  int how;
  EXPECT(waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0, "exit 6 and a message, no signal");
  EXPECT(access(path, F_OK) != 0, "nothing published");
  EXPECT(temporaries() == 0, "the temporary file is gone");
  struct maker maker = {.bytes = 200000};
  struct store_outcome outcome;
  EXPECT(obtain(&key, &maker, &outcome) == MOEFLOW_OK && outcome.made, "the next run makes it");
}

static void sweeping(void) {
  static const char *const left[] = {"cache/tmp/new-1-2-3-4", "cache/tmp/0123abcd.lock", "cache/tmp/damaged-0123abcd-1"};
  struct timespec old[2] = {{time(NULL) - 7200, 0}, {time(NULL) - 7200, 0}};
  for (int i = 0; i < 3; i++) {
    scratch_write(scratch_path(left[i]), "old", 3, 0600);
    EXPECT(utimensat(AT_FDCWD, scratch_path(left[i]), old, 0) == 0);
  }
  scratch_write(scratch_path("cache/tmp/new-5-6-7-8"), "new", 3, 0600);
  struct store store = open_store();
  store_sweep(&store);
  store_close(&store);
  for (int i = 0; i < 3; i++) EXPECT(access(scratch_path(left[i]), F_OK) != 0, "older than an hour: %s", left[i]);
  EXPECT(access(scratch_path("cache/tmp/new-5-6-7-8"), F_OK) == 0, "a writer may be at it");
  unlink(scratch_path("cache/tmp/new-5-6-7-8"));
}

int main(void) {
  scratch_make();
  umask(022);
  one_process();
  many_processes();
  failing_makers_take_turns();
  killed_holder();
  lock_out_of_reach();
  damaged_entries();
  read_only();
  no_room();
  sweeping();
  scratch_remove();
  TEST_END;
}
