#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "number.h"
#include "spec.h"
#include "status.h"

enum option_kind {
  OPTION_FLAG,
  OPTION_INTEGER,
  OPTION_UNSIGNED,
  OPTION_BYTES,
  OPTION_STRING,
  OPTION_CHOICE,
  OPTION_TOKENS,
  OPTION_ROUTING
};

struct choice {
  const char *name;
  int64_t value;
};

struct option_row {
  const char *name;
  enum option_kind kind;
  size_t offset;
  const char *argument; /* as --help shows it */
  int64_t minimum, maximum;
  const struct choice *choices;
  const char *help;
};

static const struct choice backends[] = {{"cpu", MOEFLOW_BACKEND_CPU}, {"cuda", MOEFLOW_BACKEND_CUDA}, {NULL, 0}};
static const struct choice transports[] = {{"auto", MOEFLOW_TRANSPORT_AUTO},     {"nccl", MOEFLOW_TRANSPORT_NCCL},
                                           {"window", MOEFLOW_TRANSPORT_WINDOW}, {"allgather", MOEFLOW_TRANSPORT_ALLGATHER},
                                           {"local", MOEFLOW_TRANSPORT_LOCAL},   {NULL, 0}};
static const struct choice reduces[] = {{"owner", SPEC_REDUCE_OWNER}, {"choices", SPEC_REDUCE_CHOICES}, {NULL, 0}};
static const struct choice combines[] = {{"plan", MOEFLOW_COMBINE_PLAN}, {"ring", MOEFLOW_COMBINE_RING}, {NULL, 0}};
static const struct choice formats[] = {{"text", OPTIONS_TEXT}, {"json", OPTIONS_JSON}, {NULL, 0}};

