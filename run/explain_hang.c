#include "explain_hang.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"
#include "flight.h"
#include "status.h"

#define LINE_MAX_BYTES 512

struct flight_lane { /* a `lane` line */
  int number;
  uint32_t epoch, started, received, finished, poison, peer, phase, step, mine, theirs;
};

struct flight_phase { /* of a `source` line */
  uint32_t least, most;
  int up; /* words at `most` */
};

struct flight_source { /* a `source` line */
  int rank;
  struct flight_phase dispatch, home;
  uint32_t mark, epoch, rows_sent, tokens_max, flags;
};

static const char *cause(uint32_t poison) {
  static const char *const texts[] = {
      [MOEFLOW_POISON_NONE] = "not poisoned",
      [MOEFLOW_POISON_PEER] = "a peer said that it is poisoned",
      [MOEFLOW_POISON_TOKENS_MAX] = "the ranks called with different tokens_max",
      [MOEFLOW_POISON_EPOCH] = "the ranks are at different steps",
      [MOEFLOW_POISON_TIMEOUT] = "a peer stayed silent until the timeout",
      [MOEFLOW_POISON_ABORT] = "moeflow_abort was called, or a call failed here",
      [MOEFLOW_POISON_LEND] = "no weights were lent",
  };
  return poison < sizeof texts / sizeof *texts ? texts[poison] : "an unknown cause";
}

static const char *phase_name(uint32_t phase) {
  return phase == MOEFLOW_PHASE_DISPATCH ? "dispatch" : phase == MOEFLOW_PHASE_RETURN ? "return" : "no";
}

static void say_lane(const struct flight_lane *lane, FILE *out) {
  fprintf(out, "\nlane %d: step %u started, rows of step %u arrived, step %u ended; %s", lane->number, lane->started,
          lane->received, lane->finished, cause(lane->poison));
  if (lane->poison == MOEFLOW_POISON_TOKENS_MAX || lane->poison == MOEFLOW_POISON_EPOCH) {
    fprintf(out, " (%u here, %u there)", lane->mine, lane->theirs);
  }
  if (lane->poison) fprintf(out, ": rank %u, %s phase of step %u", lane->peer, phase_name(lane->phase), lane->step);
  fputc('\n', out);
}

/* How far a source's words of a phase are, as against the step that this rank is in. */
static void say_phase(const char *name, const struct flight_phase *phase, uint32_t step, int words, FILE *out) {
  const int32_t ahead = (int32_t)(phase->least - step);
  if (ahead >= MOEFLOW_FLAG_AHEAD) {
    fprintf(out, "  %s: it gave itself up\n", name);
  } else if (ahead >= 0) {
    fprintf(out, "  %s: done\n", name);
  } else if (phase->most != phase->least) {
    fprintf(out,
            "  %s: step %u is under way: %d of %d words are up, the others are at step %u. Its kernel was running, or was "
            "ended in the middle\n",
            name, phase->most, phase->up, words, phase->least);
  } else {
    fprintf(out, "  %s: it has not come to step %u; its last was step %u, %d behind\n", name, step, phase->most, -ahead);
  }
}

static void say_source(const struct flight_source *source, const struct flight_lane *lane, int words, FILE *out) {
  const uint32_t step = lane->poison ? lane->step : lane->started;
  fprintf(out, " rank %d: its last row 0 here is of step %u, %u row(s), tokens_max %u%s\n", source->rank, source->epoch,
          source->rows_sent, source->tokens_max, source->flags & MOEFLOW_ROW_FAILED ? ", after an error of its own" : "");
  say_phase("dispatch", &source->dispatch, step, words, out);
  say_phase("return", &source->home, step, words, out);
  if (source->mark) fprintf(out, "  it is poisoned: %s\n", cause(source->mark));
}

static int read_lane(const char *line, struct flight_lane *lane) {
  return sscanf(line,
                "lane %d epoch %u started %u received %u finished %u poison %u peer %u phase %u step %u mine %u theirs %u",
                &lane->number, &lane->epoch, &lane->started, &lane->received, &lane->finished, &lane->poison, &lane->peer,
                &lane->phase, &lane->step, &lane->mine, &lane->theirs) == 11;
}

static int read_source(const char *line, struct flight_source *source) {
  return sscanf(line, "source %d dispatch %u %u %d return %u %u %d mark %u header %u %u %u %u", &source->rank,
                &source->dispatch.least, &source->dispatch.most, &source->dispatch.up, &source->home.least,
                &source->home.most, &source->home.up, &source->mark, &source->epoch, &source->rows_sent, &source->tokens_max,
                &source->flags) == 12;
}

static void say_advice(FILE *out) {
  fputs(
      "\nA rank that has not come to a step has not called moeflow_forward as often as the others, or its stream is held up "
      "by\n"
      "work of its own: look there first. One whose kernel was ended in the middle has lost its process or its GPU. Ranks "
      "at\n"
      "different steps, or with different tokens_max, do not make the same calls in the same order. A record of every rank "
      "tells\n"
      "more than one.\n",
      out);
}

moeflow_status explain_hang(const char *path, FILE *out) {
  moeflow_status status = MOEFLOW_OK;
  char line[LINE_MAX_BYTES], transport[32];
  struct flight_lane lane = {.number = -1};
  struct flight_source source;
  int version, rank, ranks, lanes, capacity, words, timeout_ms, number = 2, ended = 0;
  FILE *file = fopen(path, "r");
  if (!file) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot read the flight record %s: %s", path, strerror(errno));
  if (!fgets(line, sizeof line, file) || sscanf(line, "moeflow-flight %d", &version) != 1 || version != FLIGHT_VERSION) {
    FAIL(MOEFLOW_ERROR_FORMAT, "%s:1: no flight record of version %d", path, FLIGHT_VERSION);
  }
  if (!fgets(line, sizeof line, file) ||
      sscanf(line, "rank %d ranks %d lanes %d capacity %d words %d timeout_ms %d transport %31s", &rank, &ranks, &lanes,
             &capacity, &words, &timeout_ms, transport) != 7) {
    FAIL(MOEFLOW_ERROR_FORMAT, "%s:2: not the line of a group", path);
  }
  fprintf(out, "rank %d of %d over %s, %d lane(s), capacity %d; a wait for a peer ends after %d ms\n", rank, ranks,
          transport, lanes, capacity, timeout_ms);
  while (!ended && fgets(line, sizeof line, file)) {
    number++;
    if (read_lane(line, &lane)) {
      say_lane(&lane, out);
    } else if (lane.number >= 0 && read_source(line, &source)) {
      say_source(&source, &lane, words, out);
    } else if (!strcmp(line, "end\n")) {
      ended = 1;
    } else {
      FAIL(MOEFLOW_ERROR_FORMAT, "%s:%d: neither a lane nor a source", path, number);
    }
  }
  if (!ended) FAIL(MOEFLOW_ERROR_FORMAT, "%s:%d: the record ends early", path, number);
  say_advice(out);
cleanup:
  if (file) fclose(file);
  return status;
}
