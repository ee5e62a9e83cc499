#include "store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "status.h"

#define STALE_SECONDS 3600
#define LOCK_POLL_NS 20000000 /* 20 ms */

moeflow_status store_open(const char *explicit_path, struct store *store) {
  int missing = 0;
  store->fd = -1;
  moeflow_status status = cache_path(explicit_path, store->path, sizeof store->path);
  if (status != MOEFLOW_OK) return status;
  status = cache_open_or_create(store->path, 0, &store->fd, &missing);
  return missing ? MOEFLOW_OK : status;
}

moeflow_status store_create(struct store *store) {
  signal(SIGXFSZ, SIG_IGN); /* a file size limit is to be EFBIG, a message and exit 6, not a signal */
  if (store->fd >= 0) return MOEFLOW_OK;
  return cache_open_or_create(store->path, 1, &store->fd, NULL);
}

void store_close(struct store *store) {
  if (store->fd >= 0) close(store->fd);
  store->fd = -1;
}

enum store_state store_find(const struct store *store, const struct key *key, struct entry *entry) {
  int missing = 0;
  memset(entry, 0, sizeof *entry);
  if (store->fd < 0) return STORE_MISSING;
  if (entry_read(store->fd, store->path, key->hash, entry, &missing) != MOEFLOW_OK)
    return missing ? STORE_MISSING : STORE_DAMAGED;
  if (entry->header.key_bytes == key->size && memcmp(entry->key, key->text, key->size) == 0) return STORE_HIT;
  status_set(MOEFLOW_ERROR_CACHE, "cache entry %s has another key of the same hash", key->hash);
  entry_free(entry);
  return STORE_DAMAGED;
}

/* ---- One writer per key ---- */

struct lock {
  int folder; /* tmp/ */
  int fd;     /* -1: goes on without */
  char name[96];
};

