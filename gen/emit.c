#include "emit.h"

#include <stdarg.h>
#include <string.h>

#include "number.h"
#include "status.h"

#define K(kernel) (1u << KERNEL_##kernel)
#define COMBINES (K(COMBINE) | K(COMBINE_RING) | K(RETURN_COMBINE))
#define EXPERTS (K(EXPERTS) | K(EXPERTS_STREAM))
#define ROUTERS (K(ROUTER) | K(DISPATCH))
#define PACKS (K(PACK) | K(DISPATCH))

#define FIELD(field)                                     \
  static double value_##field(const struct spec *spec) { \
    return spec->field;                                  \
  }
FIELD(hidden)
FIELD(intermediate)
FIELD(experts)
FIELD(top_k)
FIELD(score)
FIELD(correction_bias)
FIELD(groups)
FIELD(top_groups)
FIELD(group_score)
FIELD(renormalize)
FIELD(activation)

static double value_activation_limit(const struct spec *spec) {
  return spec->activation == SPEC_SWIGLU_CLAMP ? spec->activation_limit : 0;
}

static double value_return_fp32(const struct spec *spec) {
  return spec->returned == SPEC_WIRE_FP32;
}

static double value_reduce_choices(const struct spec *spec) {
  return spec->reduce == SPEC_REDUCE_CHOICES;
}

/* The scale is applied once: to the router's weights, or to the combined output. */
static double value_scale(const struct spec *spec) {
  return spec->scale_on == SPEC_SCALE_WEIGHTS ? spec->scale : 1;
}

static double value_output_scale(const struct spec *spec) {
  return spec->scale_on == SPEC_SCALE_OUTPUT ? spec->scale : 1;
}

/* The one table of model constants: which kernels' `struct Model` have them, in this order. */
static const struct constant {
  const char *name;
  const char *type;
  double (*value)(const struct spec *spec);
  unsigned kernels;
} constants[] = {
    {"hidden", "int", value_hidden,
     PACKS | K(EXPERT_INDEX) | K(EXPERT_PREPARE) | K(GATE_UP) | K(DOWN) | EXPERTS | K(PACK_WEIGHTS) | K(IDENTITY) |
         K(OWNER_REDUCE) | COMBINES},
    {"intermediate", "int", value_intermediate, K(GATE_UP) | K(DOWN) | EXPERTS | K(PACK_WEIGHTS)},
    {"experts", "int", value_experts, K(ROUTER) | PACKS},
    {"top_k", "int", value_top_k,
     K(ROUTER) | PACKS | K(EXPERT_INDEX) | K(EXPERT_PREPARE) | K(GATE_UP) | EXPERTS | K(IDENTITY) | K(OWNER_REDUCE) |
         COMBINES},
    {"score", "int", value_score, ROUTERS},
    {"correction_bias", "int", value_correction_bias, ROUTERS},
    {"groups", "int", value_groups, ROUTERS},
    {"top_groups", "int", value_top_groups, ROUTERS},
    {"group_score", "int", value_group_score, ROUTERS},
    {"renormalize", "int", value_renormalize, ROUTERS},
    {"scale", "float", value_scale, ROUTERS},
    {"activation", "int", value_activation, K(GATE_UP) | EXPERTS},
    {"activation_limit", "float", value_activation_limit, K(GATE_UP) | EXPERTS},
    {"return_fp32", "int", value_return_fp32, K(EXPERTS) | K(OWNER_REDUCE) | COMBINES},
    {"reduce_choices", "int", value_reduce_choices, K(EXPERTS) | K(OWNER_REDUCE) | COMBINES},
    {"output_scale", "float", value_output_scale, COMBINES},
};

struct writer {
  char *text;
  size_t length;
  int full;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *writer, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t room = EMIT_TEXT_MAX - writer->length;
  int n = vsnprintf(writer->text + writer->length, room, format, arguments);
  va_end(arguments);
  if (n < 0 || (size_t)n >= room) {
    writer->full = 1;
  } else {
    writer->length += (size_t)n;
  }
}

