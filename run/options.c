#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "exit_code.h"
#include "number.h"
#include "option_table.h"
#include "spec.h"
#include "status.h"

static const struct option_choice backends[] = {{"cpu", MOEFLOW_BACKEND_CPU}, {"cuda", MOEFLOW_BACKEND_CUDA}, {NULL, 0}};
static const struct option_choice transports[] = {
    {"auto", MOEFLOW_TRANSPORT_AUTO},           {"nccl", MOEFLOW_TRANSPORT_NCCL},   {"window", MOEFLOW_TRANSPORT_WINDOW},
    {"allgather", MOEFLOW_TRANSPORT_ALLGATHER}, {"local", MOEFLOW_TRANSPORT_LOCAL}, {NULL, 0}};
static const struct option_choice reduces[] = {{"owner", SPEC_REDUCE_OWNER}, {"choices", SPEC_REDUCE_CHOICES}, {NULL, 0}};
static const struct option_choice combines[] = {{"plan", MOEFLOW_COMBINE_PLAN}, {"ring", MOEFLOW_COMBINE_RING}, {NULL, 0}};
static const struct option_choice formats[] = {{"text", OPTIONS_TEXT}, {"json", OPTIONS_JSON}, {NULL, 0}};

#define AT(field) offsetof(struct options, field)
#define TOKENS_LIMIT (1 << 20)
const char *options_transport_name(moeflow_transport transport) {
  for (const struct option_choice *choice = transports; choice->name; choice++)
    if (choice->value == (int64_t)transport) return choice->name;
  return "unknown";
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

static moeflow_status read_seed(const struct option_row *row, const char *text, void *value) {
  const char *end;
  if (!read_unsigned(text, &end, value) && !*end) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s'; it must be 0 to 18446744073709551615", row->name, text);
}

static moeflow_status read_bytes(const struct option_row *row, const char *text, void *value) {
  static const struct option_choice units[] = {{"", 0},     {"B", 0},    {"KiB", 10}, {"MiB", 20},
                                               {"GiB", 30}, {"TiB", 40}, {NULL, 0}};
  const char *end;
  uint64_t number;
  if (!read_unsigned(text, &end, &number) && number > 0) {
    while (*end == ' ') end++;
    for (const struct option_choice *unit = units; unit->name; unit++) {
      if (strcmp(end, unit->name) != 0 || number > UINT64_MAX >> unit->value) continue;
      *(uint64_t *)value = number << unit->value;
      return MOEFLOW_OK;
    }
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s'; it must be a number of bytes such as 4294967296 or 4GiB",
                    row->name, text);
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
      return status_set(MOEFLOW_ERROR_ARGUMENT,
                        "--tokens is '%.64s'; it must be a list such as 0,1,8 or 5/0,3/3 of numbers up to %d", whole,
                        TOKENS_LIMIT);
    point->tokens[point->count++] = (int32_t)number;
    text = *end;
    if (*text != '/') return MOEFLOW_OK;
  }
}

static void free_points(struct options *options) {
  for (int p = 0; p < options->point_count; p++) free(options->points[p].tokens);
  options->point_count = 0;
}

/* `value` is the whole struct options: a list has a length beside its points. */
static moeflow_status read_tokens(const struct option_row *row, const char *text, void *value) {
  struct options *options = value;
  const char *whole = text;
  (void)row;
  free_points(options);
  for (;; text++) {
    if (options->point_count == OPTIONS_POINTS_MAX)
      return status_set(MOEFLOW_ERROR_ARGUMENT, "--tokens is '%.64s', which has more than %d points", whole,
                        OPTIONS_POINTS_MAX);
    struct options_point *point = &options->points[options->point_count++];
    moeflow_status status = read_point(text, whole, &text, point);
    if (status != MOEFLOW_OK) return status;
    if (!*text) return MOEFLOW_OK;
  }
}

