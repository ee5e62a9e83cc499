/* A cache with plan and entries for the fake GPU, and the fakes' own state, for tests of the runtime's host logic. Libraries
 * are loaded once a process, so each case runs in a child of its own. */
#ifndef MOEFLOW_FAKE_WORLD_H
#define MOEFLOW_FAKE_WORLD_H

#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>

#include "entry.h"
#include "fake_cuda.h"
#include "fake_nccl.h"
#include "internal.h"
#include "scratch.h"
#include "sha256.h"
#include "test.h"

#define UNUSED __attribute__((unused))

static struct fake_cuda *cuda;
static struct fake_nccl *nccl_fake;

static void *fake_symbol(const char *file, const char *symbol) {
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  void *found = library ? dlsym(library, symbol) : NULL;
  if (!found) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return found;
}

/* nccl_name: "fake_nccl" or "fake_nccl_old". */
static void fake_load(const char *nccl_name) {
  char path[1024];
  snprintf(path, sizeof path, "%s/tests/libfake_cuda.so", MOEFLOW_BINARY_DIR);
  setenv("MOEFLOW_CUDA_LIB", path, 1);
  cuda = ((fake_cuda_fn)fake_symbol(path, "fake_cuda"))();
  snprintf(path, sizeof path, "%s/tests/lib%s.so", MOEFLOW_BINARY_DIR, nccl_name);
  setenv("MOEFLOW_NCCL", path, 1);
  nccl_fake = ((fake_nccl_fn)fake_symbol(path, "fake_nccl"))();
  nccl_fake->clock = &cuda->call_count;
}

/* ---- The cache ---- */

UNUSED static struct spec fake_spec(void) {
  return (struct spec){.name = "tiny",
                       .hidden = 512,
                       .intermediate = 256,
                       .experts = 16,
                       .top_k = 4,
                       .score = SPEC_SIGMOID,
                       .groups = 1,
                       .top_groups = 1,
                       .scale = 1};
}

static void fake_directory(const char *below) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", scratch, below);
  mkdir(path, 0700);
}

static void fake_entry(const struct plan *plan, struct plan_variant *variant, int number) {
  struct entry_header facts;
  char key[128], below[128], path[1024];
  uint8_t digest[32], *bytes;
  size_t size;
  memset(&facts, 0, sizeof facts);
  snprintf(facts.arch, sizeof facts.arch, "%s", plan->arch);
  snprintf(facts.symbol, sizeof facts.symbol, "moeflow_%s", kernel_names[variant->kernel]);
  facts.minimum_driver = (uint32_t)plan->minimum_driver;
  facts.threads = (uint32_t)variant->threads;
  snprintf(key, sizeof key, "fake entry %d of %s\n", number, plan->arch);
  sha256(key, strlen(key), digest);
  sha256_hex(digest, variant->entry);
  EXPECT(entry_build(&facts, key, strlen(key), "fake cubin", 10, &bytes, &size) == MOEFLOW_OK, "%s", moeflow_last_error());
  snprintf(below, sizeof below, "entries/%.2s", variant->entry);
  fake_directory(below);
  snprintf(path, sizeof path, "%s/%s/%s", scratch, below, variant->entry);
  scratch_write(path, bytes, size, 0600);
  free(bytes);
}

/* A variant of each kernel, two of each GEMM: tiles of 8 and of 32. */
static void fake_variants(struct plan *plan, int kernel) {
  const int experts = kernel == KERNEL_EXPERTS || kernel == KERNEL_EXPERTS_STREAM;
  for (int n = 0; n < 1 + plan_is_gemm(kernel); n++) {
    struct plan_variant *variant = &plan->variants[plan->variant_count];
    const int narrow = kernel == KERNEL_ROUTER || kernel == KERNEL_EXCHANGE || plan_is_gemm(kernel);
    *variant = (struct plan_variant){.kernel = kernel, .parts = 1, .residency = 1, .threads = narrow ? 128 : 256};
    if (plan_is_gemm(kernel)) {
      variant->tile_tokens = n ? 32 : 8;
      variant->tile_rows = variant->tile_depth = 64;
      variant->stages = 4;
      variant->shared_bytes = 65536;
      variant->order_tag = 1;
    }
    if (experts) { /* the first: parts apart; the second: two blocks a multiprocessor */
      variant->parts = n ? 1 : 4;
      variant->residency = n ? 2 : 1;
      variant->threads = n ? 256 : 384;
      variant->order_tag = (kernel == KERNEL_EXPERTS ? 16 : 32) + (n ? 0 : 2);
    }
    fake_entry(plan, variant, plan->variant_count++);
  }
}

