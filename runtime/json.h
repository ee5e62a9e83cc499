/* A small JSON writer for the tools: commas, quotes and escapes are its business, order and content the caller's. */
#ifndef MOEFLOW_JSON_H
#define MOEFLOW_JSON_H

#include <stdint.h>
#include <stdio.h>

struct json {
  FILE *file;
  int depth;
  char first[32]; /* per level: nothing written yet */
  char after_key; /* the next value belongs to a key just written */
};

void json_begin(struct json *json, FILE *file);
void json_end(struct json *json); /* newline */
void json_object(struct json *json);
void json_object_end(struct json *json);
void json_array(struct json *json);
void json_array_end(struct json *json);
void json_key(struct json *json, const char *key);
void json_string(struct json *json, const char *value); /* NULL writes null; bytes that are not UTF-8 are replaced */
void json_int(struct json *json, int64_t value);
void json_double(struct json *json, double value); /* %.9g in the C locale; NaN and infinities write null */
void json_bool(struct json *json, int value);
void json_null(struct json *json);
void json_raw(struct json *json, const char *text); /* a value that is JSON already */
#endif
