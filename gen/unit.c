#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sha256.h"
#include "status.h"

static moeflow_status make_unit(const struct units *units, struct unit *unit) {
  emit_file_name(unit->draft, unit->variant, unit->name);
  moeflow_status status = emit_unit(unit->draft, unit->variant, unit->text);
  if (status != MOEFLOW_OK) return status;
  return templates_included(&units->templates, unit->text, unit->name, unit->included, &unit->included_count);
}

moeflow_status units_make(const struct model *model, const struct plan_options *options, const char *template_folder,
                          int lineinfo, struct units *units) {
  moeflow_status status = MOEFLOW_OK;
  const struct model_deploy *deploy = &model->deploy;
  memset(units, 0, sizeof *units);
  CHECK(templates_load(template_folder, &units->templates));
  units->arch_count = deploy->arch_count;
  units->drafts = calloc((size_t)deploy->arch_count, sizeof *units->drafts);
  units->units = calloc((size_t)deploy->arch_count * PLAN_VARIANTS_MAX, sizeof *units->units);
  if (!units->drafts || !units->units) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d plans", deploy->arch_count);
  for (int a = 0; a < deploy->arch_count; a++) {
    struct plan_draft *draft = &units->drafts[a];
    CHECK(plan_build(&model->spec, deploy->arch[a]->name, options, draft));
    compile_options_for(deploy->arch[a]->name, lineinfo, &units->options[a]);
    for (int v = 0; v < draft->plan.variant_count; v++) {
      struct unit *unit = &units->units[units->count++];
      unit->arch = deploy->arch[a];
      unit->draft = draft;
      unit->variant = v;
      CHECK(make_unit(units, unit));
    }
  }
cleanup:
  return status;
}

moeflow_status units_keys(struct units *units, const struct toolchain *toolchain) {
  for (int i = 0; i < units->count; i++) {
    struct unit *unit = &units->units[i];
    struct plan_variant *variant = &unit->draft->plan.variants[unit->variant];
    struct key_parts parts = {.kernel = kernel_names[variant->kernel],
                              .arch = unit->arch->name,
                              .options = &units->options[unit->draft - units->drafts],
                              .toolchain = toolchain->identity,
                              .unit = unit->text,
                              .templates = &units->templates,
                              .included = unit->included,
                              .included_count = unit->included_count};
    moeflow_status status = key_build(&parts, &unit->key);
    if (status != MOEFLOW_OK) return status;
    memcpy(variant->entry, unit->key.hash, sizeof variant->entry);
  }
  return MOEFLOW_OK;
}

moeflow_status unit_compile(const struct units *units, const struct unit *unit, const struct toolchain *toolchain,
                            struct compile_result *result) {
  char symbol[40];
  emit_symbol(unit->draft->plan.variants[unit->variant].kernel, symbol);
  const struct compile_request request = {.name = unit->name,
                                          .symbol = symbol,
                                          .text = unit->text,
                                          .templates = &units->templates,
                                          .included = unit->included,
                                          .included_count = unit->included_count,
                                          .options = &units->options[unit->draft - units->drafts]};
  return compile_unit(toolchain, &request, result);
}

void units_templates(const struct units *units, char used[TEMPLATES_MAX]) {
  memset(used, 0, TEMPLATES_MAX);
  for (int i = 0; i < units->count; i++) {
    for (int t = 0; t < units->units[i].included_count; t++) used[units->units[i].included[t]] = 1;
  }
}

static void add_template(struct sha256 *hash, const struct template_file *file) {
  sha256_add(hash, file->name, strlen(file->name) + 1);
  sha256_add(hash, file->hash, sizeof file->hash);
}

moeflow_status units_experts_digest(const struct units *units, char hex[65]) {
  static const int kernels[] = {KERNEL_GATE_UP, KERNEL_DOWN, KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM};
  struct sha256 hash;
  uint8_t digest[32];
  int included[TEMPLATES_MAX], count;
  char text[256];
  size_t used = 0;
  for (int i = 0; i < 4; i++) {
    used += (size_t)snprintf(text + used, sizeof text - used, "#include \"%s.cuh\"\n", kernel_names[kernels[i]]);
  }
  moeflow_status status = templates_included(&units->templates, text, "the experts", included, &count);
  if (status != MOEFLOW_OK) return status;
  sha256_begin(&hash);
  for (int i = 0; i < count; i++) add_template(&hash, &units->templates.files[included[i]]);
  sha256_end(&hash, digest);
  sha256_hex(digest, hex);
  return MOEFLOW_OK;
}

void units_digest(const struct units *units, char hex[65]) {
  struct sha256 hash;
  uint8_t digest[32];
  char used[TEMPLATES_MAX];
  sha256_begin(&hash);
  for (int i = 0; i < units->count; i++) { /* names and texts end with NUL: no two lists of them run together */
    const struct unit *unit = &units->units[i];
    sha256_add(&hash, unit->arch->name, strlen(unit->arch->name) + 1);
    sha256_add(&hash, unit->name, strlen(unit->name) + 1);
    sha256_add(&hash, unit->text, strlen(unit->text) + 1);
  }
  units_templates(units, used);
  for (int t = 0; t < units->templates.count; t++) {
    if (used[t]) add_template(&hash, &units->templates.files[t]);
  }
  sha256_end(&hash, digest);
  sha256_hex(digest, hex);
}

void units_free(struct units *units) {
  templates_free(&units->templates);
  free(units->drafts);
  free(units->units);
  memset(units, 0, sizeof *units);
}
