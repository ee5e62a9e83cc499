/* The space of the experts kernels: every point once, each rule where it should bite, the defaults inside. */
#include "experts_space.h"

#include "abi.h"
#include "test.h"

#define SHARED (227 << 10)

static struct spec spec_of(int hidden, int intermediate) {
  struct spec spec = {.hidden = hidden, .intermediate = intermediate, .experts = 64, .top_k = 8};
  return spec;
}

static void every_point_once(void) {
  static const struct {
    int32_t kernel;
    int points;
  } spaces[] = {{KERNEL_EXPERTS, 5 * 3 * 3 * 11 * 4 * 2}, {KERNEL_EXPERTS_STREAM, 4 * 2 * 6 * 6 * 4 * 2}};
  for (int s = 0; s < 2; s++) {
    struct experts_shape shape = {0}, before = {0};
    int points = 0;
    while (experts_space_next(spaces[s].kernel, &shape)) {
      int later = 0; /* ascending as words, so each once */
      for (int i = 0; i < EXPERTS_AXES_COUNT && !later; i++) {
        int32_t a = *(int32_t *)((char *)&shape + experts_axes[i].offset);
        int32_t b = *(int32_t *)((char *)&before + experts_axes[i].offset);
        later = a > b ? 1 : a < b ? -1 : 0;
      }
      EXPECT(later == 1, "point %d", points);
      before = shape;
      points++;
    }
    EXPECT(points == spaces[s].points, "%s: %d points", kernel_names[spaces[s].kernel], points);
  }
}

/* Points just inside a rule, and what one step breaks. */
static void rules(void) {
  static const struct {
    int hidden, intermediate;
    int32_t kernel;
    struct experts_shape shape;
    enum experts_rule rule;
  } cases[] = {
      {4096, 2048, KERNEL_EXPERTS, {8, 128, 128, 6, 4, 1}, EXPERTS_LEGAL},
      {4096, 2048, KERNEL_EXPERTS, {24, 128, 128, 6, 4, 1}, EXPERTS_AXES},
      {4096, 2048, KERNEL_EXPERTS, {8, 128, 128, 2, 4, 1}, EXPERTS_AXES},
      {4096, 2048, KERNEL_EXPERTS, {8, 128, 128, 7, 4, 1}, EXPERTS_SHARED}, /* 7 * 34,816 + 1,024 */
      {4096, 2048, KERNEL_EXPERTS, {8, 64, 128, 6, 4, 2}, EXPERTS_LEGAL},
      {4096, 2048, KERNEL_EXPERTS, {8, 64, 128, 7, 4, 2}, EXPERTS_SHARED},
      {4096, 2048, KERNEL_EXPERTS, {64, 128, 128, 5, 1, 1}, EXPERTS_LEGAL},     /* 168 of 168 */
      {4096, 2048, KERNEL_EXPERTS, {128, 128, 128, 5, 1, 1}, EXPERTS_LEGAL},    /* 168 of 168 */
      {4096, 2048, KERNEL_EXPERTS, {128, 256, 64, 4, 1, 1}, EXPERTS_REGISTERS}, /* 232 of 168 */
      {4096, 2048, KERNEL_EXPERTS, {32, 128, 64, 5, 1, 2}, EXPERTS_LEGAL},      /* 72 of 80 */
      {4096, 2048, KERNEL_EXPERTS, {32, 256, 64, 3, 1, 2}, EXPERTS_REGISTERS},
      {4096, 2048, KERNEL_EXPERTS, {64, 64, 64, 6, 1, 2}, EXPERTS_REGISTERS}, /* 136 of 128 */
      {4096, 2048, KERNEL_EXPERTS, {128, 64, 64, 4, 1, 2}, EXPERTS_REGISTERS},
      {4096, 1408, KERNEL_EXPERTS, {8, 128, 128, 6, 2, 1}, EXPERTS_LEGAL}, /* 22 steps */
      {4096, 1408, KERNEL_EXPERTS, {8, 128, 128, 6, 4, 1}, EXPERTS_PARTS},
      {4096, 512, KERNEL_EXPERTS, {8, 128, 64, 6, 8, 1}, EXPERTS_LEGAL},
      {4096, 512, KERNEL_EXPERTS, {8, 128, 128, 6, 8, 1}, EXPERTS_PARTS}, /* a part of 64 columns */
      {4096, 520, KERNEL_EXPERTS, {8, 128, 64, 6, 8, 1}, EXPERTS_PARTS},  /* 9 steps, the last one a tail */
      {64, 64, KERNEL_EXPERTS, {8, 128, 64, 6, 1, 1}, EXPERTS_LEGAL},     /* 128 rows of gate_up */
      {64, 64, KERNEL_EXPERTS, {8, 256, 64, 6, 1, 1}, EXPERTS_WIDTH},
      {64, 32, KERNEL_EXPERTS, {8, 128, 64, 6, 1, 1}, EXPERTS_WIDTH},
      {64, 64, KERNEL_EXPERTS, {8, 64, 64, 3, 1, 1}, EXPERTS_LEGAL}, /* 24 KB exactly */
      {4096, 2048, KERNEL_EXPERTS_STREAM, {8, 64, 512, 32, 4, 2}, EXPERTS_LEGAL},
      {4096, 2048, KERNEL_EXPERTS_STREAM, {8, 64, 256, 32, 4, 2}, EXPERTS_AXES}, /* a chunk is 16 columns a stage */
      {4096, 2048, KERNEL_EXPERTS_STREAM, {8, 64, 512, 32, 8, 2}, EXPERTS_PARTS},
      {4096, 2048, KERNEL_EXPERTS_STREAM, {8, 64, 64, 4, 1, 2}, EXPERTS_IN_FLIGHT}, /* 16 KB */
      {4096, 2048, KERNEL_EXPERTS_STREAM, {64, 64, 512, 32, 1, 2}, EXPERTS_SHARED},
      {4096, 2048, KERNEL_EXPERTS_STREAM, {8, 128, 512, 32, 1, 2}, EXPERTS_REGISTERS},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const struct spec spec = spec_of(cases[i].hidden, cases[i].intermediate);
    char why[EXPERTS_WHY_MAX];
    enum experts_rule rule = experts_shape_check(&spec, cases[i].kernel, &cases[i].shape, SHARED, why);
    EXPECT(rule == cases[i].rule, "case %zu: %s: %s", i, experts_rule_names[rule], why);
    EXPECT((rule == EXPERTS_LEGAL) == !why[0]);
    EXPECT(rule == experts_shape_check(&spec, cases[i].kernel, &cases[i].shape, SHARED, NULL));
  }
}

