/* Where the cache is, and whom it trusts: a matrix of variables, owners, modes and links. */
#include "cache.h"

#include "scratch.h"
#include "test.h"

static void expect_path(const char *explicit_path, const char *expected) {
  char path[CACHE_PATH_MAX] = "";
  moeflow_status status = cache_path(explicit_path, path, sizeof path);
  if (expected) {
    EXPECT(status == MOEFLOW_OK && strcmp(path, expected) == 0, "'%s' instead of '%s'", path, expected);
  } else {
    EXPECT(status == MOEFLOW_ERROR_CACHE, "'%s' instead of an error", path);
  }
}

static void variables(void) {
  char here[600];
  setenv("MOEFLOW_CACHE_DIR", "/a/b", 1);
  setenv("XDG_CACHE_HOME", "/x", 1);
  setenv("HOME", "/h", 1);
  expect_path(NULL, "/a/b");
  expect_path("/given", "/given");
  EXPECT(chdir(scratch) == 0);
  snprintf(here, sizeof here, "%s/rel", scratch);
  expect_path("rel", here);
  expect_path("", NULL);
  setenv("MOEFLOW_CACHE_DIR", "relative", 1);
  expect_path(NULL, NULL);
  setenv("MOEFLOW_CACHE_DIR", "", 1);
  expect_path(NULL, "/x/moeflow");
  setenv("XDG_CACHE_HOME", "relative", 1);
  expect_path(NULL, NULL);
  unsetenv("XDG_CACHE_HOME");
  expect_path(NULL, "/h/.cache/moeflow");
  setenv("HOME", "relative", 1);
  expect_path(NULL, NULL);
  unsetenv("HOME");
  expect_path(NULL, NULL);
  EXPECT(strstr(moeflow_last_error(), "--cache"), "says what to do: %s", moeflow_last_error());
}

static int opens(const char *path) {
  int fd;
  moeflow_status status = cache_open(path, &fd);
  EXPECT((status == MOEFLOW_OK) == (fd >= 0));
  EXPECT(status == MOEFLOW_OK || status == MOEFLOW_ERROR_CACHE);
  if (fd >= 0) close(fd);
  return status == MOEFLOW_OK;
}

static void modes(void) {
  static const struct {
    mode_t mode;
    int trusted;
  } cases[] = {{0700, 1}, {0755, 1}, {0500, 1}, {0775, 0}, {0757, 0}, {0770, 0}, {0777, 0}, {01777, 0}, {02770, 0}};
  const char *path = scratch_path("modes");
  mkdir(path, 0700);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    chmod(path, cases[i].mode);
    EXPECT(opens(path) == cases[i].trusted, "mode %04o", (unsigned)cases[i].mode);
  }
}

static void parents_and_links(void) {
  mkdir(scratch_path("open"), 0700);
  mkdir(scratch_path("open/cache"), 0700);
  chmod(scratch_path("open"), 0777);
  EXPECT(!opens(scratch_path("open/cache")), "below a world-writable folder that is not sticky");
  chmod(scratch_path("open"), 01777);
  EXPECT(opens(scratch_path("open/cache")), "below a sticky one: %s", moeflow_last_error());
  chmod(scratch_path("open"), 0711);
  EXPECT(opens(scratch_path("open/cache")));
  EXPECT(symlink(scratch_path("open/cache"), scratch_path("last-link")) == 0);
  EXPECT(symlink(scratch_path("open"), scratch_path("middle-link")) == 0);
  EXPECT(!opens(scratch_path("last-link")), "a link as the last component");
  EXPECT(!opens(scratch_path("middle-link/cache")), "a link on the way");
  EXPECT(opens(scratch_path("open//cache/")) && opens(scratch_path("open/./cache")) &&
         opens(scratch_path("open/../open/cache")));
  scratch_write(scratch_path("file"), "x", 1, 0600);
  EXPECT(!opens(scratch_path("file")) && !opens(scratch_path("file/cache")), "a file is no directory");
  EXPECT(!opens("/") && !opens("") && !opens("relative"));
  int fd, missing;
  EXPECT(cache_open_or_create(scratch_path("new/deep"), 0, &fd, &missing) == MOEFLOW_ERROR_CACHE && missing);
  EXPECT(access(scratch_path("new"), F_OK) != 0, "looking creates nothing");
  EXPECT(cache_open_or_create(scratch_path("new/deep"), 1, &fd, &missing) == MOEFLOW_OK && !missing);
  struct stat info;
  EXPECT(fstat(fd, &info) == 0 && (info.st_mode & 07777) == 0700, "created private");
  close(fd);
}

