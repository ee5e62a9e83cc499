#include "options.h"

#include <getopt.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "build_stamp.h"
#include "environment.h"
#include "number.h"
#include "status.h"

enum option_kind { OPTION_TEXT, OPTION_INTEGER, OPTION_JOBS, OPTION_FLAG, OPTION_FORMAT, OPTION_HELP, OPTION_VERSION };

/* `letter` names the option in the commands' lists; it is also a short option where `is_short` is set. */
static const struct option_row {
  char letter;
  int is_short;
  const char *name;
  const char *argument;
  enum option_kind kind;
  size_t offset; /* in struct gen_options */
  int64_t maximum;
  const char *help;
} option_table[] = {
    {'t', 0, "dtype", "TYPE", OPTION_TEXT, offsetof(struct gen_options, overrides.dtype), 0,
     "weights as bf16, fp8_w8a8 or fp8_w8a16, instead of the file's"},
    {'e', 0, "ep", "N", OPTION_INTEGER, offsetof(struct gen_options, overrides.ep), SPEC_EXPERTS_MAX,
     "ranks that share the experts"},
    {'c', 0, "capacity", "C", OPTION_INTEGER, offsetof(struct gen_options, overrides.capacity), MODEL_CAPACITY_MAX,
     "most tokens a rank brings to a step"},
    {'E', 0, "experts", "N", OPTION_INTEGER, offsetof(struct gen_options, overrides.experts), SPEC_EXPERTS_MAX,
     "a scaled-down model with N experts"},
    {'r', 0, "reduce", "WHERE", OPTION_TEXT, offsetof(struct gen_options, overrides.reduce), 0,
     "owner or choices: where a token's choices are summed, instead of the file's"},
    {'a', 0, "arch", "LIST", OPTION_TEXT, offsetof(struct gen_options, overrides.arch), 0,
     "targets, such as sm_90a or sm_90a,sm_100a"},
    {'d', 0, "cache", "DIR", OPTION_TEXT, offsetof(struct gen_options, cache), 0, "cache directory"},
    {'j', 1, "jobs", "N", OPTION_JOBS, offsetof(struct gen_options, jobs), 256,
     "compiler processes at a time; default: the CPUs"},
    {'n', 1, "dry-run", NULL, OPTION_FLAG, offsetof(struct gen_options, dry_run), 0,
     "list what would be done, write nothing"},
    {'T', 0, "templates", "DIR", OPTION_TEXT, offsetof(struct gen_options, templates), 0,
     "kernel templates to use instead of the built-in ones"},
    {'o', 1, "output", "DIR", OPTION_TEXT, offsetof(struct gen_options, output), 0, "folder to write to"},
    {'g', 0, "digest", NULL, OPTION_FLAG, offsetof(struct gen_options, digest), 0,
     "print one SHA-256 over all units and their templates, the same on every machine"},
    {'l', 0, "lineinfo", NULL, OPTION_FLAG, offsetof(struct gen_options, lineinfo), 0,
     "put source lines into the cubins, for profilers; part of their keys"},
    {'f', 0, "format", "FORMAT", OPTION_FORMAT, offsetof(struct gen_options, format), 0, "table or json"},
    {'F', 0, "format", "FORMAT", OPTION_FORMAT, offsetof(struct gen_options, format), 0,
     "table, json, or spec: the canonical spec text"},
    {'h', 1, "help", NULL, OPTION_HELP, 0, 0, "print this and exit"},
    {'V', 0, "version", NULL, OPTION_VERSION, 0, 0, "print the version and exit"},
};
#define OPTION_ROWS (int)(sizeof option_table / sizeof *option_table)

static const struct gen_command commands[] = {
    {"build", "MODEL.yaml", "compile the cubins that a model needs into the cache", "tecEradjnTlfhV", command_build},
    {"explain", "MODEL.yaml", "show rows, memory, kernel variants and why; compare with the cache", "tecEradTFhV",
     command_explain},
    {"emit", "MODEL.yaml", "write the instantiated kernel sources", "tecEraTogfhV", command_emit},
    {"list", NULL, "show what the cache holds", "dfhV", command_list},
    {"verify", NULL, "check every byte of the cache", "dfhV", command_verify},
    {"doctor", NULL, "check toolchain, driver, GPUs, NCCL and cache", "dfhV", command_doctor},
    {"help", "[TOPIC]", "explain a command, `model` (the YAML's keys) or `env` (environment variables)", "hV", command_help},
};
#define COMMANDS (int)(sizeof commands / sizeof *commands)

static const struct gen_command *find_command(const char *name) {
  for (int i = 0; i < COMMANDS; i++) {
    if (!strcmp(commands[i].name, name)) return &commands[i];
  }
  return NULL;
}

/* ---- Help ---- */

