/* Where the ranks of a local group meet: threads of one process that share a unique id. */
#ifndef MOEFLOW_HUB_H
#define MOEFLOW_HUB_H

#include "moeflow.h"

struct hub;

/* Joins as `rank`, waiting until all ranks have. MOEFLOW_ERROR_TIMEOUT names who is missing. id NULL: one rank, alone. */
moeflow_status hub_join(const moeflow_unique_id *id, int rank, int ranks, int timeout_ms, struct hub **hub);

/* all[r] = rank r's bytes. After a failure, the hub is of no use to anybody: every later call on it fails. */
moeflow_status hub_gather(struct hub *hub, int rank, const void *mine, size_t bytes, void *all, int timeout_ms);

/* Memory that the other ranks may still write when its owner has left. The last rank to leave calls `release`. */
struct hub_memory {
  void *memory;
  size_t bytes;
  moeflow_allocator allocator; /* release may be NULL: the backend's */
};
typedef void (*hub_release_fn)(void *user, const struct hub_memory *memory);
void hub_keep(struct hub *hub, const struct hub_memory *memory);
void hub_leave(struct hub *hub, hub_release_fn release, void *user);
#endif
