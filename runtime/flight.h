/* The flight record: what a rank knows of its peers' last steps, as text, for when a step did not end. docs/file-formats.md
 * describes the lines; `moeflow-run --explain-hang FILE` reads them aloud. */
#ifndef MOEFLOW_FLIGHT_H
#define MOEFLOW_FLIGHT_H

#include "moeflow.h"

#define FLIGHT_VERSION 1

struct moeflow_group;

/* All lanes of a group over a one-sided transport, to `path`, which is made anew. The device must be current; waits for small
 * copies only, not for steps. Any thread. */
moeflow_status flight_write(const struct moeflow_group *group, const char *path);
#endif
