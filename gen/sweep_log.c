#include "sweep_log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "number.h"
#include "sha256.h"
#include "status.h"
#include "sweep_worker.h"

#define IDENTITY_DIGITS 16
#define CHECKSUM_DIGITS 8
#define LINE_MAX_BYTES 1024
#define LOG_BYTES_MAX (64 << 20)

enum { ROWS = 1, ARM = 2, AGAINST = 4, WHY = 8 };
#define V(value) (1u << SWEEP_##value)

/* Which fields a record of each event has, in the order of the struct; `why` is the rest of the line. */
static const struct event_row {
  const char *name;
  unsigned fields, values;
} events[SWEEP_EVENTS] = {
    [SWEEP_BEGIN] = {"begin", WHY, 0},
    [SWEEP_REFUSED] = {"refused", ARM | WHY, 0},
    [SWEEP_FAILED] = {"failed", ROWS | ARM | WHY, 0},
    [SWEEP_SKIPPED] = {"skipped", ROWS | ARM | WHY, 0},
    [SWEEP_SCREENED] = {"screened", ROWS | ARM, V(REL_L2) | V(US)},
    [SWEEP_SKEWED] = {"skewed", ROWS | ARM, V(US)},
    [SWEEP_PAIRED] = {"paired", ROWS | ARM | AGAINST, V(US) | V(DEFAULT_US) | V(GAP) | V(GAP_LOW) | V(GAP_HIGH)},
};

static const char *const value_names[SWEEP_VALUES_MAX] = {"rel_l2",      "us",          "default_us",
                                                          "gap_percent", "low_percent", "high_percent"};

/* ---- A record as text ---- */

__attribute__((format(printf, 4, 5))) static size_t put(char *text, size_t size, size_t used, const char *format, ...) {
  va_list arguments;
  if (used >= size) return used;
  va_start(arguments, format);
  const int n = vsnprintf(text + used, size - used, format, arguments);
  va_end(arguments);
  return n < 0 ? used : used + (size_t)n;
}

void sweep_record_write(const struct sweep_record *record, char *text, size_t size) {
  const struct event_row *row = &events[record->event];
  size_t used = put(text, size, 0, "%s", row->name);
  if (row->fields & ROWS) used = put(text, size, used, " rows=%d", record->rows);
  if (row->fields & ARM) used = put(text, size, used, " arm=%s", record->arm);
  if (row->fields & AGAINST) used = put(text, size, used, " against=%s", record->against);
  for (int i = 0; i < SWEEP_VALUES_MAX; i++) {
    char number[NUMBER_TEXT_MAX];
    if (!(row->values >> i & 1)) continue;
    number_write(record->values[i], number);
    used = put(text, size, used, " %s=%s", value_names[i], number);
  }
  if (row->fields & WHY) used = put(text, size, used, " why=");
  for (const char *p = record->why; (row->fields & WHY) && *p; p++) /* one line, whatever a compiler or a driver said */
    used = put(text, size, used, "%c", (unsigned char)*p < 0x20 ? ' ' : *p);
}

/* The word after "name=" at *text, which then moves behind it; NULL when the text goes on otherwise. `rest`: the word is all
 * that is left. */
static const char *take(const char **text, const char *name, int rest, char *word, size_t size) {
  const size_t length = strlen(name);
  if (**text != ' ' || strncmp(*text + 1, name, length) || (*text)[1 + length] != '=') return NULL;
  const char *begin = *text + length + 2;
  const size_t n = rest ? strlen(begin) : strcspn(begin, " ");
  if (n >= size || (!n && !rest)) return NULL;
  memcpy(word, begin, n);
  word[n] = 0;
  *text = begin + n;
  return word;
}

static int take_number(const char **text, const char *name, double *value) {
  char word[NUMBER_TEXT_MAX], *end;
  if (!take(text, name, 0, word, sizeof word)) return -1;
  *value = strtod(word, &end); /* written by number_write: a gap may be negative or have an exponent */
  return *end ? -1 : 0;
}

/* A figure that no measurement gives. */
static int is_odd(int value, double number) {
  if (!isfinite(number)) return 1;
  if (value == SWEEP_REL_L2) return number < 0 || number > SWEEP_REL_L2_MAX;
  return (value == SWEEP_US || value == SWEEP_DEFAULT_US) && number <= 0;
}

