/* The memory bill and row layouts against numbers worked out by hand, with E not divisible by EP and sizes beyond 2^31. */
#include "bill.h"
#include "status.h"
#include "test.h"

static struct model base(void) {
  struct model model = {.hidden = 4096, .deploy = {.ep = 4, .capacity = 128}};
  model.spec = (struct spec){.name = "m",
                             .hidden = 4096,
                             .intermediate = 2048,
                             .experts = 288,
                             .top_k = 8,
                             .groups = 1,
                             .top_groups = 1,
                             .scale = 1};
  return model;
}

/* Parts follow each other without a gap, and their end is the runtime's row size. */
static void expect_layout(const struct row_layout *layout, int64_t bytes) {
  int64_t end = 0;
  for (int i = 0; i < layout->count; i++) {
    EXPECT(layout->parts[i].offset == end && layout->parts[i].bytes > 0, "%s at %lld", layout->parts[i].name,
           (long long)layout->parts[i].offset);
    end += layout->parts[i].bytes;
  }
  EXPECT(end == bytes && layout->bytes == bytes, "%lld, wanted %lld", (long long)layout->bytes, (long long)bytes);
}

static int64_t offset_of(const struct row_layout *layout, const char *name) {
  for (int i = 0; i < layout->count; i++) {
    if (!strcmp(layout->parts[i].name, name)) return layout->parts[i].offset;
  }
  return -1;
}

static void test_rows(void) {
  struct row_layout layout;
  for (int top_k = 1; top_k <= 32; top_k++) {
    for (int hidden = 8; hidden <= 8192; hidden += 712) {
      for (int fp8 = 0; fp8 < 2; fp8++) {
        struct spec spec = base().spec;
        spec.top_k = top_k;
        spec.hidden = hidden;
        spec.dtype = fp8 ? SPEC_FP8_W8A8 : SPEC_BF16;
        spec.dispatch = fp8 ? SPEC_WIRE_FP8 : SPEC_WIRE_BF16;
        row_layout_dispatch(&spec, &layout);
        expect_layout(&layout, spec_row_bytes(&spec));
        EXPECT(offset_of(&layout, "weights") == 16 + 4 * top_k, "weights of %d choices", top_k);
        EXPECT(offset_of(&layout, "hidden") == (top_k <= 14 ? 128 : top_k <= 30 ? 256 : 384), "hidden of %d choices", top_k);
        row_layout_return(&spec, &layout);
        expect_layout(&layout, spec_return_row_bytes(&spec));
      }
    }
  }
}

static void test_bill(void) {
  struct model model = base();
  struct bill bill;
  EXPECT(bill_make(&model, NULL, &bill) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(bill.local_experts_max == 72 && bill.local_experts_min == 72 && bill.ranks_with_max == 4, "%d experts",
         bill.local_experts_max);
  EXPECT(bill.dispatch_buffers == 2LL * 4 * 128 * 8320 && bill.return_buffers == 2LL * 4 * 128 * 8192, "buffers");
  /* 4096 entries: FP32 outputs, bf16 activations; the lists come on top and are small */
  int64_t large = 4096LL * 4096 * 4 + 4096LL * 2048 * 2;
  EXPECT(bill.workspace > large && bill.workspace < large + large / 100, "%lld", (long long)bill.workspace);
  EXPECT(bill.weights == 72LL * 3 * 4096 * 2048 * 2, "%lld", (long long)bill.weights);
  EXPECT(bill.lane == bill.dispatch_buffers + bill.return_buffers + bill.workspace && bill.total == bill.lane + bill.weights,
         "sums");
  model.deploy.ep = 7; /* 288 = 7 * 41 + 1 */
  EXPECT(bill_make(&model, NULL, &bill) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(bill.local_experts_max == 42 && bill.local_experts_min == 41 && bill.ranks_with_max == 1, "%d experts",
         bill.local_experts_max);
  model.spec.reduce = SPEC_REDUCE_CHOICES;
  model.spec.returned = SPEC_WIRE_FP32;
  EXPECT(bill_make(&model, NULL, &bill) == MOEFLOW_OK && bill.return_buffers == 2LL * 7 * 128 * 8 * 16384,
         "choices in fp32");
}

/* The largest legal deployment: every product is far beyond 32 bits, none beyond 64. */
static void test_largest(void) {
  struct model model = base();
  struct bill bill;
  model.spec.hidden = model.spec.intermediate = 65536;
  model.spec.experts = 4096;
  model.spec.top_k = 32;
  model.spec.reduce = SPEC_REDUCE_CHOICES;
  model.spec.returned = SPEC_WIRE_FP32;
  model.deploy.ep = 64;
  model.deploy.capacity = 1048575;
  EXPECT(bill_make(&model, NULL, &bill) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(bill.dispatch_buffers == 2LL * 64 * 1048575 * (384 + 131072), "%lld", (long long)bill.dispatch_buffers);
  EXPECT(bill.return_buffers == 2LL * 64 * 1048575 * 32 * 262144, "%lld", (long long)bill.return_buffers);
  EXPECT(bill.workspace > 64LL * 1048575 * 32 * (65536 * 4 + 65536 * 2), "%lld", (long long)bill.workspace);
  EXPECT(bill.weights == 64 * (17179869184 + 8589934592), "%lld", (long long)bill.weights);
}

int main(void) {
  test_rows();
  test_bill();
  test_largest();
  TEST_END;
}
