/* The command line of moeflow-run: one table drives parsing, ranges and --help. */
#ifndef MOEFLOW_RUN_OPTIONS_H
#define MOEFLOW_RUN_OPTIONS_H

#include <stdint.h>
#include <stdio.h>

#include "moeflow.h"

#define OPTIONS_UNSET (-1)
#define OPTIONS_POINTS_MAX 64

enum options_format { OPTIONS_TEXT, OPTIONS_JSON };
enum options_routing_kind { ROUTING_UNIFORM, ROUTING_LOGNORMAL, ROUTING_ZIPF };

struct options_routing {
  enum options_routing_kind kind;
  double parameter; /* lognormal: sigma; zipf: the exponent */
};

struct options_point { /* one entry of --tokens */
  int count;           /* 1: the same on all ranks; else one count per rank */
  int32_t *tokens;
};

struct options {
  const char *model;
  int64_t ep; /* OPTIONS_UNSET: the launcher's size, else the model's */
  struct options_point points[OPTIONS_POINTS_MAX];
  int point_count;
  int64_t check, ids;
  int64_t backend;   /* moeflow_backend or OPTIONS_UNSET */
  int64_t transport; /* moeflow_transport */
  int64_t capacity, experts;
  const char *dtype, *cache, *rendezvous, *output, *machine, *flight, *explain_hang;
  uint64_t seed;
  struct options_routing routing;
  int64_t check_rows;
  int64_t allow_roundings;
  int64_t reduce;  /* enum spec_reduce or OPTIONS_UNSET */
  int64_t combine; /* moeflow_combine */
  int64_t lanes, replays, threads;
  uint64_t host_memory;
  int64_t timeout; /* seconds; OPTIONS_UNSET until setup_create */
  int64_t format;
  uint64_t reference_seed; /* self-test: the reference's weights come from this seed; 0 = from `seed` */
  int64_t die_rank;        /* self-test: this rank's process ends without a word before the first step */
  int64_t hand_example, help, version;
};

/* Reads argv. On failure MOEFLOW_ERROR_ARGUMENT and a message that names the option. --help and the like end the reading
 * early, so that they work beside anything. Strings are borrowed from argv. */
moeflow_status options_parse(int argc, char **argv, struct options *options);
void options_free(struct options *options);

/* Tokens of `rank` at a point; the largest over `ranks` ranks. */
int options_tokens(const struct options_point *point, int rank);
int options_tokens_max(const struct options_point *point);

void options_help(FILE *file);
const char *options_transport_name(moeflow_transport transport);
#endif
