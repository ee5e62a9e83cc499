#include "environment.h"

#include <string.h>
#include <unistd.h>

const struct environment_variable environment_table[] = {
    {"MOEFLOW_CACHE_DIR", "cache directory, an absolute path; else $XDG_CACHE_HOME/moeflow, else ~/.cache/moeflow"},
    {"MOEFLOW_NVRTC", "path of libnvrtc.so to compile with"},
    {"MOEFLOW_NCCL", "path of libnccl.so.2 to exchange with"},
    {"MOEFLOW_CUDA_LIB", "path of libcuda.so.1, the driver"},
    {"MOEFLOW_LOG", "moeflow-run: error, warning, info or debug; what the library's log prints"},
    {"MOEFLOW_TIMEOUT_S", "moeflow-run: seconds to wait for a silent peer"},
    {"MOEFLOW_LIBRARY", "Python: path of libmoeflow.so"},
    {"MOEFLOW_GEN", "Python: path of moeflow-gen"},
    {"MOEFLOW_BIN", "scripts: folder of the tools, in place of build/bin"},
    {"MOEFLOW_NO_SYSTEM_CUDA", "set-up and CMake: 1 ignores CUDA toolkits and takes the pip wheels in .venv"},
    {NULL, NULL},
};

static int known(const char *name, size_t length) {
  for (const struct environment_variable *row = environment_table; row->name; row++) {
    if (strlen(row->name) == length && !strncmp(row->name, name, length)) return 1;
  }
  return 0;
}

void environment_warn(const char *tool, FILE *file) {
  char names[512] = "";
  size_t used = 0;
  for (char **variable = environ; variable && *variable; variable++) {
    size_t length = strcspn(*variable, "=");
    if (strncmp(*variable, "MOEFLOW_", 8) || known(*variable, length) || used + length + 3 > sizeof names) continue;
    if (strspn(*variable, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_abcdefghijklmnopqrstuvwxyz") != length) continue;
    used += (size_t)snprintf(names + used, sizeof names - used, "%s%.*s", used ? ", " : "", (int)length, *variable);
  }
  if (used) fprintf(file, "%s: warning: unknown environment: %s; `moeflow-gen help env` lists the known\n", tool, names);
}
