/* The kernel templates as the generator sees them: embedded in the binary, each replaceable by a file of --templates DIR. */
#ifndef MOEFLOW_TEMPLATE_H
#define MOEFLOW_TEMPLATE_H

#include <stddef.h>

#include "moeflow.h"

#define TEMPLATES_MAX 64
#define TEMPLATE_NAME_MAX 64
#define TEMPLATE_BYTES_MAX (1 << 20)

struct template_file {
  char name[TEMPLATE_NAME_MAX]; /* "gate_up.cuh" */
  const char *text;             /* NUL-terminated */
  size_t size;
  char *owned; /* text read from a folder; NULL for embedded ones */
  char hash[65];
};

struct templates {
  struct template_file files[TEMPLATES_MAX]; /* ascending by name */
  int count;
};

/* Embedded templates, with those of `folder` (may be NULL) in place of, or beside, them. */
moeflow_status templates_load(const char *folder, struct templates *templates);
void templates_free(struct templates *templates);

/* Every template that `text` includes, directly or through others, as indices in ascending order (so by name). Includes are
 * taken as written, conditional ones too; `where` names the text in messages. */
moeflow_status templates_included(const struct templates *templates, const char *text, const char *where,
                                  int included[TEMPLATES_MAX], int *count);
#endif
