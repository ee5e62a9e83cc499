/* What a sweep knows, what it should measure next, and what it chooses: pure functions of the records. Resuming is knowing
 * more at the start. */
#ifndef MOEFLOW_SWEEP_CHOICE_H
#define MOEFLOW_SWEEP_CHOICE_H

#include "experts_space.h"
#include "sweep_log.h"
#include "sweep_worker.h"

#define SWEEP_ARMS_MAX 2048
#define SWEEP_POINTS_MAX 12 /* lines of a tune file */
#define SWEEP_FINALISTS 3
#define SWEEP_SKEWED_ROUTING (-1.0) /* every token picks the same experts: bench/experts_bench.h's BENCH_SKEW_SAME */
#define SWEEP_SKEW_SLACK 1.15       /* slower than the best by this factor on the skewed routing: not chosen */
#define SWEEP_STREAM_GAP 2.0        /* per cent that packed weights must win, since they cost a copy in another order */
#define SWEEP_SCREEN_LAUNCHES 4
#define SWEEP_PAIRS 30

struct sweep_arm { /* a way to compute the experts */
  char name[SWEEP_NAME_MAX];
  int32_t kernel;             /* KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM, or KERNEL_GATE_UP: the portable form */
  struct experts_shape shape; /* of the first two */
  int refused;                /* has no cubin; never measured */
};

struct sweep_arms {
  struct sweep_arm *arms; /* arms[0]: gate_up and down, which any plan has */
  int count;
  int left_out; /* shapes for which there was no room */
};
#define SWEEP_PORTABLE 0

struct sweep_result { /* of an arm at a point */
  int failed, skipped, screened, skewed, paired;
  struct sweep_record screen, skew, pair;
};

struct sweep_point { /* a bucket: what is to be decided */
  int tokens;        /* a rank */
  int rows;          /* received, of a step of so many tokens a rank */
  int standard;      /* arm: the default plan's */
  int *order;        /* other arms to screen, the most promising first */
  int order_count;
  struct sweep_result *results; /* by arm */
};

/* Takes a record into what is known. Names that are no arm's, and rows that are no point's, are passed over. */
void sweep_learn(struct sweep_arms *arms, struct sweep_point *points, int count, const struct sweep_record *record);

/* The default, or the portable form where the default has failed; -1: both have. */
int sweep_incumbent(const struct sweep_point *point);

enum sweep_phase { SWEEP_OPEN, SWEEP_CLOSING /* nothing new is screened */, SWEEP_OVER };

/* What to measure next: first the default, then the others in order; the best of them and the default on a skewed routing;
 * then the best in turns with the default. 0: nothing is left. */
int sweep_next(const struct sweep_arms *arms, const struct sweep_point *point, enum sweep_phase phase,
               struct sweep_request *request);

/* Requests that are left if none fails: for progress. */
int sweep_left(const struct sweep_arms *arms, const struct sweep_point *point, enum sweep_phase phase);

/* The record of an answered request. */
void sweep_judge(const struct sweep_arms *arms, const struct sweep_point *point, const struct sweep_request *request,
                 const struct sweep_answer *answer, struct sweep_record *record);

enum sweep_reason {
  SWEEP_WINS,      /* an arm beats the default beyond noise */
  SWEEP_KEPT,      /* none of a whole shortlist does */
  SWEEP_UNDECIDED, /* not all was measured that could decide it: no line in the tune file */
  SWEEP_NO_DEFAULT /* the default fails, and so does the portable form */
};

struct sweep_choice {
  enum sweep_reason reason;
  int arm;       /* -1: NO_DEFAULT */
  int runner_up; /* the next best that is right, -1: none */
  double us, default_us;
  double gap, low, high; /* of WINS; KEPT: of the best that was paired, if any (then `compared`) */
  int compared;
  int failed;              /* arms */
  int skipped;             /* arms for which there was no memory at this size */
  int shortlist, screened; /* arms beside the default that have a cubin; those that were checked, wrong ones too */
};
void sweep_choose(const struct sweep_arms *arms, const struct sweep_point *point, struct sweep_choice *choice);
#endif
