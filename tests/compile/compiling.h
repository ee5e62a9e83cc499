/* Compiles units in worker processes and holds each to the rules: a cubin, no spill, no compiler message, shared memory that
 * fits. */
#ifndef MOEFLOW_COMPILING_H
#define MOEFLOW_COMPILING_H

#include "pool.h"
#include "status.h"
#include "test.h"
#include "unit.h"

struct compiling {
  struct toolchain toolchain;
  const struct units *units;
  int tasks[ARCH_MAX * PLAN_VARIANTS_MAX];
  int count;
};

struct compiled {
  int32_t registers, static_shared_bytes, spill_bytes, cubin_bytes;
};

static inline void compiling_begin(struct compiling *compiling) {
  memset(compiling, 0, sizeof *compiling);
  if (toolchain_find(&compiling->toolchain) != MOEFLOW_OK) SKIP("%s", moeflow_last_error());
}

/* In a worker. */
static inline moeflow_status compiling_work(void *user, int task, struct pool_output *output) {
  const struct compiling *compiling = user;
  struct compile_result result;
  moeflow_status status =
      unit_compile(compiling->units, &compiling->units->units[compiling->tasks[task]], &compiling->toolchain, &result);
  struct compiled compiled = {(int32_t)result.registers, (int32_t)result.static_shared_bytes, (int32_t)result.spill_bytes,
                              (int32_t)result.cubin_size};
  memcpy(output->bytes, &compiled, sizeof compiled);
  output->size = sizeof compiled;
  output->log = result.log;
  result.log = NULL;
  compile_free(&result);
  return status;
}

/* What the compiler said beside ptxas' report: nothing. */
static inline int compiling_messages(const char *log) {
  int messages = 0;
  for (const char *line = log; *line; line += strcspn(line, "\n"), line += *line == '\n') {
    size_t length = strcspn(line, "\n");
    if (length == 0 || compile_is_report(line)) continue;
    fprintf(stderr, "  %.*s\n", (int)length, line);
    messages++;
  }
  return messages;
}

static inline void compiling_done(void *user, int task, moeflow_status status, const struct pool_output *output) {
  const struct compiling *compiling = user;
  const struct unit *unit = &compiling->units->units[compiling->tasks[task]];
  const struct plan_variant *variant = &unit->draft->plan.variants[unit->variant];
  struct compiled compiled;
  EXPECT(status == MOEFLOW_OK, "%s %s: %s", unit->arch->name, unit->name, moeflow_last_error());
  EXPECT(compiling_messages(output->log) == 0, "%s %s: messages above", unit->arch->name, unit->name);
  if (status != MOEFLOW_OK) return;
  memcpy(&compiled, output->bytes, sizeof compiled);
  EXPECT(compiled.cubin_bytes > 0 && compiled.spill_bytes == 0 && compiled.registers > 0);
  EXPECT(compiled.static_shared_bytes <= 48 << 10, "%s %s: %d bytes of static shared memory", unit->arch->name, unit->name,
         compiled.static_shared_bytes);
  EXPECT(compiled.static_shared_bytes + variant->shared_bytes <= unit->arch->shared_bytes,
         "%s %s: %d + %d of %d bytes shared", unit->arch->name, unit->name, compiled.static_shared_bytes,
         variant->shared_bytes, unit->arch->shared_bytes);
}

static inline const char *compiling_name(void *user, int task) {
  const struct compiling *compiling = user;
  return compiling->units->units[compiling->tasks[task]].name;
}

/* All units, or with `one_per_kernel` the last (largest) variant of each kernel and target. */
static inline void compiling_run(struct compiling *compiling, const struct units *units, int one_per_kernel) {
  int interrupted;
  compiling->units = units;
  compiling->count = 0;
  for (int i = 0; i < units->count; i++) {
    const struct plan *plan = &units->units[i].draft->plan;
    int v = units->units[i].variant;
    int last = v + 1 == plan->variant_count || plan->variants[v + 1].kernel != plan->variants[v].kernel;
    if (last || !one_per_kernel) compiling->tasks[compiling->count++] = i;
  }
  struct pool_job job = {compiling->count, 0, 120, compiling, compiling_work, compiling_done, compiling_name};
  EXPECT(pool_run(&job, &interrupted) == MOEFLOW_OK, "%s", moeflow_last_error());
}

static inline void compiling_model(struct compiling *compiling, const struct model *model,
                                   const struct plan_options *options, int one_per_kernel) {
  struct units units;
  if (units_make(model, options, NULL, 0, &units) == MOEFLOW_OK) {
    compiling_run(compiling, &units, one_per_kernel);
    printf("%s: %d units for %d targets\n", model->spec.name, compiling->count, units.arch_count);
  } else {
    EXPECT(0, "%s: %s", model->spec.name, moeflow_last_error());
  }
  units_free(&units);
}
#endif
