/* A layer small enough for pencil and paper: docs/hand-example.md works it out, this runs it. */
#ifndef MOEFLOW_HAND_EXAMPLE_H
#define MOEFLOW_HAND_EXAMPLE_H

#include <stdio.h>

/* Runs the example on the CPU backend, both ranks as threads, and prints each stage beside the numbers worked out by hand.
 * Returns an exit code: 0 when all agree, 4 when one does not, or that of what failed. */
int hand_example_print(FILE *out);
#endif
