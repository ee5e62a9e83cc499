#include "template.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embed.h"
#include "sha256.h"
#include "status.h"

static int by_name(const void *a, const void *b) {
  return strcmp(((const struct template_file *)a)->name, ((const struct template_file *)b)->name);
}

static int find(const struct templates *templates, const char *name) {
  for (int i = 0; i < templates->count; i++) {
    if (strcmp(templates->files[i].name, name) == 0) return i;
  }
  return -1;
}

static moeflow_status put(struct templates *templates, const char *name, const char *text, size_t size, char *owned) {
  int i = find(templates, name);
  if (i < 0) i = templates->count;
  if (i == TEMPLATES_MAX || strlen(name) >= TEMPLATE_NAME_MAX) {
    free(owned);
    return status_set(MOEFLOW_ERROR_INTERNAL, "template %s: more than %d templates, or a name of %d bytes or more", name,
                      TEMPLATES_MAX, TEMPLATE_NAME_MAX);
  }
  struct template_file *file = &templates->files[i];
  free(file->owned);
  *file = (struct template_file){.text = text, .size = size, .owned = owned};
  strcpy(file->name, name);
  uint8_t digest[32];
  sha256(text, size, digest);
  sha256_hex(digest, file->hash);
  if (i == templates->count) templates->count++;
  return MOEFLOW_OK;
}

static moeflow_status read_file(const char *path, char **text, size_t *size) {
  moeflow_status status = MOEFLOW_OK;
  FILE *file = fopen(path, "rbe");
  *text = NULL;
  if (!file) return status_set(MOEFLOW_ERROR_FORMAT, "cannot open template %s: %s", path, strerror(errno));
  *text = malloc(TEMPLATE_BYTES_MAX + 1);
  if (!*text) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for template %s", path);
  *size = fread(*text, 1, TEMPLATE_BYTES_MAX + 1, file);
  if (ferror(file)) FAIL(MOEFLOW_ERROR_FORMAT, "cannot read template %s: %s", path, strerror(errno));
  if (*size > TEMPLATE_BYTES_MAX)
    FAIL(MOEFLOW_ERROR_FORMAT, "template %s is larger than %d bytes", path, TEMPLATE_BYTES_MAX);
  (*text)[*size] = 0;
cleanup:
  if (status != MOEFLOW_OK) {
    free(*text);
    *text = NULL;
  }
  fclose(file);
  return status;
}

static int is_template(const char *name) {
  const char *end = strrchr(name, '.');
  return end && name[0] != '.' && (strcmp(end, ".cuh") == 0 || strcmp(end, ".h") == 0);
}

static moeflow_status load_folder(struct templates *templates, const char *folder) {
  moeflow_status status = MOEFLOW_OK;
  DIR *directory = opendir(folder);
  int found = 0;
  if (!directory) return status_set(MOEFLOW_ERROR_FORMAT, "cannot open --templates %s: %s", folder, strerror(errno));
  for (struct dirent *item; (item = readdir(directory));) {
    char path[4096], *text;
    size_t size = 0;
    if (!is_template(item->d_name)) continue;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, item->d_name) >= sizeof path) {
      FAIL(MOEFLOW_ERROR_FORMAT, "--templates: the path %s is too long", folder);
    }
    CHECK(read_file(path, &text, &size));
    CHECK(put(templates, item->d_name, text, size, text));
    found++;
  }
  if (!found) FAIL(MOEFLOW_ERROR_FORMAT, "--templates %s holds no .cuh or .h file", folder);
cleanup:
  closedir(directory);
  return status;
}

moeflow_status templates_load(const char *folder, struct templates *templates) {
  moeflow_status status = MOEFLOW_OK;
  memset(templates, 0, sizeof *templates);
  for (const struct embedded_file *file = embedded_files; file->name; file++) {
    CHECK(put(templates, file->name, (const char *)file->bytes, file->size, NULL));
  }
  if (folder) CHECK(load_folder(templates, folder));
  qsort(templates->files, (size_t)templates->count, sizeof templates->files[0], by_name);
  return MOEFLOW_OK;
cleanup:
  templates_free(templates);
  return status;
}

void templates_free(struct templates *templates) {
  for (int i = 0; i < templates->count; i++) free(templates->files[i].owned);
  memset(templates, 0, sizeof *templates);
}

enum include { INCLUDE_NONE, INCLUDE_TEMPLATE, INCLUDE_SYSTEM, INCLUDE_UNKNOWN };

/* What a line includes. <name> is left to the compiler, which has no folder to look in; a path or a macro there could read a
 * file that the key knows nothing of. */
static enum include include_name(const char *line, char name[TEMPLATE_NAME_MAX]) {
  line += strspn(line, " \t");
  if (*line++ != '#') return INCLUDE_NONE;
  line += strspn(line, " \t");
  if (strncmp(line, "include", 7) != 0) return INCLUDE_NONE;
  line += 7;
  line += strspn(line, " \t");
  if (*line != '"') return *line == '<' && line[1 + strspn(line + 1, " \t")] != '/' ? INCLUDE_SYSTEM : INCLUDE_UNKNOWN;
  size_t length = strcspn(++line, "\"\n");
  if (line[length] != '"' || length >= TEMPLATE_NAME_MAX) return INCLUDE_UNKNOWN;
  memcpy(name, line, length);
  name[length] = 0;
  return INCLUDE_TEMPLATE;
}

static moeflow_status scan(const struct templates *templates, const char *text, const char *where, char *seen) {
  char name[TEMPLATE_NAME_MAX];
  for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
    enum include include = include_name(line, name);
    if (include == INCLUDE_UNKNOWN) {
      return status_set(MOEFLOW_ERROR_FORMAT, "%s: '%.*s': a template includes templates by name, nothing else", where,
                        (int)strcspn(line, "\n"), line);
    }
    if (include != INCLUDE_TEMPLATE) continue;
    int i = find(templates, name);
    if (i < 0) return status_set(MOEFLOW_ERROR_FORMAT, "%s includes \"%s\", which is no template", where, name);
    if (seen[i]) continue;
    seen[i] = 1;
    moeflow_status status =
        scan(templates, templates->files[i].text, name, seen); /* depth: at most one level per template */
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

moeflow_status templates_included(const struct templates *templates, const char *text, const char *where,
                                  int included[TEMPLATES_MAX], int *count) {
  char seen[TEMPLATES_MAX] = {0};
  *count = 0;
  moeflow_status status = scan(templates, text, where, seen);
  if (status != MOEFLOW_OK) return status;
  for (int i = 0; i < templates->count; i++) {
    if (seen[i]) included[(*count)++] = i;
  }
  return MOEFLOW_OK;
}
