#include "unit_entry.h"

#include <stdio.h>
#include <string.h>

#include "status.h"

struct making {
  const struct units *units;
  const struct unit *unit;
  const struct toolchain *toolchain;
  char *log;
};

static moeflow_status check_shared(const struct unit *unit, const struct compile_result *result) {
  int64_t dynamic = unit->draft->plan.variants[unit->variant].shared_bytes;
  if (result->static_shared_bytes + dynamic > unit->arch->shared_bytes) {
    return status_set(MOEFLOW_ERROR_INTERNAL,
                      "%s takes %u static + %lld dynamic bytes of shared memory; %s has %d per block", unit->name,
                      result->static_shared_bytes, (long long)dynamic, unit->arch->name, unit->arch->shared_bytes);
  }
  return MOEFLOW_OK;
}

/* Within one major version of CUDA, cubins run on that version's older drivers too, if those know the architecture. */
static uint32_t minimum_driver(uint32_t nvrtc_version, const struct arch *arch) {
  uint32_t major = nvrtc_version / 1000 * 1000;
  return major > (uint32_t)arch->minimum_cuda ? major : (uint32_t)arch->minimum_cuda;
}

static void fill_facts(const struct unit *unit, const struct compile_result *result, struct entry_header *facts) {
  const struct plan_variant *variant = &unit->draft->plan.variants[unit->variant];
  memset(facts, 0, sizeof *facts);
  snprintf(facts->arch, sizeof facts->arch, "%s", unit->arch->name);
  emit_symbol(variant->kernel, facts->symbol);
  facts->minimum_driver = minimum_driver(result->nvrtc_version, unit->arch);
  facts->nvrtc_version = result->nvrtc_version;
  facts->registers = result->registers;
  facts->static_shared_bytes = result->static_shared_bytes;
  facts->threads = (uint32_t)variant->threads;
}

static moeflow_status make(void *user, struct entry_header *facts, uint8_t **cubin, size_t *cubin_bytes) {
  struct making *making = user;
  struct compile_result result;
  moeflow_status status = unit_compile(making->units, making->unit, making->toolchain, &result);
  if (status == MOEFLOW_OK) status = check_shared(making->unit, &result);
  if (status == MOEFLOW_OK) {
    fill_facts(making->unit, &result, facts);
    *cubin = result.cubin;
    *cubin_bytes = result.cubin_size;
    result.cubin = NULL;
  }
  making->log = result.log;
  result.log = NULL;
  compile_free(&result);
  return status;
}

moeflow_status unit_entry(const struct units *units, const struct unit *unit, const struct toolchain *toolchain,
                          struct store *store, int wait_s, struct store_outcome *outcome, char **log) {
  struct making making = {units, unit, toolchain, NULL};
  moeflow_status status = store_obtain(store, &unit->key, make, &making, wait_s, outcome);
  *log = making.log;
  return status;
}