#define AT(field) offsetof(struct options, field)
#define TOKENS_LIMIT (1 << 20)
static const struct option_row table[] = {
    {"ep", OPTION_INTEGER, AT(ep), "N", 1, SPEC_EXPERTS_MAX, NULL,
     "ranks; default: the launcher's, else the model's deploy.ep"},
    {"tokens", OPTION_TOKENS, AT(points), "LIST", 0, TOKENS_LIMIT, NULL,
     "tokens per rank, a comma list of points; 5/0 gives one count per rank; default 1"},
    {"check", OPTION_FLAG, AT(check), NULL, 0, 0, NULL,
     "compare every rank with the reference, repeats and graph replays bitwise"},
    {"backend", OPTION_CHOICE, AT(backend), "cpu|cuda", 0, 0, backends, "default: cuda where there is a GPU"},
    {"transport", OPTION_CHOICE, AT(transport), "auto|nccl|window|allgather|local", 0, 0, transports,
     "how rows travel; local: all ranks in one process, on one GPU or the CPU"},
    {"capacity", OPTION_INTEGER, AT(capacity), "C", 1, TOKENS_LIMIT, NULL,
     "most tokens a rank may bring; default: deploy.capacity"},
    {"dtype", OPTION_STRING, AT(dtype), "D", 0, 0, NULL, "weight dtype in place of the model's, such as bf16"},
    {"seed", OPTION_UNSIGNED, AT(seed), "S", 0, 0, NULL, "of weights, hidden states and logits; default 1"},
    {"routing", OPTION_ROUTING, AT(routing), "uniform|lognormal:SIGMA|zipf:S", 0, 0, NULL,
     "popularity of the experts; default uniform"},
    {"ids", OPTION_FLAG, AT(ids), NULL, 0, 0, NULL, "route on the host and pass ids and weights instead of logits"},
    {"check-rows", OPTION_INTEGER, AT(check_rows), "N", 1, TOKENS_LIMIT, NULL,
     "rows per rank that the reference computes from 512 tokens over all ranks up; default 64"},
    {"experts", OPTION_INTEGER, AT(experts), "N", 1, SPEC_EXPERTS_MAX, NULL, "a scaled-down model with N experts"},
    {"cache", OPTION_STRING, AT(cache), "DIR", 0, 0, NULL,
     "cubin cache; default: MOEFLOW_CACHE_DIR, else the user's cache folder"},
    {"reduce", OPTION_CHOICE, AT(reduce), "owner|choices", 0, 0, reduces,
     "where choices are summed, in place of the model's"},
    {"combine", OPTION_CHOICE, AT(combine), "plan|ring", 0, 0, combines,
     "how the source adds the owners' sums; default plan"},
    {"lanes", OPTION_INTEGER, AT(lanes), "1|2", 1, 2, NULL, "micro-batches in flight; repeats alternate between them"},
    {"replays", OPTION_INTEGER, AT(replays), "N", 1, 1000000, NULL,
     "repeats and graph replays; default 100 on a GPU, 2 on the CPU"},
    {"threads", OPTION_INTEGER, AT(threads), "N", 1, 4096, NULL, "CPU threads over all ranks; default: the cores"},
    {"host-memory", OPTION_BYTES, AT(host_memory), "BYTES|NGiB", 0, 0, NULL,
     "most memory that the CPU backend may take; default 8GiB"},
    {"timeout", OPTION_INTEGER, AT(timeout), "S", 1, 86400, NULL,
     "bound of every wait for a peer in seconds; default: MOEFLOW_TIMEOUT_S, else 60"},
    {"rendezvous", OPTION_STRING, AT(rendezvous), "HOST:PORT", 0, 0, NULL,
     "where rank 0 listens, under a launcher; default: MASTER_ADDR and MASTER_PORT + 1, else this machine"},
    {"format", OPTION_CHOICE, AT(format), "text|json", 0, 0, formats, "of the result on stdout; default text"},
    {"output", OPTION_STRING, AT(output), "FILE", 0, 0, NULL, "write the JSON there as well"},
    {"machine", OPTION_STRING, AT(machine), "NAME", 0, 0, NULL, "in the JSON; default: from the GPUs, such as h200x2"},
    {"hand-example", OPTION_FLAG, AT(hand_example), NULL, 0, 0, NULL,
     "print the worked example of 2 ranks, 4 experts, 3 tokens"},
    {"reference-seed", OPTION_UNSIGNED, AT(reference_seed), "S", 0, 0, NULL,
     "self-test: give the reference other weights, to see the check fail"},
    {"die-rank", OPTION_INTEGER, AT(die_rank), "R", 0, SPEC_EXPERTS_MAX, NULL,
     "self-test: the process of rank R ends itself before the first step, to see the others end"},
    {"help", OPTION_FLAG, AT(help), NULL, 0, 0, NULL, "this text"},
    {"version", OPTION_FLAG, AT(version), NULL, 0, 0, NULL, "version and build"},
    {NULL, OPTION_FLAG, 0, NULL, 0, 0, NULL, NULL}};

const char *options_transport_name(moeflow_transport transport) {
  for (const struct choice *choice = transports; choice->name; choice++)
    if (choice->value == (int64_t)transport) return choice->name;
  return "unknown";
}

void options_help(FILE *file) {
  fprintf(file,
          "usage: moeflow-run MODEL.yaml [options]\n\n"
          "Runs one expert-parallel MoE layer with made-up weights and tokens, one process per rank (forked, or under\n"
          "torchrun, mpirun or srun), all ranks as threads on the CPU or with --transport local.\n\n");
  for (const struct option_row *row = table; row->name; row++) {
    char left[64];
    snprintf(left, sizeof left, "%s--%s%s%s", strcmp(row->name, "help") ? "" : "-h, ", row->name, row->argument ? " " : "",
             row->argument ? row->argument : "");
    if (strlen(left) > 30) {
      fprintf(file, "  %s\n  %-30s  %s\n", left, "", row->help);
    } else {
      fprintf(file, "  %-30s  %s\n", left, row->help);
    }
  }
  fprintf(file,
          "\nexit: 0 ok, 1 internal, 2 usage, 3 bad model file, 4 check failed, 5 environment, 6 cache, 7 timeout or peer\n"
          "lost, 130 interrupted\n");
}

