/* The cache as its one writer sees it: keys, entries that are made once however many processes ask, plans that come last.
 * runtime/cache.h and runtime/entry.h have the trust rules and the file format. */
#ifndef MOEFLOW_STORE_H
#define MOEFLOW_STORE_H

#include "compile.h"
#include "emit.h"
#include "entry.h"
#include "plan.h"

#define KEY_VERSION 1
#define KEY_TEXT_MAX 8192

struct key { /* all that decides a cubin's bytes, as lines that a person can read and compare */
  char text[KEY_TEXT_MAX];
  size_t size;
  char hash[65]; /* the entry's name */
};

struct key_parts {
  const char *kernel;
  const char *arch;
  const struct compile_options *options;
  const char *toolchain; /* struct toolchain's identity */
  const char *unit;      /* emitted text */
  const struct templates *templates;
  const int *included; /* templates_included(unit) */
  int included_count;
};
moeflow_status key_build(const struct key_parts *parts, struct key *key);

struct store {
  char path[CACHE_PATH_MAX];
  int fd; /* -1: there is no directory (yet) */
};

/* Opens the directory if it is there; `store_create` makes it (mode 0700) when the first write is due. */
moeflow_status store_open(const char *explicit_path, struct store *store);
moeflow_status store_create(struct store *store);
void store_close(struct store *store);

enum store_state { STORE_MISSING, STORE_HIT, STORE_DAMAGED };

/* Looks an entry up and compares the stored key text. HIT fills *entry (entry_free); DAMAGED leaves the reason in
 * moeflow_last_error(). An untrusted directory or file counts as DAMAGED: it is never used. */
enum store_state store_find(const struct store *store, const struct key *key, struct entry *entry);

/* Makes what the entry holds: facts (arch, symbol, numbers) and a malloc'ed cubin. */
typedef moeflow_status (*store_make)(void *user, struct entry_header *facts, uint8_t **cubin, size_t *cubin_bytes);

struct store_outcome {
  struct entry_header header;
  int made;    /* by this call; 0: it was there, or another process made it meanwhile */
  int damaged; /* a damaged file was moved to tmp/ first; `warning` says which and why */
  char warning[512];
};

/* The entry of `key`, made with `make` if need be: one maker per key at a time (flock, waited for at most `wait_s` seconds,
 * then without), private temporary file, fsync, rename. MOEFLOW_ERROR_CACHE when it cannot be written. */
moeflow_status store_obtain(struct store *store, const struct key *key, store_make make, void *user, int wait_s,
                            struct store_outcome *outcome);

/* Writes the plan unless the same bytes are there. */
moeflow_status store_put_plan(struct store *store, const struct plan *plan);

/* Removes what interrupted writers left in tmp/ more than an hour ago. Best effort. */
void store_sweep(const struct store *store);

/* Names below entries/ or plans/, ascending. store_names_free. */
struct store_names {
  char **names; /* "entries/3f/3f..", "plans/glm-5.3-flash.bf16.sm_90a.0123456789abcdef.plan" */
  int count;
};
moeflow_status store_list(const struct store *store, const char *folder, struct store_names *names);
void store_names_free(struct store_names *names);
#endif
