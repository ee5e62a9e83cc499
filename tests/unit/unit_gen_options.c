/* moeflow-gen's command line: what is parsed, and what is refused with the option's name and exit code 2. */
#include <unistd.h>

#include "command.h"
#include "environment.h"
#include "status.h"
#include "test.h"

#define WORDS 24
static struct gen_options options;
static const struct gen_command *command;
static int exit_code;

/* What was printed on `descriptor` during the call is left in `printed`. */
static char printed[16384];
static int parse(const char *line, int descriptor) {
  char *words[WORDS + 1] = {"moeflow-gen"};
  int count = 1;
  static char storage[32][512];
  static int slot;
  char *kept = strcpy(storage[slot++ % 32], line); /* the options point into it */
  for (char *word = strtok(kept, " "); word && count < WORDS; word = strtok(NULL, " ")) words[count++] = word;
  FILE *file = tmpfile();
  fflush(NULL);
  int saved = dup(descriptor);
  dup2(fileno(file), descriptor);
  int run = gen_options_parse(count, words, &options, &command, &exit_code);
  fflush(NULL);
  dup2(saved, descriptor);
  close(saved);
  rewind(file);
  printed[fread(printed, 1, sizeof printed - 1, file)] = 0;
  fclose(file);
  return run;
}

static void test_good(void) {
  EXPECT(parse("build m.yaml --dtype bf16 --ep 4 --capacity=256 -j 3 --dry-run --format json --cache c", 2), "%s", printed);
  EXPECT(!strcmp(command->name, "build") && command->run == command_build && !strcmp(options.model, "m.yaml"), "command");
  EXPECT(!strcmp(options.overrides.dtype, "bf16") && options.overrides.ep == 4 && options.overrides.capacity == 256,
         "overrides");
  EXPECT(options.jobs == 3 && options.dry_run && options.format == FORMAT_JSON && !strcmp(options.cache, "c"), "options");
  EXPECT(!printed[0], "printed: %s", printed);
  EXPECT(parse("emit --arch sm_80,sm_90a -o out m.yaml", 2) && !strcmp(options.output, "out"), "%s", printed);
  EXPECT(!strcmp(options.overrides.arch, "sm_80,sm_90a") && !options.dry_run && options.overrides.ep == 0,
         "left over from before");
  EXPECT(parse("build -j8 m.yaml -n", 2) && options.jobs == 8 && options.dry_run, "%s", printed);
  EXPECT(parse("explain m.yaml --format spec", 2) && options.format == FORMAT_SPEC, "%s", printed);
  EXPECT(parse("build m.yaml --tuned none --gpu h200 --tuned-only --packed", 2) && options.tuned_only && options.packed,
         "%s", printed);
  EXPECT(!strcmp(options.tuned, "none") && !strcmp(options.gpu, "h200"), "tuned");
  EXPECT(parse("explain m.yaml", 2) && !options.tuned && !options.gpu && !options.tuned_only && !options.packed, "defaults");
  EXPECT(parse("doctor", 2) && !options.model, "%s", printed);
  EXPECT(parse("help model", 2) && !strcmp(options.model, "model"), "%s", printed);
  EXPECT(parse("help", 2) && !options.model, "%s", printed);
}

