/* The plan: round trip, look-ups, and every kind of damage: flips, cuts, and well-hashed texts that break a rule. */
#include "plan.h"
#include "sha256.h"
#include "status.h"
#include "test.h"

static struct plan base(void) {
  struct plan plan = {.arch = "sm_90a", .minimum_driver = 13000};
  plan.spec = (struct spec){
      .name = "m", .hidden = 64, .intermediate = 32, .experts = 8, .top_k = 2, .groups = 1, .top_groups = 1, .scale = 1};
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    int gemm = plan_is_gemm(kernel), experts = kernel == KERNEL_EXPERTS || kernel == KERNEL_EXPERTS_STREAM;
    for (int n = 0; n < (gemm ? 3 : 1); n++) {
      struct plan_variant *variant = &plan.variants[plan.variant_count++];
      *variant = (struct plan_variant){.kernel = kernel, .parts = 1, .residency = 1, .threads = gemm ? 128 : 256};
      for (int i = 0; i < 64; i++) variant->entry[i] = "0123456789abcdef"[(kernel + n + i) % 16];
      if (gemm) {
        variant->tile_tokens = 8 << (2 * n), variant->tile_rows = 64, variant->shared_bytes = 36864, variant->order_tag = 1;
        variant->tile_depth = 64, variant->stages = 4;
      }
      if (experts) variant->parts = 4 >> n, variant->residency = n ? 1 : 2, variant->order_tag = 4 * kernel - n;
    }
  }
  plan.bucket_count = 3;
  plan.buckets[0] = (struct plan_bucket){64, 0, 0, 1, 0};
  plan.buckets[1] = (struct plan_bucket){512, 1, 1, 0, 2};
  plan.buckets[2] = (struct plan_bucket){0, 2, 2, PLAN_NONE, 1};
  return plan;
}

static char text[PLAN_TEXT_MAX + 1];

static void write_base(void) {
  struct plan plan = base();
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
}

static void test_round_trip(void) {
  struct plan plan = base(), again;
  static char other[PLAN_TEXT_MAX + 1];
  char hex[65], wanted[65], name[160];
  uint8_t digest[32];
  write_base();
  EXPECT(plan_parse(text, strlen(text), "p", &again) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(!memcmp(&plan, &again, sizeof plan), "what was read differs");
  EXPECT(plan_write(&again, other, sizeof other) == MOEFLOW_OK && !strcmp(text, other), "%s", other);
  sha256(text, strlen(text), digest);
  sha256_hex(digest, wanted);
  plan_hash(&plan, hex);
  EXPECT(!strcmp(hex, wanted), "%s, wanted %s", hex, wanted);
  spec_hash(&plan.spec, hex);
  plan_file_name(&plan, name);
  snprintf(other, sizeof other, "m.bf16.sm_90a.%.16s.plan", hex);
  EXPECT(!strcmp(name, other), "%s, wanted %s", name, other);
  EXPECT(plan_write(&plan, other, strlen(text) + 1) == MOEFLOW_OK, "a buffer that just fits");
  EXPECT(plan_write(&plan, other, strlen(text)) == MOEFLOW_ERROR_INTERNAL, "a buffer one byte short");
}

static void test_fullest(void) {
  struct plan plan = base(), again;
  while (plan.variant_count < PLAN_VARIANTS_MAX) plan.variants[plan.variant_count++] = plan.variants[0];
  plan.bucket_count = PLAN_BUCKETS_MAX;
  for (int i = 0; i < PLAN_BUCKETS_MAX; i++)
    plan.buckets[i] = (struct plan_bucket){i == PLAN_BUCKETS_MAX - 1 ? 0 : 2147483600 + i, 2, 2, 2, 2};
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_parse(text, strlen(text), "p", &again) == MOEFLOW_OK && !memcmp(&plan, &again, sizeof plan), "%s",
         moeflow_last_error());
}

