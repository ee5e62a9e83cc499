/* What both tools end with. Where there is a status, status_exit_code() gives the number. */
#ifndef MOEFLOW_EXIT_CODE_H
#define MOEFLOW_EXIT_CODE_H

enum exit_code {
  EXIT_USAGE = 2,
  EXIT_CHECK_FAILED = 4,
  EXIT_ENVIRONMENT = 5,
  EXIT_IO = 6,
  EXIT_PEER = 7,
  EXIT_INTERRUPTED = 130
};

#define EXIT_CODES_TEXT                                                                                                   \
  "Exit codes: 0 ok, 1 internal, 2 usage, 3 bad file contents, 4 check failed, 5 environment (toolchain, driver, GPU),\n" \
  "6 I/O or cache, 7 timeout or peer lost, 130 interrupted.\n"
#endif
