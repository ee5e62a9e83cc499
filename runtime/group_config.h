/* A group's configuration: every rule that this rank can check alone, before anything is allocated or a peer is met. */
#ifndef MOEFLOW_GROUP_CONFIG_H
#define MOEFLOW_GROUP_CONFIG_H

#include "internal.h"

/* Checks the configuration against the contexts and resolves its defaults: AUTO transport, timeout, local_experts_max. */
moeflow_status group_config_check(moeflow_context *const *contexts, int context_count, moeflow_group_config *config);
#endif
