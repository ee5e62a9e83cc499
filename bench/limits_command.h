/* What bounds a kernel on this GPU, measured in the command that measures the kernel. */
#ifndef MOEFLOW_BENCH_LIMITS_H
#define MOEFLOW_BENCH_LIMITS_H

#include "dense_rate.h"
#include "json.h"
#include "read_rate.h"

/* The faster of both ways to read so many bytes a launch: bulk copies where the GPU has them, else loads. */
moeflow_status limits_read(struct read_bench *bench, int64_t bytes, struct read_result *result);

/* The dense rate, on values that the read bench has made. */
moeflow_status limits_dense(const struct read_bench *bench, const char *cublas, struct dense_result *result);

void limits_print_dense(const struct dense_result *result, FILE *file);
void limits_write_dense(const struct dense_result *result, struct json *json); /* key "dense" */
#endif
