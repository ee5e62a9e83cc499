#include <stdio.h>
#include <string.h>

#include "catalog.h"
#include "command.h"
#include "json.h"
#include "status.h"

static void list_json(const struct store *store, const struct catalog *catalog) {
  struct json json;
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "cache"), json_string(&json, store->path);
  json_key(&json, "bytes"), json_int(&json, catalog->bytes);
  json_key(&json, "plans"), json_array(&json);
  for (int i = 0; i < catalog->plan_names.count; i++) {
    const struct catalog_plan *item = &catalog->plans[i];
    json_object(&json);
    json_key(&json, "file"), json_string(&json, item->file);
    json_key(&json, "model"), json_string(&json, item->plan.spec.name);
    json_key(&json, "arch"), json_string(&json, item->plan.arch);
    json_key(&json, "fault"), item->fault[0] ? json_string(&json, item->fault) : json_null(&json);
    json_key(&json, "entries"), json_array(&json);
    for (int v = 0; v < item->plan.variant_count; v++) json_string(&json, item->plan.variants[v].entry);
    json_array_end(&json);
    json_object_end(&json);
  }
  json_array_end(&json);
  json_key(&json, "entries"), json_array(&json);
  for (int i = 0; i < catalog->entry_names.count; i++) {
    const struct catalog_entry *item = &catalog->entries[i];
    json_object(&json);
    json_key(&json, "hash"), json_string(&json, item->hash);
    json_key(&json, "symbol"), json_string(&json, item->header.symbol);
    json_key(&json, "arch"), json_string(&json, item->header.arch);
    json_key(&json, "bytes"), json_int(&json, (int64_t)item->bytes);
    json_key(&json, "cubin_bytes"), json_int(&json, (int64_t)item->header.cubin_bytes);
    json_key(&json, "plans"), json_int(&json, item->plans);
    json_key(&json, "fault"), item->fault[0] ? json_string(&json, item->fault) : json_null(&json);
    json_object_end(&json);
  }
  json_array_end(&json);
  json_object_end(&json);
  json_end(&json);
}

/* What tells a kernel's variants from each other. */
static void print_variant(const struct plan_variant *variant) {
  printf("  %-16s %.16s", kernel_names[variant->kernel], variant->entry);
  if (variant->tile_tokens) {
    printf("  tile tokens %d, rows %d, depth %d, stages %d", variant->tile_tokens, variant->tile_rows, variant->tile_depth,
           variant->stages);
  }
  if (variant->kernel == KERNEL_EXPERTS || variant->kernel == KERNEL_EXPERTS_STREAM)
    printf(", parts %d, residency %d", variant->parts, variant->residency);
  putchar('\n');
}

static void list_table(const struct store *store, const struct catalog *catalog) {
  for (int i = 0; i < catalog->plan_names.count; i++) {
    const struct catalog_plan *item = &catalog->plans[i];
    printf("%s%s%s\n", item->file, item->fault[0] ? ": " : "", item->fault);
    for (int v = 0; v < item->plan.variant_count; v++) print_variant(&item->plan.variants[v]);
  }
  if (catalog->entry_names.count) printf("%-16s  %-24s %-8s %9s %6s\n", "entry", "symbol", "arch", "cubin B", "plans");
  for (int i = 0; i < catalog->entry_names.count; i++) {
    const struct catalog_entry *item = &catalog->entries[i];
    if (item->fault[0]) {
      printf("%-16.16s  %s\n", item->hash, item->fault);
    } else {
      printf("%-16.16s  %-24s %-8s %9llu %6d\n", item->hash, item->header.symbol, item->header.arch,
             (unsigned long long)item->header.cubin_bytes, item->plans);
    }
  }
  printf("%s: %d plan%s, %d entries, %.1f MB%s\n", store->path, catalog->plan_names.count,
         catalog->plan_names.count == 1 ? "" : "s", catalog->entry_names.count, (double)catalog->bytes / 1e6,
         store->fd < 0 ? " (no such directory yet)" : "");
}

