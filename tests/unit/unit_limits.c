/* Sizes that int32 counters of the kernels would not hold are refused on the host, both sides of the boundary. */
#include "group_config.h"
#include "internal.h"
#include "test.h"

static struct moeflow_context context; /* from spec text: no variants */
static struct moeflow_group group;

static void set_shape(int experts, int top_k) {
  memset(&context, 0, sizeof context);
  context.backend = &backend_cpu;
  context.plan.spec = (struct spec){.name = "tiny", .hidden = 8, .intermediate = 8, .experts = experts, .top_k = top_k};
}

static moeflow_status check_config(int ranks, int capacity) {
  struct moeflow_context *contexts[1] = {handle_create(HANDLE_CONTEXT, sizeof context)};
  moeflow_unique_id id = {{0}};
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  struct handle handle = contexts[0]->handle;
  *contexts[0] = context;
  contexts[0]->handle = handle;
  config.ranks = ranks;
  config.capacity = capacity;
  config.unique_id = &id;
  const moeflow_status status = group_config_check(contexts, 1, &config);
  handle_destroy(contexts[0], HANDLE_CONTEXT);
  return status;
}

static void test_entries(void) {
  set_shape(8, 1); /* with one choice a row, a block of 64 rows ends beyond the last row */
  EXPECT(check_config(2, (1 << 30) - 512) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(check_config(2, (1 << 30) - 511) == MOEFLOW_ERROR_ARGUMENT);
  EXPECT(strstr(moeflow_last_error(), "2^31 - 1024 entries"), "%s", moeflow_last_error());
}

static moeflow_status check_layer(int ranks, int capacity, int local_experts) {
  struct moeflow_layer layer = {.group = &group, .context = &context, .local_experts = local_experts};
  group = (struct moeflow_group){.ranks = ranks, .capacity = capacity};
  return layer_check_grids(&layer, capacity);
}

static void test_counts(void) { /* per chunk of 64 rows and local expert: 2^19 chunks x 4096 experts are 2^31 */
  set_shape(8192, 1);
  EXPECT(check_layer(2, 1 << 24, 4095) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(check_layer(2, 1 << 24, 4096) == MOEFLOW_ERROR_UNSUPPORTED);
  EXPECT(strstr(moeflow_last_error(), "need 2147483648 counts"), "%s", moeflow_last_error());
}

static void test_blocks(void) { /* 2^28 entries are 2^25 tiles of 8 and a few more, times 64 blocks of 64 rows */
  set_shape(8, 32);
  context.plan.spec.hidden = context.plan.spec.intermediate = 4096;
  context.plan.variant_count = 2;
  for (int i = 0; i < 2; i++) {
    context.plan.variants[i] =
        (struct plan_variant){.kernel = i ? KERNEL_DOWN : KERNEL_GATE_UP, .threads = 128, .tile_tokens = 8, .tile_rows = 64};
  }
  EXPECT(check_layer(2, 1 << 21, 4) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(check_layer(2, 1 << 22, 4) == MOEFLOW_ERROR_UNSUPPORTED);
  EXPECT(strstr(moeflow_last_error(), "2147483904 blocks"), "%s", moeflow_last_error());
}

/* 2^25 entries are 2^22 tiles and 4, each of 128 units of gate_up and 8 parts of 64 units of down; 2^20 rows have 2^16 x 64
 * sums at most. */
static void test_tickets(void) {
  for (int packed = 0; packed < 2; packed++) {
    set_shape(8, 32);
    context.plan.spec.hidden = context.plan.spec.intermediate = 4096;
    context.plan.variant_count = 1;
    context.plan.variants[0] = (struct plan_variant){.kernel = packed ? KERNEL_EXPERTS_STREAM : KERNEL_EXPERTS,
                                                     .threads = 128,
                                                     .tile_tokens = 8,
                                                     .tile_rows = 64,
                                                     .parts = 8};
    context.plan.bucket_count = 1;
    context.plan.buckets[0] = (struct plan_bucket){0, 0, 0, packed ? PLAN_NONE : 0, packed ? 0 : PLAN_NONE};
    EXPECT(check_layer(2, 1 << 18, 4) == MOEFLOW_OK, "%s", moeflow_last_error());
    EXPECT(check_layer(2, 1 << 19, 4) == MOEFLOW_ERROR_UNSUPPORTED);
    EXPECT(strstr(moeflow_last_error(), "2688551424 blocks"), "%s", moeflow_last_error());
  }
}

int main(void) {
  test_entries();
  test_counts();
  test_blocks();
  test_tickets();
  TEST_END;
}
