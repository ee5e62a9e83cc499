/* A model YAML: read strictly, through one table of fields that also prints `moeflow-gen help model`. */
#ifndef MOEFLOW_MODEL_H
#define MOEFLOW_MODEL_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "arch.h"
#include "spec.h"

#define MODEL_BYTES_MAX 65536
#define MODEL_CAPACITY_MAX (1 << 20)

struct model_deploy { /* not part of the spec: all ranks and all EP sizes share the cubins */
  int32_t ep;         /* ranks */
  int32_t capacity;   /* C, tokens a rank */
  int32_t arch_count; /* 1 .. ARCH_MAX */
  const struct arch *arch[ARCH_MAX];
};

struct model {
  struct spec spec;        /* spec.hidden is the width of a dispatched row: dispatch_hidden, else hidden */
  int32_t hidden;          /* the model's own width */
  int32_t weight_block[2]; /* FP8: weight rows and columns per scale; 0 for bf16 */
  struct model_deploy deploy;
};

/* From the command line; NULL and 0 leave what the file says. */
struct model_overrides {
  const char *dtype; /* bf16 | fp8_w8a8 | fp8_w8a16 */
  const char *arch;  /* sm_90a,sm_100a */
  int64_t ep;
  int64_t capacity;
  int64_t experts;    /* a scaled-down E for runs and tests */
  const char *reduce; /* owner | choices */
};

/* Reads and checks a file. MOEFLOW_ERROR_FORMAT with one line `file:line:column: what, why`; MOEFLOW_ERROR_CACHE (exit 6)
 * when the file cannot be read at all. */
moeflow_status model_read(const char *path, struct model *model);

/* The same from memory (tests, fuzzing); `where` stands for the file name in messages. */
moeflow_status model_parse(const char *text, size_t length, const char *where, struct model *model);

/* Applies overrides and checks the result: MOEFLOW_ERROR_ARGUMENT. */
moeflow_status model_override(struct model *model, const struct model_overrides *overrides);

/* Read, overridden and checked: what every command starts with. */
moeflow_status model_load(const char *path, const struct model_overrides *overrides, struct model *model);

/* The `moeflow-gen build` command for what the overrides make of the file at `path`, one arch; `cache` NULL: the default. */
#define MODEL_BUILD_LINE_MAX 9216
void model_build_line(const char *path, const struct model_overrides *overrides, const char *arch, const char *cache,
                      char text[MODEL_BUILD_LINE_MAX]);

/* MOEFLOW_ERROR_UNSUPPORTED for a model that can be read and explained but not built by this version (FP8), with what to
 * add. */
moeflow_status model_buildable(const struct model *model);

/* Received rows of a step of `tokens` tokens a rank, which choose its bucket: ep times a power of two, at most the capacity
 * (the runtime's layer_rows). A group for more tokens than that has a larger one. */
int model_rows(int ep, int capacity, int tokens);

/* Parts of the above that the field table shares with the command line: MOEFLOW_ERROR_ARGUMENT, without a position. */
moeflow_status model_add_arch(struct model_deploy *deploy, const char *name);
moeflow_status model_check_deploy(const struct model *model, const char **path); /* *path: the key to blame */

/* The field table as text: key, type, range, default, meaning. */
void model_print_fields(FILE *file);
#endif