static void test_bad(void) {
  static const struct {
    const char *line, *says;
  } cases[] = {{"--no-such-option", "--no-such-option"},
               {"build m.yaml --no-such-option", "--no-such-option"},
               {"build --no-such-option=3 m.yaml", "--no-such-option"},
               {"build m.yaml -x", "'-x'"},
               {"list --ep 4", "'--ep'"},
               {"frobnicate m.yaml", "'frobnicate'"},
               {"frob\x1b[31m\nnicate", "'frob?[31m?nicate'; see"},
               {"sweeps m.yaml", "'sweeps' (did you mean 'sweep'?); see `moeflow-gen help`"},
               {"biuld m.yaml", "'biuld' (did you mean 'build'?)"},
               {"build m.yaml --dytpe bf16", "'--dytpe' is an unknown option (did you mean '--dtype'?); see"},
               {"build m.yaml --dytpe=bf16", "'--dytpe=bf16' is an unknown option (did you mean '--dtype'?); see"},
               {"sweep m.yaml --token 8", "(did you mean '--tokens'?)"},
               {"build m.yaml -dtype bf16", "'-dtype' is an unknown option (did you mean '--dtype'?)"},
               {"build m.yaml --token 8", "'--token' is an unknown option; see"}, /* another command's */
               {"explain m.yaml --tuned-only", "'--tuned-only' is an unknown option"},
               {"emit m.yaml --gpu h200", "'--gpu' is an unknown option"},
               {"build m.yaml --tuned=", "--tuned is empty"},
               {"", "usage"},
               {"build", "which model"},
               {"build a.yaml b.yaml", "'b.yaml'"},
               {"doctor x", "'x'"},
               {"build m.yaml --ep", "'--ep' needs a value: N"},
               {"build m.yaml -j", "'-j' needs a value: N"},
               {"build m.yaml --ar sm_90a", "'--ar' is an unknown option"},
               {"build m.yaml -", "'-' is an unknown option"},
               {"--ep 4 build m.yaml", "'--ep' is an unknown option"},
               {"build m.yaml -n1", "'-n1' takes no value"},
               {"build m.yaml --ep=", "--ep is empty"},
               {"build m.yaml --ep 0", "1 to 4096"},
               {"build m.yaml --ep 4097", "1 to 4096"},
               {"build m.yaml --ep -4", "sign"},
               {"build m.yaml --ep 4x", "not a number"},
               {"build m.yaml --ep 4294967300", "1 to 4096"},
               {"build m.yaml --capacity 1048577", "1 to 1048576"},
               {"build m.yaml --jobs 257", "1 to 256"},
               {"build m.yaml --format xml", "table|json"},
               {"build m.yaml --format spec", "table|json"},
               {"build m.yaml --dry-run=1", "takes no value"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    EXPECT(!parse(cases[i].line, 2) && exit_code == 2, "%s: exit %d", cases[i].line, exit_code);
    EXPECT(strstr(printed, cases[i].says), "%s: %s", cases[i].line, printed);
  }
}

static void test_help(void) {
  static const char *const lines[] = {
      "--help", "-h", "--version", "build --help", "list -h", "explain m.yaml --help", "doctor --version"};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    EXPECT(!parse(lines[i], 1) && exit_code == 0 && printed[0], "%s: exit %d, '%s'", lines[i], exit_code, printed);
  }
  parse("--help", 1);
  EXPECT(strstr(printed, "build MODEL.yaml") && strstr(printed, "sweep MODEL.yaml"), "%s", printed);
}

static void test_topics(void) {
  static const struct {
    const char *line, *says;
  } cases[] = {{"help buidl", "no help on 'buidl' (did you mean 'build'?); topics: model, env"},
               {"help modle", "(did you mean 'model'?)"},
               {"help tuned", "no help on 'tuned'; topics"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    EXPECT(parse(cases[i].line, 2) && command->run(&options) == 2, "%s", cases[i].line);
    EXPECT(strstr(moeflow_last_error(), cases[i].says), "%s: %s", cases[i].line, moeflow_last_error());
  }
}

static void test_environment(void) {
  char *text = NULL;
  size_t size;
  for (int set = 0; set < 2; set++) {
    if (set) setenv("MOEFLOW_CACHE_DRI", "x", 1), setenv("MOEFLOW_CACHE_DIR", "/x", 1);
    FILE *file = open_memstream(&text, &size);
    environment_warn("tool", file);
    fclose(file);
    EXPECT(!set == !strstr(text, "MOEFLOW_CACHE_DRI"), "'%s'", text);
    EXPECT(!strstr(text, "MOEFLOW_CACHE_DIR"), "'%s'", text);
    free(text);
  }
}

int main(void) {
  test_good();
  test_bad();
  test_help();
  test_topics();
  test_environment();
  TEST_END;
}