static int read_fields(const struct event_row *row, const char *text, struct sweep_record *record) {
  double rows = 0;
  if ((row->fields & ROWS) && (take_number(&text, "rows", &rows) || !(rows >= 1 && rows < 1e9) || rows != floor(rows)))
    return -1;
  record->rows = (int)rows;
  if ((row->fields & ARM) && !take(&text, "arm", 0, record->arm, sizeof record->arm)) return -1;
  if ((row->fields & AGAINST) && !take(&text, "against", 0, record->against, sizeof record->against)) return -1;
  for (int i = 0; i < SWEEP_VALUES_MAX; i++)
    if ((row->values >> i & 1) && (take_number(&text, value_names[i], &record->values[i]) || is_odd(i, record->values[i])))
      return -1;
  if ((row->fields & WHY) && !take(&text, "why", 1, record->why, sizeof record->why)) return -1;
  return *text ? -1 : 0;
}

int sweep_record_read(const char *text, struct sweep_record *record) {
  const size_t length = strcspn(text, " ");
  for (int i = 0; i < SWEEP_EVENTS; i++) {
    if (strlen(events[i].name) != length || memcmp(events[i].name, text, length)) continue;
    *record = (struct sweep_record){.event = (enum sweep_event)i};
    return read_fields(&events[i], text + length, record);
  }
  return -1;
}

/* ---- Lines ---- */

static void checksum(const char *text, size_t length, char digits[CHECKSUM_DIGITS + 1]) {
  uint8_t digest[32];
  char hex[65];
  sha256(text, length, digest);
  sha256_hex(digest, hex);
  memcpy(digits, hex, CHECKSUM_DIGITS);
  digits[CHECKSUM_DIGITS] = 0;
}

/* "<identity> <record> #<checksum>": the identity into its place, the record's text where it stands; NULL for a line that is
 * torn or of another form. */
static char *unwrap(char *line, char identity[IDENTITY_DIGITS + 1]) {
  char *hash = strrchr(line, '#'), digits[CHECKSUM_DIGITS + 1];
  if (!hash || hash - line < IDENTITY_DIGITS + 2 || hash[-1] != ' ' || line[IDENTITY_DIGITS] != ' ') return NULL;
  checksum(line, (size_t)(hash - 1 - line), digits);
  if (strcmp(hash + 1, digits)) return NULL;
  hash[-1] = 0;
  memcpy(identity, line, IDENTITY_DIGITS);
  identity[IDENTITY_DIGITS] = 0;
  return line + IDENTITY_DIGITS + 1;
}

typedef void (*sweep_take)(void *user, const struct sweep_record *record);

/* Two rounds over the text, since only what follows the last begin counts: `skip` is its number among the lines. */
static int for_each(struct sweep_log *log, const char *text, int skip, sweep_take take_record, void *user) {
  int number = 0, last_begin = 0;
  log->passed_over = 0;
  for (const char *at = text; *at; number++) {
    struct sweep_record record;
    char line[LINE_MAX_BYTES], identity[IDENTITY_DIGITS + 1], *words = NULL;
    const size_t length = strcspn(at, "\n");
    if (length < sizeof line) {
      memcpy(line, at, length);
      line[length] = 0;
      words = unwrap(line, identity);
    }
    at += length + (at[length] == '\n');
    log->has_lines |= words != NULL;
    if (!words || sweep_record_read(words, &record)) {
      log->passed_over += length > 0;
    } else if (!strcmp(identity, log->identity)) {
      if (record.event == SWEEP_BEGIN) last_begin = number;
      if (take_record && number >= skip && record.event != SWEEP_BEGIN) take_record(user, &record);
    }
  }
  return last_begin;
}

