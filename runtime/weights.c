/* The weights that a caller lends to a layer. */
#include <string.h>

#include "internal.h"
#include "tensor_map.h"

#define WEIGHT_ALIGN 16
#define PACKED_ROW_BYTES 1024 /* packed matrices are whole pairs of fragments: checked as if those were rows */
#define PACK_BLOCKS_MAX 2048
/* A matrix has at most 2^17 rows and a rank 4096 experts: with these, no address passes 64 bits. */
#define ROW_STRIDE_MAX ((int64_t)1 << 32)
#define EXPERT_STRIDE_MAX ((int64_t)1 << 50)

/* What the caller said of one matrix: [rows, columns] bf16 per local expert. */
struct lent {
  const char *name;
  const void *base;
  const void *const *experts;
  int64_t expert_stride, row_stride;
  int64_t rows, columns;
};

static moeflow_status take_matrix(const struct moeflow_layer *layer, const struct lent *lent,
                                  struct moeflow_matrix *matrix) {
  const int64_t row_bytes = lent->columns * 2;
  const int64_t row_stride = lent->row_stride ? lent->row_stride : row_bytes;
  if (row_stride < -ROW_STRIDE_MAX || row_stride > ROW_STRIDE_MAX || lent->expert_stride > EXPERT_STRIDE_MAX) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s: strides of %lld bytes an expert and %lld a row are beyond any memory",
                      lent->name, (long long)lent->expert_stride, (long long)row_stride);
  }
  const int64_t expert_stride = lent->expert_stride ? lent->expert_stride : lent->rows * row_stride;
  if (!lent->base && !lent->experts && layer->local_experts) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s: neither a base nor an array of pointers, for %d local experts",
                      lent->name, layer->local_experts);
  }
  if (row_stride < row_bytes || (!lent->experts && expert_stride < (lent->rows - 1) * row_stride + row_bytes)) {
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "%s: strides of %lld bytes an expert and %lld a row do not hold [%lld, %lld] bf16", lent->name,
                      (long long)expert_stride, (long long)row_stride, (long long)lent->rows, (long long)lent->columns);
  }
  if (((lent->experts ? 0 : (uintptr_t)lent->base) | (uint64_t)row_stride | (lent->experts ? 0 : (uint64_t)expert_stride)) %
      WEIGHT_ALIGN) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%s: address %p and strides %lld and %lld must be multiples of %d bytes",
                      lent->name, lent->base, (long long)expert_stride, (long long)row_stride, WEIGHT_ALIGN);
  }
  *matrix = (struct moeflow_matrix){.base = lent->base,
                                    .experts = (const uint8_t *const *)lent->experts,
                                    .expert_stride = expert_stride,
                                    .row_stride = row_stride};
  return MOEFLOW_OK;
}

static moeflow_status check_reserved(const struct moeflow_layer *layer, const moeflow_weights *weights) {
  if (weights->gate_up_bias || weights->down_bias) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                      "expert biases are not in this version: gate_up_bias and down_bias must be NULL");
  }
  if (weights->packed != 0 && weights->packed != 1) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "packed is %d and must be 0 or 1", weights->packed);
  }
  if (weights->lend && layer->context->backend != &backend_cpu) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "`lend` is for the CPU backend; on a GPU give a base or pointers");
  }
  return MOEFLOW_OK;
}

static moeflow_status take_order(const struct moeflow_layer *layer, moeflow_gate_up_order order,
                                 struct layer_weights *rows) {
  const int32_t intermediate = layer->context->plan.spec.intermediate;
  const struct {
    int32_t gate, up, step;
  } orders[] = {
      [MOEFLOW_GATE_UP] = {0, intermediate, 1},
      [MOEFLOW_UP_GATE] = {intermediate, 0, 1},
      [MOEFLOW_INTERLEAVED] = {0, 1, 2},
  };
  if ((unsigned)order >= sizeof orders / sizeof *orders) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "gate/up order %d does not exist", (int)order);
  }
  rows->gate_row = orders[order].gate;
  rows->up_row = orders[order].up;
  rows->row_step = orders[order].step;
  return MOEFLOW_OK;
}

