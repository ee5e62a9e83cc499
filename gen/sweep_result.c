/* What a sweep has found: as a table, as JSON, and in the tuned file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "json.h"
#include "progress.h"
#include "status.h"
#include "sweep_command.h"

/* ---- The file as it was ---- */

/* Old lines of another toolchain do not stand beside new ones. */
static void drop_old(struct sweep *sweep) {
  char differences[TUNE_DIFFERENCES_MAX];
  if (!sweep->old.count || !tune_differs(&sweep->old, &sweep->tune.identity, differences)) return;
  fprintf(stderr, "moeflow-gen sweep: %s will be replaced as a whole: %s\n", sweep->output, differences);
  sweep->old.count = 0;
}

moeflow_status sweep_read_old(struct sweep *sweep) {
  moeflow_status status = MOEFLOW_OK;
  sweep->old.count = 0;
  if (access(sweep->output, F_OK)) return MOEFLOW_OK;
  CHECK(tune_read(sweep->output, &sweep->old));
  if (tune_match(&sweep->old, &sweep->tune.identity, sweep->options->model) != MOEFLOW_OK)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "%s is of another model, spec or GPU: give another with --output, or remove it",
         sweep->output);
  drop_old(sweep);
cleanup:
  return status;
}
/* ---- The file as it will be ---- */

static void fill_line(const struct sweep_arms *arms, const struct sweep_point *point, const struct sweep_choice *choice,
                      struct tune_line *line) {
  const struct sweep_arm *arm = &arms->arms[choice->arm];
  *line = (struct tune_line){.rows = point->rows,
                             .kernel = arm->kernel,
                             .shape = arm->shape,
                             .us = choice->us,
                             .default_us = choice->default_us,
                             .gap = choice->gap,
                             .gap_low = choice->low,
                             .gap_high = choice->high};
  if (choice->reason == SWEEP_KEPT && choice->compared) { /* what the default saves: the other way round */
    line->gap = -choice->gap;
    line->gap_low = -choice->high;
    line->gap_high = -choice->low;
  }
  if (choice->runner_up >= 0) snprintf(line->runner_up, sizeof line->runner_up, "%s", arms->arms[choice->runner_up].name);
}

moeflow_status sweep_tune_lines(const struct sweep_arms *arms, const struct sweep_point *points, int count,
                                const struct tune *old, struct tune *tune) {
  struct tune_line lines[TUNE_ROWS_MAX + SWEEP_POINTS_MAX];
  int total = 0;
  for (int i = 0; old && i < old->count; i++) {
    int measured = 0;
    for (int p = 0; p < count; p++) {
      struct sweep_choice choice;
      sweep_choose(arms, &points[p], &choice);
      measured |= points[p].rows == old->lines[i].rows && choice.reason != SWEEP_UNDECIDED;
    }
    if (!measured) lines[total++] = old->lines[i];
  }
  for (int p = 0; p < count; p++) {
    struct sweep_choice choice;
    sweep_choose(arms, &points[p], &choice);
    if (choice.reason == SWEEP_WINS || choice.reason == SWEEP_KEPT) fill_line(arms, &points[p], &choice, &lines[total++]);
  }
  if (total > TUNE_ROWS_MAX)
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "%d sizes with those that are in the file, which holds %d: give another --output", total,
                      TUNE_ROWS_MAX);
  for (int i = 1; i < total; i++) {
    for (int j = i; j > 0 && lines[j - 1].rows > lines[j].rows; j--) {
      const struct tune_line swapped = lines[j];
      lines[j] = lines[j - 1];
      lines[j - 1] = swapped;
    }
  }
  memcpy(tune->lines, lines, (size_t)total * sizeof *lines);
  tune->count = total;
  return MOEFLOW_OK;
}

/* ---- As a table and as JSON ---- */

static const char *const reasons[] = {
    [SWEEP_WINS] = "wins", [SWEEP_KEPT] = "default", [SWEEP_UNDECIDED] = "undecided", [SWEEP_NO_DEFAULT] = "failed"};

static void print_table(const struct sweep *sweep) {
  printf("%6s %6s %8s  %-9s %9s %9s  %-24s  %s\n", "tokens", "rows", "screened", "result", "us", "default",
         "gap % (95 % for all)", "variant");
  for (int i = 0; i < sweep->point_count; i++) {
    struct sweep_choice choice;
    char gap[48] = "-", screened[32];
    sweep_choose(&sweep->arms, &sweep->points[i], &choice);
    if (choice.compared) snprintf(gap, sizeof gap, "%+.2f (%+.2f, %+.2f)", choice.gap, choice.low, choice.high);
    snprintf(screened, sizeof screened, "%d/%d", choice.screened, choice.shortlist);
    printf("%6d %6d %8s  %-9s %9.1f %9.1f  %-24s  %s", sweep->points[i].tokens, sweep->points[i].rows, screened,
           reasons[choice.reason], choice.us, choice.default_us, gap,
           choice.arm >= 0 ? sweep->arms.arms[choice.arm].name : "-");
    printf("%s%s\n", choice.runner_up >= 0 ? ", then " : "",
           choice.runner_up >= 0 ? sweep->arms.arms[choice.runner_up].name : "");
    if (choice.skipped)
      printf("%6s %6s of them %d not measured: there was no memory at this size; see %s\n", "", "", choice.skipped,
             sweep->log.path);
  }
}

