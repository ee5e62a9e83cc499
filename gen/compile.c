#include "compile.h"

#include <ctype.h>
#include <dlfcn.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

#define STATIC_SHARED_MAX (48 << 10) /* beyond it, ptxas is content but only dynamic memory can be had */

static struct {
  void *library;
  nvrtcResult (*version)(int *major, int *minor);
  const char *(*error_string)(nvrtcResult result);
  nvrtcResult (*create)(nvrtcProgram *program, const char *text, const char *name, int headers, const char *const *texts,
                        const char *const *names);
  nvrtcResult (*destroy)(nvrtcProgram *program);
  nvrtcResult (*compile)(nvrtcProgram program, int count, const char *const *options);
  nvrtcResult (*log_size)(nvrtcProgram program, size_t *size);
  nvrtcResult (*log)(nvrtcProgram program, char *log);
  nvrtcResult (*cubin_size)(nvrtcProgram program, size_t *size);
  nvrtcResult (*cubin)(nvrtcProgram program, char *cubin);
} nvrtc;

static const struct {
  const char *name;
  void **function;
} functions[] = {
    {"nvrtcVersion", (void **)&nvrtc.version},        {"nvrtcGetErrorString", (void **)&nvrtc.error_string},
    {"nvrtcCreateProgram", (void **)&nvrtc.create},   {"nvrtcDestroyProgram", (void **)&nvrtc.destroy},
    {"nvrtcCompileProgram", (void **)&nvrtc.compile}, {"nvrtcGetProgramLogSize", (void **)&nvrtc.log_size},
    {"nvrtcGetProgramLog", (void **)&nvrtc.log},      {"nvrtcGetCUBINSize", (void **)&nvrtc.cubin_size},
    {"nvrtcGetCUBIN", (void **)&nvrtc.cubin},
};

static void add_option(struct compile_options *options, const char *format, const char *value) {
  snprintf(options->text[options->count++], COMPILE_OPTION_MAX, format, value);
}

void compile_options_for(const char *arch, int lineinfo, struct compile_options *options) {
  memset(options, 0, sizeof *options);
  add_option(options, "--gpu-architecture=%s", arch);
  add_option(options, "--std=%s", "c++17");
  add_option(options, "--ptxas-options=%s", "-v");
  if (lineinfo) add_option(options, "%s", "-lineinfo");
}

static moeflow_status load(const struct toolchain *toolchain) {
  if (nvrtc.library) return MOEFLOW_OK;
  for (int i = 0; i < toolchain->builtins_count; i++) {
    if (!dlopen(toolchain->builtins[i], RTLD_NOW | RTLD_LOCAL)) {
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot load NVRTC's builtins: %s", dlerror());
    }
  }
  void *library = dlopen(toolchain->nvrtc, RTLD_NOW | RTLD_LOCAL);
  if (!library) return status_set(MOEFLOW_ERROR_ENVIRONMENT, "cannot load NVRTC: %s", dlerror());
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    *functions[i].function = dlsym(library, functions[i].name);
    if (!*functions[i].function) {
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "%s has no %s: too old; CUDA 12 or newer is needed", toolchain->nvrtc,
                        functions[i].name);
    }
  }
  nvrtc.library = library;
  return MOEFLOW_OK;
}

/* The number before `unit` in a line such as "0 bytes stack frame, 8 bytes spill stores", -1 when it is not there. */
static long number_before(const char *line, const char *end, const char *unit) {
  const char *at = memmem(line, (size_t)(end - line), unit, strlen(unit));
  if (!at || at == line) return -1;
  const char *p = at;
  while (p > line && isdigit((unsigned char)p[-1])) p--;
  return p == at ? -1 : strtol(p, NULL, 10);
}

/* Lines read: "Compiling entry function 'x' for", "Function properties for y", "N bytes spill stores, ...", "Used N
 * registers". */
int compile_parse_report(const char *log, const char *symbol, struct compile_result *result) {
  int entry = 0, spills = 0, registers = 0;
  result->registers = result->static_shared_bytes = result->spill_bytes = 0;
  for (const char *line = log; *line;) {
    const char *end = line + strcspn(line, "\n");
    const char *name = memmem(line, (size_t)(end - line), "Compiling entry function '", 26);
    if (name) entry = strncmp(name + 26, symbol, strlen(symbol)) == 0 && name[26 + strlen(symbol)] == '\'';
    long stores = number_before(line, end, " bytes spill stores"), loads = number_before(line, end, " bytes spill loads");
    if (stores >= 0 && loads >= 0) {
      result->spill_bytes += (uint32_t)(stores + loads);
      spills |= entry;
    }
    long used = number_before(line, end, " registers");
    if (used >= 0 && entry) {
      long shared = number_before(line, end, " bytes smem");
      if ((uint32_t)used > result->registers) result->registers = (uint32_t)used;
      if (shared > (long)result->static_shared_bytes) result->static_shared_bytes = (uint32_t)shared;
      registers = 1;
    }
    line = *end ? end + 1 : end;
  }
  return spills && registers ? 0 : -1;
}

int compile_is_report(const char *line) {
  return strncmp(line, "ptxas info", 10) == 0 || strncmp(line, "ptxas         .", 15) == 0;
}

