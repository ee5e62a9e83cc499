/* The model reader: what good files mean, where and how bad ones are refused, overrides, and that garbage never crashes it.
 */
#include <time.h>
#include <unistd.h>

#include "model.h"
#include "number.h"
#include "status.h"
#include "test.h"

static const char base_text[] =
    "moeflow: 1\n"                                              /* 1 */
    "name: base\n"                                              /* 2 */
    "hidden: 4096\n"                                            /* 3 */
    "intermediate: 2048\n"                                      /* 4 */
    "experts: 64\n"                                             /* 5 */
    "top_k: 6\n"                                                /* 6 */
    "activation: swiglu\n"                                      /* 7 */
    "router: {score: softmax, renormalize: true, scale: 1.0}\n" /* 8 */
    "weights: {dtype: bf16}\n"                                  /* 9 */
    "deploy: {ep: 4, capacity: 128, arch: [sm_90a]}\n";         /* 10 */

static char text[200000];

/* The base with the first `find` replaced; an empty `find` appends. */
static size_t edit(const char *find, const char *put) {
  const char *at = *find ? strstr(base_text, find) : base_text + strlen(base_text);
  if (!at) abort();
  return (size_t)snprintf(text, sizeof text, "%.*s%s%s", (int)(at - base_text), base_text, put, at + strlen(find));
}

/* ---- Good files ---- */

