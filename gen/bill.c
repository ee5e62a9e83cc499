#include "bill.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "arena.h"
#include "status.h"

__attribute__((format(printf, 4, 5))) static void add_part(struct row_layout *layout, const char *name, int64_t bytes,
                                                           const char *format, ...) {
  if (bytes == 0) return;
  struct row_part *part = &layout->parts[layout->count++];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(part->content, sizeof part->content, format, arguments);
  va_end(arguments);
  part->name = name;
  part->offset = layout->bytes;
  part->bytes = bytes;
  layout->bytes += bytes;
}

static void pad(struct row_layout *layout) {
  add_part(layout, "padding", moeflow_align(layout->bytes) - layout->bytes, "to %d", MOEFLOW_ROW_ALIGN);
}

void row_layout_dispatch(const struct spec *spec, struct row_layout *layout) {
  int fp8 = spec->dispatch == SPEC_WIRE_FP8;
  memset(layout, 0, sizeof *layout);
  add_part(layout, "header", moeflow_row_ids_offset(), "epoch, rows sent, tokens_max, flags: 4 x uint32");
  add_part(layout, "ids", 4 * (int64_t)spec->top_k, "%d x int32: owner << 16 | local slot, -1 = none", spec->top_k);
  add_part(layout, "weights", 4 * (int64_t)spec->top_k, "%d x fp32", spec->top_k);
  pad(layout);
  add_part(layout, "hidden", (int64_t)spec->hidden * (fp8 ? 1 : 2), "%d x %s", spec->hidden, fp8 ? "fp8_e4m3" : "bf16");
  pad(layout);
  if (fp8) add_part(layout, "scales", ((int64_t)spec->hidden + 127) / 128 * 4, "%d x fp32", (spec->hidden + 127) / 128);
  pad(layout);
}

void row_layout_return(const struct spec *spec, struct row_layout *layout) {
  int wide = spec->returned == SPEC_WIRE_FP32;
  memset(layout, 0, sizeof *layout);
  add_part(layout, "hidden", (int64_t)spec->hidden * (wide ? 4 : 2), "%d x %s, %s", spec->hidden, wide ? "fp32" : "bf16",
           spec->reduce == SPEC_REDUCE_CHOICES ? "one choice's value" : "an owner's weighted sum");
  pad(layout);
}

/* The runtime's own account of a lane, asked for a group that nobody creates. */
static moeflow_status lane_bytes(const struct model *model, const struct plan *plan, const struct bill *bill,
                                 int64_t *bytes) {
  moeflow_status status = MOEFLOW_OK;
  static const struct comm_ops two_sided = {.name = "nccl", .one_sided = 0};
  struct comm comm = {&two_sided};
  struct moeflow_context *context = calloc(1, sizeof *context);
  struct moeflow_group *group = calloc(1, sizeof *group);
  if (!context || !group) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to work out the memory bill");
  context->plan.spec = model->spec;
  if (plan) context->plan = *plan;
  group->contexts = &context;
  group->context_count = 1;
  group->ranks = model->deploy.ep;
  group->capacity = model->deploy.capacity;
  group->local_experts_max = bill->local_experts_max;
  group->comm = &comm;
  group->row_bytes_max = spec_row_bytes(&model->spec);
  group->return_bytes_max = spec_return_row_bytes(&model->spec) * spec_return_rows_per_token(&model->spec);
  CHECK(arena_measure(group, &group->lanes[0]));
  *bytes = (int64_t)(group->lanes[0].window_bytes + group->lanes[0].arena_bytes);
cleanup:
  free(context);
  free(group);
  return status;
}

moeflow_status bill_make(const struct model *model, const struct plan *plan, struct bill *bill) {
  moeflow_status status = MOEFLOW_OK;
  const struct spec *spec = &model->spec;
  const int64_t rows = (int64_t)model->deploy.ep * model->deploy.capacity;
  const int32_t ep = model->deploy.ep, left_over = spec->experts % ep;
  memset(bill, 0, sizeof *bill);
  bill->local_experts_min = spec->experts / ep;
  bill->local_experts_max = bill->local_experts_min + (left_over > 0);
  bill->ranks_with_max = left_over ? left_over : ep;
  /* rows: below 2^31 (model_check_deploy); a row: below 2^24 */
  bill->dispatch_buffers = 2 * rows * spec_row_bytes(spec);
  bill->return_buffers = 2 * rows * spec_return_row_bytes(spec) * spec_return_rows_per_token(spec);
  CHECK(lane_bytes(model, plan, bill, &bill->lane));
  bill->workspace = bill->lane - bill->dispatch_buffers - bill->return_buffers;
  bill->gate_up = bill->local_experts_max * spec_gate_up_bytes(spec);
  bill->down = bill->local_experts_max * spec_down_bytes(spec);
  bill->weights = bill->gate_up + bill->down;
  if (__builtin_add_overflow(bill->lane, bill->weights, &bill->total)) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "the memory of a rank exceeds 2^63 bytes: ep %d, capacity %d", ep, model->deploy.capacity);
  }
cleanup:
  return status;
}
