/* A model's MoE layer as numbers: what the plan, the kernels, the row layout and both backends are derived from.
 *
 * The canonical text (one `key value` line per field, in table order) is what the plan file carries, what the cache keys and
 * the ranks' fingerprint hash, and what the CPU backend can be opened with. EP size, rank and capacity are not part of it.
 */
#ifndef MOEFLOW_SPEC_H
#define MOEFLOW_SPEC_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

#define SPEC_NAME_MAX 64
#define SPEC_TEXT_MAX 2048
#define SPEC_EXPERTS_MAX 4096

enum spec_activation { SPEC_SWIGLU, SPEC_SWIGLU_CLAMP };
enum spec_score { SPEC_SOFTMAX, SPEC_SIGMOID };
enum spec_renormalize { SPEC_RENORMALIZE_NONE, SPEC_SUM_1E_20, SPEC_SUM_1E_6, SPEC_MAX_1E_12 };
enum spec_scale_on { SPEC_SCALE_WEIGHTS, SPEC_SCALE_OUTPUT };
enum spec_group_score { SPEC_GROUP_MAX, SPEC_GROUP_TOP2 };
enum spec_dtype { SPEC_BF16, SPEC_FP8_W8A8, SPEC_FP8_W8A16 };
enum spec_wire { SPEC_WIRE_BF16, SPEC_WIRE_FP8, SPEC_WIRE_FP32 };
enum spec_reduce { SPEC_REDUCE_OWNER, SPEC_REDUCE_CHOICES };

struct spec {
  char name[SPEC_NAME_MAX + 1];
  int32_t hidden;       /* H: width of a dispatched row and of the experts' input and output */
  int32_t intermediate; /* I */
  int32_t experts;      /* E */
  int32_t top_k;        /* K */
  int32_t activation;   /* enum spec_activation */
  double activation_limit;
  int32_t score; /* enum spec_score */
  int32_t correction_bias;
  int32_t groups;
  int32_t top_groups;
  int32_t group_score; /* enum spec_group_score */
  int32_t renormalize; /* enum spec_renormalize */
  double scale;
  int32_t scale_on; /* enum spec_scale_on */
  int32_t shared_experts;
  int32_t shared_intermediate;
  int32_t dtype;    /* enum spec_dtype */
  int32_t dispatch; /* enum spec_wire: bf16 | fp8 */
  int32_t returned; /* enum spec_wire: bf16 | fp32 */
  int32_t reduce;   /* enum spec_reduce */
  int32_t batch_invariant;
};

/* The field table, in the order of the canonical text: what writes, reads and checks a spec, and what the YAML's table
 * refers to. */
enum spec_kind { SPEC_NAME, SPEC_INTEGER, SPEC_BOOLEAN, SPEC_REAL, SPEC_ENUM };

struct spec_field {
  const char *key;
  enum spec_kind kind;
  size_t offset;            /* in struct spec: char[], int32_t or double */
  double minimum, maximum;  /* integers and reals, both included */
  const char *const *names; /* enums: by value, the last one followed by NULL */
};
#define SPEC_FIELDS 22
extern const struct spec_field spec_fields[SPEC_FIELDS];

/* The field of a key, NULL when unknown. */
const struct spec_field *spec_field(const char *key);

/* Every rule: the range of each field and those that need several. MOEFLOW_ERROR_ARGUMENT with the numbers. */
moeflow_status spec_check(const struct spec *spec);

/* The same; on failure *key is the key of the field to blame (static storage). */
moeflow_status spec_check_field(const struct spec *spec, const char **key);

/* Canonical text into `text` (NUL-terminated, < SPEC_TEXT_MAX). */
moeflow_status spec_write(const struct spec *spec, char text[SPEC_TEXT_MAX]);

/* Strict reader of exactly what spec_write writes; then spec_check. `where` names the source in messages. */
moeflow_status spec_parse(const char *text, const char *where, struct spec *spec);

/* SHA-256 of the canonical text, 64 hex digits and NUL. */
void spec_hash(const struct spec *spec, char hex[65]);

/* "bf16", "fp8_w8a8", "fp8_w8a16"; the string of an enum field, as YAML and canonical text spell it. */
const char *spec_dtype_name(int32_t dtype);
int spec_dtype_from_name(const char *name, int32_t *dtype); /* 0, or -1 when unknown */

/* Sizes in bytes, all 64-bit; they cannot overflow for a checked spec. */
int64_t spec_row_bytes(const struct spec *spec);             /* one dispatched row */
int64_t spec_return_row_bytes(const struct spec *spec);      /* one returned row of H values */
int64_t spec_return_rows_per_token(const struct spec *spec); /* 1, or K with reduce: choices */
int64_t spec_gate_up_bytes(const struct spec *spec);         /* one expert's [2I, H] */
int64_t spec_down_bytes(const struct spec *spec);            /* one expert's [H, I] */
#endif
