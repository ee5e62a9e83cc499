/* The command line of moeflow-run: what is read, what is refused and how it is named. */
#include "options.h"

#include "status.h"
#include "test.h"

static moeflow_status parse(struct options *options, const char *line) {
  static char text[512];
  static char *argv[64];
  int argc = 0;
  snprintf(text, sizeof text, "moeflow-run %s", line);
  for (char *word = strtok(text, " "); word && argc < 63; word = strtok(NULL, " ")) argv[argc++] = word;
  return options_parse(argc, argv, options);
}

static void test_defaults(void) {
  struct options options;
  EXPECT(parse(&options, "m.yaml") == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(!strcmp(options.model, "m.yaml"));
  EXPECT(options.ep == OPTIONS_UNSET && options.capacity == OPTIONS_UNSET && options.backend == OPTIONS_UNSET);
  EXPECT(options.seed == 1 && options.check_rows == 64 && options.lanes == 1 && !options.check);
  EXPECT(options.host_memory == 8ull << 30);
  EXPECT(options.point_count == 1 && options.points[0].count == 1 && options.points[0].tokens[0] == 1);
  options_free(&options);
}

static void test_values(void) {
  struct options options;
  const char *line =
      "--ep 3 m.yaml --tokens=0,8,5/0/2 --check --backend cpu --transport local --capacity=16 --dtype bf16 --seed "
      "18446744073709551615 --routing lognormal:0.5 --check-rows 7 --experts 12 --reduce choices --combine ring --lanes 2 "
      "--host-memory 3GiB --format json --timeout 5 --reference-seed 9";
  EXPECT(parse(&options, line) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(options.ep == 3 && options.check && options.backend == MOEFLOW_BACKEND_CPU && options.capacity == 16);
  EXPECT(options.transport == MOEFLOW_TRANSPORT_LOCAL && options.lanes == 2 && options.format == OPTIONS_JSON);
  EXPECT(options.seed == UINT64_MAX && options.reference_seed == 9 && options.timeout == 5);
  EXPECT(options.routing.kind == ROUTING_LOGNORMAL && options.routing.parameter == 0.5);
  EXPECT(options.combine == MOEFLOW_COMBINE_RING && options.reduce == 1 && options.host_memory == 3ull << 30);
  EXPECT(options.point_count == 3);
  const struct options_point *uneven = &options.points[2];
  EXPECT(uneven->count == 3 && options_tokens(uneven, 0) == 5 && options_tokens(uneven, 1) == 0 &&
         options_tokens(uneven, 2) == 2);
  EXPECT(options_tokens_max(uneven) == 5);
  EXPECT(options_tokens(&options.points[1], 2) == 8 && options_tokens_max(&options.points[0]) == 0);
  options_free(&options);
}

static void test_refused(void) {
  static const struct {
    const char *line, *named;
  } rows[] = {{"", "no model"},
              {"a.yaml b.yaml", "b.yaml"},
              {"m.yaml --no-such-option", "no-such-option"},
              {"m.yaml --e 2", "--e"},
              {"m.yaml -x", "-x"},
              {"m.yaml --ep", "--ep"},
              {"m.yaml --ep 0", "--ep"},
              {"m.yaml --ep 02", "--ep"},
              {"m.yaml --ep +2", "--ep"},
              {"m.yaml --ep 4097", "4096"},
              {"m.yaml --ep 99999999999999999999", "--ep"},
              {"m.yaml --tokens 1,,2", "--tokens"},
              {"m.yaml --tokens 1,", "--tokens"},
              {"m.yaml --tokens 1/", "--tokens"},
              {"m.yaml --tokens -1", "--tokens"},
              {"m.yaml --tokens 1048577", "1048577"},
              {"m.yaml --backend gpu", "cpu|cuda"},
              {"m.yaml --transport tcp", "nccl"},
              {"m.yaml --routing zipf", "zipf"},
              {"m.yaml --routing zipf:x", "zipf:x"},
              {"m.yaml --routing zipf:1e3", "zipf:1e3"},
              {"m.yaml --routing lognormal:-1", "lognormal"},
              {"m.yaml --host-memory 8gb", "8gb"},
              {"m.yaml --host-memory 0", "--host-memory"},
              {"m.yaml --host-memory 99999999999GiB", "--host-memory"},
              {"m.yaml --seed 18446744073709551616", "--seed"},
              {"m.yaml --lanes 3", "--lanes"},
              {"m.yaml --check=yes", "--check"},
              {"m.yaml --cache=", "--cache"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    struct options options;
    EXPECT(parse(&options, rows[i].line) == MOEFLOW_ERROR_ARGUMENT, "%s", rows[i].line);
    EXPECT(strstr(moeflow_last_error(), rows[i].named), "%s: %s", rows[i].line, moeflow_last_error());
    options_free(&options);
  }
}

static void test_help(void) {
  struct options options;
  char text[16384];
  FILE *file = fmemopen(text, sizeof text, "w");
  EXPECT(parse(&options, "--help --no-such") == MOEFLOW_OK && options.help);
  EXPECT(parse(&options, "-h") == MOEFLOW_OK && options.help);
  EXPECT(parse(&options, "--version") == MOEFLOW_OK && options.version);
  EXPECT(parse(&options, "--hand-example") == MOEFLOW_OK && options.hand_example);
  options_help(file);
  fclose(file);
  EXPECT(strstr(text, "--tokens LIST") && strstr(text, "--host-memory") && strstr(text, "130"), "%s", text);
}

int main(void) {
  test_defaults();
  test_values();
  test_refused();
  test_help();
  TEST_END;
}
