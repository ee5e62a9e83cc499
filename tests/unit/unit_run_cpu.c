/* moeflow-run as a user starts it, on the CPU: a tiny model at several EP sizes, and everything that must fail. */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

#define TOOL MOEFLOW_BINARY_DIR "/bin/moeflow-run"

static char model[] = "/tmp/moeflow-run-XXXXXX";
static char output[1 << 16], errors[1 << 16];

static const char tiny[] =
    "moeflow: 1\nname: tiny\nhidden: 128\nintermediate: 64\nexperts: 11\ntop_k: 3\nactivation: {kind: swiglu_clamp, limit: "
    "1.5}\n"
    "router: {score: sigmoid, correction_bias: true, renormalize: true, scale: 2.5}\nweights: {dtype: bf16}\n"
    "shared_experts: {count: 1, intermediate: 64}\ndeploy: {ep: 2, capacity: 16}\n";

static void read_back(const char *path, char *text, size_t size) {
  FILE *file = fopen(path, "r");
  const size_t got = file ? fread(text, 1, size - 1, file) : 0;
  text[got] = 0;
  if (file) fclose(file);
}

/* Runs the tool on the tiny model; its exit code, stdout and stderr. */
static int run(const char *before, const char *arguments) {
  char command[2048], out[64], err[64];
  snprintf(out, sizeof out, "%s.out", model);
  snprintf(err, sizeof err, "%s.err", model);
  snprintf(command, sizeof command, "%s %s %s %s >%s 2>%s", before, TOOL, model, arguments, out, err);
  const int status = system(command);
  read_back(out, output, sizeof output);
  read_back(err, errors, sizeof errors);
  remove(out);
  remove(err);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int count(const char *text, const char *word) {
  int found = 0;
  for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) found++;
  return found;
}

static void test_sizes(void) {
  static const char *const arguments[] = {"--ep 1 --tokens 0,1,5",   "--ep 2 --tokens 0,1,5/0,16",
                                          "--ep 3 --tokens 2,0/7/1", "--ep 4 --tokens 3,1/0/0/16",
                                          "--ep 8 --tokens 1,2",     "--ep 11 --tokens 4"};
  static const char *const modes[] = {"", "--ids", "--combine ring --lanes 2", "--reduce choices --routing zipf:1.5",
                                      "--seed 9 --routing lognormal:2 --replays 5"};
  for (size_t a = 0; a < sizeof arguments / sizeof *arguments; a++) {
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++) {
      char line[256];
      snprintf(line, sizeof line, "--backend cpu --check --format json %s %s", arguments[a], modes[m]);
      EXPECT(run("", line) == 0, "%s: %s", line, errors);
      const int points = 1 + count(arguments[a], ",");
      EXPECT(count(output, "\"passed\": true") == points + 1 && !strstr(output, "false}"), "%s: %s", line, output);
      EXPECT(count(output, "\"dispatch_exact\": true") == points && count(output, "\"repeat_exact\": true") == points);
      EXPECT(count(output, "\"replay_exact\": null") == points && strstr(output, "\"schema\": \"moeflow-run/1\""));
    }
  }
  EXPECT(strstr(errors, "shared expert"), "%s", errors);
}

/* The output's hash with all tokens on rank 0. */
static void hash_at(int ep, const char *mode, char hash[65]) {
  char line[256] = "--backend cpu --format json --tokens 13";
  for (int rank = 1; rank < ep; rank++) strcat(line, "/0");
  snprintf(line + strlen(line), sizeof line - strlen(line), " --ep %d %s", ep, mode);
  EXPECT(run("", line) == 0, "%s: %s", line, errors);
  const char *at = strstr(output, "\"output_sha256\": \"");
  snprintf(hash, 65, "%s", at ? at + 18 : "");
}

static void test_placement(void) {
  static const int sizes[] = {2, 3, 4, 8, 11};
  char one[65], other[65], seed[65];
  hash_at(1, "--reduce choices", one);
  hash_at(1, "--reduce choices --seed 2", seed);
  EXPECT(strlen(one) == 64 && strcmp(one, seed), "another seed gives another output");
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    hash_at(sizes[i], "--reduce choices", other);
    EXPECT(!strcmp(one, other), "reduce: choices, ep %d: %s, ep 1: %s", sizes[i], other, one);
  }
}

static void test_failing_check(void) {
  EXPECT(run("", "--backend cpu --check --ep 3 --tokens 2,4 --reference-seed 99") == 4, "%s", output);
  EXPECT(count(errors, "check failed at tokens") == 2, "%s", errors);
  EXPECT(strstr(errors, "rank 0 token ") && strstr(errors, "experts ") && strstr(errors, " instead of "), "%s", errors);
  EXPECT(strstr(output, "FAILED"), "%s", output);
  EXPECT(run("", "--backend cpu --check --ep 3 --tokens 2 --reference-seed 99 --format json") == 4);
  EXPECT(count(output, "\"passed\": false") == 2 && strstr(output, "\"message\": "), "%s", output);
  EXPECT(run("", "--backend cpu --check --ep 3 --tokens 2 --reference-seed 1") == 0, "its own seed: %s", errors);
}

static void test_sample(void) {
  EXPECT(run("", "--backend cpu --check --ep 2 --capacity 300 --tokens 300 --check-rows 5 --format json") == 0, "%s",
         errors);
  EXPECT(strstr(output, "\"rows_checked\": 10,"), "%s", output);
  EXPECT(run("", "--backend cpu --check --ep 2 --capacity 300 --tokens 200 --check-rows 5 --format json") == 0, "%s",
         errors);
  EXPECT(strstr(output, "\"rows_checked\": 400,"), "fewer than 512 tokens over all ranks: every row: %s", output);
}

