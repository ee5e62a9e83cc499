#include <dlfcn.h>
#include <fcntl.h>
#include <nvrtc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"
#include "command.h"
#include "driver.h"
#include "environment.h"
#include "exit_code.h"
#include "json.h"
#include "nccl_library.h"
#include "status.h"
#include "toolchain.h"

enum finding_state { FINDING_OK, FINDING_ABSENT, FINDING_BROKEN }; /* ABSENT: builds work without it */
static const char *const state_names[] = {"ok", "absent", "MISSING"};

struct finding {
  const char *what;
  enum finding_state state;
  char detail[1024];
  const char *advice; /* what to do, NULL when nothing */
};

#define FINDINGS_MAX 160
struct report {
  struct finding findings[FINDINGS_MAX];
  int count;
};

__attribute__((format(printf, 5, 6))) static void add(struct report *report, const char *what, enum finding_state state,
                                                      const char *advice, const char *format, ...) {
  if (report->count == FINDINGS_MAX) return;
  struct finding *finding = &report->findings[report->count++];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(finding->detail, sizeof finding->detail, format, arguments);
  va_end(arguments);
  finding->what = what;
  finding->state = state;
  finding->advice = advice;
}

/* ---- What a build needs ---- */

static const char install_nvrtc[] =
    "install a CUDA toolkit of version 12 or 13 or the pip wheel nvidia-cuda-nvrtc, or set MOEFLOW_NVRTC";

static void look_at_nvrtc(struct report *report) {
  struct toolchain toolchain;
  int major = 0, minor = 0;
  if (toolchain_find(&toolchain) != MOEFLOW_OK) {
    add(report, "nvrtc", FINDING_BROKEN, install_nvrtc, "%s", moeflow_last_error());
    return;
  }
  /* NVRTC opens its builtins by bare name: found only if they are loaded already or on the library path. */
  for (int i = 0; i < toolchain.builtins_count; i++) (void)dlopen(toolchain.builtins[i], RTLD_NOW | RTLD_LOCAL);
  void *library = dlopen(toolchain.nvrtc, RTLD_NOW | RTLD_LOCAL);
  nvrtcResult (*version)(int *, int *) = NULL;
  if (library) *(void **)&version = dlsym(library, "nvrtcVersion");
  if (!version || version(&major, &minor) != NVRTC_SUCCESS) {
    add(report, "nvrtc", FINDING_BROKEN, install_nvrtc, "%s cannot be used: %s", toolchain.nvrtc,
        library ? "nvrtcVersion fails" : dlerror());
    return;
  }
  add(report, "nvrtc", FINDING_OK, NULL, "%d.%d, %s", major, minor, toolchain.nvrtc);
  if (toolchain.builtins_count == 0) {
    add(report, "nvrtc builtins", FINDING_BROKEN, install_nvrtc, "no libnvrtc-builtins beside %s", toolchain.nvrtc);
  }
}

static void look_at_cache(struct report *report, const char *explicit_path) {
  static const char advice[] = "choose a directory that only you can write: --cache DIR or MOEFLOW_CACHE_DIR=/absolute/path";
  char path[CACHE_PATH_MAX];
  int fd = -1, missing = 0;
  if (cache_path(explicit_path, path, sizeof path) != MOEFLOW_OK) {
    add(report, "cache", FINDING_BROKEN, advice, "%s", moeflow_last_error());
  } else if (cache_open_or_create(path, 0, &fd, &missing) == MOEFLOW_OK) {
    int writable = faccessat(fd, ".", W_OK, AT_EACCESS) == 0;
    add(report, "cache", FINDING_OK, writable ? NULL : "it can be read but not written: builds need another --cache",
        "%s, trusted", path);
  } else if (missing) {
    add(report, "cache", FINDING_OK, NULL, "%s, not there yet; `moeflow-gen build` makes it", path);
  } else {
    add(report, "cache", FINDING_BROKEN, advice, "%s", moeflow_last_error());
  }
  if (fd >= 0) close(fd);
}

/* ---- What runs need ---- */

static int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  return driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static void look_at_gpu(struct report *report, int ordinal) {
  CUdevice device;
  char name[96] = "?", archs[64] = "";
  size_t memory = 0, used = 0;
  const struct arch *candidates[ARCH_MAX];
  if (driver.cuDeviceGet(&device, ordinal) != CUDA_SUCCESS) {
    add(report, "gpu", FINDING_ABSENT, NULL, "%d cannot be opened", ordinal);
    return;
  }
  driver.cuDeviceGetName(name, sizeof name, device);
  if (driver.cuDeviceTotalMem) driver.cuDeviceTotalMem(&memory, device);
  int major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  int minor = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  int count = arch_for_device(major, minor, candidates);
  for (int i = 0; i < count && used < sizeof archs; i++) {
    used += (size_t)snprintf(archs + used, sizeof archs - used, "%s%s", used ? " or " : "", candidates[i]->name);
  }
  add(report, "gpu", count ? FINDING_OK : FINDING_ABSENT,
      count ? NULL : "this version has no target for it; the CPU backend runs",
      "%d: %s, compute capability %d.%d, %.1f GB%s%s", ordinal, name, major, minor, (double)memory / 1e9,
      count ? ", --arch " : "", archs);
}

