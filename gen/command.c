#include "command.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "build_stamp.h"
#include "environment.h"
#include "exit_code.h"
#include "option_table.h"
#include "status.h"
#include "word.h"

#define JOBS_MAX 256

enum { BUILD = 1, EXPLAIN = 2, EMIT = 4, LIST = 8, VERIFY = 16, DOCTOR = 32, HELP = 64, SWEEP = 128 };
#define MODEL (BUILD | EXPLAIN | EMIT) /* commands that read a model */
#define CACHE (BUILD | EXPLAIN | LIST | VERIFY | DOCTOR | SWEEP)

static const struct option_choice formats[] = {{"table", FORMAT_TABLE}, {"json", FORMAT_JSON}, {NULL, 0}};
static const struct option_choice explain_formats[] = {
    {"table", FORMAT_TABLE}, {"json", FORMAT_JSON}, {"spec", FORMAT_SPEC}, {NULL, 0}};

#define AT(field) offsetof(struct gen_options, field)
static const struct option_row option_table[] = {
    {"dtype", 0, OPTION_TEXT, AT(overrides.dtype), "TYPE", "weights as bf16, fp8_w8a8 or fp8_w8a16, instead of the file's",
     .scope = MODEL | SWEEP},
    {"ep", 0, OPTION_INTEGER, AT(overrides.ep), "N", "ranks that share the experts", .scope = MODEL | SWEEP, .minimum = 1,
     .maximum = SPEC_EXPERTS_MAX},
    {"capacity", 0, OPTION_INTEGER, AT(overrides.capacity), "C", "most tokens a rank brings to a step",
     .scope = MODEL | SWEEP, .minimum = 1, .maximum = MODEL_CAPACITY_MAX},
    {"experts", 0, OPTION_INTEGER, AT(overrides.experts), "N", "a scaled-down model with N experts", .scope = MODEL | SWEEP,
     .minimum = 1, .maximum = SPEC_EXPERTS_MAX},
    {"reduce", 0, OPTION_TEXT, AT(overrides.reduce), "WHERE",
     "owner or choices: where a token's choices are summed, instead of the file's", .scope = MODEL},
    {"arch", 0, OPTION_TEXT, AT(overrides.arch), "LIST", "targets, such as sm_90a or sm_90a,sm_100a",
     .scope = MODEL | SWEEP},
    {"cache", 0, OPTION_TEXT, AT(cache), "DIR", "cache directory", .scope = CACHE},
    {"jobs", 'j', OPTION_INTEGER, AT(jobs), "N", "compiler processes at a time; default: the CPUs", .scope = BUILD | SWEEP,
     .minimum = 1, .maximum = JOBS_MAX},
    {"dry-run", 'n', OPTION_FLAG, AT(dry_run), NULL, "list what would be done, write nothing", .scope = BUILD},
    {"templates", 0, OPTION_TEXT, AT(templates), "DIR", "kernel templates to use instead of the built-in ones",
     .scope = MODEL | SWEEP},
    {"output", 'o', OPTION_TEXT, AT(output), "DIR", "folder to write to", .scope = EMIT},
    {"output", 'o', OPTION_TEXT, AT(output), "FILE", "tuned file; default: in tuned/ beside the model", .scope = SWEEP},
    {"tokens", 0, OPTION_TEXT, AT(tokens), "LIST",
     "tokens a rank to tune for; default 1,2,4,8,16,32,64,128 up to the capacity", .scope = SWEEP},
    {"device", 0, OPTION_TEXT, AT(device), "LIST", "GPUs that measure, such as 0,1; default 0", .scope = SWEEP},
    {"time-limit", 0, OPTION_INTEGER, AT(time_limit), "SECONDS",
     "begin nothing new after so long; default 240, with --exhaustive none", .scope = SWEEP, .minimum = 1,
     .maximum = 1 << 20},
    {"exhaustive", 0, OPTION_FLAG, AT(exhaustive), NULL, "measure every legal variant, not only the promising ones",
     .scope = SWEEP},
    {"log", 0, OPTION_TEXT, AT(log), "FILE", "what was measured; default: the tuned file's name with .log", .scope = SWEEP},
    {"resume", 0, OPTION_FLAG, AT(resume), NULL, "use what the log has of this model, GPU and toolchain", .scope = SWEEP},
    {"digest", 0, OPTION_FLAG, AT(digest), NULL,
     "print one SHA-256 over all units and their templates, the same on every machine", .scope = EMIT},
    {"tuned", 0, OPTION_TEXT, AT(tuned), "FILE",
     "tuned file, or none; default: this GPU's in tuned/ beside the model, or installed", .scope = MODEL},
    {"gpu", 0, OPTION_TEXT, AT(gpu), "NAME", "GPU whose tuned file is wanted, such as h200; default: the first one here",
     .scope = BUILD | EXPLAIN},
    {"tuned-only", 0, OPTION_FLAG, AT(tuned_only), NULL,
     "refuse to build what no tuned file decides, up to ep x capacity rows", .scope = BUILD},
    {"packed", 0, OPTION_FLAG, AT(packed), NULL, "kernels for packed weights, too", .scope = MODEL | SWEEP},
    {"lineinfo", 0, OPTION_FLAG, AT(lineinfo), NULL, "put source lines into the cubins, for profilers; part of their keys",
     .scope = BUILD},
    {"format", 0, OPTION_CHOICE, AT(format), "table|json", "of the result", .scope = (MODEL | CACHE) & ~EXPLAIN,
     .choices = formats},
    {"format", 0, OPTION_CHOICE, AT(format), "table|json|spec", "of the result; spec: the canonical spec text",
     .scope = EXPLAIN, .choices = explain_formats},
    {"help", 'h', OPTION_FLAG, AT(help), NULL, .help = "print this and exit"},
    {"version", 0, OPTION_FLAG, AT(version), NULL, .help = "print the version and exit"},
    {.name = NULL}};

