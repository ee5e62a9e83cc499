/* Progress on stderr: one line with a bar and an ETA on a terminal, a plain line per step otherwise. */
#ifndef MOEFLOW_PROGRESS_H
#define MOEFLOW_PROGRESS_H

struct progress {
  int total;
  int done;
  int terminal; /* redraws one line */
  int colour;   /* terminal, NO_COLOR unset, TERM not dumb */
  double start;
};

void progress_begin(struct progress *progress, int total);
void progress_step(struct progress *progress, const char *what);
void progress_end(struct progress *progress); /* clears the bar; call it before other lines go to stderr */

double progress_seconds(void); /* monotonic */
#endif
