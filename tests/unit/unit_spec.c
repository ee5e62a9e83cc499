/* The spec: round trip of its text, every rule with both sides of its boundary, strict reading, sizes around 2^31. */
#include "spec.h"
#include "status.h"
#include "test.h"

static struct spec base(void) {
  return (struct spec){.name = "glm-5.3-flash",
                       .hidden = 4096,
                       .intermediate = 2048,
                       .experts = 288,
                       .top_k = 8,
                       .activation = SPEC_SWIGLU_CLAMP,
                       .activation_limit = 10,
                       .score = SPEC_SIGMOID,
                       .correction_bias = 1,
                       .groups = 1,
                       .top_groups = 1,
                       .group_score = SPEC_GROUP_TOP2,
                       .renormalize = SPEC_SUM_1E_20,
                       .scale = 2.5,
                       .shared_experts = 1,
                       .shared_intermediate = 2048};
}

static const char base_text[] =
    "name glm-5.3-flash\nhidden 4096\nintermediate 2048\nexperts 288\ntop_k 8\nactivation swiglu_clamp\nactivation_limit "
    "10\n"
    "score sigmoid\ncorrection_bias true\ngroups 1\ntop_groups 1\ngroup_score top2\nrenormalize sum_1e-20\nscale 2.5\n"
    "scale_on weights\nshared_experts 1\nshared_intermediate 2048\ndtype bf16\ndispatch bf16\nreturn bf16\nreduce owner\n"
    "batch_invariant false\n";

