/* Device memory that other processes of the host can open: a table of the ways there are, the preferred one first. The device
 * is current on the calling thread. */
#ifndef MOEFLOW_WINDOW_MEMORY_H
#define MOEFLOW_WINDOW_MEMORY_H

#include "internal.h"

#define WINDOW_SOURCES 2

struct window_span { /* one rank's memory, as this process reaches it; all zero: none */
  uint8_t *memory;
  size_t bytes;              /* as the driver counts them, at least those asked for */
  unsigned long long handle; /* vmm: the driver's, for the memory; 0: none */
  int mapped;                /* vmm: `memory` is more than reserved addresses */
  int opened;                /* another rank's */
};

struct window_ticket { /* what another process needs to open it, beside a file */
  uint64_t bytes;
  uint8_t handle[64];
};

struct window_source {
  const char *name;
  int by_file; /* tickets go with a file descriptor */
  /* After a failure the span is as far as it came, for release. allocate: zero-filled. */
  moeflow_status (*allocate)(struct moeflow_context *context, size_t bytes, struct window_span *span);
  moeflow_status (*share)(const struct window_span *span, struct window_ticket *ticket, int *fd); /* fd: the caller closes */
  moeflow_status (*open)(struct moeflow_context *context, const struct window_ticket *ticket, int fd,
                         struct window_span *span);
  void (*release)(struct moeflow_context *context, struct window_span *span); /* also of none */
};
extern const struct window_source window_sources[WINDOW_SOURCES];
#endif
