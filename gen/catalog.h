/* What a cache directory holds, every file read and verified: for `list` and `verify`. */
#ifndef MOEFLOW_CATALOG_H
#define MOEFLOW_CATALOG_H

#include "store.h"

struct catalog_entry {
  const char *file; /* below the cache */
  const char *hash; /* its name */
  struct entry_header header;
  size_t bytes;
  int plans;       /* how many plans use it */
  char fault[512]; /* "" when it is sound */
};

struct catalog_plan {
  const char *file;
  struct plan plan;
  size_t bytes;
  int missing; /* variants whose entry is absent or damaged */
  char fault[512];
};

struct catalog {
  struct store_names entry_names, plan_names;
  struct catalog_entry *entries; /* entry_names.count of them, ascending by hash */
  struct catalog_plan *plans;
  int64_t bytes;
  int faults;
};

moeflow_status catalog_read(const struct store *store, struct catalog *catalog); /* catalog_free, also after an error */
void catalog_free(struct catalog *catalog);
#endif
