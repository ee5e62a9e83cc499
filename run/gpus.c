#include "gpus.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deadline.h"
#include "driver.h"

#define PROBE_MS 120000 /* a driver that must start persistence first takes a while on large machines */

static moeflow_status look(struct gpus *gpus) {
  moeflow_status status = MOEFLOW_OK;
  int count = 0;
  CHECK(driver_load());
  gpus->driver = driver.version;
  CHECK_CUDA(cuDeviceGetCount(&count));
  if (count > GPUS_MAX) count = GPUS_MAX;
  for (int i = 0; i < count; i++) {
    CUdevice device;
    struct gpu *gpu = &gpus->gpu[i];
    CHECK_CUDA(cuDeviceGet(&device, i));
    CHECK_CUDA(cuDeviceGetName(gpu->name, sizeof gpu->name, device));
    CHECK_CUDA(cuDeviceGetAttribute(&gpu->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CHECK_CUDA(cuDeviceGetAttribute(&gpu->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  }
  gpus->count = count;

cleanup:
  if (status != MOEFLOW_OK) snprintf(gpus->why, sizeof gpus->why, "%s", moeflow_last_error());
  return status;
}

static void child(int fd, struct gpus *gpus) {
  look(gpus);
  const char *at = (const char *)gpus;
  for (size_t left = sizeof *gpus; left;) {
    const ssize_t put = write(fd, at, left);
    if (put <= 0) _exit(1);
    at += put, left -= (size_t)put;
  }
  _exit(0);
}

/* Reads the child's answer; 0 when all of it came in time. */
static int answer(int fd, struct gpus *gpus) {
  const int64_t deadline = deadline_in(PROBE_MS);
  char *at = (char *)gpus;
  for (size_t left = sizeof *gpus; left;) {
    struct pollfd wait = {fd, POLLIN, 0};
    const int64_t ms = deadline - deadline_now_ms();
    const int ready = ms > 0 ? poll(&wait, 1, (int)ms) : 0;
    if (ready < 0 && errno == EINTR) continue; /* a read would wait without a bound */
    if (ready <= 0) return -1;
    const ssize_t got = read(fd, at, left);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    at += got, left -= (size_t)got;
  }
  return 0;
}

void gpus_probe(struct gpus *gpus) {
  int ends[2];
  memset(gpus, 0, sizeof *gpus);
  if (pipe(ends)) {
    snprintf(gpus->why, sizeof gpus->why, "no pipe to look for GPUs: %s", strerror(errno));
    return;
  }
  fflush(stdout);
  fflush(stderr);
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    child(ends[1], gpus);
  }
  close(ends[1]);
  if (pid < 0 || answer(ends[0], gpus)) {
    memset(gpus, 0, sizeof *gpus);
    snprintf(gpus->why, sizeof gpus->why, "the process that looks for GPUs died, or gave no answer within %d s",
             PROBE_MS / 1000);
    if (pid > 0) kill(pid, SIGKILL);
  }
  if (pid > 0) waitpid(pid, NULL, 0);
  close(ends[0]);
}