/* One line for each pair that cannot, one for all when every pair can. */
static void look_at_peers(struct report *report, int gpus) {
  int denied = 0;
  if (gpus < 2 || !driver.cuDeviceCanAccessPeer) return;
  for (int from = 0; from < gpus; from++) {
    for (int to = 0; to < gpus; to++) {
      CUdevice devices[2];
      int can = 0;
      if (from == to || driver.cuDeviceGet(&devices[0], from) || driver.cuDeviceGet(&devices[1], to)) continue;
      if (driver.cuDeviceCanAccessPeer(&can, devices[0], devices[1]) == CUDA_SUCCESS && can) continue;
      denied++;
      add(report, "peer access", FINDING_ABSENT, "NCCL goes through host memory between these", "none from gpu %d to gpu %d",
          from, to);
    }
  }
  if (!denied) add(report, "peer access", FINDING_OK, NULL, "between all %d GPUs", gpus);
}

static void look_at_driver(struct report *report) {
  int gpus = 0;
  if (driver_load() != MOEFLOW_OK) {
    add(report, "driver", FINDING_ABSENT, "cubins build without it", "%s", moeflow_last_error());
    return;
  }
  add(report, "driver", FINDING_OK, NULL, "for CUDA %d.%d", driver.version / 1000, driver.version % 1000 / 10);
  if (driver.cuDeviceGetCount(&gpus) != CUDA_SUCCESS) gpus = 0;
  for (int i = 0; i < gpus; i++) look_at_gpu(report, i);
  look_at_peers(report, gpus);
}

static void look_at_nccl(struct report *report) {
  if (nccl_load() != MOEFLOW_OK) {
    add(report, "nccl", FINDING_ABSENT,
        "several GPUs need it: install libnccl2 or the pip wheel nvidia-nccl-cu13, or set MOEFLOW_NCCL", "%s",
        moeflow_last_error());
    return;
  }
  add(report, "nccl", FINDING_OK, NULL, "%d.%d.%d, %s", nccl.version / 10000, nccl.version / 100 % 100, nccl.version % 100,
      nccl.path);
}

static void look_at_environment(struct report *report) {
  for (const struct environment_variable *row = environment_table; row->name; row++) {
    const char *value = getenv(row->name);
    if (value) add(report, "environment", FINDING_OK, NULL, "%s=%s", row->name, value);
  }
}

/* ---- Showing ---- */

static int broken(const struct report *report) {
  int count = 0;
  for (int i = 0; i < report->count; i++) count += report->findings[i].state == FINDING_BROKEN;
  return count;
}

static void print_text(struct report *report) {
  for (int i = 0; i < report->count; i++) {
    struct finding *finding = &report->findings[i];
    for (char *c = finding->detail; *c; c++) {
      if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?'; /* a variable's value may hold anything */
    }
    printf("%-8s %-14s %s%s%s\n", state_names[finding->state], finding->what, finding->detail, finding->advice ? "; " : "",
           finding->advice ? finding->advice : "");
  }
  int missing = broken(report);
  printf("%s\n", missing ? "something that builds need is missing" : "all that builds need is there");
}

static void print_json(const struct report *report) {
  static const char *const states[] = {"ok", "absent", "missing"};
  struct json json;
  json_begin(&json, stdout);
  json_object(&json);
  json_key(&json, "findings"), json_array(&json);
  for (int i = 0; i < report->count; i++) {
    json_object(&json);
    json_key(&json, "what"), json_string(&json, report->findings[i].what);
    json_key(&json, "state"), json_string(&json, states[report->findings[i].state]);
    json_key(&json, "detail"), json_string(&json, report->findings[i].detail);
    json_key(&json, "advice"), json_string(&json, report->findings[i].advice);
    json_object_end(&json);
  }
  json_array_end(&json);
  json_key(&json, "can_build"), json_bool(&json, broken(report) == 0);
  json_object_end(&json);
  json_end(&json);
}

int command_doctor(const struct gen_options *options) {
  struct report *report = calloc(1, sizeof *report);
  if (!report) return command_status(options, status_set(MOEFLOW_ERROR_MEMORY, "no memory"));
  look_at_nvrtc(report);
  look_at_cache(report, options->cache);
  look_at_driver(report);
  look_at_nccl(report);
  look_at_environment(report);
  if (options->format == FORMAT_JSON) {
    print_json(report);
  } else {
    print_text(report);
  }
  int exit_code = broken(report) ? EXIT_ENVIRONMENT : 0;
  free(report);
  return exit_code;
}
