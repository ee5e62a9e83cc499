#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "status.h"

static moeflow_status path_join(char *path, size_t path_size, const char *folder, const char *rest) {
  int n = snprintf(path, path_size, "%s%s%s", folder, *rest ? "/" : "", rest);
  if (n < 0 || (size_t)n >= path_size) {
    return status_set(MOEFLOW_ERROR_CACHE, "the cache path is longer than %zu bytes; choose a shorter one with --cache",
                      path_size - 1);
  }
  return MOEFLOW_OK;
}

/* A variable's value, NULL when unset or empty. */
static moeflow_status absolute_variable(const char *name, const char **value) {
  *value = getenv(name);
  if (*value && !**value) *value = NULL;
  if (*value && **value != '/') {
    return status_set(MOEFLOW_ERROR_CACHE, "%s is '%s', a relative path; the cache needs an absolute one", name, *value);
  }
  return MOEFLOW_OK;
}

moeflow_status cache_path(const char *explicit_path, char *path, size_t path_size) {
  moeflow_status status = MOEFLOW_OK;
  const char *value;
  if (explicit_path) {
    if (!*explicit_path) FAIL(MOEFLOW_ERROR_CACHE, "the cache path is empty; give a directory");
    if (*explicit_path == '/') return path_join(path, path_size, explicit_path, "");
    char here[CACHE_PATH_MAX];
    if (!getcwd(here, sizeof here))
      FAIL(MOEFLOW_ERROR_CACHE, "no working directory: %s; give an absolute --cache", strerror(errno));
    return path_join(path, path_size, here, explicit_path);
  }
  CHECK(absolute_variable("MOEFLOW_CACHE_DIR", &value));
  if (value) return path_join(path, path_size, value, "");
  CHECK(absolute_variable("XDG_CACHE_HOME", &value));
  if (value) return path_join(path, path_size, value, "moeflow");
  CHECK(absolute_variable("HOME", &value));
  if (value) return path_join(path, path_size, value, ".cache/moeflow");
  FAIL(MOEFLOW_ERROR_CACHE,
       "no cache directory: MOEFLOW_CACHE_DIR, XDG_CACHE_HOME and HOME are unset; set one or give --cache DIR");
cleanup:
  return status;
}

/* Ours or root's, and nobody else may write. `what` is "directory" or "file". */
static moeflow_status check_owner_mode(const struct stat *info, const char *what, const char *path, const char *below) {
  const char *slash = *below ? "/" : "";
  if (info->st_uid != geteuid() && info->st_uid != 0) {
    return status_set(MOEFLOW_ERROR_CACHE,
                      "cache %s %s%s%s belongs to user %u, not to user %u or root: not trusted; choose another --cache",
                      what, path, slash, below, (unsigned)info->st_uid, (unsigned)geteuid());
  }
  if (info->st_mode & (S_IWGRP | S_IWOTH)) {
    return status_set(MOEFLOW_ERROR_CACHE,
                      "cache %s %s%s%s has mode %04o, writable by others: not trusted; run chmod go-w on it", what, path,
                      slash, below, (unsigned)info->st_mode & 07777);
  }
  return MOEFLOW_OK;
}

static moeflow_status open_error(const char *path, const char *below, int error) {
  const char *slash = *below ? "/" : "";
  if (error == ENOENT) {
    return status_set(MOEFLOW_ERROR_CACHE, "%s%s%s does not exist; run moeflow-gen build to fill the cache", path, slash,
                      below);
  }
  if (error == ELOOP || error == ENOTDIR) {
    return status_set(MOEFLOW_ERROR_CACHE,
                      "%s%s%s is or passes through a link or something that is not a directory: not trusted; "
                      "give the real path",
                      path, slash, below);
  }
  return status_set(MOEFLOW_ERROR_CACHE, "cannot open %s%s%s: %s", path, slash, below, strerror(error));
}

/* Walks `relative` from `start` one component at a time, so that no link is followed anywhere. With `inside`, every
 * component is part of the cache and must be ours alone; otherwise they are parents and only the last one must. */
