#include "pairing.h"

#include "random.h"

static void shuffle(const struct pairing *pairing, int round, int order[PAIRING_ARMS_MAX]) {
  const uint32_t key =
      moeflow_random_mix(moeflow_random_mix((uint32_t)pairing->seed ^ (uint32_t)(pairing->seed >> 32)) + (uint32_t)round);
  for (int i = 0; i < pairing->arms; i++) order[i] = i;
  for (int i = pairing->arms - 1; i > 0; i--) {
    const int other = (int)(moeflow_random_bits(key, (uint32_t)i) % (uint32_t)(i + 1)), arm = order[i];
    order[i] = order[other];
    order[other] = arm;
  }
}

void pairing_order(const struct pairing *pairing, int round, int order[PAIRING_ARMS_MAX]) {
  const int last = pairing->arms - 1;
  shuffle(pairing, round / 2, order);
  if (round % 2 == 0) return;
  for (int i = 0; i < last - i; i++) {
    const int arm = order[i];
    order[i] = order[last - i];
    order[last - i] = arm;
  }
}
