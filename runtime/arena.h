/* The memory of one lane: the window, which peers may store into, and the arena, which is this rank's alone. Each is one
 * allocation, cut into its parts by one function that first adds up and then hands out. */
#ifndef MOEFLOW_ARENA_H
#define MOEFLOW_ARENA_H

#include "internal.h"

/* Sets lane->window_bytes and lane->arena_bytes. MOEFLOW_ERROR_ARGUMENT when a size leaves its type's range. */
moeflow_status arena_measure(const struct moeflow_group *group, struct group_lane *lane);

/* Points the lane's members into lane->window and lane->arena. */
void arena_assign(const struct moeflow_group *group, struct group_lane *lane);
#endif
