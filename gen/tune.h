/* A tuned file: which variant of the experts kernels won at which number of received rows, for one (spec, GPU). Written by
 * `sweep`, or merged by hand, and read by `build` and `explain`; docs/file-formats.md shows one.
 *
 * What decides the result (spec, arch, GPU) must be the same where the file is used. What only decides whether it was
 * measured again (driver, NVRTC, templates) may differ. */
#ifndef MOEFLOW_TUNE_H
#define MOEFLOW_TUNE_H

#include "experts_space.h"

#define TUNE_VERSION 1
#define TUNE_ROWS_MAX 12 /* lines: buckets below the open one */
#define TUNE_TEXT_MAX 256
#define TUNE_PATH_MAX 4096
#define TUNE_DIFFERENCES_MAX 1024

struct tune_identity {
  char model[SPEC_NAME_MAX + 1];
  char dtype[16];
  char gpu[TUNE_TEXT_MAX]; /* as the driver says it: "NVIDIA H200" */
  int32_t multiprocessors;
  char arch[PLAN_ARCH_MAX];
  char spec[65];      /* spec_hash */
  int32_t driver;     /* CUDA version: 13000 */
  int32_t nvrtc;      /* 13000 */
  char templates[65]; /* tune_templates_hash */
};

struct tune_line {
  int32_t rows;                  /* the bucket's: received rows up to here, from the line before */
  int32_t kernel;                /* KERNEL_EXPERTS, KERNEL_EXPERTS_STREAM, or KERNEL_GATE_UP: the portable form */
  struct experts_shape shape;    /* of the first two */
  double us, default_us;         /* a layer, winner and default */
  double gap, gap_low, gap_high; /* per cent of the default's time that the winner saves: mean, interval (docs/sweep.md) */
  char runner_up[TUNE_TEXT_MAX]; /* the next best's unit name, "" = none */
};

struct tune {
  struct tune_identity identity;
  struct tune_line lines[TUNE_ROWS_MAX]; /* rows ascending */
  int count;
  char path[TUNE_PATH_MAX]; /* where it was read */
};

/* "h200" of "NVIDIA H200"; "glm-5.3-flash.bf16.h200.tune". */
void tune_gpu_slug(const char *gpu, char slug[64]);
void tune_file_name(const char *model, const char *dtype, const char *gpu, char name[192]);

/* "portable", "experts", "experts_stream" */
const char *tune_kernel_name(int32_t kernel);

/* MOEFLOW_ERROR_FORMAT with one line `file:line: what`; MOEFLOW_ERROR_CACHE when the file cannot be read. Lines may stand in
 * any order in the file. */
moeflow_status tune_read(const char *path, struct tune *tune);
moeflow_status tune_parse(const char *text, size_t length, const char *where, struct tune *tune);

/* The file's text, malloc'ed. */
moeflow_status tune_print(const struct tune *tune, char **text);

/* Makes or replaces the file, all of it or nothing: a temporary file beside it, fsync, rename. */
moeflow_status tune_write(const struct tune *tune, const char *path);

/* Compares with what is here; what is not known here (empty, 0) is passed over. MOEFLOW_ERROR_UNSUPPORTED, with both values
 * and the command to run, when the file must not be used; `model_path` is the YAML for that command. */
moeflow_status tune_match(const struct tune *tune, const struct tune_identity *here, const char *model_path);

/* Whether anything differs that does not forbid its use: "driver 13000, here 12080; ..." */
int tune_differs(const struct tune *tune, const struct tune_identity *here, char text[TUNE_DIFFERENCES_MAX]);
#endif