/* ---- Packed ---- */

/* Whether the layer's backend and plan know packed weights. */
static moeflow_status check_packable(const struct moeflow_layer *layer) {
  const struct plan *plan = &layer->context->plan;
  if (layer->context->backend == &backend_cpu) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "the CPU backend takes plain weights only, not packed ones");
  }
  if (plan_variant(plan, KERNEL_EXPERTS_STREAM, 0)) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                    "the plan of %s has no kernels for packed weights; to build them, MODEL.yaml being the file with `name: "
                    "%s`: moeflow-gen build MODEL.yaml --dtype %s --arch %s --packed",
                    plan->spec.name, plan->spec.name, spec_dtype_name(plan->spec.dtype), plan->arch);
}

static int64_t packed_bytes(const struct spec *spec, int down) {
  return down ? moeflow_packed_down_bytes(spec->hidden, spec->intermediate)
              : moeflow_packed_gate_up_bytes(spec->hidden, spec->intermediate);
}

static moeflow_status take_packed(const struct moeflow_layer *layer, const moeflow_weights *given,
                                  struct layer_weights *weights) {
  moeflow_status status = MOEFLOW_OK;
  const struct spec *spec = &layer->context->plan.spec;
  const struct lent lent[2] = {
      {"packed gate_up", given->gate_up, given->gate_up_experts, given->gate_up_expert_stride, 0,
       packed_bytes(spec, 0) / PACKED_ROW_BYTES, PACKED_ROW_BYTES / 2},
      {"packed down", given->down, given->down_experts, given->down_expert_stride, 0,
       packed_bytes(spec, 1) / PACKED_ROW_BYTES, PACKED_ROW_BYTES / 2},
  };
  CHECK(check_packable(layer));
  if (given->gate_up_row_stride || given->down_row_stride || given->order != MOEFLOW_GATE_UP) {
    FAIL(MOEFLOW_ERROR_ARGUMENT,
         "packed weights have no rows: row strides (%lld and %lld) and the order (%d) must be 0; moeflow_layer_pack took "
         "them",
         (long long)given->gate_up_row_stride, (long long)given->down_row_stride, (int)given->order);
  }
  CHECK(take_matrix(layer, &lent[0], &weights->gate_up));
  CHECK(take_matrix(layer, &lent[1], &weights->down));
  weights->packed = 1;
cleanup:
  return status;
}

moeflow_status moeflow_layer_packed_bytes(const moeflow_layer *layer, int64_t *gate_up_bytes, int64_t *down_bytes) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(handle_check(layer, HANDLE_LAYER));
  CHECK(check_packable(layer));
  if (!gate_up_bytes || !down_bytes) FAIL(MOEFLOW_ERROR_ARGUMENT, "a place for the bytes is NULL");
  *gate_up_bytes = packed_bytes(&layer->context->plan.spec, 0);
  *down_bytes = packed_bytes(&layer->context->plan.spec, 1);
cleanup:
  return status;
}

static moeflow_status check_pack(const struct moeflow_layer *layer, const moeflow_weights *plain, int first, int count,
                                 const void *to_gate_up, const void *to_down) {
  if (plain->packed) return status_set(MOEFLOW_ERROR_ARGUMENT, "the weights to pack are packed already");
  if (first < 0 || count < 0 || count > layer->local_experts - first) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "%d experts from %d on; the layer has %d local ones", count, first,
                      layer->local_experts);
  }
  if (!to_gate_up || !to_down || ((uintptr_t)to_gate_up | (uintptr_t)to_down) % WEIGHT_ALIGN) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "packed weights go to %p and %p: both must be multiples of %d, not NULL",
                      to_gate_up, to_down, WEIGHT_ALIGN);
  }
  return MOEFLOW_OK;
}

