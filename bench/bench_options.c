#include "bench_options.h"

#include <stddef.h>
#include <string.h>

#include "exit_code.h"
#include "number.h"
#include "option_table.h"
#include "routing.h"
#include "spec.h"
#include "status.h"
#include "word.h"

#define TOKENS_MAX (1 << 16)
#define MEBIBYTES_MAX (1 << 17)
#define PAIRS_MAX 10000

enum { LIMITS = 1, KERNELS = 2, HELP = 4 };

/* ---- Lists ---- */

/* Reads one item; 0, or -1. */
typedef int (*read_item)(const char *text, void *item);

static int read_tokens_item(const char *text, void *item) {
  int64_t value;
  if (number_read_integer(text, &value) || value < 1 || value > TOKENS_MAX) return -1;
  *(int32_t *)item = (int32_t)value;
  return 0;
}

static int read_skew_item(const char *text, void *item) {
  double value;
  if (!strcmp(text, "same")) {
    *(double *)item = ROUTING_SAME;
    return 0;
  }
  if (number_read_decimal(text, &value) || value > ROUTING_SKEW_MAX) return -1;
  *(double *)item = value;
  return 0;
}

static int read_size_item(const char *text, void *item) {
  int64_t value;
  if (number_read_integer(text, &value) || value < 1 || value > MEBIBYTES_MAX) return -1;
  *(int64_t *)item = value << 20;
  return 0;
}

/* Comma-separated items into `items`, `size` bytes each; how many, or -1. */
static int read_list(const char *text, read_item read, void *items, size_t size) {
  int count = 0;
  for (;;) {
    char item[32];
    const size_t length = strcspn(text, ",");
    if (length >= sizeof item || count == BENCH_LIST_MAX) return -1;
    memcpy(item, text, length);
    item[length] = 0;
    if (read(item, (char *)items + (size_t)count++ * size)) return -1;
    if (!text[length]) return count;
    text += length + 1;
  }
}

static moeflow_status bad_list(const struct option_row *row, const char *text, const char *what) {
  return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s'; it must be a list of at most %d %s", row->name, text,
                    BENCH_LIST_MAX, what);
}

static moeflow_status read_tokens(const struct option_row *row, const char *text, void *value) {
  struct bench_tokens *tokens = value;
  tokens->count = read_list(text, read_tokens_item, tokens->values, sizeof *tokens->values);
  return tokens->count > 0 ? MOEFLOW_OK : bad_list(row, text, "numbers from 1 to 65536, such as 1,8,64");
}

static moeflow_status read_skews(const struct option_row *row, const char *text, void *value) {
  struct bench_skews *skews = value;
  skews->count = read_list(text, read_skew_item, skews->values, sizeof *skews->values);
  return skews->count > 0 ? MOEFLOW_OK : bad_list(row, text, "numbers up to 16 or `same`, such as 0,0.7,1.5,same");
}

static moeflow_status read_sizes(const struct option_row *row, const char *text, void *value) {
  struct bench_sizes *sizes = value;
  sizes->count = read_list(text, read_size_item, sizes->values, sizeof *sizes->values);
  return sizes->count > 0 ? MOEFLOW_OK : bad_list(row, text, "sizes in MiB from 1 to 131072, such as 256,4096");
}

static moeflow_status read_seed(const struct option_row *row, const char *text, void *value) {
  int64_t seed;
  const char *wrong = number_read_integer(text, &seed);
  if (wrong) return status_set(MOEFLOW_ERROR_ARGUMENT, "--%s is '%.64s', which %s", row->name, text, wrong);
  *(uint64_t *)value = (uint64_t)seed;
  return MOEFLOW_OK;
}

void bench_skew_name(double skew, char text[32]) {
  char number[NUMBER_TEXT_MAX];
  if (skew > 0) {
    number_write(skew, number);
    snprintf(text, 32, "lognormal:%.20s", number);
  } else {
    snprintf(text, 32, "%s", skew == ROUTING_SAME ? "same" : "uniform");
  }
}

/* ---- The tables ---- */

static const struct option_choice variants[] = {{"served", VARIANTS_SERVED}, {"all", VARIANTS_ALL}, {NULL, 0}};
static const struct option_choice kernels[] = {{"experts", KERNEL_OF_EXPERTS}, {NULL, 0}};
static const struct option_choice fails[] = {{"nothing", FAIL_ON_NOTHING}, {"slow", FAIL_ON_SLOW}, {NULL, 0}};

