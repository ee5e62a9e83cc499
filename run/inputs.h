/* Made-up weights, hidden states and logits, all drawn by counter (templates/random.h): any process can compute any element
 * anew. Weights depend on the seed and the global expert number alone, whatever the ranks. */
#ifndef MOEFLOW_RUN_INPUTS_H
#define MOEFLOW_RUN_INPUTS_H

#include <stdint.h>

#include "options.h"
#include "reference.h"
#include "spec.h"

struct inputs {
  const struct spec *spec;
  uint64_t seed;
  float *popularity; /* [E], added to every token's logits */
  float *bias;       /* [E] correction bias, NULL for models without */
};

moeflow_status inputs_create(const struct spec *spec, uint64_t seed, const struct options_routing *routing,
                             struct inputs *inputs);
void inputs_destroy(struct inputs *inputs);

/* One expert's matrix, packed: down = 0 [2I, H] with gate rows first, down = 1 [H, I]. The fill kernel gives the same
 * bits. */
void inputs_weights(const struct spec *spec, uint64_t seed, int expert, int down, uint16_t *matrix);

/* Token `token` of `rank` at a point (the index in --tokens; points share no tokens): H bf16 values of both signs around
 * 1, and E logits: popularity plus Gumbel noise, so that picks are drawn in proportion to exp(popularity) without
 * replacement. */
void inputs_hidden(const struct inputs *inputs, int point, int rank, int token, uint16_t *hidden);
void inputs_logits(const struct inputs *inputs, int point, int rank, int token, float *logits);

/* The model's router, for reference_route. */
struct reference_router inputs_router(const struct inputs *inputs);
#endif
