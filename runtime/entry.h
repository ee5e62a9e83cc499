/* A cache entry: one kernel variant as one self-contained file.
 *
 *     struct entry_header (little-endian, 256 bytes) | canonical key text | cubin
 *
 * Cache directory (written by moeflow-gen only; the runtime only reads):
 *     entries/<first 2 hex digits>/<64 hex digits>    named by the SHA-256 of the key text
 *     plans/<plan file name>                          written last
 *     tmp/                                            private files before their rename
 */
#ifndef MOEFLOW_ENTRY_H
#define MOEFLOW_ENTRY_H

#include <stddef.h>
#include <stdint.h>

#include "cache.h"
#include "moeflow.h"

#define ENTRY_MAGIC "MOEFLOW\n"
#define ENTRY_VERSION 1
#define ENTRY_BYTES_MAX (64 << 20)

struct entry_header {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes; /* sizeof(struct entry_header) */
  uint64_t key_bytes;
  uint64_t cubin_bytes;
  uint8_t key_sha256[32];
  uint8_t cubin_sha256[32];
  char arch[16];
  char symbol[40];         /* the kernel's entry symbol */
  uint32_t minimum_driver;
  uint32_t nvrtc_version;  /* major * 1000 + minor * 10 */
  uint32_t registers;      /* from the ptxas report */
  uint32_t spill_bytes;    /* always 0: spilling variants are refused */
  uint32_t static_shared_bytes;
  uint32_t threads;        /* launch bound */
  uint8_t reserved[72];
  uint32_t zero;
  uint32_t header_crc;     /* first 4 bytes of SHA-256 over all bytes of the header before this field */
};

struct entry { /* one allocation of the whole file; free with entry_free */
  uint8_t *bytes;
  size_t size;
  struct entry_header header;
  const char *key;  /* key_bytes, not NUL-terminated */
  const void *cubin;
};

/* Reads entries/xx/<hash> below the open cache directory without following links and verifies sizes, header, key and cubin
 * hashes and the name. MOEFLOW_ERROR_CACHE says what is wrong, and with `missing` (may be NULL) whether it is just absent. */
moeflow_status entry_read(int cache_fd, const char *cache_path, const char *hash, struct entry *entry, int *missing);
void entry_free(struct entry *entry);

/* The verifying part of entry_read, over bytes from anywhere (malloc memory, taken over in every case). `where` names the
 * source in messages; with `hash` NULL the name is not compared. */
moeflow_status entry_parse(uint8_t *bytes, size_t size, const char *where, const char *hash, struct entry *entry);

/* Fills the header's magic, version, sizes, hashes and crc, takes arch, symbol and the numbers from `facts`, and returns the
 * file's bytes (malloc) and size. */
moeflow_status entry_build(const struct entry_header *facts, const char *key, size_t key_bytes, const void *cubin,
                           size_t cubin_bytes, uint8_t **bytes, size_t *size);
#endif
