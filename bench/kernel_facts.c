#include "kernel_facts.h"

#include <stdio.h>
#include <unistd.h>

#include "driver.h"
#include "entry.h"

static moeflow_status ask(const struct entry *entry, const struct plan_variant *variant, struct kernel_facts *facts) {
  moeflow_status status = MOEFLOW_OK;
  CUmodule module = NULL;
  CUfunction function;
  int fixed = 0;
  CHECK_CUDA(cuModuleLoadData(&module, entry->cubin));
  CHECK_CUDA(cuModuleGetFunction(&function, module, entry->header.symbol));
  CHECK_CUDA(cuFuncGetAttribute(&facts->registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
  CHECK_CUDA(cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function));
  facts->shared_bytes = fixed + variant->shared_bytes;
  if (!driver.cuOccupancyMaxActiveBlocksPerMultiprocessor) goto cleanup;
  if (variant->shared_bytes)
    CHECK_CUDA(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, variant->shared_bytes));
  CHECK_CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor(&facts->blocks_per_multiprocessor, function, variant->threads,
                                                         (size_t)variant->shared_bytes));

cleanup:
  if (module) driver.cuModuleUnload(module);
  return status;
}

moeflow_status kernel_facts_read(const char *cache, const struct plan_variant *variant, struct kernel_facts *facts) {
  struct entry entry = {.bytes = NULL};
  char path[CACHE_PATH_MAX];
  int fd = -1;
  moeflow_status status = MOEFLOW_OK;
  *facts = (struct kernel_facts){.tile_tokens = variant->tile_tokens,
                                 .tile_rows = variant->tile_rows,
                                 .tile_depth = variant->tile_depth,
                                 .stages = variant->stages,
                                 .parts = variant->parts,
                                 .threads = variant->threads,
                                 .order_tag = variant->order_tag};
  snprintf(facts->kernel, sizeof facts->kernel, "%s", kernel_names[variant->kernel]);
  snprintf(facts->entry, sizeof facts->entry, "%s", variant->entry);
  CHECK(cache_path(cache, path, sizeof path));
  CHECK(cache_open(path, &fd));
  CHECK(entry_read(fd, path, variant->entry, &entry, NULL));
  CHECK(ask(&entry, variant, facts));

cleanup:
  entry_free(&entry);
  if (fd >= 0) close(fd);
  return status;
}