#define AT(field) offsetof(struct bench_options, field)
static const struct option_row table[] = {
    {"kernel", 0, OPTION_CHOICE, AT(kernel), "experts", "what is timed; experts: gate_up, activation and down of one rank",
     .scope = KERNELS, .choices = kernels},
    {"ep", 0, OPTION_INTEGER, AT(ep), "N", "ranks that share the experts; default: the model's deploy.ep", .scope = KERNELS,
     .minimum = 1, .maximum = SPEC_EXPERTS_MAX},
    {"tokens", 0, OPTION_OTHER, AT(tokens), "LIST", "tokens per rank; default 1,2,4,8,16,32,64,128", .scope = KERNELS,
     .read = read_tokens},
    {"skew", 0, OPTION_OTHER, AT(skews), "LIST",
     "0: uniform routing; S: lognormal popularity of sigma S; same: all pick the same experts of one rank; default 0",
     .scope = KERNELS, .read = read_skews},
    {"variants", 0, OPTION_CHOICE, AT(variants), "served|all",
     "arms: what the plan serves and its portable form, or every variant of the plan; default served", .scope = KERNELS,
     .choices = variants},
    {"no-sum", 0, OPTION_FLAG, AT(no_sum), NULL, "leave the owner's weighted sums out of what is timed", .scope = KERNELS},
    {"pairs", 0, OPTION_INTEGER, AT(pairs), "N", "samples per launch, in which arms take turns; default 40",
     .scope = KERNELS, .minimum = 1, .maximum = PAIRS_MAX},
    {"launches", 0, OPTION_INTEGER, AT(launches), "N",
     "times that buffers and graphs are made anew; the intervals are over their means; default 5", .scope = KERNELS,
     .minimum = 2, .maximum = BENCH_LAUNCHES_MAX},
    {"fail-on", 0, OPTION_CHOICE, AT(fail_on), "nothing|slow",
     "slow: exit code 4 where what is served is slower than another arm; default nothing", .scope = KERNELS,
     .choices = fails},
    {"dtype", 0, OPTION_TEXT, AT(dtype), "D", "weight dtype in place of the model's", .scope = KERNELS},
    {"experts", 0, OPTION_INTEGER, AT(experts), "N", "a scaled-down model with N experts", .scope = KERNELS, .minimum = 1,
     .maximum = SPEC_EXPERTS_MAX},
    {"cache", 0, OPTION_TEXT, AT(cache), "DIR", "cubin cache; default: MOEFLOW_CACHE_DIR, else the user's cache folder",
     .scope = KERNELS},
    {"seed", 0, OPTION_OTHER, AT(seed), "S", "of weights, rows, routings and turns; default 1", .scope = KERNELS,
     .read = read_seed},
    {"sizes", 0, OPTION_OTHER, AT(sizes), "LIST", "MiB to read; default 216,432,1152,4608,16384", .scope = LIMITS,
     .read = read_sizes},
    {"cublas", 0, OPTION_TEXT, AT(cublas), "FILE", .help = "cuBLAS, for the dense rate; default: libcublas.so.13, then .12"},
    {"device", 0, OPTION_INTEGER, AT(device), "N", "GPU; default 0", .minimum = 0, .maximum = 63},
    {"json", 0, OPTION_TEXT, AT(json), "FILE", .help = "write the result there as well"},
    {"machine", 0, OPTION_TEXT, AT(machine), "NAME", .help = "in the JSON; default: from the GPU, such as h200x1"},
    {"help", 'h', OPTION_FLAG, AT(help), NULL, .help = "this text"},
    {"version", 0, OPTION_FLAG, AT(version), NULL, .help = "version and build"},
    {.name = NULL}};

static int command_help(const struct bench_options *options);

static const struct bench_command commands[] = {
    {"limits", NULL, "measure what this GPU can do: read its memory, multiply dense matrices", LIMITS, command_limits},
    {"kernels", "MODEL.yaml", "time one rank's experts as they are served, against those limits", KERNELS, command_kernels},
    {"help", "[COMMAND]", "explain a command", HELP, command_help},
};
#define COMMANDS (int)(sizeof commands / sizeof *commands)

/* ---- Help ---- */

