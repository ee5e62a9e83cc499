/* The variants that the two experts kernels can have: a table of axes for each, and the rules that say which points of it a
 * model can use on an arch. plan_build takes its defaults from this space, `sweep` searches it, tuned files name points of
 * it. Pure functions. */
#ifndef MOEFLOW_EXPERTS_SPACE_H
#define MOEFLOW_EXPERTS_SPACE_H

#include "arch.h"
#include "plan.h"

struct experts_shape {
  int32_t tile_tokens; /* received rows of a tile */
  int32_t tile_rows;   /* weight rows of a unit of work */
  int32_t tile_depth;  /* bf16 columns of a stage */
  int32_t stages;
  int32_t parts;     /* of down's depth */
  int32_t residency; /* blocks that share a multiprocessor */
};

/* In all that follows `kernel` is KERNEL_EXPERTS or KERNEL_EXPERTS_STREAM. */
int experts_kernel_on(int32_t kernel, const struct arch *arch);

/* The target of the same compute capability that has KERNEL_EXPERTS where `arch` has not: sm_90a beside sm_90. NULL: none.
 */
const struct arch *experts_arch_beside(const struct arch *arch);

/* Why a point is refused: the first of these rules that it breaks. */
enum experts_rule {
  EXPERTS_LEGAL,
  EXPERTS_AXES,      /* a value that its axis does not have, or values that do not go together */
  EXPERTS_WIDTH,     /* a smaller tile_rows would cover the matrices as well */
  EXPERTS_PARTS,     /* the parts are unequal, or shorter than a stage */
  EXPERTS_SHARED,    /* shared memory of a multiprocessor */
  EXPERTS_REGISTERS, /* of a multiprocessor */
  EXPERTS_IN_FLIGHT, /* too few bytes on their way to keep the memory busy */
  EXPERTS_RULES
};
extern const char *const experts_rule_names[EXPERTS_RULES]; /* "legal", "axes", ... */

/* The rule that the shape breaks; `why`, unless NULL, gets it with its numbers ("" when legal). shared_max: struct arch's.
 */
#define EXPERTS_WHY_MAX 192
enum experts_rule experts_shape_check(const struct spec *spec, int32_t kernel, const struct experts_shape *shape,
                                      int32_t shared_max, char why[EXPERTS_WHY_MAX]);

/* Every point, legal or not, in a fixed order (the last axis turns fastest): begin with a shape of zeros; 0 after the last.
 */
int experts_space_next(int32_t kernel, struct experts_shape *shape);

/* How many points fall to each rule. */
void experts_space_count(const struct spec *spec, int32_t kernel, int32_t shared_max, int count[EXPERTS_RULES]);

/* What follows from a shape. */
int32_t experts_threads(int32_t kernel, const struct experts_shape *shape);
int64_t experts_shared_bytes(int32_t kernel, const struct experts_shape *shape);    /* dynamic, of a block */
int32_t experts_registers(int32_t kernel, const struct experts_shape *shape);       /* of a thread that computes, at least */
int64_t experts_bytes_in_flight(int32_t kernel, const struct experts_shape *shape); /* weights, of a multiprocessor */
int32_t experts_order_tag(int32_t kernel, int32_t parts);

/* A shape as a variant without an entry, and back. */
void experts_variant(int32_t kernel, const struct experts_shape *shape, struct plan_variant *variant);
void experts_shape_of(const struct plan_variant *variant, struct experts_shape *shape);
int experts_shape_same(const struct experts_shape *a, const struct experts_shape *b);

/* "tile_tokens=16 tile_rows=128 tile_depth=128 stages=6 parts=4 residency=1" */
#define EXPERTS_SHAPE_TEXT_MAX 128
void experts_shape_write(const struct experts_shape *shape, char text[EXPERTS_SHAPE_TEXT_MAX]);

/* The fields of a shape in the order of its text, for readers and tables. */
#define EXPERTS_AXIS_VALUES_MAX 12
struct experts_axis {
  const char *name;
  size_t offset;                            /* of the int32_t in struct experts_shape */
  int32_t experts[EXPERTS_AXIS_VALUES_MAX]; /* ascending; 0 ends them */
  int32_t stream[EXPERTS_AXIS_VALUES_MAX];
};
#define EXPERTS_AXES_COUNT 6
extern const struct experts_axis experts_axes[EXPERTS_AXES_COUNT];
#endif
