/* A unit's entry in the store: found there, or compiled and published. In worker processes alone (gen/pool.h). */
#ifndef MOEFLOW_UNIT_ENTRY_H
#define MOEFLOW_UNIT_ENTRY_H

#include "unit.h"

/* Statuses of compile_unit and store_obtain; MOEFLOW_ERROR_INTERNAL too when the kernel takes more shared memory than a
 * block of the arch has. *log: what the compiler said, malloc'ed, NULL when nothing was compiled; also after an error. */
moeflow_status unit_entry(const struct units *units, const struct unit *unit, const struct toolchain *toolchain,
                          struct store *store, int wait_s, struct store_outcome *outcome, char **log);
#endif