static void put_constant(struct writer *writer, const struct constant *constant, const struct spec *spec) {
  double value = constant->value(spec);
  if (strcmp(constant->type, "int") == 0) {
    put(writer, "  static constexpr int %s = %d;\n", constant->name, (int)value);
    return;
  }
  char number[NUMBER_TEXT_MAX];
  number_write((float)value, number); /* 9 digits name a float exactly */
  put(writer, "  static constexpr float %s = %s%sf;\n", constant->name, number, strpbrk(number, ".e") ? "" : ".0");
}

static int is_experts(int32_t kernel) {
  return (1u << kernel & (EXPERTS)) != 0;
}

static void put_variant(struct writer *writer, const struct plan_variant *variant) {
  const struct {
    const char *name;
    int32_t value;
  } rows[] = {{"threads", variant->threads},       {"tile_tokens", variant->tile_tokens}, {"tile_rows", variant->tile_rows},
              {"tile_depth", variant->tile_depth}, {"stages", variant->stages},           {"parts", variant->parts},
              {"residency", variant->residency}};
  int count = is_experts(variant->kernel) ? 7 : plan_is_gemm(variant->kernel) ? 5 : 1;
  put(writer, "struct Variant {\n");
  for (int i = 0; i < count; i++) put(writer, "  static constexpr int %s = %d;\n", rows[i].name, rows[i].value);
  put(writer, "};\n");
}

/* Kernels that share a parameter struct with another. */
static const char *params_name(int32_t kernel) {
  if (kernel == KERNEL_COMBINE_RING) return kernel_names[KERNEL_COMBINE];
  if (kernel == KERNEL_EXPERTS_STREAM) return kernel_names[KERNEL_EXPERTS];
  return kernel_names[kernel];
}

moeflow_status emit_unit(const struct plan_draft *draft, int index, char text[EMIT_TEXT_MAX]) {
  const struct plan_variant *variant = &draft->plan.variants[index];
  const char *name = kernel_names[variant->kernel];
  struct writer writer = {text, 0, 0};
  put(&writer, "// moeflow_%s: one variant, made by moeflow-gen. The numbers are the model's and the variant's.\n", name);
  put(&writer, "#include \"%s.cuh\"\n\nstruct Model {\n", name);
  for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
    if (constants[i].kernels & 1u << variant->kernel) put_constant(&writer, &constants[i], &draft->plan.spec);
  }
  put(&writer, "};\n");
  put_variant(&writer, variant);
  put(&writer,
      "\nextern \"C\" __global__ void __launch_bounds__(%d, %d)\n"
      "moeflow_%s(const __grid_constant__ moeflow_%s_params params) {\n"
      "  moeflow::%s<Model, Variant>(params);\n"
      "}\n",
      variant->threads, variant->residency, name, params_name(variant->kernel), name);
  if (writer.full) return status_set(MOEFLOW_ERROR_INTERNAL, "the unit of %s is longer than %d bytes", name, EMIT_TEXT_MAX);
  return MOEFLOW_OK;
}

void emit_file_name(const struct plan_draft *draft, int index, char name[EMIT_NAME_MAX]) {
  const struct plan_variant *variant = &draft->plan.variants[index];
  char tiles[64] = "", blocks[32] = "";
  if (plan_is_gemm(variant->kernel)) {
    snprintf(tiles, sizeof tiles, "_tokens%d_rows%d_depth%d_stages%d", variant->tile_tokens, variant->tile_rows,
             variant->tile_depth, variant->stages);
  }
  if (is_experts(variant->kernel)) {
    snprintf(blocks, sizeof blocks, "_parts%d_residency%d", variant->parts, variant->residency);
  }
  snprintf(name, EMIT_NAME_MAX, "%s%s%s.cu", kernel_names[variant->kernel], tiles, blocks);
}

void emit_symbol(int32_t kernel, char symbol[40]) {
  snprintf(symbol, 40, "moeflow_%s", kernel_names[kernel]);
}
