/* The command line of moeflow-gen: one table of commands, one of options; both parse and print the help. */
#ifndef MOEFLOW_GEN_OPTIONS_H
#define MOEFLOW_GEN_OPTIONS_H

#include "command.h"

#define EXIT_USAGE 2

struct gen_command {
  const char *name;
  const char *operand; /* "MODEL.yaml", required; "[TOPIC]", optional; NULL */
  const char *summary;
  const char *options; /* the letters of option_table that it takes */
  int (*run)(const struct gen_options *options);
};

/* Parses argv into *options and finds the command. Returns 1 when *command is to be run; else *exit_code is what the process
 * ends with, and help, the version or a message on stderr has been printed. */
int gen_options_parse(int argc, char **argv, struct gen_options *options, const struct gen_command **command,
                      int *exit_code);
#endif
