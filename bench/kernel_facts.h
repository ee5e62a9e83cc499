/* What a variant takes of a multiprocessor, as the driver says after loading its cubin. */
#ifndef MOEFLOW_BENCH_KERNEL_FACTS_H
#define MOEFLOW_BENCH_KERNEL_FACTS_H

#include "plan.h"

struct kernel_facts {
  char kernel[32], entry[65];
  int tile_tokens, tile_rows, tile_depth, stages, parts, threads, order_tag;
  int registers;         /* of a thread */
  int shared_bytes;      /* of a block: static + dynamic */
  int blocks_per_multiprocessor; /* that fit; 0: this driver does not tell */
};

/* cache: as moeflow_open takes it, or NULL. With the device's context current. */
moeflow_status kernel_facts_read(const char *cache, const struct plan_variant *variant, struct kernel_facts *facts);
#endif
