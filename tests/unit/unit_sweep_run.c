/* A sweep over arms that are slow, wrong, crash or hang, measured by nobody: what is chosen, what is written down, and that
 * it can be stopped and killed anywhere. */
#include "sweep_run.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "progress.h"
#include "scratch.h"
#include "status.h"
#include "sweep.h"
#include "test.h"
#include "tune.h"

#define IDENTITY "0123456789abcdef"
#define POINTS 2

enum {
  PORTABLE,
  STANDARD,
  FASTER,
  A_LITTLE,
  SLOWER,
  LUCKY,
  WIDE,
  WRONG,
  NAN_ARM,
  CRASHES,
  HANGS,
  ERRS,
  REFUSED,
  STREAM,
  FAST_STREAM,
  ARMS
};

/* Time of a layer on uniform and on skewed routings, and what goes wrong. LUCKY is fast only where routings are uniform,
 * WIDE right only there. */
static const struct behaviour {
  const char *name;
  double us, skewed;
  int stream;
} behaviours[ARMS] = {
    [PORTABLE] = {"portable", 200, 250, 0},
    [STANDARD] = {"standard", 100, 130, 0},
    [FASTER] = {"faster", 97, 128, 0},
    [A_LITTLE] = {"a-little", 99.5, 129, 0},
    [SLOWER] = {"slower", 120, 140, 0},
    [LUCKY] = {"lucky", 90, 160, 0},
    [WIDE] = {"wide", 90, 110, 0},
    [WRONG] = {"wrong", 10, 10, 0},
    [NAN_ARM] = {"nan", 10, 10, 0},
    [CRASHES] = {"crashes", 10, 10, 0},
    [HANGS] = {"hangs", 10, 10, 0},
    [ERRS] = {"errs", 10, 10, 0},
    [REFUSED] = {"refused", 10, 10, 0},
    [STREAM] = {"stream", 98.5, 129, 1},
    [FAST_STREAM] = {"fast-stream", 95, 125, 1},
};

/* Shared with the workers. */
struct world {
  int calls, kill_parent_at; /* of check and time; 0: never */
  int opens, prepares, checks[ARMS], times[ARMS];
  int open_fails_on; /* device + 1 */
  int touched_refused, touched_wrong;
  int order[256], ordered; /* arms that were timed, one after another, while `record_order` */
  int record_order;
  int scale;                                   /* all times, per cent */
  int delay_us;                                /* of each call */
  int short_tokens, short_arm, short_in_pairs; /* lacks memory at so many tokens; 0: never */
  double noise;
};
static struct world *world;
static double skew; /* in a worker */
static int tokens, pairs;
static unsigned seed;

/* ---- The measuring that is no measuring ---- */

static moeflow_status probe(void *user, int device, struct sweep_gpu *gpu) {
  (void)user;
  *gpu = (struct sweep_gpu){.multiprocessors = device == 9 ? 78 : 132, .major = 9, .driver = 13000};
  snprintf(gpu->name, sizeof gpu->name, "NVIDIA Pretend Big One");
  if (device == 7) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "there is no GPU 7");
  return MOEFLOW_OK;
}

static moeflow_status open_fake(void *user, int device) {
  (void)user;
  world->opens++;
  static const char chatter[] = "a library's chatter\n";
  if (write(STDOUT_FILENO, chatter, sizeof chatter - 1) < 0) return MOEFLOW_ERROR_INTERNAL;
  if (world->open_fails_on == device + 1) return status_set(MOEFLOW_ERROR_CUDA, "out of memory");
  seed = 1;
  return MOEFLOW_OK;
}

static moeflow_status prepare(void *user, const struct sweep_request *request) {
  (void)user;
  world->prepares++;
  skew = request->skew;
  tokens = request->tokens;
  pairs = request->task == SWEEP_PAIR;
  return MOEFLOW_OK;
}

static void called(void) {
  if (world->delay_us) usleep((useconds_t)world->delay_us);
  if (++world->calls == world->kill_parent_at) {
    kill(getppid(), SIGKILL);
    pause();
  }
}

static moeflow_status lend_memory(int arm) {
  if (tokens != world->short_tokens || arm != world->short_arm || pairs < world->short_in_pairs) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_MEMORY, "cuMemAlloc: out of memory");
}