/* `file(12): error` -> `file:12: error`, which editors and readers know. In place: the text gets shorter. */
static void rewrite_positions(char *log) {
  char *to = log;
  for (char *line = log; *line;) {
    char *end = line + strcspn(line, "\n");
    char *open = memchr(line, '(', (size_t)(end - line));
    size_t digits = open ? strspn(open + 1, "0123456789") : 0;
    if (open && digits && open > line && strncmp(open + 1 + digits, "):", 2) == 0) {
      *open = ':';
      memmove(to, line, (size_t)(open + 1 + digits - line));
      to += open + 1 + digits - line;
      line = open + digits + 2;
    }
    size_t rest = (size_t)(end - line) + (*end ? 1 : 0);
    memmove(to, line, rest);
    to += rest;
    line += rest;
  }
  *to = 0;
}

static moeflow_status fetch_log(nvrtcProgram program, struct compile_result *result) {
  size_t size = 0;
  if (nvrtc.log_size(program, &size) != NVRTC_SUCCESS) size = 0;
  result->log = calloc(1, size + 1);
  if (!result->log) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a compiler log of %zu bytes", size);
  if (size && nvrtc.log(program, result->log) != NVRTC_SUCCESS) result->log[0] = 0;
  rewrite_positions(result->log);
  return MOEFLOW_OK;
}

/* A failed compile may still answer success with size 0: only a cubin with bytes in it counts. */
static moeflow_status fetch_cubin(nvrtcProgram program, const char *name, struct compile_result *result) {
  nvrtcResult answer = nvrtc.cubin_size(program, &result->cubin_size);
  if (answer != NVRTC_SUCCESS || !result->cubin_size) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "NVRTC gave no cubin for %s: %s, %zu bytes", name,
                      nvrtc.error_string(answer), result->cubin_size);
  }
  result->cubin = malloc(result->cubin_size);
  if (!result->cubin) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for a cubin of %zu bytes", result->cubin_size);
  answer = nvrtc.cubin(program, (char *)result->cubin);
  if (answer == NVRTC_SUCCESS) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "NVRTC gave no cubin for %s: %s", name, nvrtc.error_string(answer));
}

static moeflow_status run(nvrtcProgram program, const struct toolchain *toolchain, const struct compile_request *request,
                          struct compile_result *result) {
  const char *options[COMPILE_OPTIONS_MAX + 1];
  int count = 0;
  for (; count < request->options->count; count++) options[count] = request->options->text[count];
  /* NVRTC's own disk cache (12.9 and newer) writes outside our directory and would answer without ptxas' report; not in the
   * key, since it does not change the cubin. */
  if (result->nvrtc_version >= 12090) options[count++] = "--no-cache";
  nvrtcResult answer = nvrtc.compile(program, count, options);
  moeflow_status status = fetch_log(program, result);
  if (status != MOEFLOW_OK) return status;
  if (answer == NVRTC_ERROR_COMPILATION) {
    return status_set(MOEFLOW_ERROR_FORMAT, "%s does not compile; the compiler's messages are above", request->name);
  }
  if (answer != NVRTC_SUCCESS) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "NVRTC %u.%u (%s) refuses %s with option %s: %s",
                      result->nvrtc_version / 1000, result->nvrtc_version % 1000 / 10, toolchain->nvrtc, request->name,
                      options[0], nvrtc.error_string(answer));
  }
  return fetch_cubin(program, request->name, result);
}

static moeflow_status check_report(const struct compile_request *request, struct compile_result *result) {
  if (compile_parse_report(result->log, request->symbol, result) != 0) {
    return status_set(MOEFLOW_ERROR_ENVIRONMENT, "%s: ptxas reported nothing on %s, so spills cannot be ruled out",
                      request->name, request->symbol);
  }
  if (result->spill_bytes) {
    return status_set(MOEFLOW_ERROR_INTERNAL, "%s spills %u bytes of registers (%u in use): refused", request->name,
                      result->spill_bytes, result->registers);
  }
  if (result->static_shared_bytes > STATIC_SHARED_MAX) {
    return status_set(MOEFLOW_ERROR_INTERNAL,
                      "%s has %u bytes of static shared memory, more than the %d that every launch grants", request->name,
                      result->static_shared_bytes, STATIC_SHARED_MAX);
  }
  return MOEFLOW_OK;
}

moeflow_status compile_unit(const struct toolchain *toolchain, const struct compile_request *request,
                            struct compile_result *result) {
  moeflow_status status = MOEFLOW_OK;
  const char *texts[TEMPLATES_MAX], *names[TEMPLATES_MAX];
  nvrtcProgram program = NULL;
  int major = 0, minor = 0;
  memset(result, 0, sizeof *result);
  CHECK(load(toolchain));
  nvrtc.version(&major, &minor);
  result->nvrtc_version = (uint32_t)(major * 1000 + minor * 10);
  for (int i = 0; i < request->included_count; i++) {
    texts[i] = request->templates->files[request->included[i]].text;
    names[i] = request->templates->files[request->included[i]].name;
  }
  nvrtcResult answer = nvrtc.create(&program, request->text, request->name, request->included_count, texts, names);
  if (answer != NVRTC_SUCCESS) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "NVRTC cannot take %s: %s", request->name, nvrtc.error_string(answer));
  }
  CHECK(run(program, toolchain, request, result));
  CHECK(check_report(request, result));
cleanup:
  if (program) nvrtc.destroy(&program);
  return status;
}

void compile_free(struct compile_result *result) {
  free(result->cubin);
  free(result->log);
  memset(result, 0, sizeof *result);
}
