#include "arch.h"

#include <stdio.h>
#include <string.h>

#include "status.h"

/* Shared memory: 163, 99 or 227 KB a block. */
const struct arch arch_table[] = {
    {"sm_80", 8, 0, 0, 163 << 10, 0, 11000, "A100"},
    {"sm_86", 8, 6, 0, 99 << 10, 0, 11010, "A10, RTX 30"},
    {"sm_89", 8, 9, 0, 99 << 10, 0, 11080, "L4, L40S, RTX 40"},
    {"sm_90", 9, 0, 0, 227 << 10, 1, 11080, "H100, H200, GH200"},
    {"sm_90a", 9, 0, 1, 227 << 10, 1, 12000, "H100, H200, GH200"},
    {"sm_100a", 10, 0, 1, 227 << 10, 1, 12080, "B200, GB200"},
    {"sm_103a", 10, 3, 1, 227 << 10, 1, 12090, "B300, GB300"},
    {"sm_120", 12, 0, 0, 99 << 10, 1, 12080, "RTX 50, RTX PRO Blackwell"},
    {"sm_120a", 12, 0, 1, 99 << 10, 1, 12080, "RTX 50, RTX PRO Blackwell"},
    {"sm_121a", 12, 1, 1, 99 << 10, 1, 12090, "GB10 (DGX Spark)"},
    {NULL, 0, 0, 0, 0, 0, 0, NULL},
};

void arch_names(char *text, size_t size) {
  size_t length = 0;
  if (size) text[0] = 0;
  for (const struct arch *arch = arch_table; arch->name && length < size; arch++) {
    length += (size_t)snprintf(text + length, size - length, "%s%s", length ? ", " : "", arch->name);
  }
}

const struct arch *arch_find(const char *name) {
  for (const struct arch *arch = arch_table; arch->name; arch++) {
    if (!strcmp(arch->name, name)) return arch;
  }
  char names[256];
  arch_names(names, sizeof names);
  status_set(MOEFLOW_ERROR_ARGUMENT, "unknown arch '%.32s'; known: %s", name, names);
  return NULL;
}

/* A cubin runs on its own compute capability and, unless arch-specific, on later minors of the same major. */
static int runs_on(const struct arch *arch, int major, int minor) {
  return arch->major == major && (arch->minor == minor || (!arch->exact && arch->minor < minor));
}

static int better(const struct arch *a, const struct arch *b) {
  return a->minor != b->minor ? a->minor > b->minor : a->exact > b->exact;
}

int arch_for_device(int major, int minor, const struct arch *candidates[ARCH_MAX]) {
  int count = 0;
  for (const struct arch *arch = arch_table; arch->name && count < ARCH_MAX; arch++) {
    if (!runs_on(arch, major, minor)) continue;
    int at = count++;
    for (; at > 0 && better(arch, candidates[at - 1]); at--) candidates[at] = candidates[at - 1];
    candidates[at] = arch;
  }
  return count;
}