/* Plain decimal digits without a leading zero; `end` is set to the first byte after them. */
static int read_unsigned(const char *text, const char **end, uint64_t *value) {
  if (*text < '0' || *text > '9' || (*text == '0' && text[1] >= '0' && text[1] <= '9')) return -1;
  char *stop;
  errno = 0;
  const unsigned long long number = strtoull(text, &stop, 10);
  if (errno) return -1;
  *value = number;
  *end = stop;
  return 0;
}

static moeflow_status read_integer(const struct option_row *row, const char *text, int64_t *value) {
  const char *end;
  uint64_t number;
  if (read_unsigned(text, &end, &number) || *end || number > INT64_MAX || (int64_t)number < row->minimum ||
      (int64_t)number > row->maximum)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s %.64s: not an integer from %lld to %lld", row->name, text,
                      (long long)row->minimum, (long long)row->maximum);
  *value = (int64_t)number;
  return MOEFLOW_OK;
}

static moeflow_status read_bytes(const struct option_row *row, const char *text, uint64_t *value) {
  static const struct choice units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}, {NULL, 0}};
  const char *end;
  uint64_t number;
  if (!read_unsigned(text, &end, &number) && number > 0) {
    while (*end == ' ') end++;
    for (const struct choice *unit = units; unit->name; unit++) {
      if (strcmp(end, unit->name) != 0 || number > UINT64_MAX >> unit->value) continue;
      *value = number << unit->value;
      return MOEFLOW_OK;
    }
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s %.64s: not a number of bytes such as 4294967296 or 4GiB", row->name, text);
}

static moeflow_status read_choice(const struct option_row *row, const char *text, int64_t *value) {
  for (const struct choice *choice = row->choices; choice->name; choice++) {
    if (strcmp(text, choice->name) != 0) continue;
    *value = choice->value;
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s %.64s: not one of %s", row->name, text, row->argument);
}

/* One point: `8`, or `5/0/3` with one count per rank. */
static moeflow_status read_point(const char *text, const char *whole, const char **end, struct options_point *point) {
  int room = 1;
  for (const char *c = text; *c && *c != ','; c++) room += *c == '/';
  point->tokens = calloc((size_t)room, sizeof *point->tokens);
  point->count = 0;
  if (!point->tokens) return status_set(MOEFLOW_ERROR_MEMORY, "--tokens %.64s: out of memory", whole);
  for (;; text++) {
    uint64_t number;
    if (read_unsigned(text, end, &number) || number > TOKENS_LIMIT || (**end && **end != ',' && **end != '/'))
      return status_set(MOEFLOW_ERROR_ARGUMENT, "--tokens %.64s: not a list such as 0,1,8 or 5/0,3/3 of numbers up to %d",
                        whole, TOKENS_LIMIT);
    point->tokens[point->count++] = (int32_t)number;
    text = *end;
    if (*text != '/') return MOEFLOW_OK;
  }
}

static void free_points(struct options *options) {
  for (int p = 0; p < options->point_count; p++) free(options->points[p].tokens);
  options->point_count = 0;
}

static moeflow_status read_tokens(const char *text, struct options *options) {
  const char *whole = text;
  free_points(options);
  for (;; text++) {
    if (options->point_count == OPTIONS_POINTS_MAX)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "--tokens %.64s: more than %d points", whole, OPTIONS_POINTS_MAX);
    struct options_point *point = &options->points[options->point_count++];
    moeflow_status status = read_point(text, whole, &text, point);
    if (status != MOEFLOW_OK) return status;
    if (!*text) return MOEFLOW_OK;
  }
}

static moeflow_status read_routing(const char *text, struct options_routing *routing) {
  static const struct choice kinds[] = {{"lognormal:", ROUTING_LOGNORMAL}, {"zipf:", ROUTING_ZIPF}, {NULL, 0}};
  if (strcmp(text, "uniform") == 0) {
    *routing = (struct options_routing){ROUTING_UNIFORM, 0};
    return MOEFLOW_OK;
  }
  for (const struct choice *kind = kinds; kind->name; kind++) {
    const size_t length = strlen(kind->name);
    double parameter;
    if (strncmp(text, kind->name, length) != 0 || number_read_decimal(text + length, &parameter) || parameter > 16) continue;
    *routing = (struct options_routing){(enum options_routing_kind)kind->value, parameter};
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--routing %.64s: not uniform, lognormal:SIGMA or zipf:S with a number up to 16",
                    text);
}

