/* A cache entry reads back as written, and no damage whatever passes: every byte, every length, hostile sizes. */
#include "entry.h"

#include "scratch.h"
#include "sha256.h"
#include "test.h"

static const char key[] = "moeflow-key 1\nkernel gate_up\n";
static const char cubin[] = "not really a cubin, but bytes like any other";

static uint8_t *make(size_t *size, char hash[65]) {
  struct entry_header facts = {.minimum_driver = 13000, .nvrtc_version = 13000, .registers = 40, .threads = 128};
  uint8_t *bytes, digest[32];
  strcpy(facts.arch, "sm_90a");
  strcpy(facts.symbol, "moeflow_gate_up");
  EXPECT(entry_build(&facts, key, sizeof key - 1, cubin, sizeof cubin, &bytes, size) == MOEFLOW_OK);
  sha256(key, sizeof key - 1, digest);
  sha256_hex(digest, hash);
  return bytes;
}

/* entry_parse takes its bytes over. */
static moeflow_status parse(const uint8_t *bytes, size_t size, const char *hash) {
  struct entry entry;
  uint8_t *copy = malloc(size + 1);
  memcpy(copy, bytes, size);
  moeflow_status status = entry_parse(copy, size, "a test", hash, &entry);
  if (status == MOEFLOW_OK) {
    EXPECT(entry.header.key_bytes == sizeof key - 1 && memcmp(entry.key, key, sizeof key - 1) == 0);
    EXPECT(entry.header.cubin_bytes == sizeof cubin && memcmp(entry.cubin, cubin, sizeof cubin) == 0);
    EXPECT(strcmp(entry.header.symbol, "moeflow_gate_up") == 0 && entry.header.registers == 40);
  } else {
    EXPECT(entry.bytes == NULL, "nothing to free after an error");
  }
  entry_free(&entry);
  return status;
}

static void flips_and_cuts(uint8_t *bytes, size_t size, const char *hash) {
  static const uint8_t masks[] = {0x01, 0x80, 0xff};
  for (size_t i = 0; i < size; i++) {
    for (int m = 0; m < 3; m++) {
      bytes[i] ^= masks[m];
      EXPECT(parse(bytes, size, hash) == MOEFLOW_ERROR_CACHE, "byte %zu ^ %02x passes", i, masks[m]);
      bytes[i] ^= masks[m];
    }
  }
  for (size_t cut = 0; cut < size; cut++) EXPECT(parse(bytes, cut, hash) == MOEFLOW_ERROR_CACHE, "%zu bytes pass", cut);
  uint8_t *longer = calloc(1, size + 1);
  memcpy(longer, bytes, size);
  EXPECT(parse(longer, size + 1, hash) == MOEFLOW_ERROR_CACHE, "a trailing byte passes");
  free(longer);
}

/* Headers that a writer with bad intent could make: the checksum is right, the numbers are not. */
static void hostile_headers(const uint8_t *bytes, size_t size, const char *hash) {
  const uint64_t rest = size - sizeof(struct entry_header);
  const uint64_t sizes[][2] = {{UINT64_MAX, 1},
                               {UINT64_MAX - 10, UINT64_MAX},
                               {0, rest},
                               {1ull << 63, 1ull << 63},
                               {rest, 0},
                               {sizeof key, sizeof cubin},
                               {UINT64_MAX - 4, rest + 5}}; /* the last: a sum that wraps around to the right one */
  uint8_t *copy = malloc(size);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    struct entry_header header;
    uint8_t digest[32];
    memcpy(copy, bytes, size);
    memcpy(&header, copy, sizeof header);
    header.key_bytes = sizes[i][0];
    header.cubin_bytes = sizes[i][1];
    sha256(&header, offsetof(struct entry_header, header_crc), digest);
    memcpy(&header.header_crc, digest, 4);
    memcpy(copy, &header, sizeof header);
    EXPECT(parse(copy, size, hash) == MOEFLOW_ERROR_CACHE, "sizes %zu pass", i);
  }
  free(copy);
}

static void through_a_file(const uint8_t *bytes, size_t size, const char *hash) {
  struct entry entry;
  char name[100];
  int fd, missing;
  scratch_make();
  EXPECT(cache_open(scratch, &fd) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(entry_read(fd, scratch, hash, &entry, &missing) == MOEFLOW_ERROR_CACHE && missing);
  mkdir(scratch_path("entries"), 0700);
  snprintf(name, sizeof name, "entries/%.2s", hash);
  mkdir(scratch_path(name), 0700);
  EXPECT(entry_read(fd, scratch, hash, &entry, &missing) == MOEFLOW_ERROR_CACHE && missing);
  snprintf(name, sizeof name, "entries/%.2s/%s", hash, hash);
  scratch_write(scratch_path(name), bytes, size, 0600);
  EXPECT(entry_read(fd, scratch, hash, &entry, &missing) == MOEFLOW_OK, "%s", moeflow_last_error());
  entry_free(&entry);
  scratch_write(scratch_path(name), bytes, size - 1, 0600);
  EXPECT(entry_read(fd, scratch, hash, &entry, &missing) == MOEFLOW_ERROR_CACHE && !missing, "damaged is not missing");
  static const char *const bad_names[] = {"", "..", "../../etc/passwd", "ZZ", "0123"};
  for (int i = 0; i < 5; i++) EXPECT(entry_read(fd, scratch, bad_names[i], &entry, &missing) == MOEFLOW_ERROR_CACHE);
  close(fd);
  scratch_remove();
}

int main(void) {
  char hash[65], other[65];
  size_t size;
  uint8_t *bytes = make(&size, hash), *unused;
  EXPECT(size == 256 + sizeof key - 1 + sizeof cubin);
  EXPECT(parse(bytes, size, hash) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(parse(bytes, size, NULL) == MOEFLOW_OK);
  strcpy(other, hash);
  other[63] = other[63] == '0' ? '1' : '0';
  EXPECT(parse(bytes, size, other) == MOEFLOW_ERROR_CACHE, "another name passes");
  flips_and_cuts(bytes, size, hash);
  hostile_headers(bytes, size, hash);
  through_a_file(bytes, size, hash);
  struct entry_header facts = {.threads = 1};
  EXPECT(entry_build(&facts, key, 0, cubin, 1, &unused, &size) != MOEFLOW_OK, "no key, no entry");
  EXPECT(entry_build(&facts, key, 1, cubin, 0, &unused, &size) != MOEFLOW_OK, "an empty cubin is never published");
  free(bytes);
  TEST_END;
}
