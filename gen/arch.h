/* The GPU targets that cubins are built for: one table row each. */
#ifndef MOEFLOW_ARCH_H
#define MOEFLOW_ARCH_H

#include <stddef.h>
#include <stdint.h>

#include "moeflow.h"

struct arch {
  const char *name;     /* "sm_90a", as NVRTC's --gpu-architecture and the plan spell it */
  int major, minor;     /* compute capability */
  int exact;            /* arch-specific ("a"): its cubins run on this compute capability only, not on later minors */
  int32_t shared_bytes; /* most dynamic shared memory a block may opt in to (CUDA C++ Programming Guide, technical specs) */
  int has_pdl;          /* programmatic dependent launch, bulk copies and clusters: compute capability 9.0 and newer */
  int minimum_cuda;     /* first CUDA version whose NVRTC knows the target: 11080 = 11.8 */
  const char *gpus;     /* examples, for messages */
};

#define ARCH_MAX 16
extern const struct arch arch_table[]; /* ends with a NULL name */

/* The row of a name, or NULL after status_set(MOEFLOW_ERROR_ARGUMENT) with the known names. */
const struct arch *arch_find(const char *name);

/* The targets whose cubins run on a GPU of this compute capability, best first; returns how many (0: no such GPU known). */
int arch_for_device(int major, int minor, const struct arch *candidates[ARCH_MAX]);

/* "sm_80, sm_86, ...": the known names. */
void arch_names(char *text, size_t size);
#endif
