/* Unique ids of our own: random bytes behind a mark that tells whom they were made for. NCCL's carry none: they begin with
 * bytes of a random number and an address. */
#ifndef MOEFLOW_UNIQUE_ID_H
#define MOEFLOW_UNIQUE_ID_H

#include "moeflow.h"

moeflow_status unique_id_make(moeflow_unique_id *id, const char *mark);
int unique_id_has(const moeflow_unique_id *id, const char *mark);
#endif
