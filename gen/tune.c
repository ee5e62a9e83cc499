#include "tune.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "number.h"
#include "status.h"

#define TUNE_BYTES_MAX 65536

/* ---- Names ---- */

void tune_gpu_slug(const char *gpu, char slug[64]) {
  static const char maker[] = "NVIDIA ";
  size_t length = 0;
  if (!strncmp(gpu, maker, strlen(maker))) gpu += strlen(maker);
  for (; *gpu && length < 63; gpu++) {
    if (isalnum((unsigned char)*gpu)) {
      slug[length++] = (char)tolower((unsigned char)*gpu);
    } else if (length && slug[length - 1] != '-') {
      slug[length++] = '-';
    }
  }
  while (length && slug[length - 1] == '-') length--;
  slug[length] = 0;
}

void tune_file_name(const char *model, const char *dtype, const char *gpu, char name[192]) {
  char slug[64];
  tune_gpu_slug(gpu, slug);
  snprintf(name, 192, "%s.%s.%s.tune", model, dtype, slug);
}

/* ---- The identity: one table for reader, writer and comparison ---- */

enum identity_kind { IDENTITY_TEXT, IDENTITY_INTEGER, IDENTITY_HASH };

static const struct identity_field {
  const char *key, *noun;
  enum identity_kind kind;
  size_t offset, size;
  int binding; /* must be the same where the file is used */
} identity_fields[] = {
#define FIELD(field, noun, kind, binding) \
  { #field, noun, kind, offsetof(struct tune_identity, field), sizeof(((struct tune_identity *)0)->field), binding }
    FIELD(model, "model", IDENTITY_TEXT, 1),
    FIELD(dtype, "weights", IDENTITY_TEXT, 1),
    FIELD(gpu, "GPU", IDENTITY_TEXT, 1),
    FIELD(multiprocessors, "multiprocessors", IDENTITY_INTEGER, 1),
    FIELD(arch, "arch", IDENTITY_TEXT, 1),
    FIELD(spec, "spec", IDENTITY_HASH, 1),
    FIELD(driver, "driver", IDENTITY_INTEGER, 0),
    FIELD(nvrtc, "NVRTC", IDENTITY_INTEGER, 0),
    FIELD(templates, "templates", IDENTITY_HASH, 0),
#undef FIELD
};
#define IDENTITY_FIELDS ((int)(sizeof identity_fields / sizeof identity_fields[0]))

static const char *field_at(const struct identity_field *field, const struct tune_identity *identity) {
  return (const char *)identity + field->offset;
}

static int32_t integer_at(const struct identity_field *field, const struct tune_identity *identity) {
  return *(const int32_t *)(const void *)field_at(field, identity);
}

/* "" and 0 are not known. A hash is shown by its first digits. */
static void show_field(const struct identity_field *field, const struct tune_identity *identity, int whole,
                       char text[TUNE_TEXT_MAX]) {
  text[0] = 0;
  if (field->kind != IDENTITY_INTEGER) {
    snprintf(text, TUNE_TEXT_MAX, field->kind == IDENTITY_HASH && !whole ? "%.12s" : "%s", field_at(field, identity));
  } else if (integer_at(field, identity)) {
    snprintf(text, TUNE_TEXT_MAX, "%d", integer_at(field, identity));
  }
}

/* ---- The kernels that a line can name ---- */

static const struct {
  const char *name;
  int32_t kernel;
} line_kernels[] = {{"portable", KERNEL_GATE_UP}, {"experts", KERNEL_EXPERTS}, {"experts_stream", KERNEL_EXPERTS_STREAM}};
#define LINE_KERNELS ((int)(sizeof line_kernels / sizeof line_kernels[0]))

const char *tune_kernel_name(int32_t kernel) {
  for (int i = 0; i < LINE_KERNELS; i++) {
    if (line_kernels[i].kernel == kernel) return line_kernels[i].name;
  }
  return "?";
}

/* ---- Reading ---- */

struct reader {
  char *next; /* NUL-terminated copy, cut up as it is read */
  const char *where;
  int line;
  int lines[TUNE_ROWS_MAX]; /* where each of tune->lines stands */
};

__attribute__((format(printf, 2, 3))) static moeflow_status fault(const struct reader *reader, const char *format, ...) {
  char text[384];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d: %s", reader->where, reader->line, text);
}

/* The next line that is neither blank nor a comment, NULL at the end. */
static char *take_line(struct reader *reader) {
  while (*reader->next) {
    char *line = reader->next, *end = strchr(line, '\n');
    reader->line++;
    reader->next = end ? end + 1 : line + strlen(line);
    if (end) *end = 0;
    if (*line && *line != '#') return line;
  }
  reader->line++;
  return NULL;
}

static char *take_word(char **rest) {
  char *word = *rest, *end = strchr(word, ' ');
  if (end) *end++ = 0;
  *rest = end ? end : word + strlen(word);
  return word;
}

/* The value of `key=value`, which must come next; NULL when another word does. */
static char *take_value(char **rest, const char *key) {
  size_t length = strlen(key);
  if (strncmp(*rest, key, length) || (*rest)[length] != '=') return NULL;
  return take_word(rest) + length + 1;
}

static moeflow_status take_number(const struct reader *reader, char **rest, const char *key, double *value) {
  const char *text = take_value(rest, key);
  if (!text) return fault(reader, "%s= is missing before '%.40s'", key, *rest);
  const char *wrong = number_read_decimal(text, value);
  return wrong ? fault(reader, "%s is '%.40s', which %s", key, text, wrong) : MOEFLOW_OK;
}

static const char *read_signed(const char *text, double *value) {
  const char *wrong = number_read_decimal(text + (*text == '-'), value);
  if (*text == '-') *value = -*value;
  return wrong;
}

static moeflow_status take_shape(const struct reader *reader, char **rest, struct experts_shape *shape) {
  for (int i = 0; i < EXPERTS_AXES_COUNT; i++) {
    const struct experts_axis *axis = &experts_axes[i];
    int64_t value = 0;
    const char *text = take_value(rest, axis->name);
    if (!text) return fault(reader, "%s= is missing before '%.40s'", axis->name, *rest);
    const char *wrong = number_read_integer(text, &value);
    if (!wrong && (value < 1 || value > 1024)) wrong = "is out of range";
    if (wrong) return fault(reader, "%s is '%.40s', which %s", axis->name, text, wrong);
    *(int32_t *)((char *)shape + axis->offset) = (int32_t)value;
  }
  return MOEFLOW_OK;
}

static moeflow_status take_gap(const struct reader *reader, char **rest, struct tune_line *line) {
  const char *wrong, *gap = take_value(rest, "gap_percent");
  if (!gap) return fault(reader, "gap_percent= is missing before '%.40s'", *rest);
  if ((wrong = read_signed(gap, &line->gap))) return fault(reader, "gap_percent is '%.40s', which %s", gap, wrong);
  char *interval = take_value(rest, "ci_percent"), *comma = interval ? strchr(interval, ',') : NULL;
  if (!comma) return fault(reader, "ci_percent= is missing or not of the form LOW,HIGH");
  *comma = 0;
  if ((wrong = read_signed(interval, &line->gap_low)) || (wrong = read_signed(comma + 1, &line->gap_high))) {
    return fault(reader, "ci_percent is '%.40s,%.40s', which %s", interval, comma + 1, wrong);
  }
  if (line->gap_low > line->gap_high) return fault(reader, "ci_percent ends below where it begins");
  return MOEFLOW_OK;
}

static moeflow_status take_kernel(const struct reader *reader, char **rest, int32_t *kernel) {
  const char *name = take_word(rest);
  for (int i = 0; i < LINE_KERNELS; i++) {
    *kernel = line_kernels[i].kernel;
    if (!strcmp(name, line_kernels[i].name)) return MOEFLOW_OK;
  }
  return fault(reader, "'%.40s' is no kernel of a tuned file; known: portable, experts, experts_stream", name);
}

static moeflow_status read_rows(struct reader *reader, char *rest, struct tune *tune) {
  moeflow_status status = MOEFLOW_OK;
  struct tune_line line = {0};
  int64_t rows = 0;
  const char *text, *wrong;
  if (strcmp(text = take_word(&rest), "rows")) return fault(reader, "'%.40s' is not `rows`", text);
  text = take_word(&rest);
  wrong = number_read_integer(text, &rows);
  if (!wrong && (rows < 1 || rows > INT32_MAX)) wrong = "is out of range";
  if (wrong) return fault(reader, "rows is '%.40s', which %s", text, wrong);
  line.rows = (int32_t)rows;
  CHECK(take_kernel(reader, &rest, &line.kernel));
  if (line.kernel != KERNEL_GATE_UP) CHECK(take_shape(reader, &rest, &line.shape));
  CHECK(take_number(reader, &rest, "us", &line.us));
  CHECK(take_number(reader, &rest, "default", &line.default_us));
  CHECK(take_gap(reader, &rest, &line));
  text = take_value(&rest, "runner_up");
  if (!text || !*text || *rest || strlen(text) >= TUNE_TEXT_MAX) {
    status = fault(reader, "runner_up= with a name, or '-' for none, must end the line");
    goto cleanup;
  }
  if (strcmp(text, "-")) strcpy(line.runner_up, text);

  int at = tune->count;
  for (; at > 0 && tune->lines[at - 1].rows >= line.rows; at--) {
    if (tune->lines[at - 1].rows > line.rows) continue;
    status = fault(reader, "rows %d again, first on line %d; keep one of them", line.rows, reader->lines[at - 1]);
    goto cleanup;
  }
  if (tune->count == TUNE_ROWS_MAX) {
    status = fault(reader, "more than %d sizes", TUNE_ROWS_MAX);
    goto cleanup;
  }
  memmove(&tune->lines[at + 1], &tune->lines[at], (size_t)(tune->count - at) * sizeof line);
  memmove(&reader->lines[at + 1], &reader->lines[at], (size_t)(tune->count - at) * sizeof reader->lines[0]);
  tune->lines[at] = line;
  reader->lines[at] = reader->line;
  tune->count++;
cleanup:
  return status;
}

static int is_hash(const char *text) {
  return strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64;
}

static moeflow_status read_field(struct reader *reader, const struct identity_field *field, struct tune_identity *identity) {
  char *line = take_line(reader), *to = (char *)identity + field->offset;
  size_t length = strlen(field->key);
  if (!line || strncmp(line, field->key, length) || line[length] != ' ') {
    return fault(reader, "`%s` is missing; a tuned file begins with its identity, line by line", field->key);
  }
  const char *text = line + length + 1, *wrong = NULL;
  int64_t number;
  switch (field->kind) {
    case IDENTITY_INTEGER:
      wrong = number_read_integer(text, &number);
      if (!wrong && (number < 1 || number > INT32_MAX)) wrong = "is out of range";
      if (!wrong) *(int32_t *)(void *)to = (int32_t)number;
      break;
    case IDENTITY_HASH:
      if (!is_hash(text)) wrong = "is not a hash of 64 hex digits";
      break;
    case IDENTITY_TEXT:
      if (!*text || strlen(text) >= field->size) wrong = *text ? "is too long" : "is empty";
      break;
  }
  if (wrong) return fault(reader, "%s is '%.40s', which %s", field->key, text, wrong);
  if (field->kind != IDENTITY_INTEGER) strcpy(to, text);
  return MOEFLOW_OK;
}

static moeflow_status read_version(struct reader *reader) {
  static const char key[] = "moeflow-tune ";
  char *line = take_line(reader);
  int64_t version = 0;
  if (!line || strncmp(line, key, strlen(key)) || number_read_integer(line + strlen(key), &version)) {
    return fault(reader, "no tuned file: it must begin with `%s%d`", key, TUNE_VERSION);
  }
  if (version != TUNE_VERSION) {
    return fault(reader, "version %lld; this moeflow-gen reads version %d: sweep anew", (long long)version, TUNE_VERSION);
  }
  return MOEFLOW_OK;
}

moeflow_status tune_parse(const char *text, size_t length, const char *where, struct tune *tune) {
  moeflow_status status = MOEFLOW_OK;
  char *copy = malloc(length + 1);
  struct reader reader = {.next = copy, .where = where};
  memset(tune, 0, sizeof *tune);
  snprintf(tune->path, sizeof tune->path, "%s", where);
  if (!copy) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to read %s", where);
  memcpy(copy, text, length);
  copy[length] = 0;
  if (strlen(copy) != length) FAIL(MOEFLOW_ERROR_FORMAT, "%s: a NUL byte; this is no text", where);
  CHECK(read_version(&reader));
  for (int i = 0; i < IDENTITY_FIELDS; i++) CHECK(read_field(&reader, &identity_fields[i], &tune->identity));
  for (char *line; (line = take_line(&reader));) CHECK(read_rows(&reader, line, tune));
cleanup:
  free(copy);
  return status;
}

moeflow_status tune_read(const char *path, struct tune *tune) {
  moeflow_status status = MOEFLOW_OK;
  char *text = NULL;
  FILE *file = fopen(path, "rbe");
  if (!file) return status_set(MOEFLOW_ERROR_CACHE, "cannot open the tuned file %s: %s", path, strerror(errno));
  text = malloc(TUNE_BYTES_MAX + 1);
  if (!text) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to read %s", path);
  size_t length = fread(text, 1, TUNE_BYTES_MAX + 1, file);
  if (ferror(file)) FAIL(MOEFLOW_ERROR_CACHE, "cannot read the tuned file %s: %s", path, strerror(errno));
  if (length > TUNE_BYTES_MAX) FAIL(MOEFLOW_ERROR_FORMAT, "%s is larger than %d bytes", path, TUNE_BYTES_MAX);
  CHECK(tune_parse(text, length, path, tune));
cleanup:
  free(text);
  fclose(file);
  return status;
}

/* ---- Writing ---- */

static void print_line(FILE *file, const struct tune_line *line) {
  char shape[EXPERTS_SHAPE_TEXT_MAX];
  fprintf(file, "rows %d %s", line->rows, tune_kernel_name(line->kernel));
  if (line->kernel != KERNEL_GATE_UP) {
    experts_shape_write(&line->shape, shape);
    fprintf(file, " %s", shape);
  }
  fprintf(file, " us=%.2f default=%.2f gap_percent=%.2f ci_percent=%.2f,%.2f runner_up=%s\n", line->us, line->default_us,
          line->gap, line->gap_low, line->gap_high, line->runner_up[0] ? line->runner_up : "-");
}

moeflow_status tune_print(const struct tune *tune, char **text) {
  char value[TUNE_TEXT_MAX];
  size_t size;
  FILE *file = open_memstream(text, &size);
  if (!file) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a tuned file");
  fprintf(file, "moeflow-tune %d\n", TUNE_VERSION);
  for (int i = 0; i < IDENTITY_FIELDS; i++) {
    show_field(&identity_fields[i], &tune->identity, 1, value);
    fprintf(file, "%s %s\n", identity_fields[i].key, value);
  }
  for (int i = 0; i < tune->count; i++) print_line(file, &tune->lines[i]);
  if (fclose(file) != 0) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a tuned file");
  return MOEFLOW_OK;
}

/* A folder's entries reach the disk when the folder does. Best effort: the file itself is there. */
static void sync_folder(const char *path) {
  char folder[TUNE_PATH_MAX];
  snprintf(folder, sizeof folder, "%s", path);
  char *slash = strrchr(folder, '/');
  if (slash) slash[slash == folder] = 0;
  int fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

moeflow_status tune_write(const struct tune *tune, const char *path) {
  moeflow_status status = MOEFLOW_OK;
  char *text = NULL, temporary[TUNE_PATH_MAX] = "";
  int fd = -1, failed;
  if ((size_t)snprintf(temporary, sizeof temporary, "%s.XXXXXX", path) >= sizeof temporary) {
    return status_set(MOEFLOW_ERROR_CACHE, "the path of the tuned file is too long: %.64s...", path);
  }
  CHECK(tune_print(tune, &text));
  fd = mkostemp(temporary, O_CLOEXEC);
  if (fd < 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot create %s: %s", temporary, strerror(errno));
  FILE *file = fdopen(fd, "wb");
  if (!file) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to write %s", temporary);
  failed = fputs(text, file) < 0 || fflush(file) != 0 || fchmod(fd, 0644) != 0 || fsync(fd) != 0;
  int error = errno;
  failed |= fclose(file) != 0;
  fd = -1;
  if (failed) FAIL(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", temporary, strerror(error));
  if (rename(temporary, path) != 0) FAIL(MOEFLOW_ERROR_CACHE, "cannot write the tuned file %s: %s", path, strerror(errno));
  temporary[0] = 0;
  sync_folder(path);
cleanup:
  if (fd >= 0) close(fd);
  if (status != MOEFLOW_OK && temporary[0]) unlink(temporary);
  free(text);
  return status;
}

/* ---- Matching ---- */

static int field_differs(const struct identity_field *field, const struct tune_identity *a, const struct tune_identity *b) {
  char left[TUNE_TEXT_MAX], right[TUNE_TEXT_MAX];
  show_field(field, a, 1, left);
  show_field(field, b, 1, right);
  return left[0] && right[0] && strcmp(left, right) != 0;
}

moeflow_status tune_match(const struct tune *tune, const struct tune_identity *here, const char *model_path) {
  for (int i = 0; i < IDENTITY_FIELDS; i++) {
    const struct identity_field *field = &identity_fields[i];
    char theirs[TUNE_TEXT_MAX], ours[TUNE_TEXT_MAX];
    if (!field->binding || !field_differs(field, &tune->identity, here)) continue;
    show_field(field, &tune->identity, 0, theirs);
    show_field(field, here, 0, ours);
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "%s is for %s %s, this is %s; run: moeflow-gen sweep %s --dtype %s",
                      tune->path, field->noun, theirs, ours, model_path, here->dtype);
  }
  return MOEFLOW_OK;
}

int tune_differs(const struct tune *tune, const struct tune_identity *here, char text[TUNE_DIFFERENCES_MAX]) {
  size_t used = 0;
  text[0] = 0;
  for (int i = 0; i < IDENTITY_FIELDS; i++) {
    const struct identity_field *field = &identity_fields[i];
    char theirs[TUNE_TEXT_MAX], ours[TUNE_TEXT_MAX];
    if (field->binding || !field_differs(field, &tune->identity, here)) continue;
    show_field(field, &tune->identity, 0, theirs);
    show_field(field, here, 0, ours);
    used += (size_t)snprintf(text + used, TUNE_DIFFERENCES_MAX - used, "%s%s %s, here %s", used ? "; " : "", field->noun,
                             theirs, ours); /* three fields of TUNE_TEXT_MAX fit */
  }
  return used > 0;
}
