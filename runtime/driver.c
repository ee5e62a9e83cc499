#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct driver driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t loaded; /* by this process; 0: not yet */

#define STRING(name) #name
#define SYMBOL(name) STRING(name) /* after cuda.h's macros: cuMemAlloc -> "cuMemAlloc_v2" */

static moeflow_status resolve(void *library, struct driver *table) {
  const struct {
    const char *symbol;
    void **function;
    int optional;
  } functions[] = {
#define REQUIRED(name) {SYMBOL(name), (void **)&table->name, 0},
#define OPTIONAL(name) {SYMBOL(name), (void **)&table->name, 1},
      DRIVER_FUNCTIONS(REQUIRED) DRIVER_OPTIONAL(OPTIONAL)
#undef REQUIRED
#undef OPTIONAL
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    *functions[i].function = dlsym(library, functions[i].symbol);
    if (!*functions[i].function && !functions[i].optional) {
      return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the CUDA driver has no %s: it is too old; install a newer NVIDIA driver",
                        functions[i].symbol);
    }
  }
  return MOEFLOW_OK;
}

static moeflow_status initialise(const struct driver *table, const char *name, int *version) {
  int devices = 0;
  CUresult result = table->cuInit(0);
  if (result == CUDA_SUCCESS) result = table->cuDriverGetVersion(version);
  if (result == CUDA_SUCCESS) result = table->cuDeviceGetCount(&devices);
  if (result == CUDA_SUCCESS && devices > 0) return MOEFLOW_OK;
  const char *text = NULL;
  if (result == CUDA_SUCCESS) {
    text = "it sees no GPU (CUDA_VISIBLE_DEVICES may hide them)";
  } else if (table->cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) {
    text = "unknown error";
  }
  return status_set(MOEFLOW_ERROR_ENVIRONMENT, "the CUDA driver (%s) cannot be used: %s; `moeflow-gen doctor` looks closer",
                    name, text);
}

static moeflow_status load(void) {
  moeflow_status status = MOEFLOW_OK;
  struct driver table;
  memset(&table, 0, sizeof table);
  const char *name = getenv("MOEFLOW_CUDA_LIB");
  if (!name || !*name) name = "libcuda.so.1";
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    FAIL(MOEFLOW_ERROR_ENVIRONMENT, "no CUDA driver: %s; install the NVIDIA driver", dlerror());
  }
  CHECK(resolve(library, &table));
  CHECK(initialise(&table, name, &table.version));
  driver = table;
  return MOEFLOW_OK;
cleanup:
  if (library) dlclose(library);
  return status;
}

moeflow_status driver_load(void) {
  moeflow_status status = MOEFLOW_OK;
  pthread_mutex_lock(&mutex);
  if (!loaded) {
    status = load();
    if (status == MOEFLOW_OK) loaded = getpid();
  } else if (loaded != getpid()) {
    status =
        status_set(MOEFLOW_ERROR_ENVIRONMENT,
                   "process %lld was forked from %lld after that had initialised CUDA, which does not survive: fork before "
                   "the first use of a GPU, or start a new program",
                   (long long)getpid(), (long long)loaded);
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

moeflow_status driver_status(CUresult result, const char *call) {
  const char *name = NULL, *text = NULL;
  int length = (int)strcspn(call, "("); /* the macro hands over the call as it was written */
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name) name = "unknown error";
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) text = "no description";
  return status_set(result == CUDA_ERROR_OUT_OF_MEMORY ? MOEFLOW_ERROR_MEMORY : MOEFLOW_ERROR_CUDA, "%.*s: %s (%s)", length,
                    call, name, text);
}
