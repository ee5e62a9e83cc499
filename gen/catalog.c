#include "catalog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

static void read_entry(const struct store *store, const char *file, struct catalog_entry *item) {
  struct entry entry;
  item->file = file;
  item->hash = strrchr(file, '/') + 1;
  if (entry_read(store->fd, store->path, item->hash, &entry, NULL) != MOEFLOW_OK) {
    snprintf(item->fault, sizeof item->fault, "%s", moeflow_last_error());
  } else if (strncmp(file + sizeof "entries/" - 1, item->hash, 2) != 0) {
    snprintf(item->fault, sizeof item->fault, "%.300s is in the wrong folder", file);
  } else {
    item->header = entry.header;
    item->bytes = entry.size;
  }
  entry_free(&entry);
}

static void read_plan(const struct store *store, const char *file, struct catalog_plan *item) {
  uint8_t *text;
  char expected[160];
  item->file = file;
  if (cache_read(store->fd, store->path, file, PLAN_TEXT_MAX, &text, &item->bytes, NULL) != MOEFLOW_OK ||
      plan_parse((const char *)text, item->bytes, file, &item->plan) != MOEFLOW_OK) {
    snprintf(item->fault, sizeof item->fault, "%s", moeflow_last_error());
    item->plan.variant_count = 0;
  } else {
    plan_file_name(&item->plan, expected);
    if (strcmp(expected, strrchr(file, '/') + 1) != 0) {
      snprintf(item->fault, sizeof item->fault, "%s holds the plan %s", file, expected);
    }
  }
  free(text);
}

static int by_hash(const void *hash, const void *item) {
  return strcmp(hash, ((const struct catalog_entry *)item)->hash);
}

/* Counts who uses an entry and what a plan lacks. */
static void join(struct catalog *catalog, struct catalog_plan *item) {
  char seen[65] = "";
  for (int v = 0; v < item->plan.variant_count; v++) {
    const char *hash = item->plan.variants[v].entry;
    struct catalog_entry *entry =
        catalog->entry_names.count
            ? bsearch(hash, catalog->entries, (size_t)catalog->entry_names.count, sizeof *catalog->entries, by_hash)
            : NULL;
    if (entry && !entry->fault[0]) {
      entry->plans++;
      continue;
    }
    item->missing++;
    if (!seen[0]) memcpy(seen, hash, sizeof seen);
  }
  if (item->missing && !item->fault[0]) {
    snprintf(item->fault, sizeof item->fault, "%s lacks %d of %d entries, first %s", item->file, item->missing,
             item->plan.variant_count, seen);
  }
}

moeflow_status catalog_read(const struct store *store, struct catalog *catalog) {
  moeflow_status status = MOEFLOW_OK;
  memset(catalog, 0, sizeof *catalog);
  CHECK(store_list(store, "entries", &catalog->entry_names));
  CHECK(store_list(store, "plans", &catalog->plan_names));
  catalog->entries = calloc((size_t)catalog->entry_names.count + 1, sizeof *catalog->entries);
  catalog->plans = calloc((size_t)catalog->plan_names.count + 1, sizeof *catalog->plans);
  if (!catalog->entries || !catalog->plans) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to list the cache");
  for (int i = 0; i < catalog->entry_names.count; i++) {
    read_entry(store, catalog->entry_names.names[i], &catalog->entries[i]);
    catalog->bytes += (int64_t)catalog->entries[i].bytes;
    catalog->faults += catalog->entries[i].fault[0] != 0;
  }
  for (int i = 0; i < catalog->plan_names.count; i++) {
    read_plan(store, catalog->plan_names.names[i], &catalog->plans[i]);
    join(catalog, &catalog->plans[i]);
    catalog->bytes += (int64_t)catalog->plans[i].bytes;
    catalog->faults += catalog->plans[i].fault[0] != 0;
  }
cleanup:
  return status;
}

void catalog_free(struct catalog *catalog) {
  store_names_free(&catalog->entry_names);
  store_names_free(&catalog->plan_names);
  free(catalog->entries);
  free(catalog->plans);
  memset(catalog, 0, sizeof *catalog);
}
