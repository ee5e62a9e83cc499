/* In which order arms take their turns, so that a drift of the machine falls on all alike. */
#ifndef MOEFLOW_BENCH_PAIRING_H
#define MOEFLOW_BENCH_PAIRING_H

#include <stdint.h>

#define PAIRING_ARMS_MAX 80

struct pairing {
  uint64_t seed;
  int arms;
};

/* The arms of one round, each once. Even rounds shuffle by seed and round, the round after goes backwards: A B, B A. */
void pairing_order(const struct pairing *pairing, int round, int order[PAIRING_ARMS_MAX]);
#endif