static void test_good(void) {
  static const struct {
    const char *find, *put, *key, *value; /* a field of the canonical text */
  } cases[] = {
      {"base", "base", "hidden", "4096"},
      {"base", "\"a-b\"", "name", "a-b"},
      {"base", "'5'", "name", "5"},
      {"hidden: 4096", "hidden: 7168\ndispatch_hidden: 3584", "hidden", "3584"},
      {"hidden: 4096", "dispatch_hidden: 3584\nhidden: 7168", "hidden", "3584"},
      {"hidden: 4096", "\"hidden\": 4096 # a comment: [[[[[[[[[[", "hidden", "4096"},
      {"activation: swiglu", "activation: {kind: swiglu_clamp, limit: 10.0}", "activation_limit", "10"},
      {"activation: swiglu", "activation: {kind: swiglu_clamp, limit: 7}", "activation", "swiglu_clamp"},
      {"activation: swiglu", "activation:\n  kind: swiglu", "activation", "swiglu"},
      {"renormalize: true", "renormalize: true", "renormalize", "sum_1e-20"},
      {"renormalize: true", "renormalize: false", "renormalize", "none"},
      {"renormalize: true, ", "", "renormalize", "none"},
      {"renormalize: true", "renormalize: {guard: sum_1e-20}", "renormalize", "sum_1e-20"},
      {"renormalize: true", "renormalize: {guard: sum_1e-6}", "renormalize", "sum_1e-6"},
      {"renormalize: true", "renormalize: {guard: max_1e-12}", "renormalize", "max_1e-12"},
      {"scale: 1.0", "scale: 2.827", "scale", "2.827"},
      {"scale: 1.0", "scale: {value: 2.5, on: output}", "scale_on", "output"},
      {"scale: 1.0", "scale: {value: 2.5}", "scale_on", "weights"},
      {", scale: 1.0", "", "scale", "1"},
      {"scale: 1.0", "scale: 0.3333333333333333", "scale", "0.333333333"},
      {"softmax", "sigmoid, correction_bias: true", "group_score", "top2"},
      {"softmax", "sigmoid, correction_bias: true, group_score: max", "group_score", "max"},
      {"softmax", "sigmoid, correction_bias: false", "group_score", "max"},
      {"softmax", "softmax, groups: 8, top_groups: 4", "top_groups", "4"},
      {"weights: {dtype: bf16}", "weights: {dtype: fp8_e4m3}", "dtype", "fp8_w8a8"},
      {"weights: {dtype: bf16}", "weights: {dtype: fp8_e4m3, block: [128, 128], activations: bf16}", "dtype", "fp8_w8a16"},
      {"weights: {dtype: bf16}", "weights: {dtype: fp8_e4m3}\ndispatch: fp8", "dispatch", "fp8"},
      {"deploy", "return: fp32\ndeploy", "return", "fp32"},
      {"deploy", "reduce: choices\ndeploy", "reduce", "choices"},
      {"deploy", "shared_experts: {count: 2, intermediate: 1408}\ndeploy", "shared_intermediate", "1408"},
      {"deploy: {ep: 4, capacity: 128, arch: [sm_90a]}\n", "", "batch_invariant", "false"},
      {"arch: [sm_90a]", "batch_invariant: true", "batch_invariant", "true"},
      {"moeflow: 1\n", "---\nmoeflow: 1\n", "name", "base"},
      {"moeflow: 1\n", "# \xc3\xa9t\xc3\xa9\r\n\r\nmoeflow: 1\r\n", "name", "base"},
      {"ep: 4", "ep: 64", "experts", "64"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct model model;
    char canonical[SPEC_TEXT_MAX], line[160];
    size_t length = edit(cases[i].find, cases[i].put);
    moeflow_status status = model_parse(text, length, "f", &model);
    EXPECT(status == MOEFLOW_OK, "%s: %s", cases[i].put, moeflow_last_error());
    if (status != MOEFLOW_OK || spec_write(&model.spec, canonical) != MOEFLOW_OK) continue;
    snprintf(line, sizeof line, "\n%s %s\n", cases[i].key, cases[i].value);
    memmove(canonical + 1, canonical, strlen(canonical) + 1), canonical[0] = '\n';
    EXPECT(strstr(canonical, line), "%s: no line `%s %s` in %s", cases[i].put, cases[i].key, cases[i].value, canonical);
  }
}

static void test_deploy(void) {
  struct model model;
  size_t length = edit("deploy: {ep: 4, capacity: 128, arch: [sm_90a]}\n", "");
  EXPECT(model_parse(text, length, "f", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(model.deploy.ep == 1 && model.deploy.capacity == 128 && model.deploy.arch_count == 1, "defaults");
  EXPECT(!strcmp(model.deploy.arch[0]->name, "sm_90a"), "%s", model.deploy.arch[0]->name);
  length = edit("[sm_90a]", "[sm_80, sm_100a]");
  EXPECT(model_parse(text, length, "f", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(model.deploy.ep == 4 && model.deploy.arch_count == 2, "ep %d", model.deploy.ep);
  EXPECT(!strcmp(model.deploy.arch[1]->name, "sm_100a"), "%s", model.deploy.arch[1]->name);
  length = edit("hidden: 4096", "hidden: 7168\ndispatch_hidden: 3584");
  EXPECT(model_parse(text, length, "f", &model) == MOEFLOW_OK && model.hidden == 7168 && model.spec.hidden == 3584,
         "latent");
}

/* ---- Bad files: where, and what the message says ---- */

struct bad {
  const char *find, *put;
  int line, column;
  const char *says;
};

static void expect_refused(const char *bytes, size_t length, int line, int column, const char *says) {
  struct model model;
  char start[64];
  snprintf(start, sizeof start, "f.yaml:%d:%d: ", line, column);
  moeflow_status status = model_parse(bytes, length, "f.yaml", &model);
  EXPECT(status == MOEFLOW_ERROR_FORMAT, "accepted, wanted `%s%s`: %.300s", start, says, bytes);
  if (status == MOEFLOW_OK) return;
  EXPECT(!strncmp(moeflow_last_error(), start, strlen(start)), "%s, wanted %s", moeflow_last_error(), start);
  EXPECT(strstr(moeflow_last_error(), says), "%s, wanted '%s'", moeflow_last_error(), says);
}

static void expect_all(const struct bad *cases, size_t count) {
  for (size_t i = 0; i < count; i++) {
    size_t length = edit(cases[i].find, cases[i].put);
    expect_refused(text, length, cases[i].line, cases[i].column, cases[i].says);
  }
}
#define EXPECT_ALL(cases) expect_all(cases, sizeof cases / sizeof *cases)

static void test_bad_numbers(void) {
  static const struct bad cases[] = {
      {"hidden: 4096", "hidden: 4e3", 3, 9, "exponent"},
      {"hidden: 4096", "hidden: 0o10000", 3, 9, "base prefix"},
      {"hidden: 4096", "hidden: 0x1000", 3, 9, "base prefix"},
      {"hidden: 4096", "hidden: 04096", 3, 9, "leading zero"},
      {"hidden: 4096", "hidden: 4_096", 3, 9, "underscore"},
      {"hidden: 4096", "hidden: 4096.0", 3, 9, "fraction"},
      {"hidden: 4096", "hidden: +4096", 3, 9, "sign"},
      {"hidden: 4096", "hidden: -4096", 3, 9, "sign"},
      {"hidden: 4096", "hidden: 0", 3, 9, "8 to 65536"},
      {"hidden: 4096", "hidden: 7", 3, 9, "8 to 65536"},
      {"hidden: 4096", "hidden: 4100", 3, 9, "nearest is 4104"},
      {"hidden: 4096", "hidden: 65537", 3, 9, "8 to 65536"},
      {"hidden: 4096", "hidden: 2147483647", 3, 9, "out of range"},
      {"hidden: 4096", "hidden: 2147483648", 3, 9, "out of range"},
      {"hidden: 4096", "hidden: 4294971392", 3, 9, "out of range"}, /* 2^32 + 4096 */
      {"hidden: 4096", "hidden: 9223372036854775807", 3, 9, "out of range"},
      {"hidden: 4096", "hidden: 18446744073709555712", 3, 9, "out of range"}, /* 2^64 + 4096 */
      {"hidden: 4096", "hidden: 99999999999999999999999999999", 3, 9, "out of range"},
      {"hidden: 4096", "hidden:", 3, 8, "no value"},
      {"hidden: 4096", "hidden: ~", 3, 9, "'~'"},
      {"hidden: 4096", "hidden: null", 3, 9, "'null'"},
      {"hidden: 4096", "hidden: '4096'", 3, 9, "quotes"},
      {"hidden: 4096", "hidden: \"4096\"", 3, 9, "quotes"},
      {"hidden: 4096", "hidden: |\n  4096", 3, 9, "quotes"},
      {"hidden: 4096", "hidden: [4096]", 3, 9, "list"},
      {"hidden: 4096", "hidden: {a: 1}", 3, 9, "map"},
      {"hidden: 4096", "hidden: true", 3, 9, "not a number"},
      {"hidden: 4096", "hidden: 4096\ndispatch_hidden: 100", 4, 18, "nearest is 104"},
      {"scale: 1.0", "scale: 1e0", 8, 52, "exponent"},
      {"scale: 1.0", "scale: .5", 8, 52, "not a number"},
      {"scale: 1.0", "scale: 1.", 8, 52, "not a number"},
      {"scale: 1.0", "scale: -1.0", 8, 52, "sign"},
      {"scale: 1.0", "scale: 0", 8, 52, "0.001 to 1000"},
      {"scale: 1.0", "scale: 1000.1", 8, 52, "0.001 to 1000"},
      {"scale: 1.0", "scale: nan", 8, 52, "not a number"},
      {"scale: 1.0", "scale: {value: 1.0, on: input}", 8, 69, "weights | output"},
      {"scale: 1.0", "scale: {on: output}", 8, 52, "router.scale.value"},
      {"top_k: 6", "top_k: 0", 6, 8, "1 to 32"},
      {"top_k: 6", "top_k: 33", 6, 8, "1 to 32"},
      {"experts: 64\ntop_k: 6", "experts: 4\ntop_k: 6", 6, 8, "6, more than the 4 experts"},
      {"experts: 64", "experts: 4097", 5, 10, "1 to 4096"},
      {"moeflow: 1", "moeflow: 2", 1, 10, "must be 1"},
      {"activation: swiglu", "activation: silu", 7, 13, "config.json's 'silu' is swiglu here"},
      {"activation: swiglu", "activation: {kind: silu}", 7, 20, "config.json's 'silu' is swiglu here"},
      {"dtype: bf16", "dtype: bfloat16", 9, 18, "config.json's 'bfloat16' is bf16 here"},
      {"activation: swiglu", "activation: gelu", 7, 13, "must be swiglu | swiglu_clamp"},
  };
  EXPECT_ALL(cases);
}

static void test_bad_keys(void) {
  static const struct bad cases[] = {
      {"", "hiden: 4096\n", 11, 1, "did you mean 'hidden'"},
      {"", "hidden: 4096\n", 11, 1, "second time, first on line 3"},
      {"", "Hidden: 4096\n", 11, 1, "did you mean 'hidden'"},
      {"", "score: sigmoid\n", 11, 1, "did you mean 'router.score'"},
      {"", "norm_topk_prob: true\n", 11, 1, "config.json; here it is 'router.renormalize'"},
      {"", "quantization_config: x\n", 11, 1, "help model"},
      {"", "router.score: sigmoid\n", 11, 1, "unknown key"},
      {"", "<<: {hidden: 1}\n", 11, 1, "unknown key"},
      {"", "? [a]\n: 1\n", 11, 3, "plain word"},
      {"", "'': 1\n", 11, 1, "unknown key"},
      {"", "\"a\\0b\": 1\n", 11, 1, "NUL"},
      {"", "\"a\\x1b[0m\": 1\n", 11, 1, "a?[0m"},
      {"renormalize", "renormalise", 8, 26, "did you mean 'router.renormalize'"},
      {"renormalize", "norm", 8, 26, "did you mean 'router.renormalize'"},
      {"renormalize: true", "score: sigmoid", 8, 26, "second time"},
      {"dtype: bf16", "dtype: bf16, limit: 3", 9, 24, "unknown key 'weights.limit'"},
      {"hidden: 4096\n", "", 1, 1, "'hidden' is missing"},
      {"moeflow: 1\n", "", 1, 1, "'moeflow' is missing"},
      {"name: base\n", "", 1, 1, "'name' is missing"},
      {"intermediate: 2048\n", "", 1, 1, "'intermediate' is missing"},
      {"experts: 64\n", "", 1, 1, "'experts' is missing"},
      {"top_k: 6\n", "", 1, 1, "'top_k' is missing"},
      {"activation: swiglu\n", "", 1, 1, "'activation' is missing"},
      {"score: softmax, ", "", 8, 9, "'router.score' is missing"},
      {"router: {score: softmax, renormalize: true, scale: 1.0}\n", "", 1, 1, "'router' is missing"},
      {"{dtype: bf16}", "{}", 9, 10, "'weights.dtype' is missing"},
      {"weights: {dtype: bf16}\n", "", 1, 1, "'weights' is missing"},
      {"activation: swiglu", "activation: {limit: 1.0}", 7, 13, "'activation.kind' is missing"},
      {"", "shared_experts: {count: 1}\n", 11, 17, "'shared_experts.intermediate' is missing"},
      {"", "shared_experts: {}\n", 11, 17, "'shared_experts.count' is missing"},
  };
  EXPECT_ALL(cases);
}

static void test_bad_values(void) {
  static const struct bad cases[] = {
      {"base", "../../etc/passwd", 2, 7, "a-z, 0-9"},
      {"base", "Base", 2, 7, "a-z, 0-9"},
      {"base", "''", 2, 7, "a-z, 0-9"},
      {"base", "\"a\\nb\"", 2, 7, "a-z, 0-9"},
      {"base", "\xc3\xa9", 2, 7, "a-z, 0-9"},
      {"base", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 2, 7, "too long"},
      {"swiglu", "swishglu", 7, 13, "swiglu | swiglu_clamp"},
      {"swiglu", "SwiGLU", 7, 13, "swiglu | swiglu_clamp"},
      {"swiglu", "swiglu_clamp", 7, 13, "limit above 0"},
      {"swiglu", "{kind: swiglu, limit: 10.0}", 7, 20, "takes no limit"},
      {"swiglu", "{kind: swiglu_clamp, limit: 0.0}", 7, 20, "limit above 0"},
      {"swiglu", "{kind: swiglu_clamp, alpha: 1.7}", 7, 34, "unknown key"},
      {"swiglu", "[swiglu]", 7, 13, "list"},
      {"renormalize: true", "renormalize: yes", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: no", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: on", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: True", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: 1", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: 'true'", 8, 39, "quotes"},
      {"renormalize: true", "renormalize: none", 8, 39, "true | false"},
      {"renormalize: true", "renormalize: {guard: none}", 8, 47, "sum_1e-20"},
      {"softmax", "softmax, groups: 7", 8, 34, "does not divide"},
      {"softmax", "softmax, groups: 4, top_groups: 5", 8, 49, "more than the 4 groups"},
      {"softmax", "softmax, groups: 64, top_groups: 1", 6, 8, "more than the 1 experts"},
      {"softmax", "softmax, groups: 64, top_groups: 64, group_score: top2", 8, 67, "use max"},
      {"bf16", "fp8", 9, 18, "bf16 | fp8_e4m3"},
      {"bf16", "fp8_w8a8", 9, 18, "bf16 | fp8_e4m3"},
      {"bf16", "bf16, block: [128, 128]", 9, 31, "fp8_e4m3 weights"},
      {"bf16", "bf16, activations: fp8", 9, 37, "fp8_e4m3 weights"},
      {"bf16", "fp8_e4m3, block: [128]", 9, 35, "1 numbers"},
      {"bf16", "fp8_e4m3, block: [128, 64]", 9, 41, "[128, 128]"},
      {"bf16", "fp8_e4m3, block: [128, 128, 1]", 9, 46, "[128, 128]"},
      {"bf16", "fp8_e4m3, block: [[128], 128]", 9, 36, "[128, 128]"},
      {"", "dispatch: fp8\n", 11, 11, "fp8_w8a8"},
      {"", "dispatch: fp32\n", 11, 11, "bf16 or fp8"},
      {"", "return: fp8\n", 11, 9, "bf16 or fp32"},
      {"", "reduce: all\n", 11, 9, "owner | choices"},
      {"", "shared_experts: {count: 1, intermediate: 0}\n", 11, 25, "neither is"},
      {"ep: 4", "ep: 0", 10, 14, "1 to experts"},
      {"ep: 4", "ep: 65", 10, 14, "more ranks than the 64 experts"},
      {"capacity: 128", "capacity: 0", 10, 27, "1 to 1048576"},
      {"capacity: 128", "capacity: 1048577", 10, 27, "1 to 1048576"},
      {"[sm_90a]", "[sm_9000]", 10, 39, "known: sm_80"},
      {"[sm_90a]", "[sm_90a, sm_90a]", 10, 47, "twice"},
      {"[sm_90a]", "[]", 10, 38, "empty"},
      {"[sm_90a]", "sm_90a", 10, 38, "list"},
      {"[sm_90a]", "[[sm_90a]]", 10, 39, "names such as"},
      {"[sm_90a]", "[\"\\x1b]0;x\\a\"]", 10, 39, "?]0;x?"},
      {"{ep: 4, capacity: 128, arch: [sm_90a]}", "4", 10, 9, "single value"},
  };
  EXPECT_ALL(cases);
}

static void test_bad_yaml(void) {
  static const struct bad cases[] = {
      {"hidden: 4096", "hidden: &h 4096", 3, 9, "anchor"},
      {"hidden: 4096", "hidden: *h", 3, 9, "alias"},
      {"hidden: 4096", "hidden: !!int 4096", 3, 9, "tag"},
      {"hidden: 4096", "hidden: ! 4096", 3, 9, "tag"},
      {"name: base", "name:\tbase", 2, 6, "tab"},
      {"name: base", "\tname: base", 2, 1, "tab"},
      {"name: base", "name: \xc3\xa9\tx", 2, 8, "tab"}, /* columns are characters */
      {"name: base", "name: a\x01", 2, 8, "0x01"},
      {"name: base", "name: a\x7f", 2, 8, "0x7f"},
      {"name: base", "name: \xff\xfe", 2, 7, "not valid YAML"},
      {"name: base", "name: \xc0\xaf", 2, 7, "not valid YAML"},
      {"name: base", "name: [base", 3, 7, "not valid YAML"},
      {"name: base", "name: \"base", 11, 1, "not valid YAML"},
      {"name: base", "name: a: b", 2, 8, "not valid YAML"},
      {"name: base", "name: @base", 2, 7, "not valid YAML"},
      {"moeflow: 1", "\xef\xbb\xbfmoeflow: 1", 1, 1, "byte order mark"},
      {"moeflow: 1", "%YAML 1.1\n---\nmoeflow: 1", 1, 1, "directive"},
      {"", "---\nmoeflow: 1\n", 11, 1, "second document"},
      {"", "...\n---\n", 12, 1, "second document"},
  };
  EXPECT_ALL(cases);
  expect_refused("", 0, 1, 1, "empty");
  expect_refused("\n\n# nothing\n", 12, 1, 1, "empty");
  expect_refused("- 1\n- 2\n", 8, 1, 1, "list");
  expect_refused("moeflow", 7, 1, 1, "single value");
  expect_refused("a: \0b\n", 6, 1, 4, "0x00");
  expect_refused("a: &a [x, x]\nb: &b [*a, *a]\n", 28, 1, 4, "anchor");
  expect_refused(
      "\xff\xfe"
      "a\0",
      4, 1, 4, "0x00"); /* UTF-16 */
}

static void expect_quick(const char *what, size_t length, int line, int column, const char *says) {
  clock_t start = clock();
  expect_refused(text, length, line, column, says);
  double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  EXPECT(seconds < 0.05, "%s: %.3f s", what, seconds);
}

static size_t repeat(const char *first, const char *unit, size_t bytes) {
  size_t length = (size_t)sprintf(text, "%s", first);
  while (length + strlen(unit) <= bytes) length += (size_t)sprintf(text + length, "%s", unit);
  return length;
}

/* libyaml alone takes seconds for deep nesting: its time grows with the square. */
/* What the runtime's layer_rows says of a group of that capacity, times its ranks. */
static void test_rows(void) {
  static const struct {
    int ep, capacity, tokens, rows;
  } cases[] = {{2, 128, 1, 2},   {2, 128, 3, 8},   {2, 128, 4, 8},     {3, 128, 5, 24},
               {2, 96, 80, 192}, {2, 96, 64, 128}, {2, 128, 128, 256}, {2, 96, 100, 256}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int rows = model_rows(cases[i].ep, cases[i].capacity, cases[i].tokens);
    EXPECT(rows == cases[i].rows, "case %zu: %d rows", i, rows);
  }
}

static void test_limits(void) {
  static const struct {
    const char *first, *unit;
    int line, column;
    const char *says;
  } deep[] = {{"a: ", "[", 1, 11, "8 levels"},
              {"", "[", 1, 9, "8 levels"},
              {"a: '[", "[", 1, 65537, "quoted scalar from 1:4"},
              {"", "{", 1, 2, "plain word"},
              {"", "- ", 1, 17, "8 levels"},
              {"", "? ", 1, 3, "plain word"},
              {"a: [x' ", "[", 1, 8, "not valid YAML"},
              {"a: {b: ", "[", 1, 14, "8 levels"},
              {"", "[a,", 1, 25, "8 levels"}};
  for (size_t i = 0; i < sizeof deep / sizeof *deep; i++) {
    size_t length = repeat(deep[i].first, deep[i].unit, MODEL_BYTES_MAX);
    expect_quick(deep[i].unit, length, deep[i].line, deep[i].column, deep[i].says);
  }
  expect_quick("100 KB", repeat("hidden: ", "[", 100000), 1, 1, "65536 bytes");
  expect_quick("events", repeat("a: [", "b,", 20000), 1, 8187, "4096");
  /* exactly the most bytes: a comment fills the file */
  size_t length = edit("", "#");
  while (length < MODEL_BYTES_MAX) text[length++] = 'x';
  struct model model;
  EXPECT(model_parse(text, length, "f", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  text[length++] = 'x';
  expect_refused(text, length, 1, 1, "65536 bytes");
}

/* ---- Deployments: entry numbers are 32-bit ---- */

static void test_entries(void) {
  struct model model;
  size_t length = edit("experts: 64\ntop_k: 6", "experts: 4096\ntop_k: 32");
  EXPECT(model_parse(text, length, "f", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  struct model_overrides overrides = {.ep = 64, .capacity = 1048575}; /* 64 * 32 * 1048575 = 2^31 - 2048 */
  EXPECT(model_override(&model, &overrides) == MOEFLOW_OK, "%s", moeflow_last_error());
  overrides.capacity = 1048576; /* 2^31 */
  EXPECT(model_override(&model, &overrides) == MOEFLOW_ERROR_ARGUMENT && strstr(moeflow_last_error(), "2147483648 entries"),
         "%s", moeflow_last_error());
}

static void test_overrides(void) {
  static const struct {
    struct model_overrides overrides;
    const char *says; /* NULL: legal */
  } cases[] = {
      {{.dtype = "fp8_w8a8"}, NULL},
      {{.dtype = "fp8"}, "--dtype fp8 is unknown"},
      {{.dtype = ""}, "--dtype"},
      {{.ep = 64}, NULL},
      {{.ep = 65}, "more ranks than the 64 experts"},
      {{.ep = 4097}, "--ep 4097"},
      {{.ep = -1}, "--ep -1"},
      {{.ep = 1LL << 32}, "--ep"},
      {{.capacity = 1048577}, "--capacity 1048577"},
      {{.capacity = 8192}, NULL},
      {{.arch = "sm_80,sm_120"}, NULL},
      {{.arch = "sm_80,"}, "unknown arch ''"},
      {{.arch = "sm_80,sm_80"}, "twice"},
      {{.arch = "sm_9000"}, "known: sm_80"},
      {{.experts = 8}, NULL},
      {{.experts = 5}, "top_k is 6, more than the 5"},
      {{.experts = 3, .ep = 1}, "top_k"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct model model;
    EXPECT(model_parse(text, edit("", ""), "f", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
    moeflow_status status = model_override(&model, &cases[i].overrides);
    EXPECT(status == (cases[i].says ? MOEFLOW_ERROR_ARGUMENT : MOEFLOW_OK), "case %zu: %d", i, status);
    EXPECT(!cases[i].says || strstr(moeflow_last_error(), cases[i].says), "case %zu: %s", i, moeflow_last_error());
  }
  struct model model;
  struct model_overrides overrides = {.dtype = "bf16"};
  model_parse(text, edit("bf16", "fp8_e4m3"), "f", &model);
  EXPECT(model_buildable(&model) == MOEFLOW_ERROR_UNSUPPORTED && strstr(moeflow_last_error(), "--dtype bf16"), "%s",
         moeflow_last_error());
  EXPECT(model.weight_block[0] == 128 && model.weight_block[1] == 128, "block");
  EXPECT(model_override(&model, &overrides) == MOEFLOW_OK && model_buildable(&model) == MOEFLOW_OK, "%s",
         moeflow_last_error());
  EXPECT(model.weight_block[0] == 0, "block");
}

/* ---- Files ---- */

static void test_files(void) {
  static const struct {
    const char *file;
    int32_t hidden, intermediate, experts, top_k, dtype;
  } models[] = {{"glm-5.3-flash", 4096, 2048, 288, 8, SPEC_FP8_W8A8},
                {"deepseek-v2-lite", 2048, 1408, 64, 6, SPEC_BF16},
                {"qwen3-30b-a3b", 2048, 768, 128, 8, SPEC_BF16},
                {"mixtral-8x7b", 4096, 14336, 8, 2, SPEC_BF16}};
  for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
    char path[512];
    struct model model;
    snprintf(path, sizeof path, MOEFLOW_SOURCE_DIR "/models/%s.yaml", models[i].file);
    EXPECT(model_read(path, &model) == MOEFLOW_OK, "%s", moeflow_last_error());
    const struct spec *spec = &model.spec;
    EXPECT(!strcmp(spec->name, models[i].file) && spec->hidden == models[i].hidden &&
               spec->intermediate == models[i].intermediate && spec->experts == models[i].experts &&
               spec->top_k == models[i].top_k && spec->dtype == models[i].dtype,
           "%s", path);
  }
  struct model model;
  char path[] = "/tmp/moeflow-unit-model-XXXXXX";
  EXPECT(model_read("/nonexistent/x.yaml", &model) == MOEFLOW_ERROR_CACHE, "%s", moeflow_last_error());
  EXPECT(model_read("/", &model) == MOEFLOW_ERROR_CACHE, "%s", moeflow_last_error());
  int fd = mkstemp(path);
  size_t length = edit("hidden: 4096", "hidden: x");
  EXPECT(fd >= 0 && write(fd, text, length) == (ssize_t)length, "%s", path);
  EXPECT(model_read(path, &model) == MOEFLOW_ERROR_FORMAT && strstr(moeflow_last_error(), path) &&
             strstr(moeflow_last_error(), ":3:9: "),
         "%s", moeflow_last_error());
  unlink(path);
  close(fd);
}

/* ---- Property: whatever the bytes, an answer with a position, and no crash ---- */

static uint64_t state = 88172645463325252; /* xorshift64 (Marsaglia 2003) */
static uint32_t draw(uint32_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 32) % below;
}

static void expect_answer(size_t length) {
  struct model model;
  int line, column;
  moeflow_status status = model_parse(text, length, "f", &model);
  if (status == MOEFLOW_OK) {
    EXPECT(spec_check(&model.spec) == MOEFLOW_OK && model.deploy.ep >= 1 && model.deploy.arch_count >= 1, "accepted: %s",
           text);
    return;
  }
  EXPECT(status == MOEFLOW_ERROR_FORMAT && sscanf(moeflow_last_error(), "f:%d:%d: ", &line, &column) == 2 && line >= 1 &&
             column >= 1,
         "%s", moeflow_last_error());
}

static void test_garbage(void) {
  static const char marks[] = "[]{}:,-?#&*!|>'\"%@`\n \t~0123456789.+_ehidentrousclx\\\xc3\xa9\x01\xff";
  for (int i = 0; i < 20000; i++) { /* printable */
    size_t length = draw(200);
    for (size_t j = 0; j < length; j++) text[j] = draw(8) ? (char)(0x20 + draw(95)) : '\n';
    text[length] = 0;
    expect_answer(length);
  }
  for (int i = 0; i < 40000; i++) { /* a good file with a few bytes changed, doubled or gone */
    size_t length = edit("", "");
    for (uint32_t edits = 1 + draw(6); edits > 0; edits--) {
      size_t at = draw((uint32_t)length);
      uint32_t kind = draw(3);
      if (kind == 0) {
        text[at] = marks[draw(sizeof marks - 1)];
      } else if (kind == 1) {
        memmove(text + at + 1, text + at, length - at + 1), length++;
      } else {
        memmove(text + at, text + at + 1, length - at), length--;
      }
    }
    text[length] = 0;
    expect_answer(length);
  }
}

static void test_archs(void) {
  const struct arch *found[ARCH_MAX];
  static const struct {
    int major, minor, count;
    const char *best;
  } cases[] = {{8, 0, 1, "sm_80"},    {8, 6, 2, "sm_86"},    {8, 7, 2, "sm_86"},    {8, 9, 3, "sm_89"},
               {9, 0, 2, "sm_90a"},   {10, 0, 1, "sm_100a"}, {10, 3, 1, "sm_103a"}, {12, 0, 2, "sm_120a"},
               {12, 1, 2, "sm_121a"}, {7, 5, 0, NULL},       {11, 0, 0, NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int count = arch_for_device(cases[i].major, cases[i].minor, found);
    EXPECT(count == cases[i].count && (!count || !strcmp(found[0]->name, cases[i].best)), "%d.%d: %d, %s", cases[i].major,
           cases[i].minor, count, count ? found[0]->name : "none");
  }
  EXPECT(arch_find("sm_90a") && arch_find("sm_90a")->shared_bytes == 232448, "sm_90a");
  EXPECT(!arch_find("sm_90b") && strstr(moeflow_last_error(), "sm_121a"), "%s", moeflow_last_error());
}

int main(void) {
  test_good();
  test_deploy();
  test_bad_numbers();
  test_bad_keys();
  test_bad_values();
  test_bad_yaml();
  test_rows();
  test_limits();
  test_entries();
  test_overrides();
  test_files();
  test_garbage();
  test_archs();
  TEST_END;
}