static void fake_publish(const struct plan *plan) {
  static char text[PLAN_TEXT_MAX + 1];
  char name[160], path[1024];
  EXPECT(plan_write(plan, text, sizeof text) == MOEFLOW_OK, "%s", moeflow_last_error());
  plan_file_name(plan, name);
  snprintf(path, sizeof path, "%s/plans/%s", scratch, name);
  scratch_write(path, text, strlen(text), 0600);
}

static void fake_begin(const struct spec *spec, const char *arch, struct plan *plan) {
  memset(plan, 0, sizeof *plan);
  plan->spec = *spec;
  plan->minimum_driver = 13000;
  snprintf(plan->arch, sizeof plan->arch, "%s", arch);
  fake_directory("entries");
  fake_directory("plans");
}

/* Two buckets: up to 64 received rows, and beyond. */
UNUSED static void fake_plan(const struct spec *spec, const char *arch, struct plan *plan) {
  fake_begin(spec, arch, plan);
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
    const int fused = kernel == KERNEL_DISPATCH || kernel == KERNEL_RETURN_COMBINE;
    if (!fused && (kernel < KERNEL_EXPERTS || kernel > KERNEL_PACK_WEIGHTS)) fake_variants(plan, kernel);
  }
  plan->buckets[0] = (struct plan_bucket){64, 0, 0, PLAN_NONE, PLAN_NONE};
  plan->buckets[1] = (struct plan_bucket){0, 1, 1, PLAN_NONE, PLAN_NONE};
  plan->bucket_count = 2;
  fake_publish(plan);
}

/* With experts kernels: up to 16 and up to 64 received rows, beyond the portable form; packed weights in all of them. */
UNUSED static void fake_plan_experts(const struct spec *spec, const char *arch, struct plan *plan) {
  fake_begin(spec, arch, plan);
  for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) fake_variants(plan, kernel);
  plan->buckets[0] = (struct plan_bucket){16, 0, 0, 0, 0};
  plan->buckets[1] = (struct plan_bucket){64, 0, 0, 1, 1};
  plan->buckets[2] = (struct plan_bucket){0, 1, 1, PLAN_NONE, 1};
  plan->bucket_count = 3;
  fake_publish(plan);
}

UNUSED static moeflow_open_config fake_open_config(void) {
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  config.model = "tiny";
  config.cache = scratch;
  return config;
}

/* ---- Cases, each in a child ---- */

UNUSED static void in_child(const char *name, void (*run)(void)) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    test_checks = test_failures = 0;
    scratch_make();
    run();
    scratch_remove();
    fflush(NULL);
    exit(test_failures || !test_checks);
  }
  int result = 1;
  waitpid(child, &result, 0);
  EXPECT(result == 0, "case %s", name);
}

/* The message holds `text`. */
#define EXPECT_STATUS(call, want, text)                                                       \
  do {                                                                                        \
    const moeflow_status got_ = (call);                                                       \
    EXPECT(got_ == (want), "%s: %s", moeflow_status_name(got_), moeflow_last_error());        \
    EXPECT(strstr(moeflow_last_error(), text), "no '%s' in: %s", text, moeflow_last_error()); \
  } while (0)

#define EXPECT_OK(call) EXPECT((call) == MOEFLOW_OK, "%s", moeflow_last_error())
#endif
