#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "command.h"
#include "json.h"
#include "status.h"
#include "tune_find.h"
#include "unit.h"

static moeflow_status write_file(const char *folder, const char *name, const char *text, size_t size) {
  char path[4096];
  if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path) {
    return status_set(MOEFLOW_ERROR_CACHE, "the path of %s in the output folder is too long", name);
  }
  FILE *file = fopen(path, "wbe");
  if (!file) return status_set(MOEFLOW_ERROR_CACHE, "cannot create %s: %s", path, strerror(errno));
  int failed = fwrite(text, 1, size, file) != size;
  if (fclose(file) != 0 || failed) return status_set(MOEFLOW_ERROR_CACHE, "cannot write %s: %s", path, strerror(errno));
  return MOEFLOW_OK;
}

/* Units of several targets share the folder: a unit's name tells all that its text depends on beside the model. */
static moeflow_status write_all(const struct units *units, const char *folder) {
  moeflow_status status = MOEFLOW_OK;
  char used[TEMPLATES_MAX];
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
    return status_set(MOEFLOW_ERROR_CACHE, "cannot create %s: %s", folder, strerror(errno));
  }
  for (int i = 0; i < units->count; i++) {
    CHECK(write_file(folder, units->units[i].name, units->units[i].text, strlen(units->units[i].text)));
  }
  units_templates(units, used);
  for (int t = 0; t < units->templates.count; t++) {
    const struct template_file *file = &units->templates.files[t];
    if (used[t]) CHECK(write_file(folder, file->name, file->text, file->size));
  }
  fprintf(stderr, "%d units and their templates in %s; to compile one by hand:\n", units->count, folder);
  fprintf(stderr, "  nvcc -cubin -arch=%s -std=c++17 --expt-relaxed-constexpr -I%s %s/%s\n", units->units[0].arch->name,
          folder, folder, units->units[0].name);
cleanup:
  return status;
}

/* One line of digest for scripts to compare, or the JSON document. */
static void print_result(const struct gen_options *options, const struct units *units) {
  struct json json;
  char hex[65];
  if (options->digest) units_digest(units, hex);
  if (options->format != FORMAT_JSON) {
    if (options->digest) puts(hex);
    return;
  }
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "output"), json_string(&json, options->output);
  json_key(&json, "digest"), json_string(&json, options->digest ? hex : NULL);
  json_key(&json, "units"), json_array(&json);
  for (int i = 0; i < units->count; i++) json_string(&json, units->units[i].name);
  json_array_end(&json);
  json_object_end(&json);
  json_end(&json);
}

int command_emit(const struct gen_options *options) {
  moeflow_status status = MOEFLOW_OK;
  struct units units = {.count = 0};
  struct tune_search tuned = {.tune = NULL};
  struct model model;
  if (!options->output && !options->digest) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "emit needs -o DIR for the sources, or --digest for their SHA-256 alone");
  }
  CHECK(model_load(options->model, &options->overrides, &model));
  CHECK(model_buildable(&model));
  if (options->tuned) CHECK(tune_find(options, &model, &tuned)); /* none is looked for: the digest is the same everywhere */
  const struct plan_options plan = {.tune = tuned.tune, .packed = options->packed != 0};
  CHECK(units_make(&model, &plan, options->templates, 0, &units));
  if (options->output) CHECK(write_all(&units, options->output));
  print_result(options, &units);
cleanup:
  units_free(&units);
  tune_search_free(&tuned);
  return command_status(options, status);
}
