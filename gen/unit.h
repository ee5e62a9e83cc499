/* All that a build makes: per arch a plan draft, per variant a unit with its text, templates and key. */
#ifndef MOEFLOW_UNIT_H
#define MOEFLOW_UNIT_H

#include "model.h"
#include "store.h"

struct unit {
  const struct arch *arch;
  struct plan_draft *draft;
  int variant; /* index in the draft's plan */
  char name[EMIT_NAME_MAX];
  char text[EMIT_TEXT_MAX];
  int included[TEMPLATES_MAX];
  int included_count;
  struct key key; /* after units_keys */
};

struct units {
  struct templates templates;
  struct plan_draft *drafts; /* one per arch, in the model's order */
  struct compile_options options[ARCH_MAX];
  int arch_count;
  struct unit *units; /* arch by arch, variants in plan order */
  int count;
};

/* Plans and emits for every arch of model->deploy; `options`, which may be NULL, are plan_build's. units_free, also after an
 * error. */
moeflow_status units_make(const struct model *model, const struct plan_options *options, const char *template_folder,
                          int lineinfo, struct units *units);

/* Fills the keys and the drafts' entry hashes. */
moeflow_status units_keys(struct units *units, const struct toolchain *toolchain);

/* compile_unit of one of them: in worker processes alone. */
moeflow_status unit_compile(const struct units *units, const struct unit *unit, const struct toolchain *toolchain,
                            struct compile_result *result);

/* One SHA-256 over every unit's text and every template that one includes: 64 hex digits. No machine, path or toolchain in
 * it. */
void units_digest(const struct units *units, char hex[65]);

/* One SHA-256 over the templates that compute experts, of whatever variant: what a tuned file was measured with. */
moeflow_status units_experts_digest(const struct units *units, char hex[65]);

/* Marks the templates that any unit includes. */
void units_templates(const struct units *units, char used[TEMPLATES_MAX]);

void units_free(struct units *units);
#endif