static void test_round_trip(void) {
  struct spec spec = base(), again;
  char text[SPEC_TEXT_MAX], other[SPEC_TEXT_MAX];
  EXPECT(spec_write(&spec, text) == MOEFLOW_OK && !strcmp(text, base_text), "%s", text);
  EXPECT(spec_parse(text, "t", &again) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(spec_write(&again, other) == MOEFLOW_OK && !strcmp(text, other), "%s", other);
  /* the longest text there can be */
  spec = (struct spec){.hidden = 65536,
                       .intermediate = 65536,
                       .experts = 4096,
                       .top_k = 32,
                       .activation = SPEC_SWIGLU_CLAMP,
                       .activation_limit = 123456.789,
                       .score = SPEC_SIGMOID,
                       .correction_bias = 1,
                       .groups = 2048,
                       .top_groups = 2048,
                       .group_score = SPEC_GROUP_TOP2,
                       .renormalize = SPEC_MAX_1E_12,
                       .scale = 1.0 / 3,
                       .scale_on = SPEC_SCALE_OUTPUT,
                       .shared_experts = 64,
                       .shared_intermediate = 65536,
                       .dtype = SPEC_FP8_W8A8,
                       .dispatch = SPEC_WIRE_FP8,
                       .returned = SPEC_WIRE_FP32,
                       .reduce = SPEC_REDUCE_CHOICES,
                       .batch_invariant = 1};
  memset(spec.name, 'z', SPEC_NAME_MAX);
  EXPECT(spec_write(&spec, text) == MOEFLOW_OK && spec_parse(text, "t", &again) == MOEFLOW_OK, "%s", moeflow_last_error());
  spec.scale = 0.333333333; /* what its text says */
  EXPECT(!memcmp(&spec, &again, sizeof spec), "%s", text);
}

/* One change to the base, and the key to blame; "" = still legal. */
struct change {
  const char *field, *blamed;
  double value;
  const char *also; /* a second change */
  double also_value;
};

static void apply(struct spec *spec, const char *key, double value) {
  if (!key) return;
  const struct spec_field *field = spec_field(key);
  void *target = (char *)spec + field->offset;
  if (field->kind == SPEC_REAL) {
    *(double *)target = value;
  } else {
    *(int32_t *)target = (int32_t)value;
  }
}

static void test_rules(void) {
  static const struct change changes[] = {
      {"hidden", "hidden", 0, NULL, 0},
      {"hidden", "", 8, NULL, 0},
      {"hidden", "hidden", 4100, NULL, 0},
      {"hidden", "", 65536, NULL, 0},
      {"hidden", "hidden", 65544, NULL, 0},
      {"hidden", "hidden", -8, NULL, 0},
      {"hidden", "", 2880, NULL, 0},
      {"intermediate", "intermediate", 1412, NULL, 0},
      {"intermediate", "", 1408, NULL, 0},
      {"intermediate", "intermediate", 0, NULL, 0},
      {"intermediate", "intermediate", 2147483647, NULL, 0},
      {"experts", "", 4096, NULL, 0},
      {"experts", "experts", 4097, NULL, 0},
      {"experts", "experts", 0, NULL, 0},
      {"experts", "", 8, NULL, 0},
      {"experts", "top_k", 7, NULL, 0},
      {"top_k", "top_k", 0, NULL, 0},
      {"top_k", "", 1, NULL, 0},
      {"top_k", "", 32, NULL, 0},
      {"top_k", "top_k", 33, NULL, 0},
      {"groups", "groups", 0, NULL, 0},
      {"groups", "groups", 5, NULL, 0},
      {"groups", "", 6, NULL, 0},
      {"groups", "groups", 576, NULL, 0},
      {"top_groups", "top_groups", 2, NULL, 0},
      {"top_groups", "", 2, "groups", 2},
      {"groups", "group_score", 288, "top_groups", 288},
      {"groups", "top_k", 72, NULL, 0}, /* groups of 4, one kept: 4 experts for 8 choices */
      {"groups", "", 72, "top_groups", 2},
      {"groups", "", 36, NULL, 0}, /* exactly 8 */
      {"activation_limit", "activation", 0, NULL, 0},
      {"activation_limit", "activation_limit", -1, NULL, 0},
      {"activation_limit", "activation_limit", 1000001, NULL, 0},
      {"activation", "activation", SPEC_SWIGLU, NULL, 0},
      {"activation", "", SPEC_SWIGLU, "activation_limit", 0},
      {"activation", "activation", 2, NULL, 0},
      {"score", "score", 2, NULL, 0},
      {"score", "score", -1, NULL, 0},
      {"correction_bias", "correction_bias", 2, NULL, 0},
      {"renormalize", "renormalize", 4, NULL, 0},
      {"scale", "scale", 0, NULL, 0},
      {"scale", "", 0.001, NULL, 0},
      {"scale", "scale", 1000.5, NULL, 0},
      {"scale", "scale", 0.0 / 0.0, NULL, 0},
      {"shared_experts", "shared_experts", 0, NULL, 0},
      {"shared_experts", "", 0, "shared_intermediate", 0},
      {"shared_intermediate", "shared_experts", 0, NULL, 0},
      {"shared_experts", "shared_experts", 65, NULL, 0},
      {"dtype", "dtype", 3, NULL, 0},
      {"dtype", "", SPEC_FP8_W8A16, NULL, 0},
      {"dispatch", "dispatch", SPEC_WIRE_FP8, NULL, 0},
      {"dispatch", "", SPEC_WIRE_FP8, "dtype", SPEC_FP8_W8A8},
      {"dispatch", "dispatch", SPEC_WIRE_FP8, "dtype", SPEC_FP8_W8A16},
      {"dispatch", "dispatch", SPEC_WIRE_FP32, NULL, 0},
      {"return", "return", SPEC_WIRE_FP8, NULL, 0},
      {"return", "", SPEC_WIRE_FP32, NULL, 0},
      {"reduce", "reduce", 2, NULL, 0},
      {"batch_invariant", "batch_invariant", -1, NULL, 0}};
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    const char *key = "";
    struct spec spec = base();
    apply(&spec, changes[i].field, changes[i].value);
    apply(&spec, changes[i].also, changes[i].also_value);
    moeflow_status status = spec_check_field(&spec, &key);
    if (status == MOEFLOW_OK) key = "";
    EXPECT(!strcmp(key, changes[i].blamed), "%s = %g: blamed '%s', wanted '%s': %s", changes[i].field, changes[i].value, key,
           changes[i].blamed, status == MOEFLOW_OK ? "" : moeflow_last_error());
    EXPECT(status == MOEFLOW_OK || strstr(moeflow_last_error(), key), "message without the key: %s", moeflow_last_error());
  }
}

