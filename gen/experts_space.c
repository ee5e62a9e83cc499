#include "experts_space.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "abi.h"

#define AT(field) offsetof(struct experts_shape, field)
const struct experts_axis experts_axes[EXPERTS_AXES_COUNT] = {
    {"tile_tokens", AT(tile_tokens), {8, 16, 32, 64, 128}, {8, 16, 32, 64}},
    {"tile_rows", AT(tile_rows), {64, 128, 256}, {64, 128}},
    {"tile_depth", AT(tile_depth), {64, 128, 256}, {64, 128, 192, 256, 384, 512}},
    {"stages", AT(stages), {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, {4, 8, 12, 16, 24, 32}},
    {"parts", AT(parts), {1, 2, 4, 8}, {1, 2, 4, 8}},
    {"residency", AT(residency), {1, 2}, {1, 2}},
};

const char *const experts_rule_names[EXPERTS_RULES] = {
    [EXPERTS_LEGAL] = "legal",
    [EXPERTS_AXES] = "axes",
    [EXPERTS_WIDTH] = "width",
    [EXPERTS_PARTS] = "parts",
    [EXPERTS_SHARED] = "shared memory",
    [EXPERTS_REGISTERS] = "registers",
    [EXPERTS_IN_FLIGHT] = "bytes in flight",
};

#define REGISTERS 65536          /* of a multiprocessor, on every arch */
#define REGISTERS_OF_THREAD 255  /* at most */
#define REGISTERS_BESIDE 40      /* addresses, counters and the like, beside sums and fragments */
#define STATIC_SHARED 2048       /* barriers, the queue and the tile's row addresses, and what the system keeps */
#define IN_FLIGHT_MIN (24 << 10) /* bytes: 132 multiprocessors at 4.8 TB/s and 650 ns */
#define GROUP_THREADS 128        /* a warpgroup */
#define FRAGMENT_DEPTH 16

static int32_t *value_of(const struct experts_axis *axis, const struct experts_shape *shape) {
  return (int32_t *)((char *)shape + axis->offset);
}

static const int32_t *values_of(const struct experts_axis *axis, int32_t kernel) {
  return kernel == KERNEL_EXPERTS ? axis->experts : axis->stream;
}

int experts_kernel_on(int32_t kernel, const struct arch *arch) {
  if (kernel == KERNEL_EXPERTS) return arch->major == 9 && arch->exact; /* warpgroup MMA */
  return arch->major >= 8;
}

const struct arch *experts_arch_beside(const struct arch *arch) {
  if (experts_kernel_on(KERNEL_EXPERTS, arch)) return NULL;
  for (const struct arch *other = arch_table; other->name; other++) {
    if (other->major == arch->major && other->minor == arch->minor && experts_kernel_on(KERNEL_EXPERTS, other)) return other;
  }
  return NULL;
}

/* ---- What follows from a shape ---- */

/* experts: warpgroups that compute, beside the one that loads. */
static int32_t consumer_groups(const struct experts_shape *shape) {
  return shape->tile_rows > MOEFLOW_UNIT_ROWS ? 2 : 1;
}

int32_t experts_threads(int32_t kernel, const struct experts_shape *shape) {
  if (kernel == KERNEL_EXPERTS) return (1 + consumer_groups(shape)) * GROUP_THREADS;
  return shape->tile_rows / MOEFLOW_FRAGMENT_ROWS * 32; /* a warp for each 16 rows */
}

int64_t experts_shared_bytes(int32_t kernel, const struct experts_shape *shape) {
  if (kernel == KERNEL_EXPERTS) {
    return moeflow_experts_shared_bytes(shape->tile_tokens, shape->tile_rows, shape->tile_depth, shape->stages);
  }
  return moeflow_experts_stream_shared_bytes(shape->tile_tokens, shape->tile_depth);
}

/* A warpgroup holds 64 x tile_tokens sums in tile_tokens / 2 registers, once for each of its blocks of 64 rows, and once
 * more for the step that is added to them. A warp of the stream holds 16 x tile_tokens sums in as many, and its fragments.
 */
int32_t experts_registers(int32_t kernel, const struct experts_shape *shape) {
  if (kernel == KERNEL_EXPERTS) {
    int32_t blocks = shape->tile_rows / MOEFLOW_UNIT_ROWS / consumer_groups(shape);
    int32_t wide = shape->tile_tokens == 64; /* holds both steps' sums, and those of a pair of blocks */
    int32_t sums = wide && shape->tile_rows == 128 ? 4 : blocks + (wide ? 2 : 1);
    return sums * shape->tile_tokens / 2 + REGISTERS_BESIDE;
  }
  return shape->stages * 4 + shape->tile_tokens / 2 + REGISTERS_BESIDE;
}

int64_t experts_bytes_in_flight(int32_t kernel, const struct experts_shape *shape) {
  if (kernel == KERNEL_EXPERTS) {
    return (int64_t)shape->stages * shape->tile_rows * shape->tile_depth * 2 * shape->residency;
  }
  return (int64_t)experts_threads(kernel, shape) / 32 * shape->stages * MOEFLOW_FRAGMENT_BYTES * shape->residency;
}

int32_t experts_order_tag(int32_t kernel, int32_t parts) {
  int32_t tag = kernel == KERNEL_EXPERTS ? 16 : 32;
  for (; parts > 1; parts /= 2) tag++;
  return tag;
}

void experts_variant(int32_t kernel, const struct experts_shape *shape, struct plan_variant *variant) {
  *variant = (struct plan_variant){.kernel = kernel,
                                   .tile_tokens = shape->tile_tokens,
                                   .tile_rows = shape->tile_rows,
                                   .tile_depth = shape->tile_depth,
                                   .stages = shape->stages,
                                   .parts = shape->parts,
                                   .residency = shape->residency,
                                   .threads = experts_threads(kernel, shape),
                                   .shared_bytes = (int32_t)experts_shared_bytes(kernel, shape),
                                   .order_tag = experts_order_tag(kernel, shape->parts)};
}

void experts_shape_of(const struct plan_variant *variant, struct experts_shape *shape) {
  *shape = (struct experts_shape){variant->tile_tokens, variant->tile_rows, variant->tile_depth,
                                  variant->stages,      variant->parts,     variant->residency};
}

int experts_shape_same(const struct experts_shape *a, const struct experts_shape *b) {
  for (int i = 0; i < EXPERTS_AXES_COUNT; i++) {
    if (*value_of(&experts_axes[i], a) != *value_of(&experts_axes[i], b)) return 0;
  }
  return 1;
}

void experts_shape_write(const struct experts_shape *shape, char text[EXPERTS_SHAPE_TEXT_MAX]) {
  size_t used = 0;
  for (int i = 0; i < EXPERTS_AXES_COUNT; i++) {
    const struct experts_axis *axis = &experts_axes[i];
    used += (size_t)snprintf(text + used, EXPERTS_SHAPE_TEXT_MAX - used, "%s%s=%d", i ? " " : "", axis->name,
                             *value_of(axis, shape));
  }
}

/* ---- Rules ---- */

struct question {
  const struct spec *spec;
  int32_t kernel;
  const struct experts_shape *shape;
  int32_t shared_max;
  char *why; /* NULL: nobody asks */
};

__attribute__((format(printf, 2, 3))) static int refuse(const struct question *question, const char *format, ...) {
  va_list arguments;
  if (!question->why) return 1;
  va_start(arguments, format);
  vsnprintf(question->why, EXPERTS_WHY_MAX, format, arguments);
  va_end(arguments);
  return 1;
}

static int breaks_axes(const struct question *q) {
  for (int i = 0; i < EXPERTS_AXES_COUNT; i++) {
    const int32_t *values = values_of(&experts_axes[i], q->kernel), value = *value_of(&experts_axes[i], q->shape);
    int known = 0;
    for (int v = 0; v < EXPERTS_AXIS_VALUES_MAX && values[v]; v++) known |= values[v] == value;
    if (!known) return refuse(q, "%s %d: %s has no such variants", experts_axes[i].name, value, kernel_names[q->kernel]);
  }
  if (q->kernel == KERNEL_EXPERTS_STREAM && q->shape->tile_depth != q->shape->stages * FRAGMENT_DEPTH) {
    return refuse(q, "%d stages, each %d columns, make tile_depth %d, not %d", q->shape->stages, FRAGMENT_DEPTH,
                  q->shape->stages * FRAGMENT_DEPTH, q->shape->tile_depth);
  }
  return 0;
}

static int breaks_width(const struct question *q) {
  int32_t rows = 2 * q->spec->intermediate > q->spec->hidden ? 2 * q->spec->intermediate : q->spec->hidden;
  if (q->shape->tile_rows / 2 < MOEFLOW_UNIT_ROWS || q->shape->tile_rows / 2 < rows) return 0;
  return refuse(q, "tile_rows %d: half of it covers the %d rows there are", q->shape->tile_rows, rows);
}

/* Part by part the depth is read in the same steps, so that parts which divide it end together. */
static int breaks_parts(const struct question *q) {
  int32_t step = q->kernel == KERNEL_EXPERTS ? MOEFLOW_COLUMN_DEPTH : MOEFLOW_STEP_DEPTH;
  int32_t steps = (q->spec->intermediate + step - 1) / step;
  if (steps % q->shape->parts)
    return refuse(q, "%d parts do not divide the %d steps of down's depth", q->shape->parts, steps);
  if (q->shape->parts > 1 && steps / q->shape->parts * step < q->shape->tile_depth) {
    return refuse(q, "a part of %d columns is shorter than tile_depth %d", steps / q->shape->parts * step,
                  q->shape->tile_depth);
  }
  return 0;
}

static int breaks_shared(const struct question *q) {
  int64_t bytes = experts_shared_bytes(q->kernel, q->shape);
  int64_t room = q->shared_max / q->shape->residency - STATIC_SHARED;
  if (bytes <= room) return 0;
  return refuse(q, "%lld bytes of shared memory, of which a block has %lld", (long long)bytes, (long long)room);
}

static int breaks_registers(const struct question *q) {
  int32_t threads = experts_threads(q->kernel, q->shape);
  int32_t room = REGISTERS / (threads * q->shape->residency) / 8 * 8, needed = experts_registers(q->kernel, q->shape);
  if (room > REGISTERS_OF_THREAD) room = REGISTERS_OF_THREAD;
  if (needed <= room) return 0;
  return refuse(q, "about %d registers a thread, of which %d x %d threads have %d", needed, q->shape->residency, threads,
                room);
}

static int breaks_in_flight(const struct question *q) {
  int64_t bytes = experts_bytes_in_flight(q->kernel, q->shape);
  if (bytes >= IN_FLIGHT_MIN) return 0;
  return refuse(q, "%lld bytes in flight on a multiprocessor; the memory wants %d", (long long)bytes, IN_FLIGHT_MIN);
}

static int (*const rules[EXPERTS_RULES])(const struct question *) = {
    [EXPERTS_AXES] = breaks_axes,     [EXPERTS_WIDTH] = breaks_width,         [EXPERTS_PARTS] = breaks_parts,
    [EXPERTS_SHARED] = breaks_shared, [EXPERTS_REGISTERS] = breaks_registers, [EXPERTS_IN_FLIGHT] = breaks_in_flight,
};

enum experts_rule experts_shape_check(const struct spec *spec, int32_t kernel, const struct experts_shape *shape,
                                      int32_t shared_max, char why[EXPERTS_WHY_MAX]) {
  const struct question question = {spec, kernel, shape, shared_max, why};
  if (why) why[0] = 0;
  for (int rule = EXPERTS_LEGAL + 1; rule < EXPERTS_RULES; rule++) {
    if (rules[rule](&question)) return rule;
  }
  return EXPERTS_LEGAL;
}

/* ---- The whole space ---- */

int experts_space_next(int32_t kernel, struct experts_shape *shape) {
  int begun = shape->tile_tokens != 0;
  for (int i = EXPERTS_AXES_COUNT - 1; i >= 0; i--) {
    const int32_t *values = values_of(&experts_axes[i], kernel);
    int32_t *value = value_of(&experts_axes[i], shape);
    int at = 0;
    if (begun) {
      while (values[at] != *value) at++;
      at++;
    }
    int wraps = at == EXPERTS_AXIS_VALUES_MAX || !values[at];
    *value = values[wraps ? 0 : at];
    if (begun && !wraps) return 1;
  }
  return !begun;
}

void experts_space_count(const struct spec *spec, int32_t kernel, int32_t shared_max, int count[EXPERTS_RULES]) {
  struct experts_shape shape = {0};
  memset(count, 0, sizeof(int) * EXPERTS_RULES);
  while (experts_space_next(kernel, &shape)) count[experts_shape_check(spec, kernel, &shape, shared_max, NULL)]++;
}
