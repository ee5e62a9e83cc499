#include "spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "number.h"
#include "sha256.h"
#include "status.h"

#define WIDTH_MULTIPLE 8 /* bf16 values in 16 bytes: the vector loads and bulk copies of every kernel */
#define FP8_BLOCK 128    /* values that share one FP32 scale */

static const char *const activation_names[] = {"swiglu", "swiglu_clamp", NULL};
static const char *const score_names[] = {"softmax", "sigmoid", NULL};
static const char *const renormalize_names[] = {"none", "sum_1e-20", "sum_1e-6", "max_1e-12", NULL};
static const char *const scale_on_names[] = {"weights", "output", NULL};
static const char *const group_score_names[] = {"max", "top2", NULL};
static const char *const dtype_names[] = {"bf16", "fp8_w8a8", "fp8_w8a16", NULL};
static const char *const wire_names[] = {"bf16", "fp8", "fp32", NULL};
static const char *const reduce_names[] = {"owner", "choices", NULL};

#define AT(field) offsetof(struct spec, field)

/* Reals stay within what "%.9g" prints without an exponent. */
const struct spec_field spec_fields[SPEC_FIELDS] = {
    {"name", SPEC_NAME, AT(name), 0, 0, NULL},
    {"hidden", SPEC_INTEGER, AT(hidden), WIDTH_MULTIPLE, 65536, NULL},
    {"intermediate", SPEC_INTEGER, AT(intermediate), WIDTH_MULTIPLE, 65536, NULL},
    {"experts", SPEC_INTEGER, AT(experts), 1, SPEC_EXPERTS_MAX, NULL},
    {"top_k", SPEC_INTEGER, AT(top_k), 1, MOEFLOW_CHOICES_MAX, NULL},
    {"activation", SPEC_ENUM, AT(activation), 0, 0, activation_names},
    {"activation_limit", SPEC_REAL, AT(activation_limit), 0, 1000000, NULL},
    {"score", SPEC_ENUM, AT(score), 0, 0, score_names},
    {"correction_bias", SPEC_BOOLEAN, AT(correction_bias), 0, 1, NULL},
    {"groups", SPEC_INTEGER, AT(groups), 1, SPEC_EXPERTS_MAX, NULL},
    {"top_groups", SPEC_INTEGER, AT(top_groups), 1, SPEC_EXPERTS_MAX, NULL},
    {"group_score", SPEC_ENUM, AT(group_score), 0, 0, group_score_names},
    {"renormalize", SPEC_ENUM, AT(renormalize), 0, 0, renormalize_names},
    {"scale", SPEC_REAL, AT(scale), 0.001, 1000, NULL},
    {"scale_on", SPEC_ENUM, AT(scale_on), 0, 0, scale_on_names},
    {"shared_experts", SPEC_INTEGER, AT(shared_experts), 0, 64, NULL},
    {"shared_intermediate", SPEC_INTEGER, AT(shared_intermediate), 0, 65536, NULL},
    {"dtype", SPEC_ENUM, AT(dtype), 0, 0, dtype_names},
    {"dispatch", SPEC_ENUM, AT(dispatch), 0, 0, wire_names},
    {"return", SPEC_ENUM, AT(returned), 0, 0, wire_names},
    {"reduce", SPEC_ENUM, AT(reduce), 0, 0, reduce_names},
    {"batch_invariant", SPEC_BOOLEAN, AT(batch_invariant), 0, 1, NULL},
};

const struct spec_field *spec_field(const char *key) {
  for (int i = 0; i < SPEC_FIELDS; i++) {
    if (!strcmp(spec_fields[i].key, key)) return &spec_fields[i];
  }
  return NULL;
}

static int32_t integer_at(const struct spec *spec, const struct spec_field *field) {
  return *(const int32_t *)((const char *)spec + field->offset);
}

static double real_at(const struct spec *spec, const struct spec_field *field) {
  return *(const double *)((const char *)spec + field->offset);
}

static int name_index(const char *const *names, const char *name) {
  for (int i = 0; names[i]; i++) {
    if (!strcmp(names[i], name)) return i;
  }
  return -1;
}

