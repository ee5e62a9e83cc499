/* Reads a flight record (runtime/flight.h) aloud: who is behind whom, and what that usually means. */
#ifndef MOEFLOW_RUN_EXPLAIN_HANG_H
#define MOEFLOW_RUN_EXPLAIN_HANG_H

#include <stdio.h>

#include "moeflow.h"

/* MOEFLOW_ERROR_FORMAT for a file that is no flight record of this version, MOEFLOW_ERROR_ENVIRONMENT where there is none. */
moeflow_status explain_hang(const char *path, FILE *out);
#endif
