/* moeflow-bench: MoEFlow's kernels on one GPU, timed side by side with what limits them. */
#include <signal.h>
#include <stdio.h>

#include "environment.h"
#include "exit_code.h"
#include "bench_options.h"

int main(int argc, char **argv) {
  struct bench_options options;
  int code;
  signal(SIGXFSZ, SIG_IGN); /* a file size limit is to be EFBIG, a message and exit 6, not a signal */
  environment_warn("moeflow-bench", stderr);
  if (bench_options_parse(argc, argv, &options, &code)) code = options.command->run(&options);
  if ((fflush(stdout) || ferror(stdout)) && !code) {
    fprintf(stderr, "moeflow-bench: cannot write to stdout\n");
    code = EXIT_IO;
  }
  return code;
}
