/* What one-sided transports have in common: kernels store rows into the peers' buffers and raise flags there. */
#ifndef MOEFLOW_ONE_SIDED_H
#define MOEFLOW_ONE_SIDED_H

#include "internal.h"

struct one_sided_peer { /* a lane's buffers of one rank, as this rank's device reaches them */
  uint8_t *received, *returned;
  uint32_t *flags;
};

/* Fills the lane's target arrays: peers[ranks]. */
moeflow_status one_sided_attach(const struct moeflow_group *group, struct group_lane *lane, const struct one_sided_peer *peers);

/* What kernels need to tell the peers and await them. */
struct moeflow_peers one_sided_peers(const struct moeflow_group *group, const struct group_lane *lane);

/* From the host, with `flags` the flag block of one peer: whatever it waits for, it hears that this rank has given the group
 * up. Any thread; the device is current. */
moeflow_status one_sided_give_up(const struct moeflow_group *group, const struct group_lane *lane, uint32_t *flags);

/* Enqueues the kernel that raises this rank's flags of the phase and awaits the peers'. */
moeflow_status one_sided_exchange(const struct moeflow_group *group, const struct group_lane *lane, enum moeflow_phase phase,
                                  void *stream);
#endif
