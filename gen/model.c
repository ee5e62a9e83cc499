#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

moeflow_status model_add_arch(struct model_deploy *deploy, const char *name) {
  const struct arch *arch = arch_find(name);
  if (!arch) return MOEFLOW_ERROR_ARGUMENT;
  for (int i = 0; i < deploy->arch_count; i++) {
    if (deploy->arch[i] == arch) return status_set(MOEFLOW_ERROR_ARGUMENT, "arch %s is listed twice", name);
  }
  if (deploy->arch_count == ARCH_MAX) return status_set(MOEFLOW_ERROR_ARGUMENT, "more than %d archs", ARCH_MAX);
  deploy->arch[deploy->arch_count++] = arch;
  return MOEFLOW_OK;
}

/* ---- Rules of a deployment ---- */

/* Entry numbers on an owner are 32-bit: ranks * C * K of them. */
moeflow_status model_check_deploy(const struct model *model, const char **path) {
  const struct spec *spec = &model->spec;
  const struct model_deploy *deploy = &model->deploy;
  *path = "deploy.ep";
  if (deploy->ep > spec->experts) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "deploy.ep (--ep) is %d, more ranks than the %d experts there are", deploy->ep,
                      spec->experts);
  }
  *path = "deploy.capacity";
  int64_t entries = (int64_t)deploy->ep * deploy->capacity * spec->top_k;
  if (entries > INT32_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "deploy.capacity (--capacity) is %d: %d tokens of %d ranks and %d choices make %lld entries, more "
                      "than the 2147483647 that a step can number",
                      deploy->capacity, deploy->capacity, deploy->ep, spec->top_k, (long long)entries);
  }
  return MOEFLOW_OK;
}

moeflow_status model_read(const char *path, struct model *model) {
  moeflow_status status = MOEFLOW_OK;
  char *text = NULL;
  FILE *file = fopen(path, "rb");
  if (!file) FAIL(MOEFLOW_ERROR_CACHE, "cannot open the model file %s: %s", path, strerror(errno));
  text = malloc(MODEL_BYTES_MAX + 1);
  if (!text) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to read %s", path);
  size_t length = fread(text, 1, MODEL_BYTES_MAX + 1, file);
  if (ferror(file)) FAIL(MOEFLOW_ERROR_CACHE, "cannot read the model file %s: %s", path, strerror(errno));
  CHECK(model_parse(text, length, path, model));
cleanup:
  if (file) fclose(file);
  free(text);
  return status;
}

static moeflow_status override_arch(struct model *model, const char *list) {
  model->deploy.arch_count = 0;
  for (const char *name = list;;) {
    size_t length = strcspn(name, ",");
    char copy[64];
    snprintf(copy, sizeof copy, "%.*s", (int)(length < 63 ? length : 63), name);
    if (model_add_arch(&model->deploy, copy) != MOEFLOW_OK) return status_prefix(MOEFLOW_ERROR_ARGUMENT, "--arch");
    if (!name[length]) return MOEFLOW_OK;
    name += length + 1;
  }
}

moeflow_status model_override(struct model *model, const struct model_overrides *overrides) {
  moeflow_status status = MOEFLOW_OK;
  const char *path;
  if (overrides->dtype && spec_dtype_from_name(overrides->dtype, &model->spec.dtype)) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "--dtype %.32s is unknown; known: bf16, fp8_w8a8, fp8_w8a16", overrides->dtype);
  }
  if (overrides->dtype) model->weight_block[0] = model->weight_block[1] = model->spec.dtype == SPEC_BF16 ? 0 : 128;
  const struct {
    const char *option;
    int64_t value, maximum;
    int32_t *target;
  } integers[] = {{"--ep", overrides->ep, SPEC_EXPERTS_MAX, &model->deploy.ep},
                  {"--capacity", overrides->capacity, MODEL_CAPACITY_MAX, &model->deploy.capacity},
                  {"--experts", overrides->experts, SPEC_EXPERTS_MAX, &model->spec.experts}};
  for (int i = 0; i < 3; i++) {
    if (integers[i].value == 0) continue;
    if (integers[i].value < 0 || integers[i].value > integers[i].maximum) {
      FAIL(MOEFLOW_ERROR_ARGUMENT, "%s %lld is outside 1 to %lld", integers[i].option, (long long)integers[i].value,
           (long long)integers[i].maximum);
    }
    *integers[i].target = (int32_t)integers[i].value;
  }
  if (overrides->reduce && strcmp(overrides->reduce, "owner") && strcmp(overrides->reduce, "choices")) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "--reduce %.32s is unknown; known: owner, choices", overrides->reduce);
  }
  if (overrides->reduce) model->spec.reduce = strcmp(overrides->reduce, "owner") ? SPEC_REDUCE_CHOICES : SPEC_REDUCE_OWNER;
  if (overrides->arch) CHECK(override_arch(model, overrides->arch));
  CHECK(spec_check(&model->spec));
  CHECK(model_check_deploy(model, &path));
cleanup:
  return status;
}

moeflow_status model_load(const char *path, const struct model_overrides *overrides, struct model *model) {
  moeflow_status status = model_read(path, model);
  return status == MOEFLOW_OK ? model_override(model, overrides) : status;
}

void model_build_line(const char *path, const struct model_overrides *overrides, const char *arch, const char *cache,
                      char text[MODEL_BUILD_LINE_MAX]) {
  char experts[24];
  snprintf(experts, sizeof experts, "%lld", (long long)overrides->experts);
  const struct {
    const char *option, *value;
  } rows[] = {{"--dtype", overrides->dtype},
              {"--experts", overrides->experts ? experts : NULL},
              {"--reduce", overrides->reduce},
              {"--arch", arch},
              {"--cache", cache}};
  size_t used = (size_t)snprintf(text, MODEL_BUILD_LINE_MAX, "moeflow-gen build %s", path);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (!rows[i].value || used >= MODEL_BUILD_LINE_MAX) continue;
    used += (size_t)snprintf(text + used, MODEL_BUILD_LINE_MAX - used, " %s %s", rows[i].option, rows[i].value);
  }
}

int model_rows(int ep, int capacity, int tokens) {
  int rows = 1;
  while (rows < tokens) rows *= 2;
  return ep * (tokens <= capacity && rows > capacity ? capacity : rows);
}

moeflow_status model_buildable(const struct model *model) {
  const struct spec *spec = &model->spec;
  if (spec->dtype != SPEC_BF16) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                      "model %s has %s weights; this version builds bf16 only: add `--dtype bf16`", spec->name,
                      spec_dtype_name(spec->dtype));
  }
  return MOEFLOW_OK;
}
