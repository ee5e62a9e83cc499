#include "unique_id.h"

#include <string.h>
#include <sys/random.h>

#include "status.h"

#define RANDOM_BYTES 32

moeflow_status unique_id_make(moeflow_unique_id *id, const char *mark) {
  const size_t length = strlen(mark);
  memset(id, 0, sizeof *id);
  memcpy(id->bytes, mark, length);
  if (getrandom(id->bytes + length, RANDOM_BYTES, 0) == RANDOM_BYTES) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_INTERNAL, "the system gave no random bytes for a unique id");
}

int unique_id_has(const moeflow_unique_id *id, const char *mark) {
  return !memcmp(id->bytes, mark, strlen(mark));
}
