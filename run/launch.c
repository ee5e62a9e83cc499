#include "launch.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "exit_code.h"
#include "number.h"
#include "sha256.h"
#include "status.h"

/* ---- A launcher's environment ---- */

static const struct launcher_row { /* the first whose rank and size are set counts */
  const char *name, *rank, *size, *local_rank, *local_size;
} launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL},
};

/* The variable as a number up to `most`; -1 unset, -2 not such a number. */
static int64_t read_variable(const char *name, int64_t most) {
  const char *text = name ? getenv(name) : NULL;
  int64_t value;
  if (!text || !*text) return -1;
  return number_read_integer(text, &value) || value > most ? -2 : value;
}

moeflow_status launcher_detect(struct launcher *launcher) {
  *launcher = (struct launcher){.name = NULL, .rank = 0, .size = 1, .local_rank = 0, .one_machine = 1};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
    const struct launcher_row *row = &launchers[i];
    const int64_t rank = read_variable(row->rank, 65535), size = read_variable(row->size, 65536);
    const int64_t local = read_variable(row->local_rank, 65535), local_size = read_variable(row->local_size, 65536);
    if (rank == -1 || size == -1) continue;
    if (rank < 0 || size < 1 || rank >= size || local == -2)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "%s's environment makes no sense: %s=%s, %s=%s", row->name, row->rank,
                        getenv(row->rank), row->size, getenv(row->size));
    if (size == 1) continue;
    launcher->name = row->name;
    launcher->rank = (int)rank;
    launcher->size = (int)size;
    launcher->local_rank = (int)(local >= 0 ? local : rank);
    launcher->one_machine = local_size > 0 ? local_size == size : read_variable("SLURM_NNODES", INT32_MAX) <= 1;
    return MOEFLOW_OK;
  }
  return MOEFLOW_OK;
}

/* Two runs on one machine should not meet: a port from what only this run's ranks share. */
static int job_port(void) {
  static const char *const names[] = {"SLURM_JOB_ID", "SLURM_STEP_ID",      "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                      "PMI_JOBID",    "TORCHELASTIC_RUN_ID"};
  char text[1024];
  uint8_t digest[32];
  int length = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (getenv(names[i])) length += snprintf(text + length, sizeof text - (size_t)length, "%.128s;", getenv(names[i]));
  if (!length) length = snprintf(text, sizeof text, "session %ld", (long)getsid(0));
  sha256(text, (size_t)length, digest);
  return 20000 + (digest[0] << 8 | digest[1]) % 12000; /* below Linux's ephemeral ports */
}

moeflow_status launcher_rendezvous(const struct launcher *launcher, const char *option, char host[256], int *port) {
  const char *address = getenv("MASTER_ADDR");
  const int64_t master = read_variable("MASTER_PORT", 65534);
  int64_t number;
  if (option) {
    const char *colon = strrchr(option, ':');
    if (!colon || colon == option || colon - option > 255 || number_read_integer(colon + 1, &number) || number < 1 ||
        number > 65535)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "--rendezvous %s: not HOST:PORT", option);
    snprintf(host, 256, "%.*s", (int)(colon - option), option);
    *port = (int)number;
    return MOEFLOW_OK;
  }
  if (master == -2) return status_set(MOEFLOW_ERROR_ARGUMENT, "MASTER_PORT=%s is not a port", getenv("MASTER_PORT"));
  if (!(address && *address) && !launcher->one_machine)
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "%s's ranks are on several machines: set MASTER_ADDR to rank 0's, or give "
                      "--rendezvous HOST:PORT",
                      launcher->name);
  snprintf(host, 256, "%s", address && *address ? address : "127.0.0.1");
  *port = master > 0 ? (int)master + 1 : job_port();
  return MOEFLOW_OK;
}

/* ---- Which failure to tell ---- */

/* Higher is closer to the cause. */
static int weight(const struct launch_failure *failure, int died) {
  if (!failure->code) return 0;
  return died ? 3 : failure->code != EXIT_PEER ? 2 : 1;
}

struct outcome { /* of one rank */
  struct launch_failure failure;
  int died;
};

static int choose(const struct outcome *outcomes, int ranks, struct launch_failure *failure) {
  int best = 0;
  for (int rank = 1; rank < ranks; rank++)
    if (weight(&outcomes[rank].failure, outcomes[rank].died) > weight(&outcomes[best].failure, outcomes[best].died))
      best = rank;
  *failure = outcomes[best].failure;
  return failure->code;
}

