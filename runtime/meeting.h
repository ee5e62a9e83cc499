/* Where ranks that are processes of one host meet: abstract Unix sockets, named by a hash of the unique id, so that no file is
 * left behind. Rank 0 listens and answers, the others connect to it.
 *
 * Every operation is collective: all ranks call the same ones in the same order, each from one thread at a time. Each is
 * bounded by the timeout (a rank other than 0 waits a second longer, for rank 0's reason). A rank that does not come or has
 * ended is an error that names it; after an error the meeting is of no use to anybody, and every later call gives the same. */
#ifndef MOEFLOW_MEETING_H
#define MOEFLOW_MEETING_H

#include <stddef.h>

#include "moeflow.h"

#define MEETING_BYTES_MAX 512 /* of a rank in one gather */

struct meeting;

/* Waits until all ranks have come. Only processes of the same user are let in. *meeting is NULL after a failure.
 * MOEFLOW_ERROR_TIMEOUT names who is missing, MOEFLOW_ERROR_MISMATCH who means another number of ranks. id may be NULL with
 * one rank. */
moeflow_status meeting_join(const moeflow_unique_id *id, int rank, int ranks, int timeout_ms, struct meeting **meeting);

/* all[r] = rank r's bytes, at most MEETING_BYTES_MAX. */
moeflow_status meeting_gather(struct meeting *meeting, const void *mine, size_t bytes, void *all);

/* all[ranks]: a descriptor of each rank's file, my own included, for the caller to close. `mine` stays the caller's. After a
 * failure all of them are -1. */
moeflow_status meeting_fds(struct meeting *meeting, int mine, int *all);

void meeting_leave(struct meeting *meeting); /* NULL is allowed */
#endif