static moeflow_status read_value(const struct option_row *row, const char *text, struct options *options) {
  void *field = (char *)options + row->offset;
  const char *end;
  switch (row->kind) {
    case OPTION_FLAG:
      *(int64_t *)field = 1;
      return MOEFLOW_OK;
    case OPTION_INTEGER:
      return read_integer(row, text, field);
    case OPTION_BYTES:
      return read_bytes(row, text, field);
    case OPTION_CHOICE:
      return read_choice(row, text, field);
    case OPTION_TOKENS:
      return read_tokens(text, options);
    case OPTION_ROUTING:
      return read_routing(text, field);
    case OPTION_UNSIGNED:
      if (!read_unsigned(text, &end, field) && !*end) return MOEFLOW_OK;
      return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s %.64s: not an unsigned 64-bit integer", row->name, text);
    case OPTION_STRING:
      if (!*text) return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s: empty", row->name);
      *(const char **)field = text;
      return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_INTERNAL, "--%s: no reader", row->name);
}

/* One argument and, for `--name value`, the next one; *index ends on the last one used. */
static moeflow_status read_argument(int argc, char **argv, int *index, struct options *options) {
  const char *argument = strcmp(argv[*index], "-h") == 0 ? "--help" : argv[*index];
  if (strncmp(argument, "--", 2) != 0) {
    if (argument[0] == '-')
      return status_set(MOEFLOW_ERROR_ARGUMENT, "unknown option %.64s; see moeflow-run --help", argument);
    if (options->model)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "two models: %s and %s; one run takes one", options->model, argument);
    options->model = argument;
    return MOEFLOW_OK;
  }
  const char *name = argument + 2, *equals = strchr(name, '=');
  const size_t length = equals ? (size_t)(equals - name) : strlen(name);
  for (const struct option_row *row = table; row->name; row++) {
    if (strlen(row->name) != length || strncmp(row->name, name, length) != 0) continue;
    const char *value = equals ? equals + 1 : NULL;
    if (row->kind == OPTION_FLAG && value) return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s takes no value", row->name);
    if (row->kind != OPTION_FLAG && !value) {
      if (*index + 1 >= argc) return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s needs a value: %s", row->name, row->argument);
      value = argv[++*index];
    }
    return read_value(row, value, options);
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "unknown option %.64s; see moeflow-run --help", argument);
}

moeflow_status options_parse(int argc, char **argv, struct options *options) {
  *options = (struct options){.ep = OPTIONS_UNSET,
                              .backend = OPTIONS_UNSET,
                              .transport = MOEFLOW_TRANSPORT_AUTO,
                              .capacity = OPTIONS_UNSET,
                              .experts = OPTIONS_UNSET,
                              .seed = 1,
                              .check_rows = 64,
                              .reduce = OPTIONS_UNSET,
                              .combine = MOEFLOW_COMBINE_PLAN,
                              .lanes = 1,
                              .replays = OPTIONS_UNSET,
                              .threads = OPTIONS_UNSET,
                              .host_memory = 8ull << 30,
                              .timeout = OPTIONS_UNSET,
                              .format = OPTIONS_TEXT,
                              .die_rank = OPTIONS_UNSET};
  for (int i = 1; i < argc; i++) {
    moeflow_status status = read_argument(argc, argv, &i, options);
    if (status != MOEFLOW_OK) return status;
    if (options->help || options->version || options->hand_example) return MOEFLOW_OK;
  }
  if (!options->model) return status_set(MOEFLOW_ERROR_ARGUMENT, "no model given; see moeflow-run --help");
  if (!options->point_count) return read_tokens("1", options);
  return MOEFLOW_OK;
}

void options_free(struct options *options) {
  free_points(options);
}

int options_tokens(const struct options_point *point, int rank) {
  return point->tokens[point->count == 1 ? 0 : rank];
}

int options_tokens_max(const struct options_point *point) {
  int most = 0;
  for (int i = 0; i < point->count; i++)
    if (point->tokens[i] > most) most = point->tokens[i];
  return most;
}
