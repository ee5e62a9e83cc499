/* The environment variables that MoEFlow reads: one table for the warning, the help and `doctor`. */
#ifndef MOEFLOW_ENVIRONMENT_H
#define MOEFLOW_ENVIRONMENT_H

#include <stdio.h>

struct environment_variable {
  const char *name;
  const char *meaning;
};
extern const struct environment_variable environment_table[]; /* ends with a NULL name */

/* A misspelt variable does nothing, silently: warns once on `file` of every MOEFLOW_* that is not in the table. */
void environment_warn(const char *tool, FILE *file);
#endif
