/* Where the ranks of a run come from: a launcher's environment, forked processes, or threads of this process. */
#ifndef MOEFLOW_RUN_LAUNCH_H
#define MOEFLOW_RUN_LAUNCH_H

#include <stdint.h>

#include "star.h"

struct launcher {
  const char *name; /* "torchrun", "mpirun", "srun"; NULL: none, or one that started a single rank */
  int rank, size;
  int local_rank; /* among the ranks of this machine */
  int one_machine;
};

/* Reads the environment. MOEFLOW_ERROR_ARGUMENT when a launcher's variables contradict each other. */
moeflow_status launcher_detect(struct launcher *launcher);

/* Where rank 0 listens: `option` ("HOST:PORT", may be NULL), else MASTER_ADDR and MASTER_PORT + 1, else this machine and a
 * port from the launcher's job, the same for all its ranks. */
moeflow_status launcher_rendezvous(const struct launcher *launcher, const char *option, char host[256], int *port);

/* How a rank ended, from the rank or from who watched it. */
struct launch_failure {
  int32_t rank;
  int32_t code;                   /* the process's exit code, 0 for none */
  char message[STAR_MESSAGE_MAX]; /* one line, "" when it has been printed already */
};

/* One rank's life: returns the exit code, and with a code other than 0 fills failure->message. */
typedef int (*launch_body)(void *user, int rank, struct star *star, struct launch_failure *failure);

/* Runs `ranks` bodies and returns the run's exit code and the one failure to tell: a rank that died before those that report
 * a failure of their own, and those before ranks that only lost a peer.
 * Threads: all in this process. Fork: one child each, killed at once on SIGINT or SIGTERM (code 130), or when they outlive a
 * failed rank by grace_ms; they die with this process. Fork before any CUDA call. */
int launch_threads(int ranks, int timeout_ms, launch_body body, void *user, struct launch_failure *failure);
int launch_fork(int ranks, int timeout_ms, int grace_ms, launch_body body, void *user, struct launch_failure *failure);

/* For processes without children: SIGINT and SIGTERM end them with 130. */
void launch_interruptible(void);
#endif
