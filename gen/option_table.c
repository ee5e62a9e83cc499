#include "option_table.h"

#include <string.h>

#include "number.h"
#include "status.h"
#include "word.h"

#define HELP_COLUMN 30

static int in_scope(const struct option_row *row, unsigned scope) {
  return !row->scope || (row->scope & scope);
}

static moeflow_status read_integer(const struct option_row *row, const char *text, int64_t *value) {
  const char *wrong = number_read_integer(text, value);
  if (!wrong && (*value < row->minimum || *value > row->maximum)) wrong = "is out of range";
  if (!wrong) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s', which %s; it must be %lld to %lld", row->name, text, wrong,
                    (long long)row->minimum, (long long)row->maximum);
}

static moeflow_status read_choice(const struct option_row *row, const char *text, int64_t *value) {
  for (const struct option_choice *choice = row->choices; choice->name; choice++) {
    if (strcmp(text, choice->name) != 0) continue;
    *value = choice->value;
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s'; it must be one of %s", row->name, text, row->argument);
}

static moeflow_status read_value(const struct option_row *row, const char *text, void *value) {
  if (text && !*text) return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is empty", row->name);
  switch (row->kind) {
    case OPTION_FLAG:
      *(int64_t *)value = 1;
      return MOEFLOW_OK;
    case OPTION_INTEGER:
      return read_integer(row, text, value);
    case OPTION_TEXT:
      *(const char **)value = text;
      return MOEFLOW_OK;
    case OPTION_CHOICE:
      return read_choice(row, text, value);
    case OPTION_OTHER:
      return row->read(row, text, value);
  }
  return status_set(MOEFLOW_ERROR_INTERNAL, "--%s: no reader", row->name);
}

/* The row of a word that begins with '-'; *value is what the word itself holds of a value, else NULL. */
static const struct option_row *find(const struct option_row *table, unsigned scope, const char *word, const char **value) {
  if (!word[1]) return NULL;
  const int is_long = word[1] == '-';
  const char *name = word + 2;
  const size_t length = is_long ? strcspn(name, "=") : 0;
  for (const struct option_row *row = table; row->name; row++) {
    if (!in_scope(row, scope)) continue;
    if (is_long ? strlen(row->name) != length || memcmp(row->name, name, length) : row->letter != word[1]) continue;
    *value = name[length] ? name + length + is_long : NULL;
    return row;
  }
  return NULL;
}

/* No row has that name: which one of the scope comes near. */
static moeflow_status unknown(const struct option_row *table, unsigned scope, const char *word) {
  struct word_guess guess = {NULL, 0};
  char typed[64], shown[64], hint[WORD_HINT_MAX];
  const char *name = word + strspn(word, "-");
  snprintf(typed, sizeof typed, "%.*s", (int)strcspn(name, "="), name);
  for (const struct option_row *row = table; row->name; row++) {
    if (in_scope(row, scope)) word_consider(&guess, typed, row->name, row->name, 0);
  }
  if (guess.best) {
    snprintf(shown, sizeof shown, "--%s", guess.best);
    guess.best = shown;
  }
  word_hint(&guess, hint);
  return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' is an unknown option%s", word, hint);
}

moeflow_status option_parse(const struct option_row *table, unsigned scope, int argc, char **argv, int *index,
                            void *target) {
  const char *word = argv[*index], *value = NULL;
  const struct option_row *row = find(table, scope, word, &value);
  if (!row) return unknown(table, scope, word);
  if (!row->argument && value) return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' takes no value", word);
  if (row->argument && !value) {
    if (*index + 1 >= argc) return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' needs a value: %s", word, row->argument);
    value = argv[++*index];
  }
  return read_value(row, value, (char *)target + row->offset);
}

void option_print(const struct option_row *table, unsigned scope, FILE *file) {
  for (const struct option_row *row = table; row->name; row++) {
    char left[80], letter[8] = "    ";
    if (!in_scope(row, scope)) continue;
    if (row->letter) snprintf(letter, sizeof letter, "-%c, ", row->letter);
    const int width = snprintf(left, sizeof left, "%s--%s%s%s", letter, row->name, row->argument ? " " : "",
                               row->argument ? row->argument : "");
    if (width > HELP_COLUMN) fprintf(file, "  %s\n", left);
    fprintf(file, "  %-*s  %s\n", HELP_COLUMN, width > HELP_COLUMN ? "" : left, row->help);
  }
}