/* The hardware's own limits hold for every legal point, worked out anew: a multiprocessor has 228 KB, of which each block
 * costs 1 KB, 65536 registers and 2048 threads. */
static void legal_fits(void) {
  static const int widths[][2] = {{4096, 2048}, {2048, 768}, {2048, 1408}, {4096, 14336}, {8, 8}, {2880, 2880}};
  static const int32_t kernels[] = {KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM};
  for (size_t w = 0; w < sizeof widths / sizeof widths[0] * 2; w++) {
    const struct spec spec = spec_of(widths[w / 2][0], widths[w / 2][1]);
    const int32_t kernel = kernels[w % 2];
    struct experts_shape shape = {0};
    int counted[EXPERTS_RULES], count[EXPERTS_RULES] = {0};
    while (experts_space_next(kernel, &shape)) {
      struct plan_variant variant;
      struct experts_shape back;
      enum experts_rule rule = experts_shape_check(&spec, kernel, &shape, SHARED, NULL);
      count[rule]++;
      if (rule != EXPERTS_LEGAL) continue;
      experts_variant(kernel, &shape, &variant);
      experts_shape_of(&variant, &back);
      EXPECT(experts_shape_same(&shape, &back) && variant.kernel == kernel && variant.threads % 128 == 0);
      int64_t block = variant.shared_bytes + 1344 + 1024; /* static: 13 stages' barriers, 128 row addresses */
      EXPECT(block * shape.residency <= 228 << 10, "%lld bytes x %d", (long long)block, shape.residency);
      EXPECT(variant.shared_bytes <= SHARED && variant.threads * shape.residency <= 2048);
      EXPECT(shape.parts <= MOEFLOW_PARTS_MAX);
      EXPECT(experts_bytes_in_flight(kernel, &shape) >= 24 << 10);
      int32_t deep = kernel == KERNEL_EXPERTS ? 64 : 32, steps = (spec.intermediate + deep - 1) / deep;
      EXPECT(steps % shape.parts == 0 && (shape.parts == 1 || steps / shape.parts * deep >= shape.tile_depth));
    }
    experts_space_count(&spec, kernel, SHARED, counted);
    EXPECT(memcmp(counted, count, sizeof count) == 0);
    EXPECT(count[EXPERTS_LEGAL] > 0, "%d x %d has no legal variant of %s", spec.hidden, spec.intermediate,
           kernel_names[kernel]);
  }
}

static void facts(void) {
  const struct experts_shape narrow = {8, 64, 128, 6, 4, 1}, wide = {128, 256, 64, 4, 1, 1}, stream = {8, 64, 512, 32, 8, 2};
  char text[EXPERTS_SHAPE_TEXT_MAX];
  EXPECT(experts_threads(KERNEL_EXPERTS, &narrow) == 256 && experts_threads(KERNEL_EXPERTS, &wide) == 384);
  EXPECT(experts_threads(KERNEL_EXPERTS_STREAM, &stream) == 128);
  EXPECT(experts_shared_bytes(KERNEL_EXPERTS, &wide) == 4 * (256 + 128) * 128 + 1024);
  EXPECT(experts_bytes_in_flight(KERNEL_EXPERTS, &narrow) == 6 * 64 * 256);
  EXPECT(experts_bytes_in_flight(KERNEL_EXPERTS_STREAM, &stream) == 128 << 10);
  static const int tags[][3] = {{1, 16, 32}, {2, 17, 33}, {4, 18, 34}, {8, 19, 35}};
  for (int i = 0; i < 4; i++) {
    EXPECT(experts_order_tag(KERNEL_EXPERTS, tags[i][0]) == tags[i][1]);
    EXPECT(experts_order_tag(KERNEL_EXPERTS_STREAM, tags[i][0]) == tags[i][2]);
  }
  experts_shape_write(&narrow, text);
  EXPECT(strcmp(text, "tile_tokens=8 tile_rows=64 tile_depth=128 stages=6 parts=4 residency=1") == 0, "%s", text);
  for (const struct arch *arch = arch_table; arch->name; arch++) {
    EXPECT(experts_kernel_on(KERNEL_EXPERTS, arch) == !strcmp(arch->name, "sm_90a"), "%s", arch->name);
    EXPECT(experts_kernel_on(KERNEL_EXPERTS_STREAM, arch));
    const struct arch *beside = experts_arch_beside(arch);
    EXPECT(strcmp(beside ? beside->name : "", strcmp(arch->name, "sm_90") ? "" : "sm_90a") == 0, "%s", arch->name);
  }
}

int main(void) {
  every_point_once();
  rules();
  legal_fits();
  facts();
  TEST_END;
}
