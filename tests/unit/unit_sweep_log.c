/* The sweep's log: what was written is read back, whatever the end of the file looks like and whoever else wrote into it. */
#include "sweep_log.h"

#include <errno.h>

#include "scratch.h"
#include "status.h"
#include "test.h"

#define US "0123456789abcdef"
#define THEM "fedcba9876543210"

struct seen {
  int count;
  struct sweep_record records[64];
};

static void take(void *user, const struct sweep_record *record) {
  struct seen *seen = user;
  if (seen->count < 64) seen->records[seen->count++] = *record;
}

static struct sweep_record screened(int rows, double us) {
  struct sweep_record record = {.event = SWEEP_SCREENED, .rows = rows, .arm = "experts_tokens8"};
  record.values[SWEEP_REL_L2] = 4.25e-4;
  record.values[SWEEP_US] = us;
  return record;
}

static moeflow_status append_to(const char *path, const char *identity, int resume, const struct sweep_record *record) {
  struct sweep_log log;
  struct seen seen = {0};
  moeflow_status status = sweep_log_open(path, identity, resume, take, &seen, &log);
  if (status == MOEFLOW_OK) status = sweep_log_append(&log, record);
  sweep_log_close(&log);
  return status;
}

static int read_all(const char *path, const char *identity, struct seen *seen) {
  struct sweep_log log;
  *seen = (struct seen){0};
  EXPECT(sweep_log_open(path, identity, 1, take, seen, &log) == MOEFLOW_OK, "%s", moeflow_last_error());
  const int passed_over = log.passed_over;
  sweep_log_close(&log);
  return passed_over;
}

static void round_trip(void) {
  const struct sweep_record records[] = {
      {.event = SWEEP_REFUSED, .arm = "a", .why = "spills 16 bytes # of registers"},
      {.event = SWEEP_FAILED, .rows = 8, .arm = "a", .why = "crashed SIGSEGV"},
      {.event = SWEEP_FAILED, .rows = 8, .arm = "a", .why = ""},
      {.event = SWEEP_SKIPPED, .rows = 8, .arm = "a", .why = "cuMemAlloc: out of memory"},
      screened(16, 610.125),
      {.event = SWEEP_SKEWED, .rows = 16, .arm = "b", .values = {[SWEEP_US] = 700.5}},
      {.event = SWEEP_PAIRED, .rows = 256, .arm = "b", .against = "a", .values = {0, 97, 100, -0.25, -1e-12, 3.5}},
  };
  for (size_t i = 0; i < sizeof records / sizeof *records; i++) {
    char text[1024], again[1024];
    struct sweep_record back;
    sweep_record_write(&records[i], text, sizeof text);
    EXPECT(sweep_record_read(text, &back) == 0, "%s", text);
    sweep_record_write(&back, again, sizeof again);
    EXPECT(!strcmp(text, again) && back.event == records[i].event && back.rows == records[i].rows, "%s / %s", text, again);
    EXPECT(!memcmp(back.values, records[i].values, sizeof back.values), "%s", text);
  }
  static const char *const bad[] = {"",
                                    "screened",
                                    "screened rows=8 arm=a rel_l2=1",
                                    "screened rows=0 arm=a rel_l2=1 us=2",
                                    "screened rows=8 arm=a rel_l2=1 us=2 more",
                                    "skewed rows=8 arm= us=1",
                                    "begun why=",
                                    "skewed rows=8 arm=a us=1x"};
  struct sweep_record back;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) EXPECT(sweep_record_read(bad[i], &back), "%s", bad[i]);
}

static void identities(void) {
  const char *path = scratch_path("identities.log");
  struct seen seen;
  struct sweep_record ours = screened(8, 1), theirs = screened(8, 2);
  EXPECT(append_to(path, US, 0, &ours) == MOEFLOW_OK && append_to(path, THEM, 0, &theirs) == MOEFLOW_OK);
  EXPECT(append_to(path, US, 1, &ours) == MOEFLOW_OK);
  EXPECT(read_all(path, US, &seen) == 0 && seen.count == 2 && seen.records[1].values[SWEEP_US] == 1, "%d", seen.count);
  EXPECT(read_all(path, THEM, &seen) == 0 && seen.count == 1 && seen.records[0].values[SWEEP_US] == 2, "%d", seen.count);
  EXPECT(append_to(path, US, 0, &ours) == MOEFLOW_OK, "a sweep that reuses nothing");
  EXPECT(read_all(path, US, &seen) == 0 && seen.count == 1, "what stands before its begin no longer counts: %d", seen.count);
  EXPECT(read_all(path, THEM, &seen) == 0 && seen.count == 1, "and it speaks for itself alone: %d", seen.count);
}

/* The file ends anywhere, as after a lost machine: whole lines are read, and what is written next is not glued to the rest.
 */