/* A lock file is unlinked by its last holder, so a lock counts only if the name still leads to the file that was locked. */
static int lock_is_current(const struct lock *lock) {
  struct stat held, named;
  return fstat(lock->fd, &held) == 0 && fstatat(lock->folder, lock->name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

/* Never fails: without locks (some network file systems) or past the deadline, two writers make the same entry and one is
 * kept. */
static void lock_take(struct lock *lock, const char *hash, int wait_s) {
  struct timespec now, pause = {0, LOCK_POLL_NS};
  clock_gettime(CLOCK_MONOTONIC, &now);
  time_t deadline = now.tv_sec + wait_s;
  snprintf(lock->name, sizeof lock->name, "%s.lock", hash);
  for (;;) {
    lock->fd = openat(lock->folder, lock->name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (lock->fd < 0) return;
    while (flock(lock->fd, LOCK_EX | LOCK_NB) != 0) {
      clock_gettime(CLOCK_MONOTONIC, &now);
      if ((errno != EWOULDBLOCK && errno != EINTR) || now.tv_sec >= deadline) {
        close(lock->fd);
        lock->fd = -1;
        return;
      }
      nanosleep(&pause, NULL);
    }
    if (lock_is_current(lock)) return;
    close(lock->fd);
  }
}

static void lock_drop(struct lock *lock) {
  if (lock->fd < 0) return;
  unlinkat(lock->folder, lock->name, 0);
  close(lock->fd);
}

/* ---- Writing ---- */

static moeflow_status write_error(const struct store *store, const char *name, int error) {
  const char *next = error == ENOSPC || error == EDQUOT || error == EFBIG ? "free some space, or choose another --cache"
                                                                          : "choose another --cache, or make it writable";
  return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s/%s: %s; %s", store->path, name, strerror(error), next);
}

static int write_all(int fd, const uint8_t *bytes, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t n = write(fd, bytes + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (n == 0) errno = ENOSPC;
      return -1;
    }
    done += (size_t)n;
  }
  return 0;
}

/* Into a new private file of tmp/, on disk when it returns. */
static moeflow_status write_temporary(const struct store *store, int folder, const uint8_t *bytes, size_t size,
                                      char name[96]) {
  static unsigned number;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(name, 96, "new-%d-%lx-%lx-%u", (int)getpid(), (unsigned long)now.tv_sec, (unsigned long)now.tv_nsec, number++);
  int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return write_error(store, "tmp", errno);
  int failed = write_all(fd, bytes, size) != 0 || fsync(fd) != 0;
  int error = errno;
  if (close(fd) != 0 && !failed) {
    failed = 1;
    error = errno;
  }
  if (!failed) return MOEFLOW_OK;
  unlinkat(folder, name, 0);
  return write_error(store, "tmp", error);
}

/* Publishes bytes as `folder`/`name`. With `replace` 0 a file that came meanwhile stays and counts as success. */
static moeflow_status publish(struct store *store, const char *folder, const char *name, const uint8_t *bytes, size_t size,
                              int replace) {
  moeflow_status status = MOEFLOW_OK;
  int temporary_folder = -1, target = -1;
  char temporary[96];
  CHECK(cache_open_below(store->fd, store->path, "tmp", 1, &temporary_folder, NULL));
  CHECK(cache_open_below(store->fd, store->path, folder, 1, &target, NULL));
  CHECK(write_temporary(store, temporary_folder, bytes, size, temporary));
  int failed = replace ? -1 : renameat2(temporary_folder, temporary, target, name, RENAME_NOREPLACE);
  if (failed && !replace && errno == EEXIST) {
    unlinkat(temporary_folder, temporary, 0);
    goto cleanup;
  }
  if (failed) failed = renameat(temporary_folder, temporary, target, name); /* also where RENAME_NOREPLACE is unknown */
  if (failed) {
    status = write_error(store, folder, errno);
    unlinkat(temporary_folder, temporary, 0);
    goto cleanup;
  }
  fsync(target);
cleanup:
  if (temporary_folder >= 0) close(temporary_folder);
  if (target >= 0) close(target);
  return status;
}

/* Moves a damaged entry out of the way, into tmp/ where it can be looked at for an hour. */
static moeflow_status quarantine(struct store *store, const char *hash, int temporary_folder) {
  char below[16], name[128];
  int shard, missing;
  snprintf(below, sizeof below, "entries/%.2s", hash);
  moeflow_status status = cache_open_below(store->fd, store->path, below, 0, &shard, &missing);
  if (status != MOEFLOW_OK) return missing ? MOEFLOW_OK : status;
  snprintf(name, sizeof name, "damaged-%s-%d", hash, (int)getpid());
  if (renameat(shard, hash, temporary_folder, name) == 0) {
    utimensat(temporary_folder, name, NULL, AT_SYMLINK_NOFOLLOW);
  } else if (errno != ENOENT && unlinkat(shard, hash, 0) != 0) {
    status = write_error(store, below, errno);
  }
  close(shard);
  return status;
}

static moeflow_status make_and_publish(struct store *store, const struct key *key, store_make make, void *user,
                                       struct store_outcome *outcome) {
  moeflow_status status = MOEFLOW_OK;
  struct entry_header facts = {0};
  uint8_t *cubin = NULL, *bytes = NULL;
  size_t cubin_bytes = 0, size;
  char folder[16];
  CHECK(make(user, &facts, &cubin, &cubin_bytes));
  CHECK(entry_build(&facts, key->text, key->size, cubin, cubin_bytes, &bytes, &size));
  snprintf(folder, sizeof folder, "entries/%.2s", key->hash);
  CHECK(publish(store, folder, key->hash, bytes, size, 0));
  memcpy(&outcome->header, bytes, sizeof outcome->header);
  outcome->made = 1;
cleanup:
  free(cubin);
  free(bytes);
  return status;
}

static int find_into(const struct store *store, const struct key *key, struct store_outcome *outcome,
                     enum store_state *state) {
  struct entry entry;
  *state = store_find(store, key, &entry);
  if (*state == STORE_HIT) outcome->header = entry.header;
  entry_free(&entry);
  return *state == STORE_HIT;
}

moeflow_status store_obtain(struct store *store, const struct key *key, store_make make, void *user, int wait_s,
                            struct store_outcome *outcome) {
  moeflow_status status = MOEFLOW_OK;
  struct lock lock = {-1, -1, ""};
  enum store_state state;
  memset(outcome, 0, sizeof *outcome);
  if (find_into(store, key, outcome, &state)) return MOEFLOW_OK;
  CHECK(store_create(store));
  CHECK(cache_open_below(store->fd, store->path, "tmp", 1, &lock.folder, NULL));
  lock_take(&lock, key->hash, wait_s);
  if (find_into(store, key, outcome, &state)) goto cleanup; /* somebody made it while we waited */
  if (state == STORE_DAMAGED) {
    outcome->damaged = 1;
    const char *why = moeflow_last_error(), *advice = strstr(why, "; run"); /* that is what we are about to do */
    snprintf(outcome->warning, sizeof outcome->warning, "%.*s", advice ? (int)(advice - why) : (int)strlen(why), why);
    CHECK(quarantine(store, key->hash, lock.folder));
  }
  CHECK(make_and_publish(store, key, make, user, outcome));
cleanup:
  lock_drop(&lock);
  if (lock.folder >= 0) close(lock.folder);
  return status;
}

moeflow_status store_put_plan(struct store *store, const struct plan *plan) {
  moeflow_status status = MOEFLOW_OK;
  char name[160], below[176], *text = malloc(PLAN_TEXT_MAX);
  uint8_t *old = NULL;
  size_t old_size;
  if (!text) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a plan of %d bytes", PLAN_TEXT_MAX);
  CHECK(plan_write(plan, text, PLAN_TEXT_MAX));
  CHECK(store_create(store));
  plan_file_name(plan, name);
  snprintf(below, sizeof below, "plans/%s", name);
  if (cache_read(store->fd, store->path, below, PLAN_TEXT_MAX, &old, &old_size, NULL) == MOEFLOW_OK &&
      old_size == strlen(text) && memcmp(old, text, old_size) == 0) {
    goto cleanup;
  }
  CHECK(publish(store, "plans", name, (const uint8_t *)text, strlen(text), 1));
cleanup:
  free(old);
  free(text);
  return status;
}

void store_sweep(const struct store *store) {
  int folder;
  struct stat info;
  time_t now = time(NULL);
  if (store->fd < 0 || cache_open_below(store->fd, store->path, "tmp", 0, &folder, NULL) != MOEFLOW_OK) return;
  DIR *directory = fdopendir(folder);
  if (!directory) {
    close(folder);
    return;
  }
  for (struct dirent *item; (item = readdir(directory));) {
    if (item->d_name[0] == '.' || fstatat(folder, item->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (now - info.st_mtime > STALE_SECONDS) unlinkat(folder, item->d_name, S_ISDIR(info.st_mode) ? AT_REMOVEDIR : 0);
  }
  closedir(directory);
}

/* ---- Listing ---- */

static int by_pointed_text(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

static moeflow_status add_name(struct store_names *names, const char *folder, const char *name) {
  char **grown = realloc(names->names, ((size_t)names->count + 1) * sizeof *grown);
  if (grown) names->names = grown;
  if (!grown || asprintf(&names->names[names->count], "%s/%s", folder, name) < 0) {
    return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the names in the cache");
  }
  names->count++;
  return MOEFLOW_OK;
}

static moeflow_status list_folder(const struct store *store, const char *folder, int depth, struct store_names *names) {
  moeflow_status status = MOEFLOW_OK;
  int fd, missing;
  status = cache_open_below(store->fd, store->path, folder, 0, &fd, &missing);
  if (status != MOEFLOW_OK) return missing ? MOEFLOW_OK : status;
  DIR *directory = fdopendir(fd);
  if (!directory) {
    close(fd);
    return status_set(MOEFLOW_ERROR_CACHE, "cannot list %s/%s: %s", store->path, folder, strerror(errno));
  }
  for (struct dirent *item; (item = readdir(directory));) {
    if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0) continue;
    if (depth == 0) {
      CHECK(add_name(names, folder, item->d_name));
    } else {
      char below[300];
      snprintf(below, sizeof below, "%s/%s", folder, item->d_name);
      CHECK(list_folder(store, below, depth - 1, names));
    }
  }
cleanup:
  closedir(directory);
  return status;
}

moeflow_status store_list(const struct store *store, const char *folder, struct store_names *names) {
  memset(names, 0, sizeof *names);
  if (store->fd < 0) return MOEFLOW_OK;
  moeflow_status status = list_folder(store, folder, strcmp(folder, "entries") == 0, names);
  if (names->count) qsort(names->names, (size_t)names->count, sizeof *names->names, by_pointed_text);
  if (status != MOEFLOW_OK) store_names_free(names);
  return status;
}

void store_names_free(struct store_names *names) {
  for (int i = 0; i < names->count; i++) free(names->names[i]);
  free(names->names);
  memset(names, 0, sizeof *names);
}
