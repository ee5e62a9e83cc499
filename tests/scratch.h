/* A private folder for a test, below TMPDIR or /tmp, removed with all that is in it. */
#ifndef MOEFLOW_SCRATCH_H
#define MOEFLOW_SCRATCH_H

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char scratch[512]; /* the folder's real path */

static inline void scratch_make(void) {
  const char *base = getenv("TMPDIR");
  char template[256];
  snprintf(template, sizeof template, "%s/moeflow-test-XXXXXX", base && *base == '/' ? base : "/tmp");
  char *made = mkdtemp(template), *real = made ? realpath(made, NULL) : NULL;
  if (!real || strlen(real) >= sizeof scratch) {
    perror("scratch folder");
    exit(1);
  }
  strcpy(scratch, real);
  free(real);
}

static inline int scratch_remove_one(const char *path, const struct stat *info, int kind, struct FTW *position) {
  (void)info, (void)kind, (void)position;
  return remove(path);
}

static inline void scratch_remove(void) {
  nftw(scratch, scratch_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* scratch/name; a few results live at a time. */
static inline const char *scratch_path(const char *name) {
  static char paths[8][1024];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
  return path;
}

static inline void scratch_write(const char *path, const void *bytes, size_t size, mode_t mode) {
  unlink(path);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, bytes, size) != (ssize_t)size || fchmod(fd, mode) != 0) {
    perror(path);
    exit(1);
  }
  close(fd);
}
#endif
