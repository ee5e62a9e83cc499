/* The memory of one lane: one allocation, cut into its parts by one function that first adds up and then hands out. */
#ifndef MOEFLOW_ARENA_H
#define MOEFLOW_ARENA_H

#include "internal.h"

/* Bytes that one lane of the group needs. MOEFLOW_ERROR_ARGUMENT when a size leaves its type's range. */
moeflow_status arena_bytes(const struct moeflow_group *group, size_t *bytes);

/* Points the lane's members into lane->arena. */
void arena_assign(const struct moeflow_group *group, struct group_lane *lane);
#endif
