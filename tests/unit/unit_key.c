/* The key changes with everything that decides a cubin's bytes, and with nothing else. */
#include "test.h"
#include "unit.h"

static struct model model_of(const char *more) {
  static const char head[] =
      "moeflow: 1\nname: %s\nhidden: 512\nintermediate: 256\nexperts: 16\ntop_k: 4\nactivation: swiglu\n"
      "router: {score: sigmoid, groups: 4, top_groups: 2}\nweights: {dtype: bf16}\n";
  struct model model;
  char text[1024];
  snprintf(text, sizeof text, head, more);
  EXPECT(model_parse(text, strlen(text), "a test", &model) == MOEFLOW_OK, "%s", moeflow_last_error());
  return model;
}

static void part_by_part(void) {
  struct templates templates = {.count = 2};
  struct compile_options options, lined;
  struct key base, same, other;
  int both[] = {0, 1};
  strcpy(templates.files[0].name, "a.cuh");
  strcpy(templates.files[0].hash, "00");
  strcpy(templates.files[1].name, "b.cuh");
  strcpy(templates.files[1].hash, "01");
  compile_options_for("sm_90a", 0, &options);
  compile_options_for("sm_90a", 1, &lined);
  const struct key_parts parts = {"gate_up", "sm_90a", &options, "nvrtc 1", "text", &templates, both, 2};
  EXPECT(key_build(&parts, &base) == MOEFLOW_OK && key_build(&parts, &same) == MOEFLOW_OK);
  EXPECT(strlen(base.hash) == 64 && strcmp(base.hash, same.hash) == 0 && strcmp(base.text, same.text) == 0);
  EXPECT(!strchr(base.text, '/'), "no path in a key: %s", base.text);
  struct templates edited = templates;
  strcpy(edited.files[1].hash, "02");
  struct key_parts changed[8];
  for (int i = 0; i < 8; i++) changed[i] = parts;
  changed[0].kernel = "down";
  changed[1].arch = "sm_80";
  changed[2].options = &lined;
  changed[3].toolchain = "nvrtc 2";
  changed[4].unit = "text ";
  changed[5].templates = &edited;
  changed[6].included_count = 1;
  changed[7].included = both + 1, changed[7].included_count = 1;
  for (int i = 0; i < 8; i++) {
    EXPECT(key_build(&changed[i], &other) == MOEFLOW_OK && strcmp(other.hash, base.hash) != 0, "part %d is not in the key",
           i);
  }
}

/* How many of the two models' units differ; the units stand in the same order. */
static int differing(const struct model *a, const struct model *b) {
  struct toolchain toolchain = {.identity = "nvrtc test"};
  struct units left, right;
  int count = 0;
  EXPECT(units_make(a, NULL, NULL, 0, &left) == MOEFLOW_OK && units_keys(&left, &toolchain) == MOEFLOW_OK, "%s",
         moeflow_last_error());
  EXPECT(units_make(b, NULL, NULL, 0, &right) == MOEFLOW_OK && units_keys(&right, &toolchain) == MOEFLOW_OK, "%s",
         moeflow_last_error());
  EXPECT(left.count > 0 && right.count > 0);
  for (int i = 0; i < left.count && i < right.count; i++) {
    if (strcmp(left.units[i].name, right.units[i].name) != 0) { /* reduce: choices has no combine_ring and nothing fused */
      count++;
      break;
    }
    count += strcmp(left.units[i].key.hash, right.units[i].key.hash) != 0;
  }
  units_free(&left);
  units_free(&right);
  return count;
}

static void field_by_field(void) {
  const struct model base = model_of("one"), renamed = model_of("two");
  EXPECT(differing(&base, &renamed) == 0, "a name decides no cubin");
  struct model same = base;
  same.deploy.ep = 4;
  same.deploy.capacity = 8192;
  same.spec.shared_experts = 1;
  same.spec.shared_intermediate = 512;
  EXPECT(differing(&base, &same) == 0, "neither do deploy and the shared experts");
  struct model changed[14];
  int n = 0;
  for (int i = 0; i < 14; i++) changed[i] = base;
  changed[n++].spec.hidden = 1024;
  changed[n++].spec.intermediate = 512;
  changed[n++].spec.experts = 32;
  changed[n++].spec.top_k = 5;
  changed[n++].spec.score = SPEC_SOFTMAX;
  changed[n++].spec.correction_bias = 1;
  changed[n++].spec.groups = 8;
  changed[n++].spec.top_groups = 3;
  changed[n++].spec.group_score = !base.spec.group_score;
  changed[n++].spec.renormalize = SPEC_SUM_1E_6;
  changed[n++].spec.scale = 2.5;
  changed[n++].spec.activation = SPEC_SWIGLU_CLAMP, changed[n - 1].spec.activation_limit = 7;
  changed[n++].spec.returned = SPEC_WIRE_FP32;
  changed[n++].spec.reduce = SPEC_REDUCE_CHOICES;
  for (int i = 0; i < n; i++) EXPECT(differing(&base, &changed[i]) > 0, "field %d decides no cubin", i);
  struct model clamped = changed[11];
  clamped.spec.activation_limit = 8;
  EXPECT(differing(&changed[11], &clamped) == 6, "the limit alone: each of 3 gate_up and 3 experts");
  struct model scaled[2] = {changed[10], changed[10]};
  scaled[1].spec.scale_on = SPEC_SCALE_OUTPUT;
  EXPECT(differing(&scaled[0], &scaled[1]) == 5, "router, dispatch and the three combines");
}

static void digest(void) {
  const struct model one = model_of("one"), two = model_of("two");
  struct units units;
  char a[65], b[65], c[65];
  EXPECT(units_make(&one, NULL, NULL, 0, &units) == MOEFLOW_OK);
  units_digest(&units, a);
  units_free(&units);
  EXPECT(units_make(&two, NULL, NULL, 0, &units) == MOEFLOW_OK);
  units_digest(&units, b);
  units.templates.files[0].hash[0] ^= 1;
  units.units[0].text[0] ^= 1;
  units_digest(&units, c);
  units_free(&units);
  EXPECT(strlen(a) == 64 && strcmp(a, b) == 0 && strcmp(a, c) != 0);
  EXPECT(units_make(&one, NULL, MOEFLOW_SOURCE_DIR "/models", 0, &units) == MOEFLOW_ERROR_FORMAT &&
             strstr(moeflow_last_error(), "holds no .cuh"),
         "%s", moeflow_last_error());
  units_free(&units);
}

int main(void) {
  part_by_part();
  field_by_field();
  digest();
  TEST_END;
}