static void test_messages(void) {
  static const struct {
    const char *field;
    double value;
    const char *says;
  } cases[] = {{"hidden", 4100, "nearest is 4104"},
               {"hidden", 4099, "nearest is 4096"},
               {"intermediate", 12, "nearest is 16"},
               {"groups", 7, "7, which does not divide the 288 experts"},
               {"experts", 7, "8, more than the 7 experts there are"},
               {"hidden", 70000, "70000; it must be 8 to 65536"},
               {"top_k", 64, "64; it must be 1 to 32"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct spec spec = base();
    apply(&spec, cases[i].field, cases[i].value);
    EXPECT(spec_check(&spec) == MOEFLOW_ERROR_ARGUMENT && strstr(moeflow_last_error(), cases[i].says), "%s",
           moeflow_last_error());
  }
}

static void test_names(void) {
  static const char *const good[] = {"a", "0", "glm-5.3-flash", "a_b.c-d", "a..b"};
  static const char *const bad[] = {"", ".a", "-a", "_a", "A", "a b", "a/b", "../x", "a\n", "a\"b", "\xc3\xa9", "a%s`id`"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    struct spec spec = base();
    strcpy(spec.name, good[i]);
    EXPECT(spec_check(&spec) == MOEFLOW_OK, "%s: %s", good[i], moeflow_last_error());
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct spec spec = base();
    strcpy(spec.name, bad[i]);
    EXPECT(spec_check(&spec) == MOEFLOW_ERROR_ARGUMENT, "'%s' is accepted", bad[i]);
  }
  struct spec spec = base();
  memset(spec.name, 'a', sizeof spec.name); /* no NUL */
  EXPECT(spec_check(&spec) == MOEFLOW_ERROR_ARGUMENT, "65 characters are accepted");
}

static void expect_refused(const char *text) {
  struct spec spec;
  EXPECT(spec_parse(text, "here", &spec) == MOEFLOW_ERROR_FORMAT, "accepted: %s", text);
  EXPECT(!strncmp(moeflow_last_error(), "here:", 5), "%s", moeflow_last_error());
}

static void test_strict(void) {
  static const struct {
    const char *find, *put;
  } edits[] = {{"hidden 4096", "hidden 04096"},
               {"hidden 4096", "hidden +4096"},
               {"hidden 4096", "hidden 4096 "},
               {"hidden 4096", "hidden  4096"},
               {"hidden 4096", "hidden 4100"},
               {"hidden 4096", "hidden 99999999999"},
               {"hidden 4096", "hidden 4294971392"},
               {"hidden 4096", "hiden 4096"},
               {"hidden 4096\n", ""},
               {"hidden 4096\n", "hidden 4096\nhidden 4096\n"},
               {"hidden 4096\nintermediate 2048", "intermediate 2048\nhidden 4096"},
               {"hidden 4096\n", "hidden 4096\r\n"},
               {"scale 2.5", "scale 2.50"},
               {"scale 2.5", "scale 2,5"},
               {"scale 2.5", "scale 25e-1"},
               {"scale 2.5", "scale 0"},
               {"limit 10", "limit 10.0"},
               {"bias true", "bias yes"},
               {"bias true", "bias 1"},
               {"score sigmoid", "score Sigmoid"},
               {"dtype bf16", "dtype fp4"},
               {"return bf16", "return fp8"},
               {"top_k 8", "top_k 300"},
               {"invariant false\n", "invariant false"},
               {"invariant false\n", "invariant false\n\n"},
               {"invariant false\n", "invariant false\nx 1\n"},
               {"name glm", "name ../glm"},
               {"name glm", "name aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaglm"}};
  for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
    char text[SPEC_TEXT_MAX];
    const char *at = strstr(base_text, edits[i].find);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - base_text), base_text, edits[i].put, at + strlen(edits[i].find));
    expect_refused(text);
  }
  for (size_t length = 0; length < sizeof base_text - 1; length++) {
    char text[SPEC_TEXT_MAX];
    snprintf(text, sizeof text, "%.*s", (int)length, base_text);
    expect_refused(text);
  }
}