static moeflow_status walk(int start, const char *path, const char *relative, int inside, int create, int *fd,
                           int *missing) {
  moeflow_status status = MOEFLOW_OK;
  const char *below = inside ? relative : "";
  char name[NAME_MAX + 1];
  int at = dup(start), next = -1;
  if (at < 0) return status_set(MOEFLOW_ERROR_CACHE, "cannot open %s: %s", path, strerror(errno));
  for (const char *p = relative + strspn(relative, "/"); *p;) {
    size_t length = strcspn(p, "/");
    if (length >= sizeof name)
      FAIL(MOEFLOW_ERROR_CACHE, "%s: a component of the path is longer than %d bytes", path, NAME_MAX);
    memcpy(name, p, length);
    name[length] = 0;
    p += length;
    p += strspn(p, "/");
    int flags = O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | (*p ? O_PATH : O_RDONLY); /* parents need not be readable */
    next = openat(at, name, flags);
    if (next < 0 && errno == ENOENT && create) {
      if (mkdirat(at, name, 0700) != 0 && errno != EEXIST) {
        FAIL(MOEFLOW_ERROR_CACHE, "cannot create %s%s%s: %s", path, *below ? "/" : "", below, strerror(errno));
      }
      next = openat(at, name, flags);
    }
    if (next < 0) {
      if (missing) *missing = errno == ENOENT;
      status = open_error(path, below, errno);
      goto cleanup;
    }
    struct stat info;
    if (fstat(next, &info) != 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot look at %s: %s", path, strerror(errno));
    if (inside || !*p) {
      CHECK(check_owner_mode(&info, "directory", path, below));
    } else if ((info.st_mode & S_IWOTH) && !(info.st_mode & S_ISVTX)) {
      FAIL(MOEFLOW_ERROR_CACHE, "%s lies below '%s', which everybody may write (mode %04o, not sticky): not trusted", path,
           name, (unsigned)info.st_mode & 07777);
    }
    close(at);
    at = next;
    next = -1;
  }
  *fd = at;
  return MOEFLOW_OK;
cleanup:
  if (next >= 0) close(next);
  close(at);
  return status;
}

moeflow_status cache_open_or_create(const char *path, int create, int *fd, int *missing) {
  *fd = -1;
  if (missing) *missing = 0;
  if (!strspn(path, "/") || !path[strspn(path, "/")]) {
    return status_set(MOEFLOW_ERROR_CACHE, "'%s' cannot be a cache directory; give an absolute path below /", path);
  }
  int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (root < 0) return open_error("/", "", errno);
  moeflow_status status = walk(root, path, path, 0, create, fd, missing);
  close(root);
  return status;
}

moeflow_status cache_open(const char *path, int *fd) {
  return cache_open_or_create(path, 0, fd, NULL);
}

moeflow_status cache_open_below(int cache_fd, const char *path, const char *below, int create, int *fd, int *missing) {
  *fd = -1;
  if (missing) *missing = 0;
  return walk(cache_fd, path, below, 1, create, fd, missing);
}

static moeflow_status read_all(int fd, const char *path, const char *below, uint8_t *bytes, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t n = read(fd, bytes + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return status_set(MOEFLOW_ERROR_CACHE, "cannot read %s/%s: %s", path, below, strerror(errno));
    if (n == 0) return status_set(MOEFLOW_ERROR_CACHE, "%s/%s shrank while it was read", path, below);
    done += (size_t)n;
  }
  return MOEFLOW_OK;
}

static moeflow_status check_file(int fd, const char *path, const char *below, size_t size_max, struct stat *info) {
  if (fstat(fd, info) != 0) return status_set(MOEFLOW_ERROR_CACHE, "cannot look at %s/%s: %s", path, below, strerror(errno));
  if (!S_ISREG(info->st_mode))
    return status_set(MOEFLOW_ERROR_CACHE, "%s/%s is not a regular file: not trusted", path, below);
  if (info->st_nlink != 1) {
    return status_set(MOEFLOW_ERROR_CACHE, "%s/%s has %u hard links, not 1: not trusted", path, below,
                      (unsigned)info->st_nlink);
  }
  if (info->st_size < 0 || (uint64_t)info->st_size > size_max) {
    return status_set(MOEFLOW_ERROR_CACHE, "%s/%s has %lld bytes, more than %zu: damaged", path, below,
                      (long long)info->st_size, size_max);
  }
  return check_owner_mode(info, "file", path, below);
}

moeflow_status cache_read(int cache_fd, const char *path, const char *below, size_t size_max, uint8_t **bytes, size_t *size,
                          int *missing) {
  moeflow_status status = MOEFLOW_OK;
  char folder[NAME_MAX + 1];
  int directory = -1, fd = -1;
  *bytes = NULL;
  *size = 0;
  if (missing) *missing = 0;
  const char *name = strrchr(below, '/');
  if (!name || (size_t)(name - below) >= sizeof folder) FAIL(MOEFLOW_ERROR_CACHE, "'%s' is no name in the cache", below);
  memcpy(folder, below, (size_t)(name - below));
  folder[name - below] = 0;
  CHECK(cache_open_below(cache_fd, path, folder, 0, &directory, missing));
  fd = openat(directory, name + 1, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); /* NONBLOCK: a fifo must not hold us */
  if (fd < 0) {
    if (missing) *missing = errno == ENOENT;
    status = open_error(path, below, errno);
    goto cleanup;
  }
  struct stat info;
  CHECK(check_file(fd, path, below, size_max, &info));
  *bytes = malloc((size_t)info.st_size + 1);
  if (!*bytes) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the %lld bytes of %s/%s", (long long)info.st_size, path, below);
  CHECK(read_all(fd, path, below, *bytes, (size_t)info.st_size));
  (*bytes)[info.st_size] = 0;
  *size = (size_t)info.st_size;
cleanup:
  if (status != MOEFLOW_OK) {
    free(*bytes);
    *bytes = NULL;
  }
  if (fd >= 0) close(fd);
  if (directory >= 0) close(directory);
  return status;
}
