#include "provenance.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sha256.h"
#include "status.h"

extern char **environ;

void provenance_machine(const char *gpu, int count, char name[PROVENANCE_MACHINE_MAX]) {
  int length = 0;
  if (strncmp(gpu, "NVIDIA ", 7) == 0) gpu += 7;
  for (; *gpu && length < 100; gpu++)
    name[length++] = isalnum((unsigned char)*gpu) ? (char)tolower((unsigned char)*gpu) : '-';
  snprintf(name + length, PROVENANCE_MACHINE_MAX - (size_t)length, "x%d", count);
}

/* A machine's own folders are nobody's business and make no two results alike: a path below the current folder is written
 * from there, another one by its last name. */
static const char *short_path(const char *path, const char *here) {
  const size_t length = strlen(here);
  const char *slash = strrchr(path, '/');
  if (path[0] != '/') return path;
  if (length > 1 && !strncmp(path, here, length) && path[length] == '/' && path[length + 1]) return path + length + 1;
  return slash[1] ? slash + 1 : path;
}

void provenance_command(const char *tool, int argc, char **argv, struct json *json) {
  size_t bytes = strlen(tool) + 1;
  char here[PATH_MAX];
  if (!getcwd(here, sizeof here)) here[0] = 0;
  for (int i = 1; i < argc; i++) bytes += strlen(argv[i]) + 1;
  char *command = malloc(bytes);
  if (!command) return;
  strcpy(command, tool);
  for (int i = 1; i < argc; i++) {
    const char *equals = argv[i][0] == '-' ? strchr(argv[i], '=') : NULL; /* --json=/folder/file */
    const char *value = equals ? equals + 1 : argv[i];
    strcat(command, " ");
    strncat(command, argv[i], (size_t)(value - argv[i]));
    strcat(command, short_path(value, here));
  }
  json_key(json, "command");
  json_string(json, command);
  free(command);
}

void provenance_environment(struct json *json) {
  json_key(json, "nccl_environment");
  json_object(json);
  for (char **variable = environ; *variable; variable++) {
    char name[128];
    const char *equals = strchr(*variable, '=');
    if (strncmp(*variable, "NCCL_", 5) != 0 || !equals || equals - *variable >= (int)sizeof name) continue;
    snprintf(name, sizeof name, "%.*s", (int)(equals - *variable), *variable);
    json_key(json, name);
    json_string(json, equals + 1);
  }
  json_object_end(json);
}

void provenance_toolchain(int nvrtc, struct json *json) {
  char text[32];
  snprintf(text, sizeof text, "NVRTC %d.%d", nvrtc / 1000, nvrtc % 1000 / 10);
  json_key(json, "toolchain");
  json_string(json, nvrtc ? text : NULL);
}

moeflow_status provenance_hash_file(const char *path, char hex[65]) {
  struct sha256 hash;
  uint8_t block[4096], digest[32];
  size_t got;
  FILE *file = fopen(path, "rb");
  if (!file) return status_set(MOEFLOW_ERROR_CACHE, "cannot read %s: %s", path, strerror(errno));
  sha256_begin(&hash);
  while ((got = fread(block, 1, sizeof block, file)) > 0) sha256_add(&hash, block, got);
  fclose(file);
  sha256_end(&hash, digest);
  sha256_hex(digest, hex);
  return MOEFLOW_OK;
}

moeflow_status provenance_check_output(const char *option, const char *path) {
  const char *slash = path ? strrchr(path, '/') : NULL;
  char folder[4096] = ".";
  struct stat info;
  if (!path) return MOEFLOW_OK;
  if (slash) snprintf(folder, sizeof folder, "%.*s", (int)(slash - path + 1), path);
  const int exists = stat(path, &info) == 0, is_folder = exists && S_ISDIR(info.st_mode);
  if (!is_folder && access(exists ? path : folder, W_OK) == 0) return MOEFLOW_OK;
  if (is_folder) errno = EISDIR;
  return status_set(MOEFLOW_ERROR_CACHE, "%s: cannot write %s: %s", option, path, strerror(errno));
}
