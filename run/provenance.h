/* What a result file says about where it comes from, for the tools that write one. */
#ifndef MOEFLOW_RUN_PROVENANCE_H
#define MOEFLOW_RUN_PROVENANCE_H

#include "json.h"
#include "moeflow.h"

/* "h200x2" of two "NVIDIA H200". Never the host's name. */
#define PROVENANCE_MACHINE_MAX 128
void provenance_machine(const char *gpu, int count, char name[PROVENANCE_MACHINE_MAX]);

/* "command": the tool's name and its arguments; of paths that are absolute what lies below the current folder, else the last
 * name. */
void provenance_command(const char *tool, int argc, char **argv, struct json *json);

/* "nccl_environment": the variables NCCL_* of this process. */
void provenance_environment(struct json *json);

/* "toolchain": "NVRTC 13.0" of major * 1000 + minor * 10; null for 0. */
void provenance_toolchain(int nvrtc, struct json *json);

/* SHA-256 of a file's bytes. MOEFLOW_ERROR_CACHE when it cannot be read. */
moeflow_status provenance_hash_file(const char *path, char hex[65]);

/* Only whether the file may be written: told before minutes of work rather than after them. `option`: "--output". path may
 * be NULL. */
moeflow_status provenance_check_output(const char *option, const char *path);
#endif