static int refuse(struct launch_failure *failure, int rank, moeflow_status status) {
  failure->rank = rank;
  failure->code = status_exit_code(status);
  snprintf(failure->message, sizeof failure->message, "%s", moeflow_last_error());
  return failure->code;
}

/* ---- Threads ---- */

struct thread {
  pthread_t id;
  int started, rank;
  struct star *star;
  launch_body body;
  void *user;
  struct outcome *outcome;
};

static void *thread_main(void *argument) {
  struct thread *thread = argument;
  struct launch_failure *failure = &thread->outcome->failure;
  failure->rank = thread->rank;
  failure->code = thread->body(thread->user, thread->rank, thread->star, failure);
  star_close(thread->star); /* a rank that left early must be seen as gone */
  return NULL;
}

int launch_threads(int ranks, int timeout_ms, launch_body body, void *user, struct launch_failure *failure) {
  struct star *stars = calloc((size_t)ranks, sizeof *stars);
  struct thread *threads = calloc((size_t)ranks, sizeof *threads);
  struct outcome *outcomes = calloc((size_t)ranks, sizeof *outcomes);
  moeflow_status status = MOEFLOW_OK;
  int code = 1;
  if (!stars || !threads || !outcomes) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", ranks);
  CHECK(star_pairs(ranks, timeout_ms, stars));
  for (int rank = 0; rank < ranks; rank++) {
    threads[rank] =
        (struct thread){.rank = rank, .star = &stars[rank], .body = body, .user = user, .outcome = &outcomes[rank]};
    const int error = pthread_create(&threads[rank].id, NULL, thread_main, &threads[rank]);
    threads[rank].started = !error;
    if (!error) continue;
    outcomes[rank].died = 1;
    refuse(&outcomes[rank].failure, rank,
           status_set(MOEFLOW_ERROR_ENVIRONMENT, "no thread for rank %d of %d: %s", rank, ranks, strerror(error)));
    star_close(&stars[rank]);
  }
  for (int rank = 0; rank < ranks; rank++)
    if (threads[rank].started) pthread_join(threads[rank].id, NULL);
  code = choose(outcomes, ranks, failure);

cleanup:
  if (status != MOEFLOW_OK) code = refuse(failure, 0, status);
  free(stars);
  free(threads);
  free(outcomes);
  return code;
}

/* ---- Forked processes ---- */

struct family {
  int ranks, alive;
  pid_t *children; /* 0: ended */
  struct outcome *outcomes;
  int reports[2]; /* pipe: a struct launch_failure per failing child, in one atomic write */
};

_Static_assert(sizeof(struct launch_failure) <= 4096, "a report must fit PIPE_BUF to be written in one piece");

/* Never returns. _exit: handlers of libraries that the parent loaded are not this process's business. */
static void child_main(struct family *family, struct star *stars, int rank, pid_t parent, launch_body body, void *user) {
  struct launch_failure failure = {.rank = rank};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(EXIT_INTERRUPTED);
  close(family->reports[0]);
  star_keep(stars, family->ranks, rank);
  failure.code = body(user, rank, &stars[rank], &failure);
  if (failure.code && write(family->reports[1], &failure, sizeof failure) < 0) failure.code = 1;
  star_close(&stars[rank]);
  if (fflush(stdout) && !failure.code) failure.code = EXIT_IO;
  _exit(failure.code);
}

static void note_death(struct family *family, int rank, int wait_status) {
  struct outcome *outcome = &family->outcomes[rank];
  family->children[rank] = 0;
  family->alive--;
  if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0) return;
  outcome->failure.rank = rank;
  outcome->failure.code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : EXIT_PEER;
  outcome->died = WIFSIGNALED(wait_status);
  if (WIFSIGNALED(wait_status))
    snprintf(outcome->failure.message, sizeof outcome->failure.message, "rank %d was killed by signal %d (%s)", rank,
             WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
}

/* Reports of those that ended; whoever failed without one died on the way. */
static void read_reports(struct family *family) {
  struct launch_failure failure;
  char *reported = calloc((size_t)family->ranks, 1);
  while (read(family->reports[0], &failure, sizeof failure) == sizeof failure) {
    if (failure.rank < 0 || failure.rank >= family->ranks) continue;
    family->outcomes[failure.rank].failure = failure;
    if (reported) reported[failure.rank] = 1;
  }
  for (int rank = 0; rank < family->ranks; rank++) {
    struct outcome *outcome = &family->outcomes[rank];
    if (!outcome->failure.code || outcome->died || (reported && reported[rank])) continue;
    outcome->died = 1;
    snprintf(outcome->failure.message, sizeof outcome->failure.message, "rank %d ended with exit code %d and no report",
             rank, outcome->failure.code);
    outcome->failure.code = EXIT_PEER;
  }
  free(reported);
}