static moeflow_status launch_pack(const struct moeflow_layer *layer, struct moeflow_pack_weights_params *params,
                                  void *stream) {
  const int64_t fragments =
      packed_bytes(&layer->context->plan.spec, params->down) / MOEFLOW_FRAGMENT_BYTES * params->experts;
  const int64_t warps = plan_variant(&layer->context->plan, KERNEL_PACK_WEIGHTS, 0)->threads / 32;
  const int64_t blocks = (fragments + warps - 1) / warps;
  const struct launch launch = {.layer = layer,
                                .kernel = KERNEL_PACK_WEIGHTS,
                                .blocks = blocks < PACK_BLOCKS_MAX ? blocks : PACK_BLOCKS_MAX,
                                .params = params,
                                .stream = stream};
  return layer->context->backend->launch(layer->context, &launch);
}

/* Both matrices and the order of rows, as plain weights have them. */
static moeflow_status take_plain(const struct moeflow_layer *layer, const moeflow_weights *given,
                                 struct layer_weights *weights) {
  moeflow_status status = MOEFLOW_OK;
  const struct spec *spec = &layer->context->plan.spec;
  const struct lent lent[2] = {
      {"gate_up", given->gate_up, given->gate_up_experts, given->gate_up_expert_stride, given->gate_up_row_stride,
       2 * (int64_t)spec->intermediate, spec->hidden},
      {"down", given->down, given->down_experts, given->down_expert_stride, given->down_row_stride, spec->hidden,
       spec->intermediate},
  };
  CHECK(take_order(layer, given->order, weights));
  if (given->lend) goto cleanup;
  CHECK(take_matrix(layer, &lent[0], &weights->gate_up));
  CHECK(take_matrix(layer, &lent[1], &weights->down));
cleanup:
  return status;
}

moeflow_status moeflow_layer_pack(moeflow_layer *layer, const moeflow_weights *plain_given, int local_expert_first,
                                  int count, void *to_gate_up, void *to_down, void *stream) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_weights plain = MOEFLOW_WEIGHTS_INIT;
  struct layer_weights weights = {.packed = 0};
  int entered = 0;
  CHECK(handle_check(layer, HANDLE_LAYER));
  CHECK(config_read(plain_given, &plain, sizeof plain, "moeflow_weights"));
  CHECK(check_packable(layer));
  CHECK(check_reserved(layer, &plain));
  CHECK(check_pack(layer, &plain, local_expert_first, count, to_gate_up, to_down));
  CHECK(take_plain(layer, &plain, &weights));
  if (count == 0) goto cleanup;
  CHECK(context_enter(layer->context));
  entered = 1;
  for (int down = 0; down < 2; down++) {
    struct moeflow_pack_weights_params params = {.weights = down ? weights.down : weights.gate_up,
                                                 .packed = down ? to_down : to_gate_up,
                                                 .first_expert = local_expert_first,
                                                 .experts = count,
                                                 .down = down,
                                                 .gate_row = weights.gate_row,
                                                 .up_row = weights.up_row,
                                                 .row_step = weights.row_step};
    CHECK(launch_pack(layer, &params, stream));
  }
cleanup:
  if (entered) context_leave(layer->context);
  return status;
}

/* ---- Binding ---- */

moeflow_status moeflow_layer_bind(moeflow_layer *layer, const moeflow_weights *weights_given) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_weights given = MOEFLOW_WEIGHTS_INIT;
  struct layer_weights weights = {.packed = 0};
  int entered = 0;
  CHECK(handle_check(layer, HANDLE_LAYER));
  CHECK(config_read(weights_given, &given, sizeof given, "moeflow_weights"));
  CHECK(check_reserved(layer, &given));
  CHECK(given.packed ? take_packed(layer, &given, &weights) : take_plain(layer, &given, &weights));
  CHECK(context_enter(layer->context));
  entered = 1;
  if (!given.packed) CHECK(tensor_maps_make(layer, &weights));
  layer->weights = weights;
  layer->lend = given.lend;
  layer->lend_user = given.lend_user;
  layer->correction_bias = given.correction_bias;
  layer->expert_load = given.expert_load;
  layer->bound = 1;
cleanup:
  if (entered) context_leave(layer->context);
  return status;
}