static void print_help(const struct bench_command *command, FILE *file) {
  if (command) {
    fprintf(file, "usage: moeflow-bench %s%s%s [options]\n\nTo %s.\n\n", command->name, command->operand ? " " : "",
            command->operand ? command->operand : "", command->summary);
    option_print(table, command->scope, file);
  } else {
    fputs(
        "usage: moeflow-bench COMMAND [MODEL.yaml] [options]\n\n"
        "Measures MoEFlow's kernels on one GPU, side by side with what limits them; docs/measuring.md in the\n"
        "source tree says how.\n\n",
        file);
    for (int i = 0; i < COMMANDS; i++) {
      char left[32];
      snprintf(left, sizeof left, "%s %s", commands[i].name, commands[i].operand ? commands[i].operand : "");
      fprintf(file, "  %-20s %s\n", left, commands[i].summary);
    }
    fputs("\n`moeflow-bench help COMMAND` lists a command's options.\n", file);
  }
  fputs("\n" EXIT_CODES_TEXT, file);
}

static void print_version(void) {
  printf("moeflow-bench %d.%d.%d\n%s\n", MOEFLOW_VERSION_MAJOR, MOEFLOW_VERSION_MINOR, MOEFLOW_VERSION_PATCH,
         moeflow_build_info());
}

/* ---- Parsing ---- */

static const struct bench_command *find_command(const char *name) {
  for (int i = 0; i < COMMANDS; i++)
    if (!strcmp(commands[i].name, name)) return &commands[i];
  return NULL;
}

static moeflow_status unknown_command(const char *name) {
  struct word_guess guess = {NULL, 0};
  char hint[WORD_HINT_MAX];
  for (int i = 0; i < COMMANDS; i++) word_consider(&guess, name, commands[i].name, commands[i].name, 0);
  word_hint(&guess, hint);
  return status_set(MOEFLOW_ERROR_ARGUMENT, "unknown command '%.64s'%s", name, hint);
}

static int command_help(const struct bench_options *options) {
  const struct bench_command *command = options->model ? find_command(options->model) : NULL;
  if (options->model && !command) {
    unknown_command(options->model);
    fprintf(stderr, "moeflow-bench: %s; see moeflow-bench --help\n", moeflow_last_error());
    return EXIT_USAGE;
  }
  print_help(command, stdout);
  return 0;
}

static moeflow_status take_operand(const char *text, struct bench_options *options) {
  const struct bench_command *command = options->command;
  if (!command) {
    options->command = find_command(text);
    return options->command ? MOEFLOW_OK : unknown_command(text);
  }
  if (!command->operand || options->model)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' is one argument too many", text);
  options->model = text;
  return MOEFLOW_OK;
}

static moeflow_status parse(int argc, char **argv, struct bench_options *options) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 1; i < argc && !options->help && !options->version; i++) {
    const unsigned scope = options->command ? options->command->scope : 0;
    CHECK(argv[i][0] == '-' ? option_parse(table, scope, argc, argv, &i, options) : take_operand(argv[i], options));
  }
  if (options->help || options->version) goto cleanup;
  if (!options->command) FAIL(MOEFLOW_ERROR_ARGUMENT, "which command? limits or kernels");
  if (options->command->operand && options->command->operand[0] != '[' && !options->model)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "which model? Give the path of a %s", options->command->operand);

cleanup:
  return status;
}

static void set_defaults(int argc, char **argv, struct bench_options *options) {
  static const struct bench_tokens tokens = {8, {1, 2, 4, 8, 16, 32, 64, 128}};
  static const struct bench_sizes sizes = {5, {216ll << 20, 432ll << 20, 1152ll << 20, 4608ll << 20, 16384ll << 20}};
  *options = (struct bench_options){.tokens = tokens,
                                    .skews = {.count = 1},
                                    .sizes = sizes,
                                    .pairs = 40,
                                    .launches = 5,
                                    .seed = 1,
                                    .argc = argc,
                                    .argv = argv};
}

int bench_options_parse(int argc, char **argv, struct bench_options *options, int *code) {
  set_defaults(argc, argv, options);
  *code = 0;
  const moeflow_status status = parse(argc, argv, options);
  if (status != MOEFLOW_OK) {
    fprintf(stderr, "moeflow-bench: %s; see moeflow-bench --help\n", moeflow_last_error());
    *code = EXIT_USAGE;
  } else if (options->version) {
    print_version();
  } else if (options->help) {
    print_help(options->command, stdout);
  } else {
    return 1;
  }
  return 0;
}
