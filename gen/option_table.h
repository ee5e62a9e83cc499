/* A tool's options as rows of a table, out of which they are parsed, checked and printed as help. */
#ifndef MOEFLOW_OPTION_TABLE_H
#define MOEFLOW_OPTION_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "moeflow.h"

enum option_kind { OPTION_FLAG, OPTION_INTEGER, OPTION_TEXT, OPTION_CHOICE, OPTION_OTHER };

struct option_choice {
  const char *name; /* NULL ends the list */
  int64_t value;
};

struct option_row {
  const char *name; /* NULL ends the table */
  char letter;      /* of the short form, or 0 */
  enum option_kind kind;
  size_t offset;        /* of the value: const char * of TEXT; int64_t of FLAG (1 when given), INTEGER and CHOICE */
  const char *argument; /* as help shows it: N, cpu|cuda; NULL for flags */
  const char *help;
  unsigned scope; /* the commands that take it, as bits; 0: all */
  int64_t minimum, maximum;
  const struct option_choice *choices;
  moeflow_status (*read)(const struct option_row *row, const char *text, void *value); /* of OTHER */
};

/* Reads the option that argv[*index] begins (`--name value`, `--name=value`, `-n value`, `-nvalue`) into `target`, which the
 * offsets count from; *index ends on the last word used. `scope`: the bit of the command. MOEFLOW_ERROR_ARGUMENT with a
 * message that names the option. TEXT is borrowed from argv. */
moeflow_status option_parse(const struct option_row *table, unsigned scope, int argc, char **argv, int *index, void *target);

void option_print(const struct option_row *table, unsigned scope, FILE *file);
#endif
