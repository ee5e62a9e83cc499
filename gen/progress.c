#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BAR_WIDTH 24

double progress_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void progress_begin(struct progress *progress, int total) {
  const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
  int dumb = !term || strcmp(term, "dumb") == 0;
  *progress = (struct progress){.total = total, .start = progress_seconds()};
  progress->terminal = isatty(STDERR_FILENO) && !dumb;
  progress->colour = progress->terminal && !(no_color && *no_color);
}

void progress_step(struct progress *progress, const char *what) {
  char bar[BAR_WIDTH + 1];
  progress->done++;
  double elapsed = progress_seconds() - progress->start;
  if (!progress->terminal) {
    fprintf(stderr, "[%*d/%d] %s\n", progress->total > 99 ? 3 : 2, progress->done, progress->total, what);
    return;
  }
  int filled = progress->total ? BAR_WIDTH * progress->done / progress->total : BAR_WIDTH;
  memset(bar, '-', BAR_WIDTH);
  memset(bar, '#', (size_t)filled);
  bar[BAR_WIDTH] = 0;
  double left = elapsed / progress->done * (progress->total - progress->done);
  fprintf(stderr, "\r\033[K%s[%s]%s %d/%d  eta %.0f s  %.60s", progress->colour ? "\033[32m" : "", bar,
          progress->colour ? "\033[0m" : "", progress->done, progress->total, left, what);
  fflush(stderr);
}

void progress_end(struct progress *progress) {
  if (progress->terminal && progress->done) fprintf(stderr, "\r\033[K");
  progress->terminal = 0;
}