int command_list(const struct gen_options *options) {
  moeflow_status status = MOEFLOW_OK;
  struct store store = {.fd = -1};
  struct catalog catalog = {.faults = 0};
  CHECK(store_open(options->cache, &store));
  CHECK(catalog_read(&store, &catalog));
  if (options->format == FORMAT_JSON) {
    list_json(&store, &catalog);
  } else {
    list_table(&store, &catalog);
  }
cleanup:
  catalog_free(&catalog);
  store_close(&store);
  return command_status(options, status);
}

/* What mends a plan that lacks entries. A plan does not know its YAML's path, but all that a line must say of its spec. */
static int rebuild_line(const struct catalog_plan *item, const char *cache, char line[MODEL_BUILD_LINE_MAX]) {
  const struct spec *spec = &item->plan.spec;
  const struct model_overrides overrides = {.dtype = spec_dtype_name(spec->dtype),
                                            .experts = spec->experts,
                                            .reduce = spec->reduce == SPEC_REDUCE_CHOICES ? "choices" : "owner"};
  char path[96];
  if (!item->missing) return 0;
  snprintf(path, sizeof path, "models/%s.yaml", spec->name);
  model_build_line(path, &overrides, item->plan.arch, cache, line);
  if (plan_variant(&item->plan, KERNEL_EXPERTS_STREAM, 0))
    strncat(line, " --packed", MODEL_BUILD_LINE_MAX - strlen(line) - 1);
  return 1;
}

static void verify_json(const struct store *store, const struct catalog *catalog, const char *cache) {
  char line[MODEL_BUILD_LINE_MAX];
  struct json json;
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "cache"), json_string(&json, store->path);
  json_key(&json, "plans"), json_int(&json, catalog->plan_names.count);
  json_key(&json, "entries"), json_int(&json, catalog->entry_names.count);
  json_key(&json, "damaged"), json_array(&json);
  for (int i = 0; i < catalog->entry_names.count; i++) {
    if (catalog->entries[i].fault[0]) json_string(&json, catalog->entries[i].fault);
  }
  for (int i = 0; i < catalog->plan_names.count; i++) {
    if (catalog->plans[i].fault[0]) json_string(&json, catalog->plans[i].fault);
  }
  json_array_end(&json);
  json_key(&json, "rebuild"), json_array(&json);
  for (int i = 0; i < catalog->plan_names.count; i++) {
    if (rebuild_line(&catalog->plans[i], cache, line)) json_string(&json, line);
  }
  json_array_end(&json);
  json_key(&json, "passed"), json_bool(&json, catalog->faults == 0);
  json_object_end(&json);
  json_end(&json);
}

static void verify_table(const struct store *store, const struct catalog *catalog, const char *cache) {
  char line[MODEL_BUILD_LINE_MAX];
  for (int i = 0; i < catalog->entry_names.count; i++) {
    if (catalog->entries[i].fault[0]) printf("damaged: %s\n", catalog->entries[i].fault);
  }
  for (int i = 0; i < catalog->plan_names.count; i++) {
    if (catalog->plans[i].fault[0]) printf("damaged: %s\n", catalog->plans[i].fault);
    if (rebuild_line(&catalog->plans[i], cache, line)) printf("to rebuild: %s\n", line);
  }
  printf("%s: %d plan%s and %d entries read, %d damaged\n", store->path, catalog->plan_names.count,
         catalog->plan_names.count == 1 ? "" : "s", catalog->entry_names.count, catalog->faults);
}

int command_verify(const struct gen_options *options) {
  moeflow_status status = MOEFLOW_OK;
  struct store store = {.fd = -1};
  struct catalog catalog = {.faults = 0};
  CHECK(store_open(options->cache, &store));
  if (store.fd < 0) FAIL(MOEFLOW_ERROR_CACHE, "%s does not exist; run moeflow-gen build to fill it", store.path);
  CHECK(catalog_read(&store, &catalog));
  if (options->format == FORMAT_JSON) {
    verify_json(&store, &catalog, options->cache);
  } else {
    verify_table(&store, &catalog, options->cache);
  }
  if (catalog.faults) {
    FAIL(MOEFLOW_ERROR_CACHE, "%d of %d files are damaged; run moeflow-gen build again for the models concerned",
         catalog.faults, catalog.plan_names.count + catalog.entry_names.count);
  }
cleanup:
  catalog_free(&catalog);
  store_close(&store);
  return command_status(options, status);
}
