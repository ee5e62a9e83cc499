/* The table of a model's keys, and what reads a document through it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "document.h"
#include "model.h"
#include "number.h"
#include "status.h"
#include "word.h"

#define DEFAULT_ARCH "sm_90a"

enum weights_dtype { WEIGHTS_BF16, WEIGHTS_FP8 };

struct reader {
  const struct document *document;
  const char *where;
  struct model *model;
  const struct document_node *seen[64]; /* by row of the field table: the value in the file, NULL when absent */
  int32_t weights_dtype;                /* enum weights_dtype */
  int32_t activations_bf16;             /* FP8 weights: activations stay bf16 */
};

enum { SCALAR = 1 << DOCUMENT_SCALAR, MAP = 1 << DOCUMENT_MAP, LIST = 1 << DOCUMENT_LIST };
enum need { OPTIONAL, REQUIRED, REQUIRED_IN_MAP };

struct field {
  const char *path; /* "router.scale.value" */
  int forms;        /* SCALAR | MAP | LIST */
  enum need need;
  const char *spec_key; /* where type and range come from; NULL: `type` says it */
  moeflow_status (*set)(struct reader *reader, const struct field *field, const struct document_node *node);
  const char *fallback; /* the default, as the file would spell it, applied when absent */
  const char *type;     /* help: overrides what the spec's field says */
  const char *shown;    /* help: a default that depends on others */
  const char *meaning;
};

