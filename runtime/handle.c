#include "handle.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "status.h"

static const struct {
  const char *name;
  unsigned magic;
} kinds[HANDLE_KINDS] = {
    [HANDLE_CONTEXT] = {"context", 0x6d6f6543u},
    [HANDLE_GROUP] = {"group", 0x6d6f6547u},
    [HANDLE_LAYER] = {"layer", 0x6d6f654cu},
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct handle *oldest[HANDLE_KINDS], *newest[HANDLE_KINDS]; /* destroyed handles, to be reused */

void *handle_create(enum handle_kind kind, size_t size) {
  pthread_mutex_lock(&mutex);
  struct handle *handle = oldest[kind];
  if (handle) {
    oldest[kind] = handle->next;
    if (!oldest[kind]) newest[kind] = NULL;
  }
  pthread_mutex_unlock(&mutex);
  if (handle) {
    memset(handle, 0, size);
  } else {
    handle = calloc(1, size);
  }
  if (!handle) return NULL;
  handle->process = getpid();
  atomic_store(&handle->magic, kinds[kind].magic);
  return handle;
}

void handle_destroy(void *memory, enum handle_kind kind) {
  struct handle *handle = memory;
  if (!handle) return;
  atomic_store(&handle->magic, 0);
  handle->next = NULL;
  pthread_mutex_lock(&mutex);
  if (newest[kind]) {
    newest[kind]->next = handle;
  } else {
    oldest[kind] = handle;
  }
  newest[kind] = handle;
  pthread_mutex_unlock(&mutex);
}

moeflow_status handle_check(const void *memory, enum handle_kind kind) {
  const struct handle *handle = memory;
  if (!handle) return status_set(MOEFLOW_ERROR_ARGUMENT, "the %s is NULL", kinds[kind].name);
  if (atomic_load(&((struct handle *)memory)->magic) != kinds[kind].magic) {
    return status_set(MOEFLOW_ERROR_STATE, "this %s was destroyed, or it is none", kinds[kind].name);
  }
  if (handle->process != getpid()) {
    return status_set(
        MOEFLOW_ERROR_STATE,
        "this %s was made by process %lld and is used in process %lld: nothing survives fork; make it in the child",
        kinds[kind].name, (long long)handle->process, (long long)getpid());
  }
  return MOEFLOW_OK;
}

moeflow_status config_read(const void *from, void *to, size_t to_size, const char *name) {
  size_t size;
  if (!from) return status_set(MOEFLOW_ERROR_ARGUMENT, "%s is NULL", name);
  memcpy(&size, from, sizeof size);
  if (size < 2 * sizeof size || size > 4096) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s.size is %zu; begin with the header's INIT macro", name, size);
  }
  for (size_t i = to_size; i < size; i++) {
    if (((const char *)from)[i]) {
      return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                        "%s has %zu bytes and sets byte %zu; this library knows %zu: it is older than your header", name,
                        size, i, to_size);
    }
  }
  memcpy(to, from, size < to_size ? size : to_size);
  memcpy(to, &to_size, sizeof to_size);
  return MOEFLOW_OK;
}