static int name_legal(const char *name) {
  static const char first[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  size_t length = strnlen(name, SPEC_NAME_MAX + 1);
  if (length == 0 || length > SPEC_NAME_MAX || !strchr(first, name[0])) return 0;
  for (size_t i = 1; i < length; i++) {
    if (!strchr("_.-", name[i]) && !strchr(first, name[i])) return 0;
  }
  return 1;
}

static moeflow_status check_range(const struct spec *spec, const struct spec_field *field) {
  char value[NUMBER_TEXT_MAX], minimum[NUMBER_TEXT_MAX], maximum[NUMBER_TEXT_MAX];
  if (field->kind == SPEC_NAME) {
    if (name_legal(spec->name)) return MOEFLOW_OK;
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "name must be 1 to %d of a-z, 0-9, '_', '.' and '-', and start with a letter or digit", SPEC_NAME_MAX);
  }
  double number = field->kind == SPEC_REAL ? real_at(spec, field) : integer_at(spec, field);
  double top = field->maximum;
  if (field->kind == SPEC_ENUM) {
    for (top = 0; field->names[(int)top + 1];) top++;
  }
  if (number >= field->minimum && number <= top) return MOEFLOW_OK; /* false for NaN */
  number_write(number, value);
  number_write(field->minimum, minimum);
  number_write(top, maximum);
  return status_set(MOEFLOW_ERROR_ARGUMENT, "%s is %s; it must be %s to %s", field->key, value, minimum, maximum);
}

#define RULE(condition, blamed, ...)                                     \
  do {                                                                   \
    if (!(condition)) {                                                  \
      *key = blamed;                                                     \
      return status_set(MOEFLOW_ERROR_ARGUMENT, blamed " " __VA_ARGS__); \
    }                                                                    \
  } while (0)

static int nearest_multiple(int32_t value) {
  int nearest = (value + WIDTH_MULTIPLE / 2) / WIDTH_MULTIPLE * WIDTH_MULTIPLE;
  return nearest ? nearest : WIDTH_MULTIPLE;
}

static moeflow_status check_widths(const struct spec *s, const char **key) {
  RULE(s->hidden % WIDTH_MULTIPLE == 0, "hidden",
       "is %d; rows are moved 16 bytes (8 bf16 values) at a time, so it must be a multiple of "
       "8; the nearest is %d",
       s->hidden, nearest_multiple(s->hidden));
  RULE(s->intermediate % WIDTH_MULTIPLE == 0, "intermediate",
       "is %d; rows are moved 16 bytes (8 bf16 values) at a time, so it must be a "
       "multiple of 8; the nearest is %d",
       s->intermediate, nearest_multiple(s->intermediate));
  RULE((s->shared_experts > 0) == (s->shared_intermediate > 0), "shared_experts",
       "is %d with an intermediate width of %d; both are 0 or "
       "neither is",
       s->shared_experts, s->shared_intermediate);
  return MOEFLOW_OK;
}

static moeflow_status check_router(const struct spec *s, const char **key) {
  RULE(s->top_k <= s->experts, "top_k", "is %d, more than the %d experts there are", s->top_k, s->experts);
  RULE(s->groups <= s->experts && s->experts % s->groups == 0, "groups", "is %d, which does not divide the %d experts",
       s->groups, s->experts);
  RULE(s->top_groups <= s->groups, "top_groups", "is %d, more than the %d groups there are", s->top_groups, s->groups);
  int32_t per_group = s->experts / s->groups;
  RULE((int64_t)s->top_groups * per_group >= s->top_k, "top_k",
       "is %d, more than the %d experts in top_groups %d of groups %d (%d "
       "experts each)",
       s->top_k, s->top_groups * per_group, s->top_groups, s->groups, per_group);
  RULE(s->groups == 1 || s->group_score != SPEC_GROUP_TOP2 || per_group >= 2, "group_score",
       "is top2, the sum of a group's two best, but "
       "a group has %d expert (experts %d, groups %d); use max",
       per_group, s->experts, s->groups);
  return MOEFLOW_OK;
}

