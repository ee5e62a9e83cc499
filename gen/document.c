#include "document.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "status.h"

moeflow_status document_fault(const char *where, int line, int column, const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return status_set(MOEFLOW_ERROR_FORMAT, "%s:%d:%d: %s", where, line, column, text);
}

const char *document_quote(const char *text, char quoted[DOCUMENT_QUOTE_MAX]) {
  int length = 0;
  for (; text[length] && length < 40; length++) {
    quoted[length] = text[length] >= 0x20 && text[length] < 0x7f ? text[length] : '?';
  }
  strcpy(quoted + length, text[length] ? "..." : "");
  return quoted;
}

/* ---- Bytes, before any parser sees them ---- */

static void position_of(const char *text, size_t offset, int *line, int *column) {
  *line = 1;
  *column = 1;
  for (size_t i = 0; i < offset; i++) {
    int ends = text[i] == '\n' || (text[i] == '\r' && text[i + 1] != '\n');
    *line += ends;
    *column = ends ? 1 : *column + ((text[i] & 0xc0) != 0x80); /* characters, not bytes */
  }
}

static moeflow_status check_bytes(const char *text, size_t length, const char *where) {
  int line, column;
  if (length > DOCUMENT_BYTES_MAX) {
    return document_fault(where, 1, 1, "the file has more than %d bytes, the most a model file may have",
                          DOCUMENT_BYTES_MAX);
  }
  if (length >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) {
    return document_fault(where, 1, 1, "the file begins with a byte order mark; save it as plain UTF-8");
  }
  for (size_t i = 0; i < length; i++) {
    unsigned char byte = (unsigned char)text[i];
    if ((byte >= 0x20 && byte != 0x7f) || byte == '\n' || byte == '\r') continue;
    position_of(text, i, &line, &column);
    if (byte == '\t') return document_fault(where, line, column, "a tab; indent and separate with spaces");
    return document_fault(where, line, column, "control byte 0x%02x; a model file is plain text", byte);
  }
  return MOEFLOW_OK;
}

/* ---- Events to nodes ---- */

struct builder {
  yaml_parser_t parser;
  yaml_event_t event; /* the present one; deleted when the next is fetched */
  int has_event;
  int events;
  int depth;
  const char *input;
  const char *where;
  struct document *document;
  size_t texts_used, texts_size;
};

static moeflow_status parser_fault(const struct builder *builder) {
  const yaml_parser_t *parser = &builder->parser;
  int line = (int)parser->problem_mark.line + 1, column = (int)parser->problem_mark.column + 1;
  if (parser->error == YAML_READER_ERROR) position_of(builder->input, parser->problem_offset, &line, &column);
  const char *problem = parser->problem ? parser->problem : "out of memory";
  if (!parser->context) return document_fault(builder->where, line, column, "not valid YAML: %s", problem);
  return document_fault(builder->where, line, column, "not valid YAML: %s, %s from %d:%d", problem, parser->context,
                        (int)parser->context_mark.line + 1, (int)parser->context_mark.column + 1);
}

static moeflow_status fault_here(const struct builder *builder, const char *what) {
  const yaml_mark_t *mark = &builder->event.start_mark;
  return document_fault(builder->where, (int)mark->line + 1, (int)mark->column + 1, "%s", what);
}

static const char *forbidden(const yaml_event_t *event) {
  const yaml_char_t *anchor = NULL, *tag = NULL;
  switch (event->type) {
    case YAML_ALIAS_EVENT:
      return "an alias (*name); write the value out";
    case YAML_SCALAR_EVENT:
      anchor = event->data.scalar.anchor;
      tag = event->data.scalar.tag;
      break;
    case YAML_SEQUENCE_START_EVENT:
      anchor = event->data.sequence_start.anchor;
      tag = event->data.sequence_start.tag;
      break;
    case YAML_MAPPING_START_EVENT:
      anchor = event->data.mapping_start.anchor;
      tag = event->data.mapping_start.tag;
      break;
    case YAML_DOCUMENT_START_EVENT:
      if (event->data.document_start.version_directive ||
          event->data.document_start.tag_directives.start != event->data.document_start.tag_directives.end) {
        return "a directive (%...); a model file has none";
      }
      break;
    default:
      break;
  }
  return anchor ? "an anchor (&name); write the value where it is needed"
         : tag  ? "a tag (!type); types are fixed by the keys"
                : NULL;
}

static moeflow_status next_event(struct builder *builder) {
  if (builder->has_event) yaml_event_delete(&builder->event);
  builder->has_event = 0;
  if (!yaml_parser_parse(&builder->parser, &builder->event)) return parser_fault(builder);
  builder->has_event = 1;
  if (++builder->events > DOCUMENT_EVENTS_MAX)
    return fault_here(builder, "more than 4096 values; a model file has a few dozen");
  const char *what = forbidden(&builder->event);
  return what ? fault_here(builder, what) : MOEFLOW_OK;
}

/* Into the one buffer, which never moves: a character takes at most 1.5 times the bytes of its spelling ("\L", 2 bytes, is 3
 * of UTF-8), and each text ends with a NUL. */