static moeflow_status check(void *user, int arm, double *rel_l2) {
  (void)user;
  called();
  world->checks[arm]++;
  *rel_l2 = arm == WRONG ? 0.5 : arm == NAN_ARM ? NAN : 4e-4;
  if (arm == REFUSED) world->touched_refused = 1;
  if (arm == CRASHES) raise(SIGSEGV);
  if (arm == ERRS) return status_set(MOEFLOW_ERROR_CUDA, "cuStreamSynchronize: an illegal\nmemory access");
  if (arm == WIDE && skew != 0) *rel_l2 = 0.25;
  while (arm == HANGS) pause();
  return lend_memory(arm);
}

static moeflow_status time_fake(void *user, int arm, int launches, double *us) {
  (void)user, (void)launches;
  called();
  world->times[arm]++;
  if (arm == WRONG || arm == NAN_ARM) world->touched_wrong = 1;
  if (world->record_order && world->ordered < 256) world->order[world->ordered++] = arm;
  seed = seed * 1103515245u + 12345u;
  const double noise = 1 + world->noise * ((double)(seed >> 16 & 1023) / 512 - 1);
  *us = (skew != 0 ? behaviours[arm].skewed : behaviours[arm].us) * noise;
  return lend_memory(arm);
}

static const struct sweep_measure measure = {NULL, probe, open_fake, prepare, check, time_fake};

/* ---- A sweep ---- */

struct scene {
  struct sweep_arm arms[ARMS];
  struct sweep_arms all;
  int order[ARMS];
  struct sweep_result results[POINTS][ARMS];
  struct sweep_point points[POINTS];
  struct sweep_log log;
  struct sweep_job job;
  int records;
};

static void learn(void *user, const struct sweep_record *record) {
  struct scene *scene = user;
  scene->records++;
  sweep_learn(&scene->all, scene->points, POINTS, record);
}

static moeflow_status begin(struct scene *scene, const int *order, const char *log, int resume) {
  memset(scene, 0, sizeof *scene);
  scene->all = (struct sweep_arms){.arms = scene->arms, .count = ARMS};
  for (int i = 0; i < ARMS; i++) {
    snprintf(scene->arms[i].name, sizeof scene->arms[i].name, "%s", behaviours[i].name);
    scene->arms[i].kernel = behaviours[i].stream ? KERNEL_EXPERTS_STREAM : i ? KERNEL_EXPERTS : KERNEL_GATE_UP;
    scene->arms[i].refused = i == REFUSED;
  }
  int count = 0;
  while (order[count] >= 0) {
    scene->order[count] = order[count];
    count++;
  }
  for (int i = 0; i < POINTS; i++)
    scene->points[i] = (struct sweep_point){.tokens = 4 << i,
                                            .rows = 8 << i,
                                            .standard = STANDARD,
                                            .order = scene->order,
                                            .order_count = count,
                                            .results = scene->results[i]};
  scene->job = (struct sweep_job){.measure = &measure,
                                  .patience = {5, 0.4},
                                  .devices = {0},
                                  .device_count = 1,
                                  .arms = &scene->all,
                                  .points = scene->points,
                                  .point_count = POINTS,
                                  .log = &scene->log};
  return sweep_log_open(log, IDENTITY, resume, learn, scene, &scene->log);
}

static const int everything[] = {FASTER, A_LITTLE, SLOWER,  LUCKY,    WRONG,  NAN_ARM, CRASHES,
                                 HANGS,  ERRS,     REFUSED, PORTABLE, STREAM, -1};
static const int plain[] = {SLOWER, FASTER, A_LITTLE, PORTABLE, -1};

static struct sweep_choice chosen(const struct scene *scene, int point) {
  struct sweep_choice choice;
  sweep_choose(&scene->all, &scene->points[point], &choice);
  return choice;
}

static void new_world(void) {
  memset(world, 0, sizeof *world);
  world->noise = 0.002;
}

static void expect_no_children(void) {
  EXPECT(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "a worker is left");
}

