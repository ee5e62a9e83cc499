/* The command line of moeflow-bench. */
#include "bench_options.h"

#include <math.h>

#include "test.h"

static struct bench_options options;

static int run_it; /* the command too, not only its parsing */

/* What was said on stderr goes to `message`. The exit code, -1 when a command is to be run. */
static int parse(char *message, size_t size, int argc, char **argv) {
  int code, run;
  char path[] = "/tmp/moeflow-bench-options-XXXXXX";
  const int fd = mkstemp(path);
  fflush(stderr);
  FILE *saved = stderr, *file = fdopen(fd, "w+");
  stderr = file;
  run = bench_options_parse(argc, argv, &options, &code);
  if (run && run_it) {
    code = options.command->run(&options);
    run = 0;
  }
  stderr = saved;
  rewind(file);
  const size_t length = fread(message, 1, size - 1, file);
  message[length] = 0;
  fclose(file);
  remove(path);
  return run ? -1 : code;
}

#define PARSE(...)                                                                                       \
  parse(message, sizeof message, (int)(sizeof(char *[]){"moeflow-bench", __VA_ARGS__} / sizeof(char *)), \
        (char *[]){"moeflow-bench", __VA_ARGS__})

static char message[2048];

static void test_defaults(void) {
  EXPECT(PARSE("kernels", "model.yaml") == -1, "%s", message);
  EXPECT(!strcmp(options.command->name, "kernels") && !strcmp(options.model, "model.yaml"), "command");
  EXPECT(options.tokens.count == 8 && options.tokens.values[7] == 128, "%d tokens", options.tokens.count);
  EXPECT(options.skews.count == 1 && options.skews.values[0] == 0, "skew");
  EXPECT(options.pairs == 40 && options.launches == 5 && options.seed == 1 && options.ep == 0, "numbers");
  EXPECT(!options.no_sum && options.variants == VARIANTS_SERVED && options.fail_on == FAIL_ON_NOTHING, "flags");
  EXPECT(PARSE("limits") == -1 && options.sizes.count == 5 && options.sizes.values[0] == 216ll << 20, "%s", message);
}

static void test_lists(void) {
  EXPECT(PARSE("kernels", "m", "--tokens", "1,3,65536", "--skew=0,0.7,3,same", "--ep", "2") == -1, "%s", message);
  EXPECT(options.tokens.count == 3 && options.tokens.values[1] == 3 && options.tokens.values[2] == 65536, "tokens");
  EXPECT(options.skews.count == 4 && options.skews.values[1] == 0.7 && options.skews.values[3] == -1, "skews");
  EXPECT(options.ep == 2, "ep");
  EXPECT(PARSE("limits", "--sizes", "1,4096") == -1 && options.sizes.values[1] == 4096ll << 20, "%s", message);
}

static void test_mistakes(void) {
  static char *const lists[][2] = {{"--tokens", "0"},    {"--tokens", "1,"},    {"--tokens", ",1"}, {"--tokens", "65537"},
                                   {"--tokens", "1 2"},  {"--skew", "-1"},      {"--skew", "17"},   {"--skew", "sames"},
                                   {"--pairs", "0"},     {"--launches", "1"},   {"--ep", "0"},      {"--variants", "some"},
                                   {"--kernel", "gate"}, {"--fail-on", "fast"}, {"--seed", "-1"},   {"--device", "64"}};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    EXPECT(PARSE("kernels", "m", lists[i][0], lists[i][1]) == 2, "%s %s is taken", lists[i][0], lists[i][1]);
    EXPECT(strstr(message, lists[i][0] + 2), "%s is not named in: %s", lists[i][0], message);
    EXPECT(strchr(message, '\n') == message + strlen(message) - 1, "more than a line: %s", message);
  }
  EXPECT(PARSE("limits", "--ep", "2") == 2 && strstr(message, "unknown option"), "%s", message);
  EXPECT(PARSE("limits", "m.yaml") == 2 && strstr(message, "too many"), "%s", message);
  EXPECT(PARSE("kernels") == 2 && strstr(message, "which model"), "%s", message);
  EXPECT(PARSE("kernel", "m") == 2 && strstr(message, "unknown command 'kernel' (did you mean 'kernels'?)"), "%s", message);
  EXPECT(PARSE("help") == -1 && PARSE("help", "kernels") == -1 && PARSE("help", "a", "b") == 2, "%s", message);
  EXPECT(PARSE("--json") == 2 && strstr(message, "needs a value"), "%s", message);
}

/* One line, and the exit code of an environment that lacks something; a file that cannot be written is told first. */
static void test_no_gpu(void) {
  char model[512];
  snprintf(model, sizeof model, "%s/models/deepseek-v2-lite.yaml", MOEFLOW_SOURCE_DIR);
  setenv("MOEFLOW_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
  run_it = 1;
  EXPECT(PARSE("kernels", model, "--ep", "2") == 5, "%s", message);
  EXPECT(strstr(message, "a GPU is needed") && strchr(message, '\n') == message + strlen(message) - 1, "%s", message);
  EXPECT(PARSE("limits") == 5 && strstr(message, "moeflow-bench limits: a GPU is needed"), "%s", message);
  EXPECT(PARSE("limits", "--json", "/nonexistent/limits.json") == 6 && strstr(message, "cannot write"), "%s", message);
  EXPECT(PARSE("kernels", "/nonexistent.yaml") == 6 && strstr(message, "/nonexistent.yaml"), "%s", message);
  run_it = 0;
}

static void test_names(void) {
  char text[32];
  bench_skew_name(0, text);
  EXPECT(!strcmp(text, "uniform"), "%s", text);
  bench_skew_name(0.7, text);
  EXPECT(!strcmp(text, "lognormal:0.7"), "%s", text);
  bench_skew_name(-1, text);
  EXPECT(!strcmp(text, "same"), "%s", text);
}

int main(void) {
  test_defaults();
  test_lists();
  test_mistakes();
  test_no_gpu();
  test_names();
  TEST_END;
}