static moeflow_status read_text(struct sweep_log *log, char **text) {
  struct stat info;
  size_t size = 0;
  if (fstat(log->fd, &info) || !S_ISREG(info.st_mode))
    return status_set(MOEFLOW_ERROR_CACHE, "the log %s is not a regular file", log->path);
  if (info.st_size > LOG_BYTES_MAX)
    return status_set(MOEFLOW_ERROR_CACHE, "the log %s has %lld bytes, more than %d: give another with --log", log->path,
                      (long long)info.st_size, LOG_BYTES_MAX);
  *text = calloc(1, (size_t)info.st_size + 1);
  if (!*text) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a log of %lld bytes", (long long)info.st_size);
  while (size < (size_t)info.st_size) {
    const ssize_t n = pread(log->fd, *text + size, (size_t)info.st_size - size, (off_t)size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return status_set(MOEFLOW_ERROR_CACHE, "cannot read the log %s: %s", log->path, strerror(errno));
    if (!n) break;
    size += (size_t)n;
  }
  for (size_t i = 0; i < size; i++)
    if (!(*text)[i]) (*text)[i] = '?'; /* a disk's zeros after a crash: part of a torn line, not the end of the text */
  log->torn = size && (*text)[size - 1] != '\n';
  return MOEFLOW_OK;
}

/* What a sweep leaves that was killed in its first line. */
static int is_torn_line(const char *text) {
  const size_t digits = strspn(text, "0123456789abcdef");
  return !strchr(text, '\n') && (!text[digits] || digits == IDENTITY_DIGITS);
}

moeflow_status sweep_log_open(const char *path, const char *identity, int resume, sweep_take take_record, void *user,
                              struct sweep_log *log) {
  moeflow_status status = MOEFLOW_OK;
  char *text = NULL;
  *log = (struct sweep_log){.fd = -1};
  snprintf(log->identity, sizeof log->identity, "%s", identity);
  if ((size_t)snprintf(log->path, sizeof log->path, "%s", path) >= sizeof log->path)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "the log's path is too long: %.64s...", path);
  log->fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (log->fd < 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot open the log %s: %s", path, strerror(errno));
  const int refused = flock(log->fd, LOCK_EX | LOCK_NB) ? errno : 0;
  if (refused && refused != EWOULDBLOCK) FAIL(MOEFLOW_ERROR_CACHE, "cannot lock the log %s: %s", path, strerror(refused));
  if (refused)
    FAIL(MOEFLOW_ERROR_CACHE, "another sweep is writing the log %s: wait for it, or give others with --log and --output",
         path);
  CHECK(read_text(log, &text));
  const int last_begin = for_each(log, text, 0, NULL, NULL);
  if (*text && !log->has_lines && !is_torn_line(text))
    FAIL(MOEFLOW_ERROR_ARGUMENT, "%s is not a sweep's log: give another with --log, or remove it", path);
  if (resume) {
    for_each(log, text, last_begin, take_record, user);
  } else {
    CHECK(sweep_log_append(log, &(struct sweep_record){.event = SWEEP_BEGIN}));
  }
cleanup:
  free(text);
  if (status != MOEFLOW_OK) sweep_log_close(log);
  return status;
}

moeflow_status sweep_log_append(struct sweep_log *log, const struct sweep_record *record) {
  char text[LINE_MAX_BYTES - 64], line[LINE_MAX_BYTES], digits[CHECKSUM_DIGITS + 1];
  sweep_record_write(record, text, sizeof text);
  const int length = snprintf(line, sizeof line, "%s%s %s", log->torn ? "\n" : "", log->identity, text);
  checksum(line + log->torn, (size_t)(length - log->torn), digits);
  const size_t size = (size_t)length + (size_t)snprintf(line + length, sizeof line - (size_t)length, " #%s\n", digits);
  log->torn = 0;
  for (size_t done = 0; done < size;) {
    const ssize_t n = write(log->fd, line + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return status_set(MOEFLOW_ERROR_CACHE, "cannot write the log %s: %s", log->path, strerror(errno));
    done += (size_t)n;
  }
  if (fsync(log->fd) && errno != EINVAL) /* EINVAL: a file system that has none */
    return status_set(MOEFLOW_ERROR_CACHE, "cannot write the log %s to the disk: %s", log->path, strerror(errno));
  return MOEFLOW_OK;
}

void sweep_log_close(struct sweep_log *log) {
  if (log->fd >= 0) close(log->fd); /* and with it the lock */
  log->fd = -1;
}
