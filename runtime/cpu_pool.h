/* Worker threads of one CPU context. Several ranks of a process may hand in work at the same time. */
#ifndef MOEFLOW_CPU_POOL_H
#define MOEFLOW_CPU_POOL_H

#include "moeflow.h"

struct cpu_pool;

/* `workers` threads beside the callers; 0 is allowed. Fewer are started when the system refuses. */
moeflow_status cpu_pool_create(int workers, struct cpu_pool **pool);
void cpu_pool_destroy(struct cpu_pool *pool); /* no work may be running; NULL is allowed */

/* Calls run(argument, unit) once for each unit in [0, units), on the caller and up to threads - 1 workers, and returns when
 * all have ended. Units start in ascending order. pool = NULL: on the caller alone. */
void cpu_pool_run(struct cpu_pool *pool, int threads, int64_t units, void (*run)(void *argument, int64_t unit),
                  void *argument);
#endif
