#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "sha256.h"
#include "status.h"
#include "store.h"

__attribute__((format(printf, 2, 3))) static void line(struct key *key, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t room = sizeof key->text - key->size;
  int n = vsnprintf(key->text + key->size, room, format, arguments);
  va_end(arguments);
  key->size = n < 0 || (size_t)n >= room ? sizeof key->text : key->size + (size_t)n;
}

moeflow_status key_build(const struct key_parts *parts, struct key *key) {
  uint8_t digest[32];
  char hex[65];
  memset(key, 0, sizeof *key);
  line(key, "moeflow-key %d\nentry-format %d\n", KEY_VERSION, ENTRY_VERSION);
  line(key, "kernel %s\narch %s\n", parts->kernel, parts->arch);
  for (int i = 0; i < parts->options->count; i++) line(key, "option %s\n", parts->options->text[i]);
  line(key, "toolchain %s\n", parts->toolchain);
  sha256(parts->unit, strlen(parts->unit), digest);
  sha256_hex(digest, hex);
  line(key, "unit %s\n", hex);
  for (int i = 0; i < parts->included_count; i++) {
    const struct template_file *file = &parts->templates->files[parts->included[i]];
    line(key, "template %s %s\n", file->name, file->hash);
  }
  if (key->size >= sizeof key->text) {
    return status_set(MOEFLOW_ERROR_INTERNAL, "the key of %s is longer than %d bytes", parts->kernel, KEY_TEXT_MAX);
  }
  sha256(key->text, key->size, digest);
  sha256_hex(digest, key->hash);
  return MOEFLOW_OK;
}
