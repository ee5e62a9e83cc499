/* The command line of moeflow-gen: what it says, and the commands that get it. */
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
  const char *output;               /* -o, --output: emit's folder, sweep's file */
  int64_t jobs;                     /* --jobs, 0: the number of CPUs */
  int64_t dry_run;                  /* --dry-run */
  int64_t digest;                   /* emit --digest */
  int64_t lineinfo;                 /* build --lineinfo */
  const char *tuned;                /* --tuned FILE, NULL: the one beside the model */
  const char *gpu;                  /* --gpu NAME, NULL: the one here */
  int64_t tuned_only;               /* build --tuned-only */
  int64_t packed;                   /* --packed */
  const char *tokens;               /* sweep --tokens LIST, NULL: the default ones */
  const char *device;               /* sweep --device LIST, NULL: 0 */
  const char *log;                  /* sweep --log FILE, NULL: beside the output */
  int64_t time_limit;               /* sweep --time-limit, 0: the default */
  int64_t exhaustive;               /* sweep --exhaustive */
  int64_t resume;                   /* sweep --resume */
  int64_t format;                   /* --format, enum gen_format */
  int64_t help, version;
};

struct gen_command {
  const char *name;
  const char *operand; /* "MODEL.yaml", required; "[TOPIC]", optional; NULL */
  const char *summary;
  unsigned scope; /* its bit in the options' rows */
  int (*run)(const struct gen_options *options);
};

/* Parses argv into *options and finds the command. Returns 1 when *command is to be run; else *exit_code is what the process
 * ends with, and help, the version or a message on stderr has been printed. */
int gen_options_parse(int argc, char **argv, struct gen_options *options, const struct gen_command **command,
                      int *exit_code);

/* Each returns the process's exit code; results on stdout, progress and messages on stderr. The strings of `options` outlive
 * the call. Each is one row of the table in command.c. */
int command_build(const struct gen_options *options);
int command_sweep(const struct gen_options *options);
int command_emit(const struct gen_options *options);
int command_list(const struct gen_options *options);
int command_verify(const struct gen_options *options);
int command_explain(const struct gen_options *options);
int command_doctor(const struct gen_options *options);
int command_help(const struct gen_options *options);

/* Prints "moeflow-gen COMMAND: <last error>" on stderr and returns the status's exit code; 0 and silence for MOEFLOW_OK. */
int command_status(const struct gen_options *options, moeflow_status status);
#endif