static moeflow_status read_routing(const struct option_row *row, const char *text, void *value) {
  struct options_routing *routing = value;
  static const struct option_choice kinds[] = {{"lognormal:", ROUTING_LOGNORMAL}, {"zipf:", ROUTING_ZIPF}, {NULL, 0}};
  if (strcmp(text, "uniform") == 0) {
    *routing = (struct options_routing){ROUTING_UNIFORM, 0};
    return MOEFLOW_OK;
  }
  for (const struct option_choice *kind = kinds; kind->name; kind++) {
    const size_t length = strlen(kind->name);
    double parameter;
    if (strncmp(text, kind->name, length) != 0 || number_read_decimal(text + length, &parameter) || parameter > 16) continue;
    *routing = (struct options_routing){(enum options_routing_kind)kind->value, parameter};
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_ARGUMENT,
                    "--%s is '%.64s'; it must be uniform, lognormal:SIGMA or zipf:S with a number up to 16", row->name,
                    text);
}

static const struct option_row table[] = {
    {"ep", 0, OPTION_INTEGER, AT(ep), "N", "ranks; default: the launcher's, else the model's deploy.ep", .minimum = 1,
     .maximum = SPEC_EXPERTS_MAX},
    {"tokens", 0, OPTION_OTHER, 0, "LIST",
     "tokens per rank, a comma list of points; 5/0 gives one count per rank; default 1", .read = read_tokens},
    {"check", 0, OPTION_FLAG, AT(check), NULL,
     .help = "compare every rank with the reference, repeats and graph replays bitwise"},
    {"backend", 0, OPTION_CHOICE, AT(backend), "cpu|cuda", "default: cuda where there is a GPU", .choices = backends},
    {"transport", 0, OPTION_CHOICE, AT(transport), "auto|nccl|window|allgather|local",
     "how rows travel; window: kernels store into other GPUs of this host; local: all ranks in one process, on one GPU or "
     "the CPU",
     .choices = transports},
    {"capacity", 0, OPTION_INTEGER, AT(capacity), "C", "most tokens a rank may bring; default: deploy.capacity",
     .minimum = 1, .maximum = TOKENS_LIMIT},
    {"dtype", 0, OPTION_TEXT, AT(dtype), "D", .help = "weight dtype in place of the model's, such as bf16"},
    {"seed", 0, OPTION_OTHER, AT(seed), "S", "of weights, hidden states and logits; default 1", .read = read_seed},
    {"routing", 0, OPTION_OTHER, AT(routing), "uniform|lognormal:SIGMA|zipf:S", "popularity of the experts; default uniform",
     .read = read_routing},
    {"ids", 0, OPTION_FLAG, AT(ids), NULL, .help = "route on the host and pass ids and weights instead of logits"},
    {"check-rows", 0, OPTION_INTEGER, AT(check_rows), "N",
     "rows per rank that the reference computes from 512 tokens over all ranks up; default 64", .minimum = 1,
     .maximum = TOKENS_LIMIT},
    {"allow-roundings", 0, OPTION_FLAG, AT(allow_roundings), NULL,
     .help = "pass a row beyond the bars where activations on the edge between two bf16 values explain it, and count it"},
    {"experts", 0, OPTION_INTEGER, AT(experts), "N", "a scaled-down model with N experts", .minimum = 1,
     .maximum = SPEC_EXPERTS_MAX},
    {"cache", 0, OPTION_TEXT, AT(cache), "DIR",
     .help = "cubin cache; default: MOEFLOW_CACHE_DIR, else the user's cache folder"},
    {"reduce", 0, OPTION_CHOICE, AT(reduce), "owner|choices", "where choices are summed, in place of the model's",
     .choices = reduces},
    {"combine", 0, OPTION_CHOICE, AT(combine), "plan|ring", "how the source adds the owners' sums; default plan",
     .choices = combines},
    {"lanes", 0, OPTION_INTEGER, AT(lanes), "1|2", "micro-batches in flight; repeats alternate between them", .minimum = 1,
     .maximum = 2},
    {"replays", 0, OPTION_INTEGER, AT(replays), "N", "repeats and graph replays; default 100 on a GPU, 2 on the CPU",
     .minimum = 1, .maximum = 1000000},
    {"threads", 0, OPTION_INTEGER, AT(threads), "N", "CPU threads over all ranks; default: the cores", .minimum = 1,
     .maximum = 4096},
    {"host-memory", 0, OPTION_OTHER, AT(host_memory), "BYTES|NGiB",
     "most memory that the CPU backend may take; default 8GiB", .read = read_bytes},
    {"timeout", 0, OPTION_INTEGER, AT(timeout), "S",
     "bound of every wait for a peer in seconds; default: MOEFLOW_TIMEOUT_S, else 60", .minimum = 1, .maximum = 86400},
    {"rendezvous", 0, OPTION_TEXT, AT(rendezvous), "HOST:PORT",
     .help = "where rank 0 listens, under a launcher; default: MASTER_ADDR and MASTER_PORT + 1, else this machine"},
    {"flight", 0, OPTION_TEXT, AT(flight), "FILE",
     .help = "where a rank that finds the group poisoned writes what it knows of its peers; FILE.rankN with several ranks"},
    {"explain-hang", 0, OPTION_TEXT, AT(explain_hang), "FILE", .help = "read such a file aloud, and no more"},
    {"format", 0, OPTION_CHOICE, AT(format), "text|json", "of the result on stdout; default text", .choices = formats},
    {"output", 0, OPTION_TEXT, AT(output), "FILE", .help = "write the JSON there as well"},
    {"machine", 0, OPTION_TEXT, AT(machine), "NAME", .help = "in the JSON; default: from the GPUs, such as h200x2"},
    {"hand-example", 0, OPTION_FLAG, AT(hand_example), NULL,
     .help = "print the worked example of 2 ranks, 4 experts, 3 tokens"},
    {"reference-seed", 0, OPTION_OTHER, AT(reference_seed), "S",
     "self-test: give the reference other weights, to see the check fail", .read = read_seed},
    {"die-rank", 0, OPTION_INTEGER, AT(die_rank), "R",
     "self-test: the process of rank R ends itself before the first step, to see the others end", .minimum = 0,
     .maximum = SPEC_EXPERTS_MAX},
    {"help", 'h', OPTION_FLAG, AT(help), NULL, .help = "this text"},
    {"version", 0, OPTION_FLAG, AT(version), NULL, .help = "version and build"},
    {.name = NULL}};