static void test_look_up(void) {
  struct plan plan = base();
  static const struct {
    int64_t rows;
    int bucket;
  } cases[] = {{0, 0}, {1, 0}, {64, 0}, {65, 1}, {512, 1}, {513, 2}, {2147483648, 2}, {INT64_MAX, 2}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    EXPECT(plan_bucket_for(&plan, cases[i].rows) == &plan.buckets[cases[i].bucket], "%lld rows", (long long)cases[i].rows);
  }
  EXPECT(plan_variant(&plan, KERNEL_GATE_UP, 2)->tile_tokens == 128, "gate_up 2");
  EXPECT(plan_variant(&plan, KERNEL_DOWN, 0)->kernel == KERNEL_DOWN, "down 0");
  EXPECT(!plan_variant(&plan, KERNEL_DOWN, 3) && !plan_variant(&plan, KERNEL_DOWN, -1), "no such variants");
}

static void expect_refused(const char *bytes, size_t length, const char *what, const char *says) {
  struct plan plan;
  EXPECT(plan_parse(bytes, length, "here", &plan) == MOEFLOW_ERROR_FORMAT, "accepted: %s", what);
  EXPECT(!strncmp(moeflow_last_error(), "here:", 5) && (!says || strstr(moeflow_last_error(), says)), "%s: %s", what,
         moeflow_last_error());
}

static void test_damage(void) {
  char what[64];
  write_base();
  size_t length = strlen(text);
  for (size_t i = 0; i < length; i++) {
    for (int bit = 0; bit < 8; bit++) {
      snprintf(what, sizeof what, "bit %d of byte %zu flipped", bit, i);
      text[i] ^= (char)(1 << bit);
      expect_refused(text, length, what, i < length - 70 && text[i] ? "damaged" : NULL); /* 70: the hash line */
      text[i] ^= (char)(1 << bit);
    }
    snprintf(what, sizeof what, "cut to %zu bytes", i);
    expect_refused(text, i, what, NULL);
  }
  text[length] = 'x';
  expect_refused(text, length + 1, "one byte more", NULL);
  static char large[PLAN_TEXT_MAX + 2];
  memset(large, 'a', sizeof large);
  expect_refused(large, sizeof large, "too large", NULL);
}

/* The text of `body` with a hash line that fits it. */
static size_t sign(const char *body, char *signed_text) {
  uint8_t digest[32];
  char hex[65];
  sha256(body, strlen(body), digest);
  sha256_hex(digest, hex);
  return (size_t)sprintf(signed_text, "%send %s\n", body, hex);
}