static void print_json(const struct sweep *sweep) {
  struct json json;
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "model"), json_string(&json, sweep->model.spec.name);
  json_key(&json, "gpu"), json_string(&json, sweep->gpu.name);
  json_key(&json, "arch"), json_string(&json, sweep->model.deploy.arch[0]->name);
  json_key(&json, "ep"), json_int(&json, sweep->model.deploy.ep);
  json_key(&json, "arms"), json_int(&json, sweep->arms.count);
  json_key(&json, "compile_seconds"), json_double(&json, sweep->plans.seconds);
  json_key(&json, "seconds"), json_double(&json, progress_seconds() - sweep->start);
  json_key(&json, "log"), json_string(&json, sweep->log.path);
  json_key(&json, "tuned"), json_string(&json, sweep->output);
  json_key(&json, "points");
  json_array(&json);
  for (int i = 0; i < sweep->point_count; i++) {
    struct sweep_choice choice;
    sweep_choose(&sweep->arms, &sweep->points[i], &choice);
    json_object(&json);
    json_key(&json, "tokens"), json_int(&json, sweep->points[i].tokens);
    json_key(&json, "rows"), json_int(&json, sweep->points[i].rows);
    json_key(&json, "result"), json_string(&json, reasons[choice.reason]);
    json_key(&json, "variant"), json_string(&json, choice.arm >= 0 ? sweep->arms.arms[choice.arm].name : "");
    json_key(&json, "runner_up"), json_string(&json, choice.runner_up >= 0 ? sweep->arms.arms[choice.runner_up].name : "");
    json_key(&json, "us"), json_double(&json, choice.us);
    json_key(&json, "default_us"), json_double(&json, choice.default_us);
    json_key(&json, "gap_percent"), json_double(&json, choice.gap);
    json_key(&json, "ci95_percent");
    json_array(&json);
    json_double(&json, choice.low), json_double(&json, choice.high);
    json_array_end(&json);
    json_key(&json, "failed"), json_int(&json, choice.failed);
    json_key(&json, "skipped"), json_int(&json, choice.skipped);
    json_key(&json, "shortlist"), json_int(&json, choice.shortlist);
    json_key(&json, "screened"), json_int(&json, choice.screened);
    json_object_end(&json);
  }
  json_array_end(&json);
  json_object_end(&json);
  json_end(&json);
}

static int count_reason(const struct sweep *sweep, enum sweep_reason reason) {
  int count = 0;
  for (int i = 0; i < sweep->point_count; i++) {
    struct sweep_choice choice;
    sweep_choose(&sweep->arms, &sweep->points[i], &choice);
    count += choice.reason == reason;
  }
  return count;
}

void sweep_say_resume(const struct sweep *sweep, const char *why) {
  fprintf(stderr, "moeflow-gen sweep: %s; the same command with --resume goes on from %s\n", why, sweep->log.path);
}

/* Another sweep may write other sizes into the same file: who holds its folder reads it once more and then replaces it.
 * Where folders cannot be locked, the later one wins. */
static int lock_output(const struct sweep *sweep) {
  char folder[TUNE_PATH_MAX];
  snprintf(folder, sizeof folder, "%s", sweep->output);
  char *end = strrchr(folder, '/');
  if (end) end[end == folder] = 0;
  const int fd = open(end ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (fd >= 0 && flock(fd, LOCK_EX) && errno == EINTR) continue;
  return fd;
}

/* After the result has been shown, which a full disk must not hide. */
static moeflow_status write_tune(struct sweep *sweep) {
  moeflow_status status = MOEFLOW_OK;
  const char *what = "nothing was decided, not written:";
  const int lock = lock_output(sweep);
  CHECK(sweep_read_old(sweep)); /* once more: NVRTC is known only now, too */
  CHECK(sweep_tune_lines(&sweep->arms, sweep->points, sweep->point_count, &sweep->old, &sweep->tune));
  if (sweep->tune.count) {
    CHECK(tune_write(&sweep->tune, sweep->output));
    what = "wrote";
  }
  if (sweep->options->format != FORMAT_JSON) printf("%s %s\n", what, sweep->output);
cleanup:
  if (lock >= 0) close(lock);
  if (status != MOEFLOW_OK) sweep_say_resume(sweep, "the choices were not written");
  return status;
}

moeflow_status sweep_write_result(struct sweep *sweep) {
  moeflow_status status = MOEFLOW_OK;
  const int undecided = count_reason(sweep, SWEEP_UNDECIDED), failed = count_reason(sweep, SWEEP_NO_DEFAULT);
  char why[64];
  sweep->tune.identity.nvrtc = sweep->plans.nvrtc;
  if (sweep->options->format == FORMAT_JSON) {
    print_json(sweep);
  } else {
    print_table(sweep);
    printf("%s %s on %s: %d arms of %d legal shapes, compiled in %.1f s, %.1f s in all\n", sweep->model.spec.name,
           spec_dtype_name(sweep->model.spec.dtype), sweep->gpu.name, sweep->arms.count, sweep->legal, sweep->plans.seconds,
           progress_seconds() - sweep->start);
    fflush(stdout);
  }
  CHECK(write_tune(sweep));
  snprintf(why, sizeof why, "%d of %d sizes are undecided", undecided, sweep->point_count);
  if (undecided) sweep_say_resume(sweep, why);
  if (failed)
    FAIL(MOEFLOW_ERROR_INTERNAL, "at %d of %d sizes neither the default nor the portable form is right; see %s", failed,
         sweep->point_count, sweep->log.path);
cleanup:
  return status;
}
