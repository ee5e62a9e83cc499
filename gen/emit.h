/* A variant's source: a thin unit that names the template, the constants and the entry symbol. Numbers and nothing else of
 * the model reach the text, so that models with the same numbers share cubins. */
#ifndef MOEFLOW_EMIT_H
#define MOEFLOW_EMIT_H

#include "plan_build.h"

#define EMIT_TEXT_MAX 4096
#define EMIT_NAME_MAX 112

/* Text of variant `index` of the draft, NUL-terminated. */
moeflow_status emit_unit(const struct plan_draft *draft, int index, char text[EMIT_TEXT_MAX]);

/* "experts_tokens8_rows128_depth128_stages6_parts4_residency1.cu", "gate_up_tokens32_rows64_depth64_stages4.cu",
 * "router.cu": the unit's name in compiler messages and in `emit -o DIR`, different for all variants of a plan. */
void emit_file_name(const struct plan_draft *draft, int index, char name[EMIT_NAME_MAX]);

/* "moeflow_gate_up" */
void emit_symbol(int32_t kernel, char symbol[40]);
#endif