static const struct gen_command commands[] = {
    {"build", "MODEL.yaml", "compile the cubins that a model needs into the cache", BUILD, command_build},
    {"explain", "MODEL.yaml", "show rows, memory, kernel variants and why; compare with the cache", EXPLAIN,
     command_explain},
    {"sweep", "MODEL.yaml", "measure on a GPU which kernel variants are fastest", SWEEP, command_sweep},
    {"emit", "MODEL.yaml", "write the instantiated kernel sources", EMIT, command_emit},
    {"list", NULL, "show what the cache holds", LIST, command_list},
    {"verify", NULL, "check every byte of the cache", VERIFY, command_verify},
    {"doctor", NULL, "check toolchain, driver, GPUs, NCCL and cache", DOCTOR, command_doctor},
    {"help", "[TOPIC]", "explain a command, `model` (the YAML's keys) or `env` (environment variables)", HELP, command_help},
};
#define COMMANDS (int)(sizeof commands / sizeof *commands)

static const struct gen_command *find_command(const char *name) {
  for (int i = 0; i < COMMANDS; i++) {
    if (!strcmp(commands[i].name, name)) return &commands[i];
  }
  return NULL;
}

static void hint_command(const char *typed, struct word_guess *guess) {
  for (int i = 0; i < COMMANDS; i++) word_consider(guess, typed, commands[i].name, commands[i].name, 0);
}

/* ---- Help ---- */

static void print_command_help(const struct gen_command *command, FILE *file) {
  fprintf(file, "usage: moeflow-gen %s%s%s [options]\n\nTo %s.\n\n", command->name, command->operand ? " " : "",
          command->operand ? command->operand : "", command->summary);
  option_print(option_table, command->scope, file);
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
  fputs("\n`moeflow-gen help COMMAND` lists a command's options.\n" EXIT_CODES_TEXT, file);
}

static void print_environment(void) {
  int width = 0;
  for (const struct environment_variable *row = environment_table; row->name; row++)
    if ((int)strlen(row->name) > width) width = (int)strlen(row->name);
  for (const struct environment_variable *row = environment_table; row->name; row++)
    printf("  %-*s %s\n", width, row->name, row->meaning);
}

static moeflow_status unknown_topic(const char *topic) {
  struct word_guess guess = {NULL, 0};
  char hint[WORD_HINT_MAX];
  hint_command(topic, &guess);
  word_consider(&guess, topic, "model", "model", 0);
  word_consider(&guess, topic, "env", "env", 0);
  word_hint(&guess, hint);
  return status_set(MOEFLOW_ERROR_ARGUMENT, "no help on '%.64s'%s; topics: model, env, or a command of `moeflow-gen help`",
                    topic, hint);
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
    print_environment();
  } else {
    return command_status(options, unknown_topic(topic));
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

static moeflow_status parse_operand(const char *text, struct gen_options *options, const struct gen_command **command) {
  if (!*command) {
    struct word_guess guess = {NULL, 0};
    char hint[WORD_HINT_MAX];
    *command = find_command(text);
    if (!*command) {
      hint_command(text, &guess);
      word_hint(&guess, hint);
      return status_set(MOEFLOW_ERROR_ARGUMENT, "unknown command '%.64s'%s", text, hint);
    }
    options->command = (*command)->name;
    return MOEFLOW_OK;
  }
  if (!(*command)->operand) return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' is one argument too many", text);
  if (options->model)
    return status_set(MOEFLOW_ERROR_ARGUMENT, "'%.64s' is one argument too many, after '%.64s'", text, options->model);
  options->model = text;
  return MOEFLOW_OK;
}

static moeflow_status parse(int argc, char **argv, struct gen_options *options, const struct gen_command **command) {
  moeflow_status status = MOEFLOW_OK;
  for (int i = 1; i < argc && !options->help && !options->version; i++) {
    if (argv[i][0] == '-') {
      CHECK(option_parse(option_table, *command ? (*command)->scope : 0, argc, argv, &i, options));
    } else {
      CHECK(parse_operand(argv[i], options, command));
    }
  }
  if (*command && (*command)->operand && (*command)->operand[0] != '[' && !options->model && !options->help &&
      !options->version)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "which model? Give the path of a %s", (*command)->operand);
cleanup:
  return status;
}

int gen_options_parse(int argc, char **argv, struct gen_options *options, const struct gen_command **command,
                      int *exit_code) {
  *options = (struct gen_options){.command = ""};
  *command = NULL;
  *exit_code = 0;
  if (parse(argc, argv, options, command) != MOEFLOW_OK) {
    const char *space = *command ? " " : "";
    fprintf(stderr, "moeflow-gen%s%s: %s; see `moeflow-gen help%s%s`\n", space, options->command, moeflow_last_error(),
            space, options->command);
    *exit_code = EXIT_USAGE;
  } else if (options->version) {
    print_version();
  } else if (options->help && *command) {
    print_command_help(*command, stdout);
  } else if (options->help) {
    print_help(stdout);
  } else if (!*command) {
    print_help(stderr);
    *exit_code = EXIT_USAGE;
  } else {
    return 1;
  }
  return 0;
}