static moeflow_status check_forms(const struct spec *s, const char **key) {
  RULE(s->activation != SPEC_SWIGLU_CLAMP || s->activation_limit > 0, "activation",
       "is swiglu_clamp, which needs a limit above 0");
  RULE(s->activation == SPEC_SWIGLU_CLAMP || s->activation_limit == 0, "activation", "is %s, which takes no limit",
       activation_names[s->activation]);
  RULE(s->dispatch != SPEC_WIRE_FP32, "dispatch", "is fp32; rows are sent as bf16 or fp8");
  RULE(s->returned != SPEC_WIRE_FP8, "return", "is fp8; rows come back as bf16 or fp32");
  RULE(s->dispatch != SPEC_WIRE_FP8 || s->dtype == SPEC_FP8_W8A8, "dispatch",
       "is fp8, which needs weights of fp8_w8a8 (FP8 activations); "
       "they are %s",
       dtype_names[s->dtype]);
  return MOEFLOW_OK;
}

moeflow_status spec_check_field(const struct spec *spec, const char **key) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 0; i < SPEC_FIELDS; i++) {
    *key = spec_fields[i].key;
    CHECK(check_range(spec, &spec_fields[i]));
  }
  CHECK(check_widths(spec, key));
  CHECK(check_router(spec, key));
  CHECK(check_forms(spec, key));
cleanup:
  return status;
}

moeflow_status spec_check(const struct spec *spec) {
  const char *key;
  return spec_check_field(spec, &key);
}

static void write_value(const struct spec *spec, const struct spec_field *field, char value[SPEC_NAME_MAX + 1]) {
  static const char *const booleans[] = {"false", "true"};
  switch (field->kind) {
    case SPEC_NAME:
      snprintf(value, SPEC_NAME_MAX + 1, "%s", spec->name);
      break;
    case SPEC_INTEGER:
      snprintf(value, SPEC_NAME_MAX + 1, "%d", integer_at(spec, field));
      break;
    case SPEC_BOOLEAN:
      snprintf(value, SPEC_NAME_MAX + 1, "%s", booleans[integer_at(spec, field)]);
      break;
    case SPEC_REAL:
      number_write(real_at(spec, field), value);
      break;
    case SPEC_ENUM:
      snprintf(value, SPEC_NAME_MAX + 1, "%s", field->names[integer_at(spec, field)]);
      break;
  }
}

moeflow_status spec_write(const struct spec *spec, char text[SPEC_TEXT_MAX]) {
  size_t length = 0;
  text[0] = 0;
  for (int i = 0; i < SPEC_FIELDS; i++) {
    char value[SPEC_NAME_MAX + 1];
    moeflow_status status = check_range(spec, &spec_fields[i]);
    if (status != MOEFLOW_OK) return status;
    write_value(spec, &spec_fields[i], value);
    int bytes = snprintf(text + length, SPEC_TEXT_MAX - length, "%s %s\n", spec_fields[i].key, value);
    if (bytes < 0 || length + (size_t)bytes >= SPEC_TEXT_MAX) {
      return status_set(MOEFLOW_ERROR_INTERNAL, "a spec's text is longer than %d bytes", SPEC_TEXT_MAX);
    }
    length += (size_t)bytes;
  }
  return MOEFLOW_OK;
}

/* NULL, or what is wrong with the value. */
static const char *read_value(struct spec *spec, const struct spec_field *field, const char *value) {
  int32_t *integer = (int32_t *)((char *)spec + field->offset);
  int64_t number;
  const char *wrong = NULL;
  switch (field->kind) {
    case SPEC_NAME:
      memcpy(spec->name, value, strlen(value) + 1);
      break;
    case SPEC_REAL:
      wrong = number_read_decimal(value, (double *)((char *)spec + field->offset));
      break;
    case SPEC_BOOLEAN:
      *integer = !strcmp(value, "true");
      wrong = *integer || !strcmp(value, "false") ? NULL : "is neither true nor false";
      break;
    case SPEC_ENUM:
      *integer = name_index(field->names, value);
      wrong = *integer >= 0 ? NULL : "is not one of the known names";
      break;
    case SPEC_INTEGER:
      wrong = number_read_integer(value, &number);
      if (!wrong && number > INT32_MAX) wrong = "is too large";
      if (!wrong) *integer = (int32_t)number;
      break;
  }
  return wrong;
}