static void test_rules(void) {
  static const struct {
    const char *find, *put, *says;
  } edits[] = {
      {"moeflow-plan 3", "moeflow-plan 2", "plan version 2; this library reads version 3"},
      {"moeflow-plan 3", "moeflow-plan 4", "version 4"},
      {"arch sm_90a", "arch sm_90a/../x", "arch"},
      {"arch sm_90a", "arch compute_90", "arch"},
      {"arch sm_90a", "arch sm_90000000000000", "arch"},
      {"minimum_driver 13000", "minimum_driver 0x32c8", "minimum_driver"},
      {"minimum_driver 13000", "minimum_driver 2147483648", "too large"},
      {"minimum_driver 13000", "minimum_driver 13000 1", "more text"},
      {"spec 22", "spec 21", "21"},
      {"hidden 64", "hidden 63", "multiple of 8"},
      {"hidden 64", "hidden 064", "leading zero"},
      {"hidden 64\n", "hidden 64\nhidden 64\n", "intermediate"},
      {"kernel router", "kernel routers", "not a kernel"},
      {"kernel router ", "kernel router  ", "hash"},
      {"kernel router ", "kernel router A", "hash"},
      {"threads=128", "threads=100", "warps"},
      {"threads=128", "threads=0", "32 to 1024"},
      {"threads=128", "threads=2048", "32 to 1024"},
      {"threads=128", "threads=128 color=1", "shared"},
      {"order_tag=1\n", "order_tag=1 color=1\n", "color=1 is not a known key"},
      {"tile_tokens=8 ", "", "tile_tokens"},
      {"tile_tokens=8", "tile_tokens=08", "leading zero"},
      {"tile_tokens=8", "tile_tokens=0", "GEMMs have all of them"},
      {"tile_tokens=0", "tile_tokens=8", "other kernels none"},
      {"tile_depth=64", "tile_depth=0", "GEMMs have all of them"},
      {"tile_depth=64", "tile_depth=2048", "0 to 1024"},
      {"tile_depth=64 ", "", "tile_depth is not where"},
      {"stages=4", "stages=0", "GEMMs have all of them"},
      {"stages=4", "stages=65", "0 to 64"},
      {"stages=0", "stages=2", "other kernels none"},
      {"parts=4", "parts=9", "1 to 8"},
      {"parts=4", "parts=0", "1 to 8"},
      {"parts=4", "parts=x", "parts"},
      {"parts=1", "parts=2", "only experts"},
      {"residency=2", "residency=3", "1 to 2"},
      {"residency=2", "residency=0", "1 to 2"},
      {"residency=1", "residency=2", "only experts"},
      {"residency=2 ", "", "residency is not where"},
      {"shared=36864", "shared=99999999", "shared"},
      {"bucket 64", "bucket 512", "ascend"},
      {"bucket 64", "bucket 0", "last one"},
      {"bucket 0", "bucket 1024", "last one"},
      {"bucket 0 gate_up=2 down=2 experts_stream=1\n", "", "last one"},
      {"bucket 64 gate_up=0", "bucket 64 gate_up=3", "no variant"},
      {"bucket 64 gate_up=0 down=0", "bucket 64 gate_up=0 down=1", "must be equal"},
      {"bucket 64 gate_up=0 down=0", "bucket 64 gate_up=0 down=0 x=1", "not a known key"},
      {"experts=1", "experts=3", "bucket 0 names experts 3"},
      {"experts=1", "experts=-1", "experts"},
      {"experts=1", "experts=", "experts"},
      {"experts=1", "expert=1", "not a known key"},
      {"experts=1 experts_stream=0", "experts_stream=0 experts=1", "not a known key"},
      {"experts=1", "experts=1 experts=1", "not a known key"},
      {"experts_stream=0", "experts_stream=3", "bucket 0 names experts_stream 3"},
      {" experts_stream=0", "", "packed weights need it in all"},
      {" experts_stream=1\n", "\n", "packed weights need it in all"},
      {"bucket 64 gate_up=0 down=0", "bucket 99999999999 gate_up=0 down=0", "too large"},
      {"bucket 64", "color 1\nbucket 64", "neither"},
      {"bucket 64", "\nbucket 64", "neither"},
  };
  static char body[PLAN_TEXT_MAX], signed_text[PLAN_TEXT_MAX + 128];
  write_base();
  *strstr(text, "end ") = 0;
  for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
    const char *at = strstr(text, edits[i].find);
    EXPECT(at, "the plan has no '%s'", edits[i].find);
    if (!at) continue;
    snprintf(body, sizeof body, "%.*s%s%s", (int)(at - text), text, edits[i].put, at + strlen(edits[i].find));
    expect_refused(signed_text, sign(body, signed_text), edits[i].put, edits[i].says);
  }
  expect_refused(signed_text, sign("", signed_text), "empty", NULL);
  expect_refused(signed_text, sign("\n", signed_text), "a line", NULL);
}