static void owners(void) {
  if (geteuid() != 0) {
    puts("not root: foreign owners not tried");
    return;
  }
  const char *path = scratch_path("owned");
  mkdir(path, 0755);
  chmod(scratch, 0755);
  EXPECT(chown(path, 12345, 12345) == 0);
  EXPECT(!opens(path), "another user's directory");
  EXPECT(seteuid(12345) == 0);
  EXPECT(opens(path), "our own: %s", moeflow_last_error());
  EXPECT(seteuid(0) == 0);
  EXPECT(chown(path, 0, 0) == 0);
  EXPECT(seteuid(12345) == 0);
  EXPECT(opens(path), "root's: %s", moeflow_last_error());
  EXPECT(seteuid(0) == 0);
}

static moeflow_status read_back(int fd, const char *below, size_t size_max, int *missing) {
  uint8_t *bytes;
  size_t size;
  moeflow_status status = cache_read(fd, scratch, below, size_max, &bytes, &size, missing);
  if (status == MOEFLOW_OK) EXPECT(size == 5 && memcmp(bytes, "hello", 6) == 0, "whole, and a NUL behind it");
  if (status != MOEFLOW_OK) EXPECT(bytes == NULL && size == 0);
  free(bytes);
  return status;
}

static void files(void) {
  int fd, missing;
  chmod(scratch, 0700);
  EXPECT(cache_open(scratch, &fd) == MOEFLOW_OK, "%s", moeflow_last_error());
  mkdir(scratch_path("plans"), 0700);
  const char *path = scratch_path("plans/p");
  EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE && missing);
  EXPECT(read_back(fd, "nowhere/p", 9, &missing) == MOEFLOW_ERROR_CACHE && missing);
  scratch_write(path, "hello", 5, 0644);
  EXPECT(read_back(fd, "plans/p", 5, &missing) == MOEFLOW_OK && !missing, "%s", moeflow_last_error());
  EXPECT(read_back(fd, "plans/p", 4, &missing) == MOEFLOW_ERROR_CACHE && !missing, "larger than allowed");
  chmod(path, 0664);
  EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE, "group-writable");
  chmod(path, 0646);
  EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE, "world-writable");
  chmod(path, 0600);
  EXPECT(link(path, scratch_path("second")) == 0);
  EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE && !missing, "two hard links");
  unlink(scratch_path("second"));
  EXPECT(symlink("p", scratch_path("plans/l")) == 0);
  EXPECT(read_back(fd, "plans/l", 9, &missing) == MOEFLOW_ERROR_CACHE && !missing, "a link");
  EXPECT(symlink("plans", scratch_path("aside")) == 0);
  EXPECT(read_back(fd, "aside/p", 9, &missing) == MOEFLOW_ERROR_CACHE && !missing, "a link as the folder");
  EXPECT(mkfifo(scratch_path("plans/f"), 0600) == 0);
  EXPECT(read_back(fd, "plans/f", 9, &missing) == MOEFLOW_ERROR_CACHE && !missing, "a fifo must not hold the reader");
  mkdir(scratch_path("plans/d"), 0700);
  EXPECT(read_back(fd, "plans/d", 9, &missing) == MOEFLOW_ERROR_CACHE && !missing, "a directory");
  if (geteuid() == 0) {
    EXPECT(chown(path, 12345, 12345) == 0);
    EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE, "another user's file");
    EXPECT(chown(path, 0, 0) == 0);
  }
  chmod(scratch_path("plans"), 0770);
  EXPECT(read_back(fd, "plans/p", 9, &missing) == MOEFLOW_ERROR_CACHE, "a group-writable folder inside the cache");
  close(fd);
}

int main(void) {
  scratch_make();
  umask(022);
  variables();
  modes();
  parents_and_links();
  owners();
  files();
  EXPECT(chdir("/") == 0);
  scratch_remove();
  TEST_END;
}
