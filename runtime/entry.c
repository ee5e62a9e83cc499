#include "entry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sha256.h"
#include "status.h"

_Static_assert(sizeof(struct entry_header) == 256, "the header's layout is the file's");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the header is read in place");

static uint32_t header_crc(const struct entry_header *header) {
  uint8_t digest[32];
  uint32_t crc;
  sha256(header, offsetof(struct entry_header, header_crc), digest);
  memcpy(&crc, digest, sizeof crc);
  return crc;
}

/* What is wrong with the header, NULL when nothing is. */
static const char *header_fault(const struct entry_header *header, size_t size) {
  if (memcmp(header->magic, ENTRY_MAGIC, sizeof header->magic) != 0) return "no MoEFlow entry (magic)";
  if (header->version != ENTRY_VERSION) return "of another format version";
  if (header->header_bytes != sizeof *header) return "damaged (header size)";
  if (header->header_crc != header_crc(header)) return "damaged (header checksum)";
  size_t rest = size - sizeof *header;
  if (header->key_bytes > rest || header->cubin_bytes != rest - header->key_bytes) return "damaged (length)";
  if (!header->key_bytes || !header->cubin_bytes) return "damaged (empty part)";
  if (!memchr(header->arch, 0, sizeof header->arch) || !memchr(header->symbol, 0, sizeof header->symbol))
    return "damaged (strings)";
  if (header->spill_bytes != 0) return "of a kernel that spills registers";
  return NULL;
}

moeflow_status entry_parse(uint8_t *bytes, size_t size, const char *where, const char *hash, struct entry *entry) {
  moeflow_status status = MOEFLOW_OK;
  const char *fault = NULL;
  uint8_t digest[32];
  char hex[65];
  memset(entry, 0, sizeof *entry);
  entry->bytes = bytes;
  entry->size = size;
  if (size < sizeof entry->header || size > ENTRY_BYTES_MAX) {
    FAIL(MOEFLOW_ERROR_CACHE, "cache entry %s has %zu bytes: damaged; run moeflow-gen build again", where, size);
  }
  memcpy(&entry->header, bytes, sizeof entry->header);
  fault = header_fault(&entry->header, size);
  if (fault) FAIL(MOEFLOW_ERROR_CACHE, "cache entry %s is %s; run moeflow-gen build again", where, fault);
  entry->key = (const char *)bytes + sizeof entry->header;
  entry->cubin = entry->key + entry->header.key_bytes;
  sha256(entry->key, entry->header.key_bytes, digest);
  sha256_hex(digest, hex);
  if (memcmp(digest, entry->header.key_sha256, sizeof digest) != 0 || (hash && strcmp(hex, hash) != 0)) {
    FAIL(MOEFLOW_ERROR_CACHE, "cache entry %s is damaged (its key hashes to %.16s); run moeflow-gen build again", where,
         hex);
  }
  sha256(entry->cubin, entry->header.cubin_bytes, digest);
  if (memcmp(digest, entry->header.cubin_sha256, sizeof digest) != 0) {
    FAIL(MOEFLOW_ERROR_CACHE, "cache entry %s is damaged (cubin checksum); run moeflow-gen build again", where);
  }
  return MOEFLOW_OK;
cleanup:
  entry_free(entry);
  return status;
}

moeflow_status entry_read(int cache_fd, const char *cache_path, const char *hash, struct entry *entry, int *missing) {
  memset(entry, 0, sizeof *entry);
  if (missing) *missing = 0;
  if (strlen(hash) != 64 || strspn(hash, "0123456789abcdef") != 64) {
    return status_set(MOEFLOW_ERROR_CACHE, "'%.70s' is no entry hash (64 hex digits)", hash);
  }
  char below[96], where[CACHE_PATH_MAX + 96];
  uint8_t *bytes;
  size_t size;
  snprintf(below, sizeof below, "entries/%.2s/%s", hash, hash);
  snprintf(where, sizeof where, "%s/%s", cache_path, below);
  moeflow_status status = cache_read(cache_fd, cache_path, below, ENTRY_BYTES_MAX, &bytes, &size, missing);
  return status != MOEFLOW_OK ? status : entry_parse(bytes, size, where, hash, entry);
}

void entry_free(struct entry *entry) {
  free(entry->bytes);
  memset(entry, 0, sizeof *entry);
}

moeflow_status entry_build(const struct entry_header *facts, const char *key, size_t key_bytes, const void *cubin,
                           size_t cubin_bytes, uint8_t **bytes, size_t *size) {
  struct entry_header header = *facts;
  *bytes = NULL;
  *size = 0;
  if (!key_bytes || !cubin_bytes || key_bytes > ENTRY_BYTES_MAX / 2 || cubin_bytes > ENTRY_BYTES_MAX / 2) {
    return status_set(MOEFLOW_ERROR_CACHE, "an entry of %zu key bytes and %zu cubin bytes: each must be 1 to %d", key_bytes,
                      cubin_bytes, ENTRY_BYTES_MAX / 2);
  }
  memcpy(header.magic, ENTRY_MAGIC, sizeof header.magic);
  header.version = ENTRY_VERSION;
  header.header_bytes = sizeof header;
  header.key_bytes = key_bytes;
  header.cubin_bytes = cubin_bytes;
  sha256(key, key_bytes, header.key_sha256);
  sha256(cubin, cubin_bytes, header.cubin_sha256);
  memset(header.reserved, 0, sizeof header.reserved);
  header.zero = 0;
  header.header_crc = header_crc(&header);
  *size = sizeof header + key_bytes + cubin_bytes;
  *bytes = malloc(*size);
  if (!*bytes) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for an entry of %zu bytes", *size);
  memcpy(*bytes, &header, sizeof header);
  memcpy(*bytes + sizeof header, key, key_bytes);
  memcpy(*bytes + sizeof header + key_bytes, cubin, cubin_bytes);
  return MOEFLOW_OK;
}