static void print_options(const char *letters, FILE *file) {
  for (int i = 0; i < OPTION_ROWS; i++) {
    const struct option_row *row = &option_table[i];
    char left[48], letter[8] = "    ";
    if (!strchr(letters, row->letter)) continue;
    if (row->is_short) snprintf(letter, sizeof letter, "-%c, ", row->letter);
    snprintf(left, sizeof left, "%s--%s%s%s", letter, row->name, row->argument ? " " : "",
             row->argument ? row->argument : "");
    fprintf(file, "  %-24s  %s\n", left, row->help);
  }
}

static void print_command_help(const struct gen_command *command, FILE *file) {
  fprintf(file, "usage: moeflow-gen %s%s%s [options]\n\nTo %s.\n\n", command->name, command->operand ? " " : "",
          command->operand ? command->operand : "", command->summary);
  print_options(command->options, file);
}

static void print_help(FILE *file) {
  fprintf(file,
          "usage: moeflow-gen COMMAND [MODEL.yaml] [options]\n\n"
          "Generates, compiles and caches the kernels of a Mixture-of-Experts layer.\n\n");
  for (int i = 0; i < COMMANDS; i++) {
    char left[32];
    snprintf(left, sizeof left, "%s %s", commands[i].name, commands[i].operand ? commands[i].operand : "");
    fprintf(file, "  %-20s %s\n", left, commands[i].summary);
  }
  fprintf(
      file,
      "\n`moeflow-gen help COMMAND` lists a command's options.\n"
      "Exit codes: 0 ok, 1 internal, 2 usage, 3 bad input file, 4 check failed, 5 environment (toolchain, driver, GPU),\n"
      "6 I/O or cache, 7 timeout or peer lost, 130 interrupted.\n");
}

int command_help(const struct gen_options *options) {
  const char *topic = options->model;
  const struct gen_command *command = topic ? find_command(topic) : NULL;
  if (!topic) {
    print_help(stdout);
  } else if (command) {
    print_command_help(command, stdout);
  } else if (!strcmp(topic, "model")) {
    model_print_fields(stdout);
  } else if (!strcmp(topic, "env")) {
    for (const struct environment_variable *row = environment_table; row->name; row++)
      printf("  %-18s %s\n", row->name, row->meaning);
  } else {
    return command_status(options, status_set(MOEFLOW_ERROR_ARGUMENT,
                                              "no help on '%.64s'; topics: model, env, or a command "
                                              "of `moeflow-gen help`",
                                              topic));
  }
  return 0;
}

static void print_version(void) {
  printf("moeflow-gen %d.%d.%d (%.12s%s)\n", MOEFLOW_VERSION_MAJOR, MOEFLOW_VERSION_MINOR, MOEFLOW_VERSION_PATCH,
         MOEFLOW_GIT_SHA, MOEFLOW_GIT_DIRTY ? ", modified" : "");
}

int command_status(const struct gen_options *options, moeflow_status status) {
  if (status != MOEFLOW_OK) fprintf(stderr, "moeflow-gen %s: %s\n", options->command, moeflow_last_error());
  return status_exit_code(status);
}

/* ---- Parsing ---- */

struct parse {
  const struct gen_command *command; /* NULL before its name was seen */
  const char *letters;
  struct gen_options *options;
  int ended, exit_code; /* help or version was printed, or something is wrong */
};

__attribute__((format(printf, 2, 3))) static void usage_error(struct parse *parse, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  status_set(MOEFLOW_ERROR_ARGUMENT, "%s", text); /* which takes control bytes out */
  fprintf(stderr, "moeflow-gen%s%s: %s; see `moeflow-gen help%s%s`\n", parse->command ? " " : "",
          parse->command ? parse->command->name : "", moeflow_last_error(), parse->command ? " " : "",
          parse->command ? parse->command->name : "");
  parse->ended = 1;
  parse->exit_code = EXIT_USAGE;
}

static void set_integer(struct parse *parse, const struct option_row *row, const char *text, int64_t *value) {
  const char *wrong = number_read_integer(text, value);
  if (!wrong && (*value < 1 || *value > row->maximum)) wrong = "is out of range";
  if (wrong)
    usage_error(parse, "--%s is '%.64s', which %s; it must be 1 to %lld", row->name, text, wrong, (long long)row->maximum);
}

static void set_format(struct parse *parse, const struct option_row *row, const char *text, enum gen_format *format) {
  static const char *const names[] = {[FORMAT_TABLE] = "table", [FORMAT_JSON] = "json", [FORMAT_SPEC] = "spec"};
  for (int i = 0; i < (row->letter == 'F' ? 3 : 2); i++) {
    if (strcmp(names[i], text)) continue;
    *format = (enum gen_format)i;
    return;
  }
  usage_error(parse, "--format is '%.64s'; it must be one of: %s", text, row->help);
}

static void print_asked_help(struct parse *parse) {
  if (parse->command) {
    print_command_help(parse->command, stdout);
  } else {
    print_help(stdout);
  }
  parse->ended = 1;
}