static void torn(void) {
  const char *path = scratch_path("torn.log");
  char text[8192];
  struct seen seen;
  for (int i = 0; i < 3; i++) {
    struct sweep_record record = screened(8 << i, 610.125 + i);
    EXPECT(append_to(path, US, i > 0, &record) == MOEFLOW_OK);
  }
  FILE *file = fopen(path, "r");
  const size_t size = fread(text, 1, sizeof text, file);
  fclose(file);
  for (size_t cut = 0; cut <= size; cut++) {
    int whole = 0;
    for (size_t i = 0; i < cut; i++) whole += text[i] == '\n';
    struct sweep_record record = screened(1000, 7);
    scratch_write(path, text, cut, 0600);
    read_all(path, US, &seen);
    const int complete = cut < size && text[cut] == '\n' && whole > 0; /* all of a line but its end */
    EXPECT(seen.count == (whole ? whole - 1 : 0) + complete, "cut at %zu: %d records of %d lines", cut, seen.count, whole);
    EXPECT(append_to(path, US, 1, &record) == MOEFLOW_OK);
    read_all(path, US, &seen);
    EXPECT(seen.count == (whole ? whole : 1) + complete, "cut at %zu: %d after appending", cut, seen.count);
    EXPECT(seen.count && seen.records[seen.count - 1].rows == 1000);
  }
  for (size_t at = 0; at < size; at++) { /* a changed byte costs its line, never a wrong figure */
    text[at] ^= 1;
    scratch_write(path, text, size, 0600);
    read_all(path, US, &seen);
    for (int i = 0; i < seen.count; i++)
      EXPECT(seen.records[i].values[SWEEP_US] >= 610.125 && seen.records[i].values[SWEEP_US] <= 612.125 &&
                 seen.records[i].values[SWEEP_REL_L2] == 4.25e-4,
             "byte %zu", at);
    text[at] ^= 1;
  }
}

static void two_writers(void) {
  const char *path = scratch_path("two.log");
  struct sweep_log first, second;
  EXPECT(sweep_log_open(path, US, 0, NULL, NULL, &first) == MOEFLOW_OK);
  EXPECT(sweep_log_open(path, US, 1, NULL, NULL, &second) == MOEFLOW_ERROR_CACHE && strstr(moeflow_last_error(), "another"),
         "%s", moeflow_last_error());
  sweep_log_close(&first);
  EXPECT(sweep_log_open(path, US, 1, NULL, NULL, &second) == MOEFLOW_OK);
  sweep_log_close(&second);
  EXPECT(sweep_log_open(scratch_path("no/such.log"), US, 0, NULL, NULL, &first) == MOEFLOW_ERROR_CACHE);
  EXPECT(sweep_log_open(scratch, US, 0, NULL, NULL, &first) == MOEFLOW_ERROR_CACHE, "a folder");
}

/* What somebody else wrote is left alone, but for what a killed sweep leaves in its first line. */
static void foreign_files(void) {
  static const struct {
    const char *text;
    int taken;
  } cases[] = {{"moeflow: 1\nname: model\n", 0},
               {"one line without an end", 0},
               {"", 1},
               {"0123456789", 1},
               {US " beg", 1},
               {US "0 beg", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *path = scratch_path("foreign");
    struct sweep_log log;
    struct seen seen = {0};
    scratch_write(path, cases[i].text, strlen(cases[i].text), 0600);
    EXPECT((sweep_log_open(path, US, 0, take, &seen, &log) == MOEFLOW_OK) == cases[i].taken, "case %zu", i);
    sweep_log_close(&log);
  }
}

/* Figures that no measurement gives do not reach a choice. */
static void odd_figures(void) {
  static const char *const texts[] = {"rows=2.5 arm=a rel_l2=0 us=1",    "rows=2 arm=a rel_l2=5 us=1",
                                      "rows=2 arm=a rel_l2=0 us=nan",    "rows=2 arm=a rel_l2=0 us=inf",
                                      "rows=2 arm=a rel_l2=0 us=-5",     "rows=2 arm=a rel_l2=nan us=1",
                                      "rows=2 arm=a rel_l2=-0.1 us=1.5", "rows=2 arm=a rel_l2=0 us=0"};
  struct sweep_record record;
  char line[128];
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    snprintf(line, sizeof line, "screened %s", texts[i]);
    EXPECT(sweep_record_read(line, &record), "%s", line);
  }
  EXPECT(!sweep_record_read("screened rows=2 arm=a rel_l2=0 us=1", &record));
}

static void full_disk(void) {
  struct sweep_log log = {.identity = US, .path = "/dev/full", .fd = open("/dev/full", O_WRONLY)};
  struct sweep_record record = screened(8, 1);
  if (log.fd < 0) return;
  EXPECT(sweep_log_append(&log, &record) == MOEFLOW_ERROR_CACHE && strstr(moeflow_last_error(), "No space"));
  sweep_log_close(&log);
}

int main(void) {
  scratch_make();
  round_trip();
  identities();
  torn();
  two_writers();
  foreign_files();
  odd_figures();
  full_disk();
  scratch_remove();
  TEST_END;
}
