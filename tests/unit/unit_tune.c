/* Tuned files: what is written reads back, every malformed line is refused where it stands, and what must not differ does
 * not. */
#include "tune.h"

#include "scratch.h"
#include "status.h"
#include "test.h"

#define HASH "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define HEAD                                                                                              \
  "moeflow-tune 1\nmodel tiny\ndtype bf16\ngpu NVIDIA H200\nmultiprocessors 132\narch sm_90a\nspec " HASH \
  "\ndriver 13000\nnvrtc 13000\ntemplates " HASH "\n"
#define SHAPE "tile_tokens=16 tile_rows=128 tile_depth=128 stages=6 parts=4 residency=1"
#define TAIL " us=610.10 default=622.00 gap_percent=1.95 ci_percent=1.60,2.30 runner_up=experts_x\n"

static struct tune tune;

static moeflow_status parse(const char *text) {
  return tune_parse(text, strlen(text), "f", &tune);
}

static void reads(void) {
  EXPECT(parse(HEAD "# a remark\n\nrows 64 portable" TAIL "rows 16 experts " SHAPE
                    " us=1 default=1 gap_percent=-0.5 ci_percent=-1.5,0.5 runner_up=-\n") == MOEFLOW_OK,
         "%s", moeflow_last_error());
  EXPECT(!strcmp(tune.identity.gpu, "NVIDIA H200") && tune.identity.multiprocessors == 132 &&
         !strcmp(tune.identity.spec, HASH) && tune.identity.nvrtc == 13000);
  const struct tune_line *few = &tune.lines[0], *many = &tune.lines[1];
  EXPECT(tune.count == 2 && few->rows == 16 && many->rows == 64, "ascending, whatever the order in the file");
  EXPECT(few->kernel == KERNEL_EXPERTS && few->shape.tile_tokens == 16 && few->shape.parts == 4 && !few->runner_up[0]);
  EXPECT(few->gap == -0.5 && few->gap_low == -1.5 && few->gap_high == 0.5);
  EXPECT(many->kernel == KERNEL_GATE_UP && many->us == 610.1 && many->default_us == 622 && many->gap == 1.95 &&
         many->gap_low == 1.6 && many->gap_high == 2.3 && !strcmp(many->runner_up, "experts_x"));
  EXPECT(parse(HEAD) == MOEFLOW_OK && tune.count == 0, "nothing was measured yet");
  EXPECT(parse(HEAD "rows 8 portable us=1 default=1 gap_percent=0 ci_percent=0,0 runner_up=-") == MOEFLOW_OK,
         "the last line may lack its end");
}