static void test_refused(void) {
  static const struct {
    const char *before, *arguments;
    int code;
    const char *named[2];
  } rows[] = {
      {"", "--backend cpu --tokens 17", 2, {"17", "16"}},
      {"", "--backend cpu --capacity 8 --tokens 0/9", 2, {"9", "8"}},
      {"", "--tokens 1/2/3", 2, {"3 counts", "2 ranks"}},
      {"", "--ep 12", 2, {"12", "11"}},
      {"", "--backend cpu --transport window", 2, {"window", "needs GPUs"}},
      {"", "--backend cpu --transport allgather", 2, {"allgather", "GPU"}},
      {"", "--transport allgather --reduce choices", 2, {"allgather", "choices"}},
      {"", "--transport allgather --combine ring", 2, {"allgather", "ring"}},
      {"", "--backend cpu --transport nccl", 2, {"nccl", "GPU"}},
      {"", "--backend cpu --host-memory 1000", 5, {"1000", "--host-memory"}},
      {"", "--backend cpu --die-rank 0", 2, {"--die-rank", ""}},
      {"", "--backend cpu --combine ring --reduce choices", 2, {"ring", "choices"}},
      {"", "--backend cpu --output /nonexistent/x.json", 6, {"/nonexistent/x.json", ""}},
      {"", "--no-such-option", 2, {"no-such-option", ""}},
      {"RANK=0 WORLD_SIZE=4", "--backend cpu --ep 2", 2, {"torchrun", "4"}},
      {"RANK=x WORLD_SIZE=4", "--backend cpu", 2, {"RANK=x", ""}},
      {"MOEFLOW_TIMEOUT_S=0", "--backend cpu", 2, {"MOEFLOW_TIMEOUT_S", ""}},
      {"MOEFLOW_CUDA_LIB=/nonexistent/libcuda.so", "--backend cuda", 5, {"GPU", "/nonexistent/libcuda.so"}},
      {"MOEFLOW_CUDA_LIB=/nonexistent/libcuda.so", "--transport nccl", 5, {"2 ranks", "0 GPUs"}},
      {"MOEFLOW_CUDA_LIB=/nonexistent/libcuda.so", "--transport allgather", 5, {"allgather needs", "0 GPUs"}},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const int code = run(rows[i].before, rows[i].arguments);
    EXPECT(code == rows[i].code, "%s: exit %d: %s", rows[i].arguments, code, errors);
    for (int n = 0; n < 2; n++)
      EXPECT(strstr(errors, rows[i].named[n]), "%s: lacks '%s': %s", rows[i].arguments, rows[i].named[n], errors);
    EXPECT(code != 2 || !output[0], "%s: something on stdout", rows[i].arguments);
  }
}

/* No GPU is no error: one line says so. Under a launcher the CPU's ranks all live in its first process. */
static void test_fallback(void) {
  EXPECT(run("MOEFLOW_CUDA_LIB=/nonexistent/libcuda.so", "") == 0, "%s", errors);
  EXPECT(count(errors, "running on the CPU backend: no CUDA driver") == 1, "%s", errors);
  EXPECT(strstr(output, "2 rank(s)") && strstr(output, "backend cpu") && strstr(output, "not a benchmark"), "%s", output);
  EXPECT(run("RANK=1 WORLD_SIZE=3", "--backend cpu") == 0 && !output[0], "%s", output);
  EXPECT(run("RANK=0 WORLD_SIZE=3", "--backend cpu --check") == 0 && strstr(output, "3 rank(s)"), "%s", output);
  EXPECT(run("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0", "--backend cpu --check") == 0 && strstr(output, "2 rank(s)"));
}

static void test_output_file(void) {
  char line[256], path[64], text[1 << 14];
  snprintf(path, sizeof path, "%s.json", model);
  snprintf(line, sizeof line, "--backend cpu --check --machine desk --output %s", path);
  EXPECT(run("", line) == 0, "%s", errors);
  read_back(path, text, sizeof text);
  EXPECT(strstr(text, "\"machine\": \"desk\"") && strstr(text, "\"kind\": \"run\"") &&
             strstr(text, "\"command\": \"moeflow-run "),
         "%s", text);
  const char *command = strstr(text, "\"command\": ");
  snprintf(line, sizeof line, "%s --backend cpu --check --machine desk --output %s.json\"", strrchr(model, '/') + 1,
           strrchr(model, '/') + 1); /* without this machine's folders */
  EXPECT(command && strstr(command, line), "%s: %s", line, text);
  EXPECT(strstr(text, "\"sha\": \"") && strstr(text, "\"dirty\": ") && strstr(text, "\"yaml_sha256\": \""), "%s", text);
  EXPECT(strstr(output, "rel_l2_max"), "the table still goes to stdout");
  remove(path);
}

static void test_interrupt(void) {
  int status = 0;
  fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    dup2(null, 2);
    execl(TOOL, TOOL, model, "--backend", "cpu", "--replays", "1000000", (char *)NULL);
    _exit(127);
  }
  const struct timespec nap = {0, 500 * 1000000};
  nanosleep(&nap, NULL);
  kill(pid, SIGINT);
  EXPECT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 130, "status %#x", (unsigned)status);
}

int main(void) {
  static const char *const launchers[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "PMI_RANK"};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) unsetenv(launchers[i]);
  const int fd = mkstemp(model);
  if (fd < 0 || write(fd, tiny, sizeof tiny - 1) != (ssize_t)sizeof tiny - 1) return EXIT_FAILURE;
  close(fd);
  test_sizes();
  test_placement();
  test_failing_check();
  test_sample();
  test_refused();
  test_fallback();
  test_output_file();
  test_interrupt();
  remove(model);
  TEST_END;
}
