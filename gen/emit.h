/* A variant's source: a thin unit that names the template, the constants and the entry symbol. Numbers and nothing else of
 * the model reach the text, so that models with the same numbers share cubins. */
#ifndef MOEFLOW_EMIT_H
#define MOEFLOW_EMIT_H

#include "plan_build.h"

#define EMIT_TEXT_MAX 4096
#define EMIT_NAME_MAX 64

/* Text of variant `index` of the draft, NUL-terminated. */
moeflow_status emit_unit(const struct plan_draft *draft, int index, char text[EMIT_TEXT_MAX]);

/* "gate_up_tokens32_rows64_depth64_stages4.cu", "router.cu": the unit's name in compiler messages and in `emit -o DIR`. */
void emit_file_name(const struct plan_draft *draft, int index, char name[EMIT_NAME_MAX]);

/* "moeflow_gate_up" */
void emit_symbol(int32_t kernel, char symbol[40]);
#endif