static void reap(struct family *family) {
  for (int rank = 0; rank < family->ranks; rank++) {
    int wait_status;
    if (family->children[rank] > 0 && waitpid(family->children[rank], &wait_status, WNOHANG) == family->children[rank])
      note_death(family, rank, wait_status);
  }
}

/* Those that we end ourselves are no cause: their own outcome stays empty. */
static void end_children(struct family *family) {
  for (int rank = 0; rank < family->ranks; rank++) {
    if (family->children[rank] <= 0) continue;
    kill(family->children[rank], SIGKILL);
    waitpid(family->children[rank], NULL, 0);
    family->children[rank] = 0;
    family->alive--;
  }
}

static int any_failed(const struct family *family) {
  for (int rank = 0; rank < family->ranks; rank++)
    if (family->outcomes[rank].failure.code) return 1;
  return 0;
}

static int64_t monotonic_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Until all children have ended; 130 when interrupted, else 0. */
static int watch(struct family *family, const sigset_t *signals, int grace_ms) {
  int64_t deadline = 0;
  while (family->alive) {
    const struct timespec nap = {0, 100 * 1000000};
    const int signal = sigtimedwait(signals, NULL, &nap);
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
      end_children(family);
      return EXIT_INTERRUPTED;
    }
    reap(family);
    if (!deadline && any_failed(family)) deadline = monotonic_ms() + grace_ms;
    if (deadline && monotonic_ms() > deadline) end_children(family);
  }
  return 0;
}

static moeflow_status fork_all(struct family *family, struct star *stars, const sigset_t *old, launch_body body,
                               void *user) {
  const pid_t parent = getpid();
  for (int rank = 0; rank < family->ranks; rank++) {
    const pid_t child = fork();
    if (child < 0)
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "no process for rank %d of %d: %s", rank, family->ranks, strerror(errno));
    if (child == 0) {
      signal(SIGINT, SIG_IGN); /* a terminal interrupts the whole process group; the parent ends us */
      sigprocmask(SIG_SETMASK, old, NULL);
      child_main(family, stars, rank, parent, body, user);
    }
    family->children[rank] = child;
    family->alive++;
  }
  return MOEFLOW_OK;
}

int launch_fork(int ranks, int timeout_ms, int grace_ms, launch_body body, void *user, struct launch_failure *failure) {
  struct family family = {.ranks = ranks,
                          .children = calloc((size_t)ranks, sizeof(pid_t)),
                          .outcomes = calloc((size_t)ranks, sizeof(struct outcome)),
                          .reports = {-1, -1}};
  struct star *stars = calloc((size_t)ranks, sizeof *stars);
  moeflow_status status = MOEFLOW_OK;
  sigset_t signals, old;
  int code = 1;
  sigemptyset(&signals);
  for (int i = 0; i < 4; i++) sigaddset(&signals, (const int[]){SIGCHLD, SIGINT, SIGTERM, SIGHUP}[i]);
  sigprocmask(SIG_BLOCK, &signals, &old);
  if (!family.children || !family.outcomes || !stars) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", ranks);
  if (pipe(family.reports)) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "no pipe: %s", strerror(errno));
  CHECK(star_pairs(ranks, timeout_ms, stars));
  fflush(stdout);
  fflush(stderr);
  CHECK(fork_all(&family, stars, &old, body, user));
  for (int rank = 0; rank < ranks; rank++) star_close(&stars[rank]);
  close(family.reports[1]);
  family.reports[1] = -1;
  code = watch(&family, &signals, grace_ms);
  if (code) {
    *failure = (struct launch_failure){.code = code, .message = "interrupted; all ranks were ended"};
  } else {
    read_reports(&family);
    code = choose(family.outcomes, ranks, failure);
  }

cleanup:
  if (status != MOEFLOW_OK) {
    if (family.children) end_children(&family);
    code = refuse(failure, 0, status);
  }
  for (int i = 0; i < 2; i++)
    if (family.reports[i] >= 0) close(family.reports[i]);
  sigprocmask(SIG_SETMASK, &old, NULL);
  free(stars);
  free(family.children);
  free(family.outcomes);
  return code;
}

static void interrupted(int signal) {
  (void)signal;
  _exit(EXIT_INTERRUPTED);
}

void launch_interruptible(void) {
  signal(SIGINT, interrupted);
  signal(SIGTERM, interrupted);
}