static moeflow_status set_spec(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_hidden(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_version(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_renormalize(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_weights_dtype(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_activations(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_block(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_ep(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_capacity(struct reader *, const struct field *, const struct document_node *);
static moeflow_status set_arch(struct reader *, const struct field *, const struct document_node *);

/* Every key a model may have. Maps stand before their members; a value with two forms has its members below it. */
static const struct field fields[] = {
    {"moeflow", SCALAR, REQUIRED, NULL, set_version, NULL, "1", NULL, "version of this format"},
    {"name", SCALAR, REQUIRED, "name", set_spec, NULL, NULL, NULL, "a-z 0-9 _ . -, names the plan"},
    {"hidden", SCALAR, REQUIRED, "hidden", set_hidden, NULL, NULL, NULL,
     "H, width of the model's hidden state; a multiple of 8"},
    {"dispatch_hidden", SCALAR, OPTIONAL, "hidden", set_spec, NULL, NULL, "hidden",
     "width of a dispatched row and of the experts, where it differs (latent experts)"},
    {"intermediate", SCALAR, REQUIRED, "intermediate", set_spec, NULL, NULL, NULL,
     "I, width inside a routed expert; a multiple of 8"},
    {"experts", SCALAR, REQUIRED, "experts", set_spec, NULL, NULL, NULL, "E, routed experts"},
    {"top_k", SCALAR, REQUIRED, "top_k", set_spec, NULL, NULL, NULL, "K, experts a token goes to; at most E"},
    {"activation", SCALAR | MAP, REQUIRED, "activation", set_spec, NULL, NULL, NULL, "the kind, or {kind, limit}"},
    {"activation.kind", SCALAR, REQUIRED_IN_MAP, "activation", set_spec, NULL, NULL, NULL,
     "swiglu: silu(gate) * up; swiglu_clamp: gate <= limit, |up| <= limit first"},
    {"activation.limit", SCALAR, OPTIONAL, "activation_limit", set_spec, NULL, NULL, NULL,
     "swiglu_clamp needs one, swiglu has none"},
    {"router", MAP, REQUIRED, NULL, NULL, NULL, "map", NULL, "how experts are chosen and weighted"},
    {"router.score", SCALAR, REQUIRED, "score", set_spec, NULL, NULL, NULL, "s, from the logits"},
    {"router.correction_bias", SCALAR, OPTIONAL, "correction_bias", set_spec, "false", NULL, NULL,
     "choose by s + bias, weight by s"},
    {"router.groups", SCALAR, OPTIONAL, "groups", set_spec, "1", NULL, NULL, "groups of E / groups experts; divides E"},
    {"router.top_groups", SCALAR, OPTIONAL, "top_groups", set_spec, "1", NULL, NULL, "groups kept; at most groups"},
    {"router.group_score", SCALAR, OPTIONAL, "group_score", set_spec, NULL, NULL, "top2 with correction_bias, else max",
     "a group's score: its best, or the sum of its two best"},
    {"router.renormalize", SCALAR | MAP, OPTIONAL, NULL, set_renormalize, "false", "true | false", NULL,
     "divide the K weights by their sum (true: guarded as sum_1e-20), or {guard}"},
    {"router.renormalize.guard", SCALAR, REQUIRED_IN_MAP, "renormalize", set_renormalize, NULL, NULL, NULL,
     "sum + 1e-20, sum + 1e-6 or max(sum, 1e-12)"},
    {"router.scale", SCALAR | MAP, OPTIONAL, "scale", set_spec, "1.0", NULL, NULL, "factor on the weights, or {value, on}"},
    {"router.scale.value", SCALAR, REQUIRED_IN_MAP, "scale", set_spec, NULL, NULL, NULL, "the factor"},
    {"router.scale.on", SCALAR, OPTIONAL, "scale_on", set_spec, "weights", NULL, NULL, "what it multiplies"},
    {"shared_experts", MAP, OPTIONAL, NULL, NULL, NULL, "map", "none",
     "experts that every token visits; described, not computed"},
    {"shared_experts.count", SCALAR, REQUIRED_IN_MAP, "shared_experts", set_spec, NULL, NULL, NULL, "how many"},
    {"shared_experts.intermediate", SCALAR, REQUIRED_IN_MAP, "shared_intermediate", set_spec, NULL, NULL, NULL,
     "width inside each of them"},
    {"weights", MAP, REQUIRED, NULL, NULL, NULL, "map", NULL, "form of the expert matrices"},
    {"weights.dtype", SCALAR, REQUIRED, NULL, set_weights_dtype, NULL, "bf16 | fp8_e4m3", NULL, "--dtype overrides"},
    {"weights.block", LIST, OPTIONAL, NULL, set_block, NULL, "[128, 128]", "[128, 128] for fp8_e4m3",
     "rows and columns that share one scale; fp8_e4m3 only"},
    {"weights.activations", SCALAR, OPTIONAL, NULL, set_activations, NULL, "fp8 | bf16", "fp8 for fp8_e4m3",
     "form of the rows they meet; fp8_e4m3 only"},
    {"dispatch", SCALAR, OPTIONAL, "dispatch", set_spec, "bf16", "bf16 | fp8", NULL, "form of a row on its way out"},
    {"return", SCALAR, OPTIONAL, "return", set_spec, "bf16", "bf16 | fp32", NULL, "form of a row on its way home"},
    {"reduce", SCALAR, OPTIONAL, "reduce", set_spec, "owner", NULL, NULL,
     "who sums a token's choices: each owner its own, or the source all of them"},
    {"deploy", MAP, OPTIONAL, NULL, NULL, NULL, "map", NULL, "the machines, overridable on the command line"},
    {"deploy.ep", SCALAR, OPTIONAL, NULL, set_ep, "1", "1 to experts", NULL, "ranks that share the experts; --ep"},
    {"deploy.capacity", SCALAR, OPTIONAL, NULL, set_capacity, "128", "1 to 1048576", NULL,
     "C, most tokens a rank brings to a step; --capacity"},
    {"deploy.arch", LIST, OPTIONAL, NULL, set_arch, NULL, "list of names", "[sm_90a]", "targets to build for; --arch"},
    {"deploy.batch_invariant", SCALAR, OPTIONAL, "batch_invariant", set_spec, "false", NULL, NULL,
     "a token's result never depends on its batch mates"},
};
#define FIELDS (int)(sizeof fields / sizeof *fields)
_Static_assert(sizeof fields / sizeof *fields <= 64, "struct reader");

static int field_index(const char *path) {
  for (int i = 0; i < FIELDS; i++) {
    if (!strcmp(fields[i].path, path)) return i;
  }
  return -1;
}

#define NODE_FAULT(reader, node, ...) document_fault((reader)->where, (node)->line, (node)->column, __VA_ARGS__)

/* ---- Values ---- */

static void describe_type(const struct field *field, char *text, size_t size) {
  const struct spec_field *spec = field->spec_key ? spec_field(field->spec_key) : NULL;
  char minimum[NUMBER_TEXT_MAX], maximum[NUMBER_TEXT_MAX];
  size_t length = 0;
  text[0] = 0;
  if (field->type || !spec) {
    snprintf(text, size, "%s", field->type ? field->type : "");
  } else if (spec->kind == SPEC_ENUM) {
    /* `none` is what the canonical text calls the absence */
    for (int i = 0; spec->names[i] && length < size; i++) {
      if (!strcmp(spec->names[i], "none")) continue;
      length += (size_t)snprintf(text + length, size - length, "%s%s", length ? " | " : "", spec->names[i]);
    }
  } else if (spec->kind == SPEC_NAME) {
    snprintf(text, size, "1 to %d characters", SPEC_NAME_MAX);
  } else if (spec->kind == SPEC_BOOLEAN) {
    snprintf(text, size, "true | false");
  } else {
    number_write(spec->minimum, minimum);
    number_write(spec->maximum, maximum);
    snprintf(text, size, "%s to %s", minimum, maximum);
  }
}

/* Values of config.json that are called otherwise here. */
static const struct {
  const char *path, *value, *here;
} config_values[] = {
    {"activation", "silu", "swiglu"},
    {"activation.kind", "silu", "swiglu"},
    {"weights.dtype", "bfloat16", "bf16"},
};
#define CONFIG_VALUES ((int)(sizeof config_values / sizeof config_values[0]))

/* "; config.json's 'silu' is swiglu here", or "". */
static void config_hint(const struct field *field, const char *value, char hint[96]) {
  hint[0] = 0;
  for (int i = 0; i < CONFIG_VALUES; i++) {
    if (strcmp(config_values[i].path, field->path) || strcmp(config_values[i].value, value)) continue;
    snprintf(hint, 96, "; config.json's '%s' is %s here", value, config_values[i].here);
  }
}

static moeflow_status wrong_value(const struct reader *reader, const struct field *field, const struct document_node *node,
                                  const char *why) {
  char quoted[DOCUMENT_QUOTE_MAX], type[160], hint[96];
  describe_type(field, type, sizeof type);
  config_hint(field, node->text, hint);
  if (!*node->text && !node->quoted) return NODE_FAULT(reader, node, "%s has no value; it must be %s", field->path, type);
  return NODE_FAULT(reader, node, "%s is '%s'%s%s; it must be %s%s", field->path, document_quote(node->text, quoted),
                    *why ? ", which " : "", why, type, hint);
}

static moeflow_status read_integer(const struct reader *reader, const struct field *field, const struct document_node *node,
                                   int64_t minimum, int64_t maximum, int32_t *value) {
  int64_t number = 0;
  const char *wrong = node->quoted ? "is in quotes" : number_read_integer(node->text, &number);
  if (!wrong && (number < minimum || number > maximum)) wrong = "is out of range";
  if (wrong) return wrong_value(reader, field, node, wrong);
  *value = (int32_t)number;
  return MOEFLOW_OK;
}

/* Rounded to what the canonical text holds, so that a spec and its text always agree. */
static moeflow_status read_real(const struct reader *reader, const struct field *field, const struct document_node *node,
                                const struct spec_field *spec, double *value) {
  double number = 0;
  char text[NUMBER_TEXT_MAX];
  const char *wrong = node->quoted ? "is in quotes" : number_read_decimal(node->text, &number);
  if (!wrong && !(number >= spec->minimum && number <= spec->maximum)) wrong = "is out of range";
  if (!wrong) number_write(number, text);
  if (!wrong) wrong = number_read_decimal(text, value); /* a tiny number is written with an exponent */
  return wrong ? wrong_value(reader, field, node, wrong) : MOEFLOW_OK;
}

/* The index among names, or an error. */
static moeflow_status read_name(const struct reader *reader, const struct field *field, const struct document_node *node,
                                const char *const *names, int32_t *value) {
  for (int i = 0; names[i]; i++) {
    if (strcmp(names[i], node->text) || !strcmp(names[i], "none")) continue;
    *value = i;
    return MOEFLOW_OK;
  }
  return wrong_value(reader, field, node, "");
}

static moeflow_status read_boolean(const struct reader *reader, const struct field *field, const struct document_node *node,
                                   int32_t *value) {
  static const char *const names[] = {"false", "true", NULL};
  if (node->quoted) return wrong_value(reader, field, node, "is in quotes");
  return read_name(reader, field, node, names, value);
}

static moeflow_status set_spec(struct reader *reader, const struct field *field, const struct document_node *node) {
  const struct spec_field *spec = spec_field(field->spec_key);
  void *value = (char *)&reader->model->spec + spec->offset;
  if (node->kind != DOCUMENT_SCALAR) return MOEFLOW_OK; /* a map: its members say it */
  switch (spec->kind) {
    case SPEC_INTEGER:
      return read_integer(reader, field, node, (int64_t)spec->minimum, (int64_t)spec->maximum, value);
    case SPEC_REAL:
      return read_real(reader, field, node, spec, value);
    case SPEC_BOOLEAN:
      return read_boolean(reader, field, node, value);
    case SPEC_ENUM:
      return read_name(reader, field, node, spec->names, value);
    case SPEC_NAME:
      break;
  }
  if (strlen(node->text) > SPEC_NAME_MAX) return wrong_value(reader, field, node, "is too long");
  strcpy(value, node->text); /* its letters: spec_check */
  return MOEFLOW_OK;
}

static moeflow_status set_version(struct reader *reader, const struct field *field, const struct document_node *node) {
  int32_t version;
  return read_integer(reader, field, node, 1, 1, &version);
}

static moeflow_status set_hidden(struct reader *reader, const struct field *field, const struct document_node *node) {
  const struct spec_field *spec = spec_field(field->spec_key);
  return read_integer(reader, field, node, (int64_t)spec->minimum, (int64_t)spec->maximum, &reader->model->hidden);
}

static moeflow_status set_renormalize(struct reader *reader, const struct field *field, const struct document_node *node) {
  int32_t on;
  if (field->spec_key || node->kind == DOCUMENT_MAP) return field->spec_key ? set_spec(reader, field, node) : MOEFLOW_OK;
  moeflow_status status = read_boolean(reader, field, node, &on);
  if (status == MOEFLOW_OK) reader->model->spec.renormalize = on ? SPEC_SUM_1E_20 : SPEC_RENORMALIZE_NONE;
  return status;
}

static moeflow_status set_weights_dtype(struct reader *reader, const struct field *field, const struct document_node *node) {
  static const char *const names[] = {[WEIGHTS_BF16] = "bf16", [WEIGHTS_FP8] = "fp8_e4m3", NULL};
  return read_name(reader, field, node, names, &reader->weights_dtype);
}

static moeflow_status set_activations(struct reader *reader, const struct field *field, const struct document_node *node) {
  static const char *const names[] = {"fp8", "bf16", NULL};
  return read_name(reader, field, node, names, &reader->activations_bf16);
}

static moeflow_status set_block(struct reader *reader, const struct field *field, const struct document_node *node) {
  const struct document_node *nodes = reader->document->nodes;
  int count = 0;
  for (int i = node->first; i >= 0; i = nodes[i].next, count++) {
    if (nodes[i].kind != DOCUMENT_SCALAR || count == 2)
      return NODE_FAULT(reader, &nodes[i], "weights.block must be [128, 128]");
    moeflow_status status = read_integer(reader, field, &nodes[i], 128, 128, &reader->model->weight_block[count]);
    if (status != MOEFLOW_OK) return status;
  }
  return count == 2 ? MOEFLOW_OK : NODE_FAULT(reader, node, "weights.block has %d numbers; it must be [128, 128]", count);
}

static moeflow_status set_ep(struct reader *reader, const struct field *field, const struct document_node *node) {
  return read_integer(reader, field, node, 1, SPEC_EXPERTS_MAX, &reader->model->deploy.ep);
}

static moeflow_status set_capacity(struct reader *reader, const struct field *field, const struct document_node *node) {
  return read_integer(reader, field, node, 1, MODEL_CAPACITY_MAX, &reader->model->deploy.capacity);
}

static moeflow_status set_arch(struct reader *reader, const struct field *field, const struct document_node *node) {
  const struct document_node *nodes = reader->document->nodes;
  for (int i = node->first; i >= 0; i = nodes[i].next) {
    if (nodes[i].kind != DOCUMENT_SCALAR) return NODE_FAULT(reader, &nodes[i], "%s lists names such as sm_90a", field->path);
    char quoted[DOCUMENT_QUOTE_MAX], message[512];
    if (model_add_arch(&reader->model->deploy, document_quote(nodes[i].text, quoted)) == MOEFLOW_OK) continue;
    snprintf(message, sizeof message, "%s", moeflow_last_error());
    return NODE_FAULT(reader, &nodes[i], "%s", message);
  }
  if (node->first >= 0) return MOEFLOW_OK;
  return NODE_FAULT(reader, node, "%s is empty; list at least one, such as [%s]", field->path, DEFAULT_ARCH);
}

/* ---- The tree against the table ---- */

/* What published config.json files call these; several names where families differ. */
static const struct {
  const char *name, *path;
} config_names[] = {
    {"hidden_size", "hidden"},
    {"moe_intermediate_size", "intermediate"},
    {"intermediate_size", "intermediate"},
    {"num_experts", "experts"},
    {"num_local_experts", "experts"},
    {"n_routed_experts", "experts"},
    {"num_experts_per_tok", "top_k"},
    {"hidden_act", "activation"},
    {"swiglu_limit", "activation.limit"},
    {"scoring_func", "router.score"},
    {"norm_topk_prob", "router.renormalize"},
    {"n_group", "router.groups"},
    {"topk_group", "router.top_groups"},
    {"routed_scaling_factor", "router.scale"},
    {"n_shared_experts", "shared_experts.count"},
};
#define CONFIG_NAMES ((int)(sizeof config_names / sizeof config_names[0]))

static moeflow_status unknown_key(const struct reader *reader, const char *prefix, const struct document_node *node) {
  char quoted[DOCUMENT_QUOTE_MAX];
  struct word_guess guess = {NULL, 0};
  for (int i = 0; i < FIELDS; i++) {
    const char *last = strrchr(fields[i].path, '.');
    last = last ? last + 1 : fields[i].path;
    /* a key of the same map is preferred to one that belongs elsewhere */
    int elsewhere = strncmp(fields[i].path, prefix, strlen(prefix)) || fields[i].path + strlen(prefix) != last;
    word_consider(&guess, node->key, last, fields[i].path, elsewhere);
  }
  document_quote(node->key, quoted);
  for (int i = 0; i < CONFIG_NAMES; i++) {
    if (strcmp(node->key, config_names[i].name)) continue;
    return document_fault(reader->where, node->key_line, node->key_column,
                          "unknown key '%s%s', a name from config.json; here it is '%s'", prefix, quoted,
                          config_names[i].path);
  }
  if (guess.best) {
    return document_fault(reader->where, node->key_line, node->key_column, "unknown key '%s%s'; did you mean '%s'?", prefix,
                          quoted, guess.best);
  }
  return document_fault(reader->where, node->key_line, node->key_column,
                        "unknown key '%s%s'; `moeflow-gen help model` lists them", prefix, quoted);
}

static moeflow_status wrong_form(const struct reader *reader, const struct field *field, const struct document_node *node) {
  static const char *const forms[] = {
      [DOCUMENT_SCALAR] = "a single value", [DOCUMENT_MAP] = "a map", [DOCUMENT_LIST] = "a list"};
  char type[160], wanted[64] = "";
  size_t length = 0;
  describe_type(field, type, sizeof type);
  for (int i = 0; i < 3; i++) {
    if (!(field->forms & 1 << i)) continue;
    length += (size_t)snprintf(wanted + length, sizeof wanted - length, "%s%s", length ? " or " : "", forms[i]);
  }
  if (node->kind == DOCUMENT_SCALAR && !*node->text && !node->quoted) {
    return NODE_FAULT(reader, node, "%s has no value; it must be %s", field->path, wanted);
  }
  return NODE_FAULT(reader, node, "%s is %s; it must be %s%s%s%s", field->path, forms[node->kind], wanted,
                    strcmp(type, "map") ? " (" : "", strcmp(type, "map") ? type : "", strcmp(type, "map") ? ")" : "");
}

static moeflow_status apply_map(struct reader *reader, const struct document_node *map, const char *prefix) {
  moeflow_status status = MOEFLOW_OK;
  const struct document_node *nodes = reader->document->nodes;
  for (int i = map->first; i >= 0; i = nodes[i].next) {
    char path[128] = "";
    int fits = (size_t)snprintf(path, sizeof path, "%s%s", prefix, nodes[i].key) < sizeof path;
    int index = fits && !strchr(nodes[i].key, '.') ? field_index(path) : -1;
    if (index < 0) return unknown_key(reader, prefix, &nodes[i]);
    const struct field *field = &fields[index];
    if (!(field->forms & 1 << nodes[i].kind)) return wrong_form(reader, field, &nodes[i]);
    reader->seen[index] = &nodes[i];
    if (field->set) CHECK(field->set(reader, field, &nodes[i]));
    if (nodes[i].kind == DOCUMENT_MAP) {
      strcat(path, ".");
      CHECK(apply_map(reader, &nodes[i], path));
    }
  }
cleanup:
  return status;
}

/* The row of the map that a row is a member of; -1 for the root. */
static int parent_index(int index) {
  char path[64];
  snprintf(path, sizeof path, "%s", fields[index].path);
  char *dot = strrchr(path, '.');
  if (!dot) return -1;
  *dot = 0;
  return field_index(path);
}

static const struct document_node *node_or_parent(const struct reader *reader, int index) {
  while (index >= 0 && !reader->seen[index]) index = parent_index(index);
  return index >= 0 ? reader->seen[index] : &reader->document->nodes[0];
}

static moeflow_status check_missing(const struct reader *reader) {
  for (int i = 0; i < FIELDS; i++) {
    int parent = parent_index(i);
    int in_map = parent >= 0 && reader->seen[parent] && reader->seen[parent]->kind == DOCUMENT_MAP;
    if (reader->seen[i] || fields[i].need == OPTIONAL || (fields[i].need == REQUIRED_IN_MAP && !in_map)) continue;
    char type[160];
    describe_type(&fields[i], type, sizeof type);
    return NODE_FAULT(reader, node_or_parent(reader, i), "key '%s' is missing (%s): %s", fields[i].path, type,
                      fields[i].meaning);
  }
  return MOEFLOW_OK;
}

static moeflow_status apply_defaults(struct reader *reader) {
  moeflow_status status = MOEFLOW_OK;
  struct spec *spec = &reader->model->spec;
  for (int i = 0; i < FIELDS; i++) {
    if (reader->seen[i] || !fields[i].fallback) continue;
    struct document_node node = {.kind = DOCUMENT_SCALAR, .text = fields[i].fallback, .line = 1, .column = 1};
    CHECK(fields[i].set(reader, &fields[i], &node));
  }
  if (!reader->seen[field_index("dispatch_hidden")]) spec->hidden = reader->model->hidden;
  if (!reader->seen[field_index("router.group_score")]) {
    spec->group_score = spec->correction_bias ? SPEC_GROUP_TOP2 : SPEC_GROUP_MAX;
  }
  if (!reader->seen[field_index("deploy.arch")]) CHECK(model_add_arch(&reader->model->deploy, DEFAULT_ARCH));
cleanup:
  return status;
}

static moeflow_status check_weights(struct reader *reader) {
  struct model *model = reader->model;
  static const char *const fp8_only[] = {"weights.block", "weights.activations"};
  if (reader->weights_dtype == WEIGHTS_FP8) {
    model->spec.dtype = reader->activations_bf16 ? SPEC_FP8_W8A16 : SPEC_FP8_W8A8;
    model->weight_block[0] = model->weight_block[1] = 128;
    return MOEFLOW_OK;
  }
  model->spec.dtype = SPEC_BF16;
  for (int i = 0; i < 2; i++) {
    const struct document_node *node = reader->seen[field_index(fp8_only[i])];
    if (node) return NODE_FAULT(reader, node, "%s is for fp8_e4m3 weights; these are bf16", fp8_only[i]);
  }
  return MOEFLOW_OK;
}

/* The row that feeds a field of the spec, a member of a map before the map itself when the file has it. */
static int field_of_spec_key(const struct reader *reader, const char *key) {
  int found = -1;
  for (int i = 0; i < FIELDS; i++) {
    if (fields[i].spec_key && !strcmp(fields[i].spec_key, key) && (found < 0 || reader->seen[i])) found = i;
  }
  return found;
}

static moeflow_status check_rules(const struct reader *reader) {
  const char *key = NULL, *path = NULL;
  int index = -1;
  if (spec_check_field(&reader->model->spec, &key) != MOEFLOW_OK) {
    index = !strcmp(key, "dtype") ? field_index("weights.dtype") : field_of_spec_key(reader, key);
  } else if (model_check_deploy(reader->model, &path) != MOEFLOW_OK) {
    index = field_index(path);
  } else {
    return MOEFLOW_OK;
  }
  char message[512];
  snprintf(message, sizeof message, "%s", moeflow_last_error());
  return NODE_FAULT(reader, node_or_parent(reader, index), "%s", message);
}

moeflow_status model_parse(const char *text, size_t length, const char *where, struct model *model) {
  moeflow_status status = MOEFLOW_OK;
  struct document *document = NULL;
  struct reader reader = {.where = where, .model = model};
  memset(model, 0, sizeof *model);
  CHECK(document_parse(text, length, where, &document));
  reader.document = document;
  if (document->nodes[0].kind != DOCUMENT_MAP) {
    status = NODE_FAULT(&reader, &document->nodes[0], "a model is a map of `key: value` lines; this is a %s",
                        document->nodes[0].kind == DOCUMENT_LIST ? "list" : "single value");
    goto cleanup;
  }
  CHECK(apply_map(&reader, &document->nodes[0], ""));
  CHECK(check_missing(&reader));
  CHECK(apply_defaults(&reader));
  CHECK(check_weights(&reader));
  CHECK(check_rules(&reader));
cleanup:
  document_free(document);
  return status;
}

void model_print_fields(FILE *file) {
  fprintf(file,
          "A model is a YAML map of these keys. Integers and decimals are plain: no sign, leading zero, underscore or "
          "exponent.\n\n");
  for (int i = 0; i < FIELDS; i++) {
    char type[160];
    const struct field *field = &fields[i];
    int parent = parent_index(i);
    describe_type(field, type, sizeof type);
    const char *fallback = field->fallback ? field->fallback : field->shown;
    int required = field->need == REQUIRED || (field->need == REQUIRED_IN_MAP && parent >= 0);
    fprintf(file, "  %-27s %s; %s%s\n  %-27s %s\n", field->path, type,
            required   ? "required"
            : fallback ? "default "
                       : "optional",
            required || !fallback ? "" : fallback, "", field->meaning);
  }
  fprintf(
      file,
      "\nWhat a model's config.json calls them. Where it has both widths, intermediate_size is a dense layer's. What it\n"
      "does not say, the family fixes: Mixtral, for one, always renormalizes.\n\n");
  for (int i = 0; i < CONFIG_NAMES; i++) fprintf(file, "  %-27s %s\n", config_names[i].name, config_names[i].path);
}
