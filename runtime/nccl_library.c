#include "nccl_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nccl nccl;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

#ifndef MOEFLOW_NCCL_DIR
#define MOEFLOW_NCCL_DIR ""
#endif
#define SONAME "libnccl.so.2"

static void *find(char tried[512]) {
  const char *named = getenv("MOEFLOW_NCCL");
  const struct {
    const char *name;
    int flags;
  } places[] = {{SONAME, RTLD_NOLOAD},
                {named && *named ? named : NULL, 0},
                {SONAME, 0},
                {*MOEFLOW_NCCL_DIR ? MOEFLOW_NCCL_DIR "/" SONAME : NULL, 0}};
  size_t length = 0;
  tried[0] = 0;
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    if (!places[i].name) continue;
    void *library = dlopen(places[i].name, RTLD_NOW | RTLD_LOCAL | places[i].flags);
    if (library) return library;
    const char *why = places[i].flags & RTLD_NOLOAD ? NULL : dlerror();
    if (why && length < 511) length += (size_t)snprintf(tried + length, 512 - length, "%s%s", length ? "; " : "", why);
  }
  return NULL;
}

static moeflow_status resolve(void *library, struct nccl *table) {
  const struct {
    const char *symbol;
    void **function;
  } functions[] = {
#define ROW(name) {#name, (void **)&table->name},
      NCCL_FUNCTIONS(ROW)
#undef ROW
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    *functions[i].function = dlsym(library, functions[i].symbol);
    if (!*functions[i].function) {
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "%s has no %s: it is too old; NCCL 2.19 or newer is needed", table->path,
                        functions[i].symbol);
    }
  }
  *(void **)&table->ncclAlltoAll = dlsym(library, "ncclAlltoAll");
  return MOEFLOW_OK;
}

static moeflow_status check_version(struct nccl *table) {
  if (table->ncclGetVersion(&table->version) != ncclSuccess) table->version = 0;
  if (table->version >= NCCL_OLDEST && table->version / 10000 == NCCL_MAJOR) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ENVIRONMENT,
                    "NCCL %d.%d.%d at %s cannot be used: this library was built with NCCL %d.%d headers and needs 2.19 or "
                    "newer; set MOEFLOW_NCCL to another libnccl.so.2",
                    table->version / 10000, table->version / 100 % 100, table->version % 100, table->path, NCCL_MAJOR,
                    NCCL_MINOR);
}

static moeflow_status load(void) {
  moeflow_status status = MOEFLOW_OK;
  struct nccl *table = NULL;
  char tried[512];
  void *library = find(tried);
  if (!library) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "no NCCL found: %s; install it or set MOEFLOW_NCCL to a libnccl.so.2", tried);
  }
  table = calloc(1, sizeof *table);
  if (!table) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for the table of NCCL functions");
  Dl_info info;
  void *symbol = dlsym(library, "ncclGetVersion");
  snprintf(table->path, sizeof table->path, "%s",
           symbol && dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : SONAME);
  CHECK(resolve(library, table));
  CHECK(check_version(table));
  nccl = *table;
  free(table);
  return MOEFLOW_OK;
cleanup:
  free(table);
  if (library) dlclose(library);
  return status;
}

moeflow_status nccl_load(void) {
  moeflow_status status = MOEFLOW_OK;
  pthread_mutex_lock(&mutex);
  if (!loaded) status = load();
  if (status == MOEFLOW_OK) loaded = 1;
  pthread_mutex_unlock(&mutex);
  return status;
}

moeflow_status nccl_status(ncclResult_t result, const char *call, ncclComm_t comm) {
  const char *detail = comm ? nccl.ncclGetLastError(comm) : NULL;
  return status_set(MOEFLOW_ERROR_NCCL, "%.*s: %s%s%s", (int)strcspn(call, "("), call, nccl.ncclGetErrorString(result),
                    detail && *detail ? ": " : "", detail ? detail : "");
}