/* The hash sees every field. */
static void test_hash(void) {
  char hashes[SPEC_FIELDS + 1][65];
  for (int i = 0; i <= SPEC_FIELDS; i++) {
    struct spec spec = base();
    if (i > 0 && spec_fields[i - 1].kind == SPEC_NAME) {
      spec.name[0] = 'x';
    } else if (i > 0 && spec_fields[i - 1].kind == SPEC_REAL) {
      *(double *)((char *)&spec + spec_fields[i - 1].offset) += 0.001;
    } else if (i > 0) {
      int32_t *value = (int32_t *)((char *)&spec + spec_fields[i - 1].offset);
      *value = *value == 1 && spec_fields[i - 1].kind != SPEC_INTEGER ? 0 : *value + 1;
    }
    spec_hash(&spec, hashes[i]);
    for (int j = 0; j < i; j++) EXPECT(strcmp(hashes[i], hashes[j]), "fields %d and %d give the same hash", i - 1, j - 1);
  }
}

static void test_sizes(void) {
  struct spec spec = base();
  EXPECT(spec_row_bytes(&spec) == 8320 && spec_return_row_bytes(&spec) == 8192 && spec_return_rows_per_token(&spec) == 1,
         "rows");
  EXPECT(spec_gate_up_bytes(&spec) == 33554432 && spec_down_bytes(&spec) == 16777216, "weights");
  spec.returned = SPEC_WIRE_FP32;
  spec.reduce = SPEC_REDUCE_CHOICES;
  EXPECT(spec_return_row_bytes(&spec) == 16384 && spec_return_rows_per_token(&spec) == 8, "rows");
  spec.dtype = SPEC_FP8_W8A8;
  spec.dispatch = SPEC_WIRE_FP8;
  EXPECT(spec_row_bytes(&spec) == 128 + 4096 + 128, "%lld", (long long)spec_row_bytes(&spec));
  EXPECT(spec_gate_up_bytes(&spec) == 16777216 + 32 * 32 * 4, "%lld", (long long)spec_gate_up_bytes(&spec));
  spec.hidden = 2880; /* 22.5 blocks of 128 */
  EXPECT(spec_row_bytes(&spec) == 128 + 2944 + 128, "%lld", (long long)spec_row_bytes(&spec));
  EXPECT(spec_down_bytes(&spec) == 2880 * 2048 + 23 * 16 * 4, "%lld", (long long)spec_down_bytes(&spec));
  spec = base();
  spec.top_k = 22;
  spec.hidden = 1024;
  EXPECT(spec_row_bytes(&spec) == 256 + 2048, "%lld",
         (long long)spec_row_bytes(&spec)); /* 192 bytes of header, ids, weights */
  spec.hidden = 16384;
  spec.intermediate = 32768; /* gate_up: 2^31 bytes; 8 less: just below */
  EXPECT(spec_gate_up_bytes(&spec) == 2147483648, "%lld", (long long)spec_gate_up_bytes(&spec));
  spec.intermediate = 32760;
  EXPECT(spec_gate_up_bytes(&spec) == 2147483648 - 8LL * 2 * 16384 * 2, "%lld", (long long)spec_gate_up_bytes(&spec));
  spec.hidden = spec.intermediate = 65536;
  EXPECT(spec_gate_up_bytes(&spec) == 17179869184 && spec_down_bytes(&spec) == 8589934592, "largest");
}

static void test_dtype_names(void) {
  for (int32_t dtype = SPEC_BF16; dtype <= SPEC_FP8_W8A16; dtype++) {
    int32_t again = -1;
    EXPECT(!spec_dtype_from_name(spec_dtype_name(dtype), &again) && again == dtype, "%d", dtype);
  }
  int32_t same = 7;
  EXPECT(spec_dtype_from_name("fp4", &same) == -1 && same == 7, "fp4");
  EXPECT(!strcmp(spec_dtype_name(99), "unknown"), "99");
}

int main(void) {
  test_round_trip();
  test_rules();
  test_messages();
  test_names();
  test_strict();
  test_hash();
  test_sizes();
  test_dtype_names();
  TEST_END;
}
