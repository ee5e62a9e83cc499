/* moeflow-run: one expert-parallel MoE layer on made-up weights and tokens, checked against the reference. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "environment.h"
#include "exit_code.h"
#include "explain_hang.h"
#include "hand_example.h"
#include "launch.h"
#include "setup.h"
#include "status.h"
#include "worker.h"

#define GRACE_MS 5000 /* that ranks get to notice a dead one, beyond which they are ended */

static void complain(const char *message) {
  fprintf(stderr, "moeflow-run: %s\n", message);
}

static int refuse(moeflow_status status) {
  complain(moeflow_last_error());
  return status_exit_code(status);
}

/* As one rank of a launcher's. */
static int run_launched(struct worker_shared *shared, struct launch_failure *failure) {
  const struct setup *setup = shared->setup;
  const struct launcher *launcher = &setup->launcher;
  struct star star = {0};
  char host[256];
  int port;
  moeflow_status status = launcher_rendezvous(launcher, setup->options.rendezvous, host, &port);
  if (status == MOEFLOW_OK)
    status = star_connect(launcher->rank, launcher->size, host, port, (int)setup->options.timeout * 1000, &star);
  if (status != MOEFLOW_OK) return refuse(status);
  const int code = worker_run(shared, launcher->rank, &star, failure);
  star_close(&star);
  return code;
}

static int run(struct setup *setup) {
  struct worker_shared shared = {.setup = setup};
  struct launch_failure failure = {.message = ""};
  const int timeout_ms = (int)setup->options.timeout * 1000;
  int code = 0;
  switch (setup->ranks) {
    case RANKS_ELSEWHERE:
      return 0;
    case RANKS_LAUNCHED:
      launch_interruptible();
      code = run_launched(&shared, &failure);
      break;
    case RANKS_THREADS:
      setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* waiting ranks must not share a hardware queue with busy ones */
      launch_interruptible();
      code = launch_threads(setup->ep, timeout_ms, worker_run, &shared, &failure);
      break;
    case RANKS_FORKED:
      code = launch_fork(setup->ep, timeout_ms, timeout_ms + GRACE_MS, worker_run, &shared, &failure);
      break;
  }
  if (code && failure.message[0]) complain(failure.message);
  return code;
}

static int finish(int code) {
  if ((fflush(stdout) || ferror(stdout)) && !code) {
    complain("cannot write to stdout");
    return EXIT_IO;
  }
  return code;
}

static int print_version(void) {
  printf("moeflow-run %d.%d.%d\n%s\n", MOEFLOW_VERSION_MAJOR, MOEFLOW_VERSION_MINOR, MOEFLOW_VERSION_PATCH,
         moeflow_build_info());
  return 0;
}

int main(int argc, char **argv) {
  static struct setup setup; /* large */
  signal(SIGXFSZ, SIG_IGN);  /* a file size limit is to be EFBIG, a message and exit 6, not a signal */
  environment_warn("moeflow-run", stderr);
  setup.argc = argc;
  setup.argv = argv;
  moeflow_status status = options_parse(argc, argv, &setup.options);
  if (status != MOEFLOW_OK) return refuse(status);
  if (setup.options.help) {
    options_help(stdout);
    return finish(0);
  }
  if (setup.options.version) return finish(print_version());
  if (setup.options.hand_example) return finish(hand_example_print(stdout));
  if (setup.options.explain_hang) {
    status = explain_hang(setup.options.explain_hang, stdout);
    return finish(status == MOEFLOW_OK ? 0 : refuse(status));
  }
  status = setup_create(&setup);
  const int code = status != MOEFLOW_OK ? refuse(status) : run(&setup);
  setup_destroy(&setup);
  return finish(code);
}
