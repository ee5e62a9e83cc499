/* Shapes that broke other generators: odd widths, expert counts around powers of two, one choice and many, each mode. */
#include "compile/compiling.h"

static const struct shape {
  const char *name;
  int hidden, intermediate, experts, top_k;
  const char *activation, *router, *more;
} shapes[] = {
    {"hidden-2880", 2880, 2880, 32, 4, "swiglu", "{score: softmax}", ""},
    {"intermediate-704", 2048, 704, 128, 8, "swiglu", "{score: softmax, renormalize: true}", ""},
    {"intermediate-224", 2048, 224, 60, 4, "{kind: swiglu_clamp, limit: 7.0}", "{score: softmax}", "reduce: choices\n"},
    {"experts-257", 1536, 512, 257, 8, "swiglu", "{score: sigmoid, correction_bias: true, scale: 2.5}", "return: fp32\n"},
    {"top-k-1", 5120, 1024, 16, 1, "swiglu", "{score: sigmoid, scale: {value: 1.5, on: output}}", ""},
    {"top-k-3", 6144, 768, 5, 3, "swiglu", "{score: softmax, renormalize: {guard: max_1e-12}}",
     "return: fp32\nreduce: choices\n"},
    {"top-k-32", 1024, 512, 4096, 32, "swiglu", "{score: softmax}", ""},
    {"softmax-groups", 5120, 1536, 160, 6, "swiglu", "{score: softmax, groups: 8, top_groups: 3, scale: 16.0}", ""},
    {"sigmoid-groups", 7168, 2048, 256, 8, "swiglu",
     "{score: sigmoid, correction_bias: true, groups: 8, top_groups: 4, renormalize: {guard: sum_1e-6}, scale: 2.5}", ""},
    {"one-expert", 512, 256, 1, 1, "swiglu", "{score: softmax}", ""},
};

int main(void) {
  static struct compiling compiling;
  const struct plan_options packed = {.packed = 1};
  compiling_begin(&compiling);
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    const struct shape *shape = &shapes[i];
    struct model model;
    char text[1024];
    snprintf(text, sizeof text,
             "moeflow: 1\nname: %s\nhidden: %d\nintermediate: %d\nexperts: %d\ntop_k: %d\nactivation: %s\nrouter: %s\n"
             "weights: {dtype: bf16}\n%s",
             shape->name, shape->hidden, shape->intermediate, shape->experts, shape->top_k, shape->activation, shape->router,
             shape->more);
    int read = model_parse(text, strlen(text), shape->name, &model) == MOEFLOW_OK;
    EXPECT(read, "%s", moeflow_last_error());
    if (read) compiling_model(&compiling, &model, &packed, i % 2 == 1); /* every second one: all tiles */
  }
  TEST_END;
}
