#include "json.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "number.h"

void json_begin(struct json *json, FILE *file) {
  memset(json, 0, sizeof *json);
  json->file = file;
  json->first[0] = 1;
}

void json_end(struct json *json) {
  fputc('\n', json->file);
}

/* What stands between the previous value and the next: nothing after a key, a comma between members. */
static void separate(struct json *json) {
  if (json->after_key) {
    json->after_key = 0;
    return;
  }
  if (!json->first[json->depth]) fputs(", ", json->file);
  json->first[json->depth] = 0;
}

static void open_level(struct json *json, char bracket) {
  separate(json);
  fputc(bracket, json->file);
  if (json->depth < (int)sizeof json->first - 1) json->depth++;
  json->first[json->depth] = 1;
}

static void close_level(struct json *json, char bracket) {
  fputc(bracket, json->file);
  if (json->depth > 0) json->depth--;
}

void json_object(struct json *json) {
  open_level(json, '{');
}
void json_object_end(struct json *json) {
  close_level(json, '}');
}
void json_array(struct json *json) {
  open_level(json, '[');
}
void json_array_end(struct json *json) {
  close_level(json, ']');
}

/* Length of the well-formed UTF-8 sequence at `text` (Unicode 3.9, table 3-7), 0 when there is none. */
static int utf8_length(const unsigned char *text) {
  if (text[0] < 0x80) return 1;
  int length = text[0] >= 0xc2 && text[0] <= 0xdf   ? 2
               : (text[0] & 0xf0) == 0xe0           ? 3
               : text[0] >= 0xf0 && text[0] <= 0xf4 ? 4
                                                    : 0;
  for (int i = 1; i < length; i++) {
    if ((text[i] & 0xc0) != 0x80) return 0;
  }
  if (text[0] == 0xe0 && text[1] < 0xa0) return 0; /* overlong */
  if (text[0] == 0xed && text[1] > 0x9f) return 0; /* surrogates */
  if (text[0] == 0xf0 && text[1] < 0x90) return 0; /* overlong */
  if (text[0] == 0xf4 && text[1] > 0x8f) return 0; /* above U+10FFFF */
  return length;
}

static void write_string(FILE *file, const char *value) {
  fputc('"', file);
  for (const unsigned char *c = (const unsigned char *)value; *c;) {
    int length = utf8_length(c);
    if (length == 0) {
      fputs("\\ufffd", file);
      c++;
    } else if (length > 1) {
      fwrite(c, 1, (size_t)length, file);
      c += length;
    } else {
      const char *escape = *c == '"' ? "\\\"" : *c == '\\' ? "\\\\" : *c == '\n' ? "\\n" : *c == '\t' ? "\\t" : NULL;
      if (escape) {
        fputs(escape, file);
      } else if (*c < 0x20 || *c == 0x7f) {
        fprintf(file, "\\u%04x", *c);
      } else {
        fputc(*c, file);
      }
      c++;
    }
  }
  fputc('"', file);
}

void json_key(struct json *json, const char *key) {
  separate(json);
  write_string(json->file, key);
  fputs(": ", json->file);
  json->after_key = 1;
}

void json_string(struct json *json, const char *value) {
  if (!value) {
    json_null(json);
    return;
  }
  separate(json);
  write_string(json->file, value);
}

void json_int(struct json *json, int64_t value) {
  separate(json);
  fprintf(json->file, "%" PRId64, value);
}

void json_double(struct json *json, double value) {
  char text[NUMBER_TEXT_MAX];
  if (isfinite(value)) number_write(value, text);
  json_raw(json, isfinite(value) ? text : "null");
}

void json_bool(struct json *json, int value) {
  json_raw(json, value ? "true" : "false");
}

void json_null(struct json *json) {
  json_raw(json, "null");
}

void json_raw(struct json *json, const char *text) {
  separate(json);
  fputs(text, json->file);
}