/* Every record once, and each one that a sweep of `order` should leave. */
static int count_lines(const char *path, const char *words) {
  char line[1024];
  int count = 0;
  FILE *file = fopen(path, "r");
  while (file && fgets(line, sizeof line, file)) count += strstr(line, words) != NULL;
  if (file) fclose(file);
  return count;
}

static void bad_arms(void) {
  struct scene scene;
  int interrupted;
  const char *path = scratch_path("bad.log");
  new_world();
  EXPECT(begin(&scene, everything, path, 0) == MOEFLOW_OK);
  const int standard_output = dup(STDOUT_FILENO);
  fflush(stdout);
  EXPECT(freopen(scratch_path("stdout"), "w", stdout) != NULL);
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK && !interrupted, "%s", moeflow_last_error());
  fflush(stdout);
  dup2(standard_output, STDOUT_FILENO);
  close(standard_output);
  sweep_log_close(&scene.log);
  EXPECT(count_lines(scratch_path("stdout"), "chatter") == 0, "what a worker's libraries print is no result");
  expect_no_children();
  for (int i = 0; i < POINTS; i++) {
    const struct sweep_choice choice = chosen(&scene, i);
    EXPECT(choice.reason == SWEEP_WINS && choice.arm == FASTER, "%d: arm %d", choice.reason, choice.arm);
    EXPECT(choice.low > 2 && choice.high < 4 && fabs(choice.gap - 3) < 0.3, "%g (%g to %g)", choice.gap, choice.low,
           choice.high);
    EXPECT(fabs(choice.us - 97) < 0.5 && fabs(choice.default_us - 100) < 0.5, "%g, %g", choice.us, choice.default_us);
    EXPECT(choice.failed == 5, "%d", choice.failed);
    EXPECT(!scene.points[i].results[LUCKY].paired, "it is slow where routings are skewed");
  }
  EXPECT(!world->touched_wrong, "a wrong arm is not timed");
  EXPECT(!world->touched_refused, "a refused arm is not touched");
  EXPECT(world->checks[CRASHES] == 1 && world->checks[HANGS] == 1, "what fails at one size is not run at another");
  EXPECT(world->opens == 6, "one, and one after each of five failures: %d", world->opens);
  EXPECT(count_lines(path, "failed rows=8 arm=crashes why=crashed SIGSEGV #") == 1);
  EXPECT(count_lines(path, "failed rows=8 arm=hangs why=hung: no answer within 0.4 s #") == 1);
  EXPECT(count_lines(path, "failed rows=8 arm=wrong why=wrong: rel-L2 0.5 ") == 1);
  EXPECT(count_lines(path, "failed rows=8 arm=nan why=wrong: rel-L2 nan ") == 1 ||
         count_lines(path, "failed rows=8 arm=nan why=wrong: rel-L2 -nan ") == 1);
  EXPECT(count_lines(path, "failed rows=8 arm=errs why=cuStreamSynchronize: an illegal") == 1);
  EXPECT(count_lines(path, "arm=refused") == 0);
}

/* Noise alone changes nothing; a clear default stays; packed weights must win by two per cent. */
static void choices(void) {
  static const struct {
    int order[8];
    double noise;
    enum sweep_reason reason;
    int arm;
  } rows[] = {
      {{SLOWER, PORTABLE, -1}, 0.002, SWEEP_KEPT, STANDARD},
      {{A_LITTLE, -1}, 0.05, SWEEP_KEPT, STANDARD}, /* half a per cent in five of noise */
      {{A_LITTLE, -1}, 0.0005, SWEEP_WINS, A_LITTLE},
      {{STREAM, -1}, 0.0005, SWEEP_KEPT, STANDARD},
      {{STREAM, FAST_STREAM, -1}, 0.0005, SWEEP_WINS, FAST_STREAM},
      {{LUCKY, -1}, 0.0005, SWEEP_KEPT, STANDARD},
      {{WRONG, -1}, 0.0005, SWEEP_KEPT, STANDARD},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    struct scene scene;
    int interrupted;
    new_world();
    world->noise = rows[i].noise;
    EXPECT(begin(&scene, rows[i].order, scratch_path("choices.log"), 0) == MOEFLOW_OK);
    EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
    sweep_log_close(&scene.log);
    const struct sweep_choice choice = chosen(&scene, 0);
    EXPECT(choice.reason == rows[i].reason && choice.arm == rows[i].arm, "row %zu: %d, arm %d, %g (%g to %g)", i,
           choice.reason, choice.arm, choice.gap, choice.low, choice.high);
  }
}