static moeflow_status read_line(const char **text, int index, const char *where, struct spec *spec) {
  const struct spec_field *field = &spec_fields[index];
  size_t key_length = strlen(field->key);
  if (strncmp(*text, field->key, key_length) || (*text)[key_length] != ' ') {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d: expected the spec line `%s VALUE`", where, index + 1, field->key);
  }
  const char *value = *text + key_length + 1, *end = strchr(value, '\n');
  char copy[SPEC_NAME_MAX + 1];
  if (!end || end - value > SPEC_NAME_MAX) {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d: the value of %s is longer than %d bytes or its line does not end", where,
                      index + 1, field->key, SPEC_NAME_MAX);
  }
  memcpy(copy, value, (size_t)(end - value));
  copy[end - value] = 0;
  const char *wrong = read_value(spec, field, copy);
  if (wrong)
    return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d: %s is '%s', which %s", where, index + 1, field->key, copy, wrong);
  *text = end + 1;
  return MOEFLOW_OK;
}

moeflow_status spec_parse(const char *text, const char *where, struct spec *spec) {
  moeflow_status status = MOEFLOW_OK;
  const char *rest = text;
  char again[SPEC_TEXT_MAX];
  memset(spec, 0, sizeof *spec);
  for (int i = 0; i < SPEC_FIELDS; i++) CHECK(read_line(&rest, i, where, spec));
  if (*rest) FAIL(MOEFLOW_ERROR_FORMAT, "%s:%d: text after the last spec line", where, SPEC_FIELDS + 1);
  if (spec_check(spec) != MOEFLOW_OK) {
    status_prefix(MOEFLOW_ERROR_FORMAT, "%s", where);
    status = MOEFLOW_ERROR_FORMAT;
    goto cleanup;
  }
  CHECK(spec_write(spec, again));
  if (strcmp(again, text))
    FAIL(MOEFLOW_ERROR_FORMAT, "%s: a number is not in canonical form (shortest, at most 9 digits)", where);
cleanup:
  return status;
}

void spec_hash(const struct spec *spec, char hex[65]) {
  char text[SPEC_TEXT_MAX];
  uint8_t digest[32];
  if (spec_write(spec, text) != MOEFLOW_OK) text[0] = 0; /* callers hash checked specs */
  sha256(text, strlen(text), digest);
  sha256_hex(digest, hex);
}

const char *spec_dtype_name(int32_t dtype) {
  return dtype >= SPEC_BF16 && dtype <= SPEC_FP8_W8A16 ? dtype_names[dtype] : "unknown";
}

int spec_dtype_from_name(const char *name, int32_t *dtype) {
  int index = name_index(dtype_names, name);
  if (index < 0) return -1;
  *dtype = index;
  return 0;
}

int64_t spec_row_bytes(const struct spec *spec) {
  int fp8 = spec->dispatch == SPEC_WIRE_FP8;
  int scales = fp8 ? (spec->hidden + FP8_BLOCK - 1) / FP8_BLOCK : 0;
  return moeflow_row_bytes(spec->top_k, spec->hidden, fp8 ? 1 : 2, scales * (int)sizeof(float));
}

int64_t spec_return_row_bytes(const struct spec *spec) {
  return moeflow_return_row_bytes(spec->hidden, spec->returned == SPEC_WIRE_FP32 ? 4 : 2);
}

int64_t spec_return_rows_per_token(const struct spec *spec) {
  return spec->reduce == SPEC_REDUCE_CHOICES ? spec->top_k : 1;
}

static int64_t weight_bytes(const struct spec *spec, int64_t rows, int64_t columns) {
  if (spec->dtype == SPEC_BF16) return rows * columns * 2;
  int64_t row_blocks = (rows + FP8_BLOCK - 1) / FP8_BLOCK, column_blocks = (columns + FP8_BLOCK - 1) / FP8_BLOCK;
  return rows * columns + row_blocks * column_blocks * (int64_t)sizeof(float);
}

int64_t spec_gate_up_bytes(const struct spec *spec) {
  return weight_bytes(spec, 2 * (int64_t)spec->intermediate, spec->hidden);
}

int64_t spec_down_bytes(const struct spec *spec) {
  return weight_bytes(spec, spec->hidden, spec->intermediate);
}