void options_help(FILE *file) {
  fprintf(file,
          "usage: moeflow-run MODEL.yaml [options]\n\n"
          "Runs one expert-parallel MoE layer with made-up weights and tokens, one process per rank (forked, or under\n"
          "torchrun, mpirun or srun), all ranks as threads on the CPU or with --transport local.\n\n");
  option_print(table, 0, file);
  fputs("\n" EXIT_CODES_TEXT, file);
}

static moeflow_status read_model(const char *text, struct options *options) {
  if (options->model)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "two models: %s and %s; one run takes one", options->model, text);
  options->model = text;
  return MOEFLOW_OK;
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
  moeflow_status status = MOEFLOW_OK;
  for (int i = 1; i < argc && status == MOEFLOW_OK; i++) {
    status = argv[i][0] == '-' ? option_parse(table, 0, argc, argv, &i, options) : read_model(argv[i], options);
    if (options->help || options->version || options->hand_example || options->explain_hang) return status;
  }
  if (status == MOEFLOW_OK && !options->model) status = status_set(MOEFLOW_ERROR_ARGUMENT, "no model given");
  if (status == MOEFLOW_ERROR_ARGUMENT) return status_set(status, "%s; see moeflow-run --help", moeflow_last_error());
  if (status == MOEFLOW_OK && !options->point_count) status = read_tokens(NULL, "1", options);
  return status;
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
