#include <signal.h>
#include <stdio.h>

#include "command.h"
#include "environment.h"
#include "exit_code.h"
#include "sweep.h"

int main(int argc, char **argv) {
  struct gen_options options;
  const struct gen_command *command;
  int exit_code;
  sweep_measuring = &sweep_measure_bench;
  signal(SIGXFSZ, SIG_IGN); /* a file size limit is to be EFBIG, a message and exit 6, not a signal */
  environment_warn("moeflow-gen", stderr);
  if (gen_options_parse(argc, argv, &options, &command, &exit_code)) exit_code = command->run(&options);
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "moeflow-gen: the results could not be written to standard output\n");
    if (exit_code == 0) exit_code = EXIT_IO;
  }
  return exit_code;
}