static void set_option(struct parse *parse, const struct option_row *row, const char *text) {
  void *target = (char *)parse->options + row->offset;
  int64_t integer = 0;
  if (row->argument && !*text) {
    usage_error(parse, "--%s is empty", row->name);
    return;
  }
  switch (row->kind) {
    case OPTION_TEXT:
      *(const char **)target = text;
      break;
    case OPTION_INTEGER:
      set_integer(parse, row, text, target);
      break;
    case OPTION_JOBS:
      set_integer(parse, row, text, &integer);
      *(int *)target = (int)integer;
      break;
    case OPTION_FLAG:
      *(int *)target = 1;
      break;
    case OPTION_FORMAT:
      set_format(parse, row, text, target);
      break;
    case OPTION_HELP:
      print_asked_help(parse);
      break;
    case OPTION_VERSION:
      print_version();
      parse->ended = 1;
      break;
  }
}

/* getopt's tables, made of the rows that `letters` names. `rows` maps a long option's number to its row. */
static void make_tables(const char *letters, struct option longs[OPTION_ROWS + 1],
                        const struct option_row *rows[OPTION_ROWS], char shorts[2 * OPTION_ROWS + 3]) {
  int count = 0;
  strcpy(shorts, "+:"); /* stop at the first operand; report missing arguments as ':' */
  for (int i = 0; i < OPTION_ROWS; i++) {
    const struct option_row *row = &option_table[i];
    if (!strchr(letters, row->letter)) continue;
    longs[count] = (struct option){row->name, row->argument ? required_argument : no_argument, NULL, 256 + count};
    rows[count++] = row;
    if (!row->is_short) continue;
    size_t end = strlen(shorts);
    shorts[end] = row->letter;
    strcpy(shorts + end + 1, row->argument ? ":" : "");
  }
  memset(&longs[count], 0, sizeof *longs);
}

static const struct option_row *row_of(int code, const struct option *longs, const struct option_row *const *rows) {
  if (code >= 256) return rows[code - 256];
  for (int i = 0; longs[i].name; i++) {
    if (rows[i]->is_short && rows[i]->letter == code) return rows[i];
  }
  return NULL;
}

/* Options from optind up to the next operand. */
static void parse_options(struct parse *parse, int argc, char **argv) {
  struct option longs[OPTION_ROWS + 1];
  const struct option_row *rows[OPTION_ROWS];
  char shorts[2 * OPTION_ROWS + 3];
  make_tables(parse->letters, longs, rows, shorts);
  opterr = 0;
  while (!parse->ended) {
    int before = optind ? optind : 1;
    int code = getopt_long(argc, argv, shorts, longs, NULL);
    if (code == -1) return;
    if (code == '?' || code == ':') {
      const char *what = code == ':' ? "needs a value" : optopt >= 256 ? "takes no value" : "is an unknown option";
      if (optopt && optopt < 256 && argv[before][1] != '-') {
        usage_error(parse, "'-%c' %s", optopt, what);
      } else {
        usage_error(parse, "'%.64s' %s", argv[before], what);
      }
    } else {
      set_option(parse, row_of(code, longs, rows), optarg ? optarg : "");
    }
  }
}

static void parse_command(struct parse *parse, const char *name) {
  parse->command = find_command(name);
  if (!parse->command) {
    usage_error(parse, "unknown command '%.64s'", name);
    return;
  }
  parse->options->command = parse->command->name;
  parse->letters = parse->command->options;
}

static void parse_operand(struct parse *parse, const char *text) {
  if (!parse->command->operand) {
    usage_error(parse, "'%.64s' is one argument too many", text);
  } else if (parse->options->model) {
    usage_error(parse, "'%.64s' is one argument too many, after '%.64s'", text, parse->options->model);
  } else {
    parse->options->model = text;
  }
}

int gen_options_parse(int argc, char **argv, struct gen_options *options, const struct gen_command **command,
                      int *exit_code) {
  struct parse parse = {.letters = "hV", .options = options};
  memset(options, 0, sizeof *options);
  options->command = "";
  optind = 0; /* GNU: starts anew */
  for (;;) {
    parse_options(&parse, argc, argv);
    if (parse.ended || optind >= argc) break;
    const char *text = argv[optind++];
    if (parse.command) {
      parse_operand(&parse, text);
    } else {
      parse_command(&parse, text);
    }
    if (parse.ended) break;
  }
  if (!parse.ended && !parse.command) {
    print_help(stderr);
    parse.ended = 1;
    parse.exit_code = EXIT_USAGE;
  }
  if (!parse.ended && parse.command->operand && parse.command->operand[0] != '[' && !options->model) {
    usage_error(&parse, "which model? Give the path of a %s", parse.command->operand);
  }
  *command = parse.command;
  *exit_code = parse.exit_code;
  return !parse.ended;
}