static moeflow_status keep_text(struct builder *builder, const char **text) {
  size_t length = builder->event.data.scalar.length;
  const char *value = (const char *)builder->event.data.scalar.value;
  if (memchr(value, 0, length)) return fault_here(builder, "a NUL character in a value");
  if (builder->texts_used + length + 1 > builder->texts_size)
    return fault_here(builder, "more text than the file has bytes");
  *text = memcpy(builder->document->texts + builder->texts_used, value, length);
  builder->document->texts[builder->texts_used + length] = 0;
  builder->texts_used += length + 1;
  return MOEFLOW_OK;
}

static moeflow_status read_value(struct builder *builder, int *index);

static void add_child(struct document *document, int parent, int *last, int child) {
  if (*last < 0) {
    document->nodes[parent].first = child;
  } else {
    document->nodes[*last].next = child;
  }
  *last = child;
}

static moeflow_status check_key(struct builder *builder, int map, const char *key) {
  const struct document_node *nodes = builder->document->nodes;
  char quoted[DOCUMENT_QUOTE_MAX], what[160];
  for (int i = nodes[map].first; i >= 0; i = nodes[i].next) {
    if (strcmp(nodes[i].key, key)) continue;
    snprintf(what, sizeof what, "key '%s' stands here a second time, first on line %d", document_quote(key, quoted),
             nodes[i].key_line);
    return fault_here(builder, what);
  }
  return MOEFLOW_OK;
}

/* After the start event of a map or list. */
static moeflow_status read_children(struct builder *builder, int parent, int is_map) {
  moeflow_status status = MOEFLOW_OK;
  struct document *document = builder->document;
  yaml_event_type_t end = is_map ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
  if (++builder->depth > DOCUMENT_DEPTH_MAX) {
    status = fault_here(builder, "nested deeper than 8 levels");
    goto cleanup;
  }
  for (int child, last = -1;;) {
    const char *key = NULL;
    CHECK(next_event(builder));
    if (builder->event.type == end) break;
    yaml_mark_t mark = builder->event.start_mark;
    if (is_map) {
      if (builder->event.type != YAML_SCALAR_EVENT) {
        status = fault_here(builder, "a key must be a plain word");
        goto cleanup;
      }
      CHECK(keep_text(builder, &key));
      CHECK(check_key(builder, parent, key));
      CHECK(next_event(builder));
    }
    CHECK(read_value(builder, &child));
    document->nodes[child].key = key;
    document->nodes[child].key_line = (int)mark.line + 1;
    document->nodes[child].key_column = (int)mark.column + 1;
    add_child(document, parent, &last, child);
  }
  builder->depth--;
cleanup:
  return status;
}

/* The present event begins a value. There are no more nodes than events. */
static moeflow_status read_value(struct builder *builder, int *index) {
  struct document_node *node = &builder->document->nodes[builder->document->count];
  const yaml_event_t *event = &builder->event;
  *index = builder->document->count++;
  *node = (struct document_node){.first = -1, .next = -1};
  node->line = (int)event->start_mark.line + 1;
  node->column = (int)event->start_mark.column + 1;
  if (event->type == YAML_SCALAR_EVENT) {
    node->kind = DOCUMENT_SCALAR;
    node->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
    return keep_text(builder, &node->text);
  }
  node->kind = event->type == YAML_MAPPING_START_EVENT ? DOCUMENT_MAP : DOCUMENT_LIST;
  return read_children(builder, *index, node->kind == DOCUMENT_MAP);
}

static moeflow_status read_stream(struct builder *builder) {
  moeflow_status status = MOEFLOW_OK;
  int root;
  CHECK(next_event(builder)); /* stream start */
  CHECK(next_event(builder));
  if (builder->event.type == YAML_STREAM_END_EVENT) {
    status = document_fault(builder->where, 1, 1, "the file is empty; a model begins with `moeflow: 1`");
    goto cleanup;
  }
  CHECK(next_event(builder)); /* after the document start */
  CHECK(read_value(builder, &root));
  CHECK(next_event(builder)); /* document end */
  CHECK(next_event(builder));
  if (builder->event.type != YAML_STREAM_END_EVENT)
    status = fault_here(builder, "a second document; a model file holds one");
cleanup:
  return status;
}

moeflow_status document_parse(const char *text, size_t length, const char *where, struct document **document) {
  moeflow_status status = MOEFLOW_OK;
  struct builder builder = {.input = text, .where = where, .texts_size = 2 * length + DOCUMENT_EVENTS_MAX + 1};
  int initialized = 0;
  *document = NULL;
  CHECK(check_bytes(text, length, where));
  builder.document = calloc(1, sizeof *builder.document);
  if (!builder.document || !(builder.document->texts = malloc(builder.texts_size))) {
    FAIL(MOEFLOW_ERROR_MEMORY, "%s: no memory to read the model", where);
  }
  initialized = yaml_parser_initialize(&builder.parser);
  if (!initialized) FAIL(MOEFLOW_ERROR_MEMORY, "%s: no memory to read the model", where);
  yaml_parser_set_encoding(&builder.parser, YAML_UTF8_ENCODING);
  yaml_parser_set_input_string(&builder.parser, (const unsigned char *)text, length);
  CHECK(read_stream(&builder));
  *document = builder.document;
  builder.document = NULL;
cleanup:
  if (builder.has_event) yaml_event_delete(&builder.event);
  if (initialized) yaml_parser_delete(&builder.parser);
  document_free(builder.document);
  return status;
}

void document_free(struct document *document) {
  if (!document) return;
  free(document->texts);
  free(document);
}