/* Memory that an arm lacks at one size says nothing about it elsewhere. */
static void out_of_memory(int in_pairs) {
  struct scene scene;
  int interrupted;
  const char *path = scratch_path("memory.log");
  const int order[] = {SLOWER, FASTER, -1};
  unlink(path);
  new_world();
  world->short_tokens = 4;
  world->short_arm = FASTER;
  world->short_in_pairs = in_pairs;
  EXPECT(begin(&scene, order, path, 0) == MOEFLOW_OK);
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
  sweep_log_close(&scene.log);
  const struct sweep_choice here = chosen(&scene, 0), there = chosen(&scene, 1);
  EXPECT(here.reason == SWEEP_KEPT && here.arm == STANDARD && here.failed == 0 && here.skipped == 1, "%d, %d failed",
         here.reason, here.failed);
  EXPECT(there.reason == SWEEP_WINS && there.arm == FASTER && there.failed == 0, "%d, %d failed", there.reason,
         there.failed);
  EXPECT(count_lines(path, "skipped rows=8 arm=faster why=cuMemAlloc: out of memory #") == 1);
  EXPECT(count_lines(path, "failed ") == 0 && count_lines(path, "skipped ") == 1);
  world->short_arm = STANDARD; /* nothing to compare with */
  EXPECT(begin(&scene, order, path, 0) == MOEFLOW_OK && sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  EXPECT(chosen(&scene, 0).reason == SWEEP_UNDECIDED && chosen(&scene, 1).arm == FASTER, "%d", chosen(&scene, 0).reason);
}

/* Wide tiles run on skewed routings alone. */
static void wrong_where_skewed(void) {
  struct scene scene;
  int interrupted;
  const char *path = scratch_path("wide.log");
  const int order[] = {WIDE, FASTER, -1};
  new_world();
  EXPECT(begin(&scene, order, path, 0) == MOEFLOW_OK);
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
  sweep_log_close(&scene.log);
  for (int i = 0; i < POINTS; i++) EXPECT(chosen(&scene, i).arm == FASTER && chosen(&scene, i).failed == 1);
  EXPECT(count_lines(path, "failed rows=8 arm=wide why=wrong: rel-L2 0.25 ") == 1 && count_lines(path, "failed ") == 1);
}

/* In turns, so that a drift falls on both alike. */
static void turns(void) {
  struct scene scene;
  int interrupted, changes = 0, firsts = 0;
  const int order[] = {FASTER, -1};
  new_world();
  EXPECT(begin(&scene, order, scratch_path("turns.log"), 0) == MOEFLOW_OK);
  scene.job.point_count = 1;
  world->record_order = 1;
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  EXPECT(world->ordered == 4 + 2 * SWEEP_PAIRS, "%d", world->ordered);
  for (int i = 4; i < world->ordered; i += 2) {
    changes += world->order[i] != world->order[i + 1];
    firsts += world->order[i] == FASTER;
  }
  EXPECT(changes == SWEEP_PAIRS && firsts == SWEEP_PAIRS / 2, "%d, %d", changes, firsts);
}

/* The default fails: the portable form stands in; both fail: nothing is chosen. */
static void no_default(void) {
  struct scene scene;
  int interrupted;
  new_world();
  EXPECT(begin(&scene, plain, scratch_path("default.log"), 0) == MOEFLOW_OK);
  for (int i = 0; i < POINTS; i++) scene.points[i].standard = WRONG;
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  EXPECT(chosen(&scene, 0).reason == SWEEP_WINS && chosen(&scene, 0).arm == FASTER);
  EXPECT(!strcmp(scene.results[0][FASTER].pair.against, "portable"), "%s", scene.results[0][FASTER].pair.against);
  EXPECT(scene.results[0][PORTABLE].failed == 0);
  strcpy(scene.results[0][FASTER].pair.against, "standard");
  EXPECT(chosen(&scene, 0).arm != FASTER, "a win over another default is none over this one");
  scene.results[0][PORTABLE].failed = 1;
  EXPECT(chosen(&scene, 0).reason == SWEEP_NO_DEFAULT && chosen(&scene, 0).arm == -1);
}

/* Runs a whole sweep in a process of its own, whose parent part is killed at the n-th call; then resumes it. */
static void killed(void) {
  const char *path = scratch_path("killed.log");
  struct scene scene;
  int interrupted, calls;
  new_world();
  world->noise = 0.0005; /* no two arms change places when they are measured again */
  EXPECT(begin(&scene, plain, path, 0) == MOEFLOW_OK && sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  calls = world->calls;
  const int records = count_lines(path, "\n");
  EXPECT(records == 1 + POINTS * (5 + 3 + 2), "%d", records); /* begin; screened, skewed, paired */
  for (int at = 1; at <= calls; at += at < 60 ? 1 : 7) {
    unlink(path);
    memset(world, 0, sizeof *world);
    world->noise = 0.0005;
    world->kill_parent_at = at;
    const pid_t child = fork();
    if (!child) {
      if (!freopen("/dev/null", "w", stderr) || begin(&scene, plain, path, 0)) _exit(2);
      sweep_run(&scene.job, &interrupted);
      _exit(1);
    }
    int how;
    EXPECT(waitpid(child, &how, 0) == child && WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL, "call %d: %x", at, how);
    while (waitpid(-1, NULL, 0) > 0) continue; /* the workers go with it */
    const int before = count_lines(path, "\n");
    world->kill_parent_at = 0;
    EXPECT(begin(&scene, plain, path, 1) == MOEFLOW_OK, "%s", moeflow_last_error());
    EXPECT(scene.records == before - 1, "call %d: %d of %d records are known again", at, scene.records, before - 1);
    EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
    sweep_log_close(&scene.log);
    EXPECT(count_lines(path, "\n") == records, "call %d: %d records, %d at one go", at, count_lines(path, "\n"), records);
    for (int i = 0; i < POINTS; i++)
      EXPECT(chosen(&scene, i).arm == FASTER && chosen(&scene, i).reason == SWEEP_WINS, "call %d", at);
  }
  expect_no_children();
  new_world();
  EXPECT(begin(&scene, plain, path, 1) == MOEFLOW_OK && sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  EXPECT(world->opens == 0, "all is known: no GPU is touched");
}

static void time_limit(void) {
  struct scene scene;
  int interrupted;
  const char *path = scratch_path("limit.log");
  new_world();
  world->delay_us = 10000; /* a point takes 0.14 s of screening and skew, and 0.6 s for each of two arms in turns */
  EXPECT(begin(&scene, plain, path, 0) == MOEFLOW_OK);
  const double start = progress_seconds();
  scene.job.end = start + 1.25;
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK && !interrupted);
  const double seconds = progress_seconds() - start;
  sweep_log_close(&scene.log);
  EXPECT(seconds < 5, "%g s", seconds); /* what was begun may end */
  EXPECT(scene.results[0][STANDARD].screened && scene.results[1][STANDARD].screened, "every point has its share");
  EXPECT(begin(&scene, plain, path, 1) == MOEFLOW_OK);
  scene.job.end = progress_seconds() - 1;
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  EXPECT(chosen(&scene, 1).reason == SWEEP_UNDECIDED || chosen(&scene, 1).reason == SWEEP_WINS);
  struct scene nothing;
  EXPECT(begin(&nothing, plain, scratch_path("none.log"), 0) == MOEFLOW_OK);
  nothing.job.end = progress_seconds() - 1;
  EXPECT(sweep_run(&nothing.job, &interrupted) == MOEFLOW_OK);
  sweep_log_close(&nothing.log);
  EXPECT(chosen(&nothing, 0).reason == SWEEP_UNDECIDED, "nothing measured, nothing said");
}

static void tell(struct scene *scene, enum sweep_event event, int arm, double us) {
  struct sweep_record record = {.event = event, .rows = 8, .values = {4e-4, us}};
  snprintf(record.arm, sizeof record.arm, "%s", behaviours[arm].name);
  if (event == SWEEP_PAIRED) {
    strcpy(record.against, "standard");
    memcpy(record.values, (double[]){0, us, 100, 100 - us, 99.9 - us, 100.1 - us}, sizeof record.values);
  }
  sweep_learn(&scene->all, scene->points, POINTS, &record);
}

/* The default stays only against a whole shortlist: the time was up, and an older line is worth more than no comparison. */
static void part_of_a_shortlist(void) {
  static struct tune old, tune;
  struct scene scene;
  const int order[] = {SLOWER, FASTER, REFUSED, -1};
  old.count = 1;
  old.lines[0] = (struct tune_line){.rows = 8, .kernel = KERNEL_EXPERTS, .us = 95, .default_us = 100, .gap = 5};
  EXPECT(begin(&scene, order, scratch_path("part.log"), 0) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  tell(&scene, SWEEP_SCREENED, STANDARD, 100);
  EXPECT(chosen(&scene, 0).reason == SWEEP_UNDECIDED, "nothing was compared: %d", chosen(&scene, 0).reason);
  tell(&scene, SWEEP_SKEWED, STANDARD, 130);
  tell(&scene, SWEEP_SCREENED, SLOWER, 120);
  tell(&scene, SWEEP_SKEWED, SLOWER, 140);
  tell(&scene, SWEEP_PAIRED, SLOWER, 120);
  EXPECT(chosen(&scene, 0).reason == SWEEP_UNDECIDED, "one of two was compared: %d", chosen(&scene, 0).reason);
  EXPECT(chosen(&scene, 0).screened == 1 && chosen(&scene, 0).shortlist == 2, "%d of %d", chosen(&scene, 0).screened,
         chosen(&scene, 0).shortlist);
  EXPECT(sweep_tune_lines(&scene.all, scene.points, 1, &old, &tune) == MOEFLOW_OK && tune.count == 1 &&
             !memcmp(&tune.lines[0], &old.lines[0], sizeof old.lines[0]),
         "the older line stays");
  tell(&scene, SWEEP_SCREENED, FASTER, 97);
  EXPECT(chosen(&scene, 0).reason == SWEEP_UNDECIDED, "a finalist is left: %d", chosen(&scene, 0).reason);
  tell(&scene, SWEEP_FAILED, FASTER, 0);
  EXPECT(chosen(&scene, 0).reason == SWEEP_KEPT, "all that can be compared is: %d", chosen(&scene, 0).reason);
  EXPECT(
      sweep_tune_lines(&scene.all, scene.points, 1, &old, &tune) == MOEFLOW_OK && tune.count == 1 && tune.lines[0].gap == 20,
      "%g", tune.lines[0].gap);
}

/* Five differences of 0.5 to 4.5 %: 2.5 +- 2.776 * 0.7071 would win alone, 2.5 +- 3.961 * 0.7071 as one of three does not.
 */
static void one_of_three(void) {
  struct scene scene;
  struct sweep_record record;
  struct sweep_answer answer = {.outcome = SWEEP_DONE, .pairs = 5};
  const int order[] = {FASTER, -1};
  EXPECT(begin(&scene, order, scratch_path("three.log"), 0) == MOEFLOW_OK);
  sweep_log_close(&scene.log);
  for (int i = 0; i < 5; i++) {
    answer.against_us[i] = 100;
    answer.arm_us[i] = 99.5 - i;
  }
  const struct sweep_request request = {.task = SWEEP_PAIR, .arm = FASTER, .against = STANDARD};
  sweep_judge(&scene.all, &scene.points[0], &request, &answer, &record);
  EXPECT(fabs(record.values[SWEEP_GAP] - 2.5) < 1e-9 && fabs(record.values[SWEEP_GAP_LOW] - (2.5 - 2.8007)) < 1e-3 &&
             fabs(record.values[SWEEP_GAP_HIGH] - (2.5 + 2.8007)) < 1e-3,
         "%g (%g to %g)", record.values[SWEEP_GAP], record.values[SWEEP_GAP_LOW], record.values[SWEEP_GAP_HIGH]);
  tell(&scene, SWEEP_SCREENED, STANDARD, 100);
  tell(&scene, SWEEP_SKEWED, STANDARD, 130);
  tell(&scene, SWEEP_SCREENED, FASTER, 97);
  tell(&scene, SWEEP_SKEWED, FASTER, 128);
  sweep_learn(&scene.all, scene.points, POINTS, &record);
  EXPECT(chosen(&scene, 0).reason == SWEEP_KEPT, "%d", chosen(&scene, 0).reason);
}

/* One signal lets the measurement end and become a record; a second one does not wait. */
static void interrupt(int signals, int arm) {
  const char *path = scratch_path("interrupt.log");
  const int order[] = {arm, -1};
  int how;
  unlink(path);
  new_world();
  world->delay_us = arm == HANGS ? 0 : 300000;
  const pid_t child = fork();
  if (!child) {
    struct scene scene;
    int interrupted = 0;
    if (begin(&scene, order, path, 0)) _exit(2);
    scene.job.patience.measure = 60;
    const moeflow_status status = sweep_run(&scene.job, &interrupted);
    sweep_log_close(&scene.log);
    _exit(status == MOEFLOW_OK && interrupted ? 30 : 1);
  }
  while (!world->checks[arm]) usleep(1000);
  const double start = progress_seconds();
  for (int i = 0; i < signals; i++) {
    kill(child, SIGINT);
    usleep(200000);
  }
  EXPECT(waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 30, "%x", how);
  EXPECT(progress_seconds() - start < 5);
  const int records = count_lines(path, "arm=faster") + count_lines(path, "arm=hangs");
  EXPECT(records == (signals == 1), "%d records after %d signals", records, signals);
  while (waitpid(-1, NULL, 0) > 0) continue;
}

static void devices(void) {
  struct scene scene;
  struct sweep_gpu gpu;
  int interrupted;
  new_world();
  EXPECT(begin(&scene, plain, scratch_path("devices.log"), 0) == MOEFLOW_OK);
  scene.job.device_count = 3;
  memcpy(scene.job.devices, (int[]){0, 1, 2}, sizeof(int[3]));
  world->open_fails_on = 1 + 1; /* GPU 1 is given up, its point goes to another */
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
  sweep_log_close(&scene.log);
  EXPECT(chosen(&scene, 0).arm == FASTER && chosen(&scene, 1).arm == FASTER);
  EXPECT(world->opens == 3 || world->opens == 4, "%d", world->opens); /* two in vain; the first may take both points */
  new_world();
  world->open_fails_on = 0 + 1;
  EXPECT(begin(&scene, plain, scratch_path("devices.log"), 0) == MOEFLOW_OK);
  EXPECT(sweep_run(&scene.job, &interrupted) == MOEFLOW_ERROR_ENVIRONMENT && strstr(moeflow_last_error(), "out of memory"),
         "%s", moeflow_last_error());
  sweep_log_close(&scene.log);
  expect_no_children();
  EXPECT(sweep_probe(&measure, (int[]){0, 1}, 2, &gpu) == MOEFLOW_OK && gpu.multiprocessors == 132 && gpu.driver == 13000 &&
             !strcmp(gpu.name, "NVIDIA Pretend Big One"),
         "%s", gpu.name);
  EXPECT(sweep_probe(&measure, (int[]){0, 9}, 2, &gpu) == MOEFLOW_ERROR_ENVIRONMENT && strstr(moeflow_last_error(), "132") &&
             strstr(moeflow_last_error(), "78"),
         "%s", moeflow_last_error());
  EXPECT(sweep_probe(&measure, (int[]){7}, 1, &gpu) == MOEFLOW_ERROR_ENVIRONMENT && strstr(moeflow_last_error(), "no GPU 7"),
         "%s", moeflow_last_error());
}

int main(void) {
  scratch_make();
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (world == MAP_FAILED) return 1;
  bad_arms();
  choices();
  out_of_memory(0);
  out_of_memory(1);
  wrong_where_skewed();
  turns();
  no_default();
  killed();
  time_limit();
  part_of_a_shortlist();
  one_of_three();
  interrupt(1, FASTER);
  interrupt(2, HANGS);
  devices();
  scratch_remove();
  TEST_END;
}