static void test_missing_kernels(void) {
  static char signed_text[PLAN_TEXT_MAX + 128], body[PLAN_TEXT_MAX];
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    char line[64];
    write_base();
    *strstr(text, "end ") = 0;
    strcpy(body, text);
    snprintf(line, sizeof line, "kernel %s ", kernel_names[kernel]);
    for (char *at; (at = strstr(body, line));) {
      char *rest = strchr(at, '\n') + 1;
      memmove(at, rest, strlen(rest) + 1);
    }
    expect_refused(signed_text, sign(body, signed_text), line, kernel_names[kernel]);
  }
  struct plan plan = base(), again;
  for (int i = 0; i < 3; i++) plan.buckets[i].experts = plan.buckets[i].experts_stream = PLAN_NONE;
  plan.variant_count = 0; /* no experts, and nothing to pack for */
  for (int i = 0; i < base().variant_count; i++) {
    const struct plan_variant variant = base().variants[i];
    if (variant.kernel >= KERNEL_EXPERTS && variant.kernel <= KERNEL_PACK_WEIGHTS) continue;
    plan.variants[plan.variant_count++] = variant;
  }
  memset(plan.variants + plan.variant_count, 0, sizeof *plan.variants * (size_t)(PLAN_VARIANTS_MAX - plan.variant_count));
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_OK && !strstr(text, "experts="), "%s", moeflow_last_error());
  EXPECT(plan_parse(text, strlen(text), "p", &again) == MOEFLOW_OK && !memcmp(&plan, &again, sizeof plan), "%s",
         moeflow_last_error());
  plan = base();
  plan.spec.reduce = SPEC_REDUCE_CHOICES; /* has no partial sums to add around a ring */
  for (int i = 0; i < plan.variant_count; i++) {
    if (plan.variants[i].kernel == KERNEL_COMBINE_RING) plan.variants[i].kernel = KERNEL_COMBINE;
  }
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(plan_parse(text, strlen(text), "p", &again) == MOEFLOW_OK, "%s", moeflow_last_error());
}

static void expect_invariant(const struct plan *plan, int invariant, const char *what) {
  const moeflow_status status = plan_write(plan, text, sizeof text);
  EXPECT((status == MOEFLOW_OK) == invariant, "%s: %s", what, invariant ? moeflow_last_error() : "written");
  if (!invariant) EXPECT(strstr(moeflow_last_error(), "order tag"), "%s: %s", what, moeflow_last_error());
}

static void test_batch_invariant(void) {
  static const struct {
    int32_t experts[3], experts_stream[3], down_tag; /* of the last down variant */
    int invariant;
    const char *what;
  } cases[] = {
      {{-1, -1, -1}, {-1, -1, -1}, 1, 1, "the portable form alone"},
      {{-1, -1, -1}, {-1, -1, -1}, 2, 0, "another tag of down"},
      {{1, 1, 1}, {-1, -1, -1}, 1, 1, "one experts variant"},
      {{1, 1, 0}, {-1, -1, -1}, 1, 0, "experts of two tags"},
      {{1, 1, -1}, {-1, -1, -1}, 1, 0, "experts, then the portable form"},
      {{1, 1, 1}, {2, 2, 2}, 1, 1, "and one experts_stream variant"},
      {{1, 1, 1}, {2, 1, 2}, 1, 0, "experts_stream of two tags"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct plan plan = base();
    for (int j = 0; j < 3; j++) {
      plan.buckets[j].experts = cases[i].experts[j];
      plan.buckets[j].experts_stream = cases[i].experts_stream[j];
    }
    ((struct plan_variant *)plan_variant(&plan, KERNEL_DOWN, 2))->order_tag = cases[i].down_tag;
    expect_invariant(&plan, 1, cases[i].what); /* the model does not ask for it */
    plan.spec.batch_invariant = 1;
    expect_invariant(&plan, cases[i].invariant, cases[i].what);
  }
}

static void test_write_checks(void) {
  struct plan plan = base();
  plan.variants[0].entry[0] = 0;
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_ERROR_INTERNAL, "an entry without a hash is written");
  plan = base();
  plan.variants[0].kernel = KERNEL_COUNT;
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_ERROR_INTERNAL, "an unknown kernel is written");
  plan = base();
  memset(plan.arch, 'a', sizeof plan.arch);
  EXPECT(plan_write(&plan, text, sizeof text) == MOEFLOW_ERROR_INTERNAL, "an arch without an end is written");
}

int main(void) {
  test_round_trip();
  test_fullest();
  test_look_up();
  test_damage();
  test_rules();
  test_missing_kernels();
  test_batch_invariant();
  test_write_checks();
  TEST_END;
}
