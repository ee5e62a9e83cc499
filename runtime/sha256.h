/* SHA-256 (FIPS 180-4), the one hash of the project. */
#ifndef MOEFLOW_SHA256_H
#define MOEFLOW_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct sha256 {
  uint32_t state[8];
  uint64_t bytes;
  uint8_t block[64];
};

void sha256_begin(struct sha256 *hash);
void sha256_add(struct sha256 *hash, const void *data, size_t bytes);
void sha256_end(struct sha256 *hash, uint8_t digest[32]);

void sha256(const void *data, size_t bytes, uint8_t digest[32]);
void sha256_hex(const uint8_t digest[32], char hex[65]);
#endif
