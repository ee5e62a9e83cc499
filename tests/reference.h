/* The reference of the routed layer, which tests and `moeflow-run --check` compare everything with: one token, one expert at
 * a time, sums in double, rounded exactly where the layer promises: gate, up and down are not rounded, the activation is
 * rounded to bf16, an owner's sum (or, with choices, each unweighted value) to the return dtype, the token's sum to bf16.
 *
 * It shares no code with the library: own bf16, own routing, no row layout; where an expert lives is the caller's function.
 */
#ifndef MOEFLOW_REFERENCE_H
#define MOEFLOW_REFERENCE_H

#include <stdint.h>

struct reference_layer {
  int hidden, intermediate, experts, top_k;
  int clamp; /* 1: gate at most `limit`, up within [-limit, limit], before the product */
  double limit;
  int ranks;
  int choices;         /* 1: values return unweighted and are summed in choice order; 0: one sum per owner */
  int return_fp32;     /* dtype of what returns: 1 FP32, 0 bf16 */
  int ring;            /* 1: owners are added from source + 1 around to source, each sum rounded to bf16 */
  int identity;        /* 1: an expert returns its input */
  double output_scale; /* on the token's sum, 1 when the scale is in the weights */
  /* Rank that computes `expert` for row `token` of the arrays below. NULL: reference_linear_owner. */
  int (*owner)(void *user, int expert, int token);
  void *owner_user;
  /* Writes one expert's matrix: down = 0 [2I, H], gate rows first; down = 1 [H, I]. Called from several threads. */
  void (*weights)(void *user, int expert, int down, uint16_t *matrix);
  void *weights_user;
};

/* Experts in contiguous runs: rank r owns e when r * experts / ranks <= e < (r + 1) * experts / ranks. */
int reference_linear_owner(int experts, int ranks, int expert);

/* `tokens` rows of any ranks: hidden [tokens, H] bf16, ids and weights [tokens, K], sources [tokens] (the token's rank;
 * NULL: 0). out [tokens, H] bf16; values, if not NULL, [tokens, K, H]: each choice's unweighted output, zero where skipped.
 * Returns 0, or -1 when memory ran out. */
int reference_run(const struct reference_layer *layer, int tokens, const uint16_t *hidden, const int32_t *ids,
                  const float *weights, const int32_t *sources, uint16_t *out, float *values, int threads);

/* Moves `want` [H] of one token, as reference_run made it, to the value nearest to `got` that its formula still allows when
 * every gate, up and down sum is off by REFERENCE_SUM_ERROR of its row's root mean square. An activation on the edge between
 * two bf16 values may then be either, and in a narrow layer one activation is enough to pass REFERENCE_L2_MAX. Got stays
 * apart from want wherever these roundings do not explain it. Returns 0, or -1 when memory ran out. */
#define REFERENCE_SUM_ERROR 0x1p-19 /* FP32 sums of some thousand products */
int reference_allow(const struct reference_layer *layer, const uint16_t *hidden, const int32_t *ids, const float *weights,
                    int32_t source, const uint16_t *got, uint16_t *want);

struct reference_router {
  int experts, top_k;
  int softmax;       /* else sigmoid */
  const float *bias; /* [experts], added for the selection only; NULL: none */
  int groups, top_groups;
  int group_top2;  /* a group's score: the sum of its two largest, else its largest */
  int renormalize; /* 0 no, 1 sum + 1e-20, 2 sum + 1e-6, 3 max(sum, 1e-12) */
  float scale;
};

/* One token's picks, best first: ids [K] (-1 when too few are selectable) and weights [K]. Arithmetic is FP32, as the
 * kernels', so that picks agree. Two exponentials that differ in the last bit can still swap two picks: the return value is
 * the smallest gap, in units of the last place, between two candidates whose order mattered and whose inputs differ (a true
 * tie is not counted: the lower id wins everywhere). Below REFERENCE_TOO_CLOSE a different pick is no error. */
#define REFERENCE_TOO_CLOSE 16.0
double reference_route(const struct reference_router *router, const float *logits, int32_t *ids, float *weights);

struct reference_difference {
  double l2; /* largest over rows of |got - want|_2 / |want|_2 */
  int l2_row;
  double element;  /* largest |got - want| over the row's largest |want| */
  int row, column; /* where */
  double got, want;
};

/* got, want: [rows, columns] bf16. NaN equals NaN and nothing else; a row of zeros must be met exactly. Differences of
 * that kind count as infinite. */
void reference_compare(const uint16_t *got, const uint16_t *want, int rows, int columns,
                       struct reference_difference *difference);

/* The bars for bf16 results whose sums ran in another order. */
#define REFERENCE_L2_MAX 2e-3
#define REFERENCE_ELEMENT_MAX 0x1p-7
int reference_close(const struct reference_difference *difference);

double reference_from_bf16(uint16_t bits);
uint16_t reference_to_bf16(double value); /* to nearest, ties to even; NaN to 0x7fc0 */
#endif
