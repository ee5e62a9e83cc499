/* A small, strict subset of YAML as a tree with positions: one document of maps, lists and scalars, nothing that can
 * surprise. */
#ifndef MOEFLOW_DOCUMENT_H
#define MOEFLOW_DOCUMENT_H

#include <stddef.h>

#include "moeflow.h"

#define DOCUMENT_BYTES_MAX 65536
#define DOCUMENT_DEPTH_MAX 8
#define DOCUMENT_EVENTS_MAX 4096

enum document_kind { DOCUMENT_SCALAR, DOCUMENT_MAP, DOCUMENT_LIST };

struct document_node {
  enum document_kind kind;
  int line, column; /* of the value, from 1 */
  const char *text; /* scalars; no NUL inside */
  int quoted;       /* scalars: 'a', "a", or a block */
  const char *key;  /* members of a map, else NULL */
  int key_line, key_column;
  int first, next; /* first child and next sibling; -1 = none */
};

struct document {
  struct document_node nodes[DOCUMENT_EVENTS_MAX]; /* the root is node 0 */
  int count;
  char *texts; /* behind text and key */
};

/* Parses `length` bytes. MOEFLOW_ERROR_FORMAT, one line `where:line:column: what, why`, for: more than DOCUMENT_BYTES_MAX
 * bytes, DOCUMENT_DEPTH_MAX levels or DOCUMENT_EVENTS_MAX events; nothing at all; several documents; directives, anchors,
 * aliases, tags; duplicate keys and keys that are no scalars; tabs, other control bytes, byte order marks; whatever is not
 * YAML. *document is one allocation pair for document_free. */
moeflow_status document_parse(const char *text, size_t length, const char *where, struct document **document);
void document_free(struct document *document);

/* The error of a position, in the one form that all have. */
moeflow_status document_fault(const char *where, int line, int column, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* `text` for a message: printable ASCII, others as '?', cut to 40 characters. Returns `quoted`. */
#define DOCUMENT_QUOTE_MAX 48
const char *document_quote(const char *text, char quoted[DOCUMENT_QUOTE_MAX]);
#endif