static void writes(void) {
  char *text = NULL, *again = NULL;
  EXPECT(parse(HEAD "rows 8 experts " SHAPE TAIL "rows 16 experts_stream " SHAPE TAIL "rows 64 portable" TAIL) ==
         MOEFLOW_OK);
  EXPECT(tune_print(&tune, &text) == MOEFLOW_OK);
  EXPECT(!strcmp(text, HEAD "rows 8 experts " SHAPE TAIL "rows 16 experts_stream " SHAPE TAIL "rows 64 portable" TAIL), "%s",
         text);
  tune.lines[0].gap = -0.004, tune.lines[0].gap_low = -12.5;
  free(text);
  EXPECT(tune_print(&tune, &text) == MOEFLOW_OK && parse(text) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(tune.lines[0].gap_low == -12.5);
  EXPECT(tune_print(&tune, &again) == MOEFLOW_OK && !strcmp(text, again));
  free(text), free(again);
}

static void files(void) {
  struct tune read;
  struct stat info;
  const char *path = scratch_path("t.tune");
  EXPECT(parse(HEAD "rows 64 portable" TAIL) == MOEFLOW_OK);
  EXPECT(tune_write(&tune, path) == MOEFLOW_OK && tune_write(&tune, path) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(tune_read(path, &read) == MOEFLOW_OK && read.count == 1 && !strcmp(read.path, path), "%s", moeflow_last_error());
  EXPECT(stat(path, &info) == 0 && (info.st_mode & 0777) == 0644, "to be read by all, whoever swept");
  char command[2048];
  snprintf(command, sizeof command, "[ $(ls %s | wc -l) -eq 1 ]", scratch);
  EXPECT(system(command) == 0, "no temporary files are left");
  EXPECT(tune_write(&tune, scratch_path("none/t.tune")) == MOEFLOW_ERROR_CACHE);
  EXPECT(tune_read(scratch_path("none"), &read) == MOEFLOW_ERROR_CACHE && tune_read(scratch, &read) == MOEFLOW_ERROR_CACHE);
}

static void malformed(void) {
  static const struct {
    const char *text, *message;
  } cases[] = {
      {"", "f:1: no tuned file"},
      {"moeflow-plan 1\n", "f:1: no tuned file"},
      {"moeflow-tune 2\n", "f:1: version 2; this moeflow-gen reads version 1"},
      {"moeflow-tune 1\ndtype bf16\n", "f:2: `model` is missing"},
      {"moeflow-tune 1\nmodel tiny\ndtype bf16\ngpu \n", "f:4: gpu is '', which is empty"},
      {"moeflow-tune 1\nmodel tiny\ndtype bf16\ngpu x\nmultiprocessors 0\n", "f:5: multiprocessors is '0'"},
      {"moeflow-tune 1\nmodel tiny\ndtype bf16\ngpu x\nmultiprocessors 1\narch sm_90a\nspec 12\n", "f:7: spec is '12'"},
      {HEAD "row 8 portable" TAIL, "f:11: 'row' is not `rows`"},
      {HEAD "<<<<<<< ours\n", "f:11: '<<<<<<<' is not `rows`"},
      {HEAD "rows 0 portable" TAIL, "f:11: rows is '0', which is out of range"},
      {HEAD "rows -8 portable" TAIL, "f:11: rows is '-8', which has a sign"},
      {HEAD "rows 8 expert " SHAPE TAIL, "f:11: 'expert' is no kernel"},
      {HEAD "rows 8 experts tile_rows=8" TAIL, "f:11: tile_tokens= is missing"},
      {HEAD "rows 8 experts tile_tokens=x" TAIL, "f:11: tile_tokens is 'x', which is not a number"},
      {HEAD "rows 8 experts " SHAPE " default=1" TAIL, "f:11: us= is missing before 'default=1"},
      {HEAD "rows 8 portable us=-1 default=1\n", "f:11: us is '-1', which has a sign"},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=--1 ci_percent=0,0 runner_up=-\n", "gap_percent is '--1'"},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=1 ci_percent=2 runner_up=-\n", "LOW,HIGH"},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=1 ci_percent=2,1 runner_up=-\n", "ends below where it begins"},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=1 ci_percent=1,2\n", "runner_up="},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=1 ci_percent=1,2 runner_up=- x\n", "runner_up="},
      {HEAD "rows 8 portable" TAIL "rows 9 portable" TAIL "rows 8 experts " SHAPE TAIL,
       "f:13: rows 8 again, first on line 11"},
      {HEAD "rows 8 portable us=1 default=1 gap_percent=1 ci_percent=nan,2 runner_up=-\n", "ci_percent is 'nan,2'"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    EXPECT(parse(cases[i].text) == MOEFLOW_ERROR_FORMAT, "case %zu is read", i);
    EXPECT(strstr(moeflow_last_error(), cases[i].message), "case %zu: %s", i, moeflow_last_error());
  }
  EXPECT(tune_parse(HEAD "\0", sizeof HEAD, "f", &tune) == MOEFLOW_ERROR_FORMAT, "a NUL byte");
  char many[8192] = HEAD;
  for (int i = 1; i <= TUNE_ROWS_MAX + 1; i++) {
    EXPECT((parse(many) == MOEFLOW_OK) == (i <= TUNE_ROWS_MAX + 1));
    snprintf(many + strlen(many), sizeof many - strlen(many), "rows %d portable" TAIL, i);
  }
  EXPECT(parse(many) == MOEFLOW_ERROR_FORMAT && strstr(moeflow_last_error(), "more than 12 sizes"), "%s",
         moeflow_last_error());
}

static void matches(void) {
  struct tune_identity here;
  char text[TUNE_DIFFERENCES_MAX];
  EXPECT(parse(HEAD) == MOEFLOW_OK);
  here = tune.identity;
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_OK && !tune_differs(&tune, &here, text) && !text[0]);
  strcpy(here.gpu, "NVIDIA H100 80GB HBM3");
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_ERROR_UNSUPPORTED);
  EXPECT(!strcmp(moeflow_last_error(),
                 "f is for GPU NVIDIA H200, this is NVIDIA H100 80GB HBM3; run: moeflow-gen sweep m.yaml --dtype bf16"),
         "%s", moeflow_last_error());
  here = tune.identity, here.multiprocessors = 114;
  EXPECT(tune_match(&tune, &here, "m.yaml") && strstr(moeflow_last_error(), "132") && strstr(moeflow_last_error(), "114"));
  here = tune.identity, strcpy(here.arch, "sm_80");
  EXPECT(tune_match(&tune, &here, "m.yaml") && strstr(moeflow_last_error(), "sm_90a"));
  here = tune.identity, here.spec[63] = '0';
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_ERROR_UNSUPPORTED, "one digit of the spec's hash");
  here = tune.identity, strcpy(here.model, "other");
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_ERROR_UNSUPPORTED);
  here = tune.identity, strcpy(here.dtype, "fp8_w8a8");
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_ERROR_UNSUPPORTED);
  here = tune.identity, here.gpu[0] = 0, here.multiprocessors = 0, here.driver = 0, here.templates[0] = 0;
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_OK && !tune_differs(&tune, &here, text), "what is not known");
  here = tune.identity, here.driver = 12080, here.nvrtc = 12080, here.templates[0] = 'f';
  EXPECT(tune_match(&tune, &here, "m.yaml") == MOEFLOW_OK && tune_differs(&tune, &here, text));
  EXPECT(!strcmp(text, "driver 13000, here 12080; NVRTC 13000, here 12080; templates 0123456789ab, here f123456789ab"), "%s",
         text);
}

static void names(void) {
  static const char *const cases[][2] = {{"NVIDIA H200", "h200"},
                                         {"NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"},
                                         {"h200", "h200"},
                                         {"NVIDIA GeForce RTX 5090", "geforce-rtx-5090"},
                                         {"NVIDIA  A100-SXM4_(40/GB)..", "a100-sxm4-40-gb"},
                                         {"../../x", "x"},
                                         {"", ""}};
  char name[192];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char slug[64];
    tune_gpu_slug(cases[i][0], slug);
    EXPECT(!strcmp(slug, cases[i][1]), "'%s'", slug);
  }
  tune_file_name("glm-5.3-flash", "bf16", "NVIDIA H200", name);
  EXPECT(!strcmp(name, "glm-5.3-flash.bf16.h200.tune"), "%s", name);
}

int main(void) {
  scratch_make();
  reads();
  writes();
  files();
  malformed();
  matches();
  names();
  scratch_remove();
  TEST_END;
}
