/* A sweep's memory: a text file that only grows, one record a line, each on the disk before the next measurement begins. A
 * line carries the identity of what was measured and a checksum, so that torn lines and other models' records are passed
 * over. docs/sweep.md shows one. */
#ifndef MOEFLOW_SWEEP_LOG_H
#define MOEFLOW_SWEEP_LOG_H

#include "moeflow.h"

#define SWEEP_NAME_MAX 96 /* of an arm */
#define SWEEP_WHY_MAX 256
#define SWEEP_VALUES_MAX 6

enum sweep_event {
  SWEEP_BEGIN,    /* a sweep that reuses nothing: what stands above no longer counts */
  SWEEP_REFUSED,  /* arm, why: not compiled, or spills */
  SWEEP_FAILED,   /* rows, arm, why: wrong, crashed or hung */
  SWEEP_SKIPPED,  /* rows, arm, why: no memory for it at this size, which says nothing about it elsewhere */
  SWEEP_SCREENED, /* rows, arm: checked, then timed by a few launches */
  SWEEP_SKEWED,   /* rows, arm: checked and timed on a skewed routing */
  SWEEP_PAIRED,   /* rows, arm, against: timed in turns with the default */
  SWEEP_EVENTS
};

enum sweep_value { /* which of a record's values; the events that carry it are in sweep_log.c's table */
                   SWEEP_REL_L2 = 0,
                   SWEEP_US = 1, /* per layer */
                   SWEEP_DEFAULT_US = 2,
                   SWEEP_GAP = 3, /* per cent of the default's time that the arm saves: mean and interval, 95 % for all
                                     finalists at once */
                   SWEEP_GAP_LOW = 4,
                   SWEEP_GAP_HIGH = 5
};

struct sweep_record {
  enum sweep_event event;
  int rows;                     /* received rows of the bucket that was measured */
  char arm[SWEEP_NAME_MAX];     /* "portable", or a unit's name without ".cu" */
  char against[SWEEP_NAME_MAX]; /* PAIRED: the default's name */
  double values[SWEEP_VALUES_MAX];
  char why[SWEEP_WHY_MAX];
};

struct sweep_log {
  int fd;
  char path[4096];
  char identity[17]; /* of the records written: 16 hex digits */
  int torn;          /* the last line has no end yet */
  int has_lines;     /* of any sweep */
  int passed_over;   /* lines that were torn or of an unknown form */
};

/* Opens or makes the file and locks it. With `resume`, hands every record of this identity since its last SWEEP_BEGIN to
 * `take`; else appends a SWEEP_BEGIN. MOEFLOW_ERROR_CACHE when it cannot be written, or another sweep is writing it. */
moeflow_status sweep_log_open(const char *path, const char *identity, int resume,
                              void (*take)(void *user, const struct sweep_record *record), void *user,
                              struct sweep_log *log);

/* One write and one fsync. */
moeflow_status sweep_log_append(struct sweep_log *log, const struct sweep_record *record);

void sweep_log_close(struct sweep_log *log);

/* A record as the text of a line, without identity and checksum; and back: 0, or -1 when the text is no record. */
void sweep_record_write(const struct sweep_record *record, char *text, size_t size);
int sweep_record_read(const char *text, struct sweep_record *record);
#endif
