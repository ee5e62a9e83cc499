/* The ranks of one run, with rank 0 in the middle: a stream socket to each peer carries the group's unique id, results and
 * failures. No data of the layer travels here.
 *
 * Every operation is collective, in the same order on all ranks, and bounded by `timeout_ms`. When a rank is gone (its
 * socket ends) or silent, the operation fails on every rank that waits, and the message names that rank. */
#ifndef MOEFLOW_RUN_STAR_H
#define MOEFLOW_RUN_STAR_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

#define STAR_PROTOCOL 1
#define STAR_MESSAGE_MAX 1024

struct star {
  int rank, size;
  int timeout_ms;
  int *sockets; /* rank 0: one per rank, its own -1; others: sockets[0] leads to rank 0 */
  uint32_t operations;
  int broken;   /* an operation failed: every later one fails at once */
};

/* Connected stars for threads or forked processes: stars[0 .. size - 1], over socket pairs. */
moeflow_status star_pairs(int size, int timeout_ms, struct star *stars);

/* In a forked child: closes what belongs to the other ranks, so that a rank's death ends its sockets. */
void star_keep(struct star *stars, int size, int rank);

/* Over TCP: rank 0 listens on the port, the others connect to host:port (retrying while nobody listens) and say hello with
 * their rank, size and protocol. */
moeflow_status star_connect(int rank, int size, const char *host, int port, int timeout_ms, struct star *star);

/* all[r * bytes ..] = rank r's bytes; `all` is written on rank 0 only and may be NULL elsewhere. */
moeflow_status star_gather(struct star *star, const void *mine, size_t bytes, void *all);

/* Rank 0's bytes to everybody. */
moeflow_status star_broadcast(struct star *star, void *data, size_t bytes);

/* A barrier that carries failures: each rank brings its status (with moeflow_last_error() as the message), and all return
 * the same failure, its message after "rank N: ": that of the lowest rank that did more than lose a peer, else of the lowest
 * failing rank. *culprit (may be NULL) is that rank, -1 for none. */
moeflow_status star_agree(struct star *star, moeflow_status mine, int *culprit);

void star_close(struct star *star);
#endif
