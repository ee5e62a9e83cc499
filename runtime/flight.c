#include "flight.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* The words that a source has raised in one phase: how far the first and the last of them are. */
struct span {
  uint32_t least, most;
  int up; /* words that are at `most` */
};

static struct span span_of(const uint32_t *words, int count) {
  struct span span = {words[0], words[0], 0};
  for (int i = 1; i < count; i++) { /* wrap-safe */
    if ((int32_t)(words[i] - span.least) < 0) span.least = words[i];
    if ((int32_t)(words[i] - span.most) > 0) span.most = words[i];
  }
  for (int i = 0; i < count; i++) span.up += words[i] == span.most;
  return span;
}

static void put_phase(FILE *file, const char *name, const struct moeflow_group *group, const uint32_t *flags, int phase,
                      int source) {
  const struct span span =
      span_of(flags + moeflow_flag_at(phase, source, group->ranks, group->flag_words), group->flag_words);
  fprintf(file, " %s %u %u %d", name, span.least, span.most, span.up);
}

static moeflow_status put_source(FILE *file, const struct moeflow_group *group, const struct group_lane *lane,
                                 const uint32_t *flags, int source) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  struct moeflow_row_header header;
  const uint8_t *row = lane->received + source * group_block_bytes(group, MOEFLOW_PHASE_DISPATCH);
  CHECK(context->backend->download(context, &header, row, sizeof header));
  fprintf(file, "source %d", source);
  put_phase(file, "dispatch", group, flags, MOEFLOW_PHASE_DISPATCH, source);
  put_phase(file, "return", group, flags, MOEFLOW_PHASE_RETURN, source);
  fprintf(file, " mark %u header %u %u %u %u\n", flags[moeflow_mark_at(source, group->ranks, group->flag_words)],
          header.epoch, header.rows_sent, header.tokens_max, header.flags);
cleanup:
  return status;
}

static moeflow_status put_lane(FILE *file, const struct moeflow_group *group, int number) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_context *context = group->contexts[0];
  const struct group_lane *lane = &group->lanes[number];
  const struct moeflow_record record = *lane->record;
  const size_t bytes = (size_t)moeflow_flag_block(group->ranks, group->flag_words) * sizeof(uint32_t);
  struct moeflow_lane state;
  uint32_t *flags = malloc(bytes);
  if (!flags) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu bytes of flags", bytes);
  CHECK(context->backend->download(context, &state, lane->state, sizeof state));
  CHECK(context->backend->download(context, flags, lane->flags, bytes));
  fprintf(file, "lane %d epoch %u started %u received %u finished %u poison %u peer %u phase %u step %u mine %u theirs %u\n",
          number, state.epoch, record.started, record.received, record.finished, record.poison, record.peer, record.phase,
          record.step, record.mine, record.theirs);
  for (int source = 0; source < group->ranks; source++) CHECK(put_source(file, group, lane, flags, source));
cleanup:
  free(flags);
  return status;
}

moeflow_status flight_write(const struct moeflow_group *group, const char *path) {
  moeflow_status status = MOEFLOW_OK;
  FILE *file = NULL;
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot write the flight record %s: %s", path, strerror(errno));
  file = fdopen(fd, "w");
  if (!file) {
    close(fd);
    FAIL(MOEFLOW_ERROR_MEMORY, "no memory to write the flight record %s", path);
  }
  fprintf(file, "moeflow-flight %d\nrank %d ranks %d lanes %d capacity %d words %d timeout_ms %d transport %s\n",
          FLIGHT_VERSION, group->rank, group->ranks, group->lane_count, group->capacity, group->flag_words,
          group->timeout_ms, group->comm->ops->name);
  for (int i = 0; i < group->lane_count; i++) CHECK(put_lane(file, group, i));
  fprintf(file, "end\n");
  if (fflush(file) || ferror(file)) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "cannot write the flight record %s: %s", path, strerror(errno));
  }
cleanup:
  if (file) fclose(file);
  return status;
}
