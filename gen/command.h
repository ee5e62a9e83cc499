/* What main.c parsed, and the commands that get it. */
#ifndef MOEFLOW_COMMAND_H
#define MOEFLOW_COMMAND_H

#include <stdint.h>

#include "model.h"

enum gen_format { FORMAT_TABLE, FORMAT_JSON, FORMAT_SPEC };

struct gen_options {
  const char *command;              /* the subcommand's name */
  const char *model;                /* MODEL.yaml; help: its topic; NULL when absent */
  struct model_overrides overrides; /* --dtype --ep --capacity --arch */
  const char *cache;                /* --cache DIR, NULL: the default directory */
  const char *templates;            /* --templates DIR, NULL: the embedded ones */
  const char *output;               /* -o, --output */
  int jobs;                         /* --jobs, 0: the number of CPUs */
  int dry_run;                      /* --dry-run */
  int digest;                       /* emit --digest */
  int lineinfo;                     /* build --lineinfo */
  enum gen_format format;           /* --format */
};

/* Each returns the process's exit code; results on stdout, progress and messages on stderr. The strings of `options` outlive
 * the call. Each is one row of the table in options.c. */
int command_build(const struct gen_options *options);
int command_emit(const struct gen_options *options);
int command_list(const struct gen_options *options);
int command_verify(const struct gen_options *options);
int command_explain(const struct gen_options *options);
int command_doctor(const struct gen_options *options);
int command_help(const struct gen_options *options);

/* Prints "moeflow-gen COMMAND: <last error>" on stderr and returns the status's exit code; 0 and silence for MOEFLOW_OK. */
int command_status(const struct gen_options *options, moeflow_status status);
#endif
