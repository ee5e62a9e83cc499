/* SHA-256 against published vectors (FIPS 180-4 examples, NIST's million a's) and every length across the block boundaries.
 */
#include "sha256.h"
#include "test.h"

static void expect_hash(const void *data, size_t bytes, const char *wanted) {
  uint8_t digest[32];
  char hex[65];
  sha256(data, bytes, digest);
  sha256_hex(digest, hex);
  EXPECT(!strcmp(hex, wanted), "%zu bytes: %s, wanted %s", bytes, hex, wanted);
}

static void test_vectors(void) {
  static char million[1000000];
  static const struct {
    const char *text, *hash;
  } vectors[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
  };
  for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
    expect_hash(vectors[i].text, strlen(vectors[i].text), vectors[i].hash);
  memset(million, 'a', sizeof million);
  expect_hash(million, sizeof million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Bytes (7 i + 3) mod 256, lengths 0 .. 299: the hash of all 300 digests in a row, made with another implementation. */
static void test_lengths(void) {
  uint8_t data[300], digests[300][32];
  for (int i = 0; i < 300; i++) data[i] = (uint8_t)(7 * i + 3);
  for (size_t length = 0; length < 300; length++) sha256(data, length, digests[length]);
  expect_hash(digests, sizeof digests, "7b074096cabb18dd0d1b468a173cb2f97f80e952525bca29542e606fd6d0753a");
}

static void test_pieces(void) {
  uint8_t data[200], whole[32], pieces[32];
  for (int i = 0; i < 200; i++) data[i] = (uint8_t)(31 * i);
  sha256(data, sizeof data, whole);
  for (size_t cut = 0; cut <= sizeof data; cut++) {
    struct sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, data, cut);
    sha256_add(&hash, data, 0);
    sha256_add(&hash, data + cut, sizeof data - cut);
    sha256_end(&hash, pieces);
    EXPECT(!memcmp(whole, pieces, 32), "cut at %zu", cut);
  }
}

int main(void) {
  test_vectors();
  test_lengths();
  test_pieces();
  TEST_END;
}
