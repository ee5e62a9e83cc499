#include "tensor_map.h"

#include <stdlib.h>
#include <string.h>

#define MAP_ALIGN 64 /* of a map, as the driver asks */

/* gate_up as [I / 8][2][8][H]: 8 gate rows, then their 8 up rows, or the other way round where up comes first in memory. */
static struct tensor_view gate_up_view(const struct spec *spec, const struct layer_weights *weights, const void *matrix) {
  const int64_t row = weights->gate_up.row_stride, step = weights->row_step * row;
  const int32_t up_first = weights->up_row < weights->gate_row;
  const int32_t first = up_first ? weights->up_row : weights->gate_row;
  const int32_t second = up_first ? weights->gate_row : weights->up_row;
  return (struct tensor_view){
      .base = (const uint8_t *)matrix + first * row,
      .dimensions = 4,
      .size = {(uint64_t)spec->hidden, MOEFLOW_GATE_ROWS, 2, (uint64_t)spec->intermediate / MOEFLOW_GATE_ROWS},
      .stride = {(uint64_t)step, (uint64_t)((second - first) * row), (uint64_t)(MOEFLOW_GATE_ROWS * step)},
      .box = {MOEFLOW_COLUMN_DEPTH, MOEFLOW_GATE_ROWS, 2, MOEFLOW_UNIT_ROWS / (2 * MOEFLOW_GATE_ROWS)},
  };
}

static struct tensor_view down_view(const struct spec *spec, const struct layer_weights *weights, const void *matrix) {
  return (struct tensor_view){
      .base = matrix,
      .dimensions = 2,
      .size = {(uint64_t)spec->intermediate, (uint64_t)spec->hidden},
      .stride = {(uint64_t)weights->down.row_stride},
      .box = {MOEFLOW_COLUMN_DEPTH, MOEFLOW_UNIT_ROWS},
  };
}

/* Where each local expert's matrix begins: an array of pointers is the backend's memory, and read here once. */
static moeflow_status find_matrices(const struct moeflow_layer *layer, const struct moeflow_matrix *matrix,
                                    const uint8_t **found) {
  const size_t bytes = (size_t)layer->local_experts * sizeof *found;
  if (matrix->experts) return layer->context->backend->download(layer->context, found, matrix->experts, bytes);
  for (int e = 0; e < layer->local_experts; e++) found[e] = matrix->base + e * matrix->expert_stride;
  return MOEFLOW_OK;
}

static moeflow_status encode_matrices(const struct moeflow_layer *layer, const struct layer_weights *weights, int down,
                                      const uint8_t **matrices, struct moeflow_tensor_map *maps) {
  moeflow_status status = MOEFLOW_OK;
  const struct spec *spec = &layer->context->plan.spec;
  const char *name = down ? "down" : "gate_up";
  CHECK(find_matrices(layer, down ? &weights->down : &weights->gate_up, matrices));
  for (int e = 0; e < layer->local_experts; e++) {
    if (!matrices[e]) FAIL(MOEFLOW_ERROR_ARGUMENT, "%s_experts: the pointer of local expert %d is NULL", name, e);
    const struct tensor_view view = down ? down_view(spec, weights, matrices[e]) : gate_up_view(spec, weights, matrices[e]);
    status = layer->context->backend->encode(layer->context, &view, &maps[e]);
    if (status != MOEFLOW_OK) {
      status = status_prefix(status, "%s of local expert %d at %p, rows of %lld bytes", name, e, (const void *)matrices[e],
                             (long long)(down ? weights->down : weights->gate_up).row_stride);
      goto cleanup;
    }
  }
cleanup:
  return status;
}

static int wanted(const struct moeflow_layer *layer) {
  return layer->context->backend->encode && layer->local_experts && plan_variant(&layer->context->plan, KERNEL_EXPERTS, 0);
}

moeflow_status tensor_maps_make(struct moeflow_layer *layer, const struct layer_weights *weights) {
  moeflow_status status = MOEFLOW_OK;
  const size_t count = (size_t)layer->local_experts, bytes = 2 * count * sizeof(struct moeflow_tensor_map);
  struct moeflow_tensor_map *maps = NULL;
  const uint8_t **matrices = NULL;
  struct tensor_maps *made = NULL;
  if (!wanted(layer)) return MOEFLOW_OK;
  maps = aligned_alloc(MAP_ALIGN, bytes);
  matrices = malloc(count * sizeof *matrices);
  made = calloc(1, sizeof *made);
  if (!maps || !matrices || !made) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu bytes of tensor maps", bytes);
  for (int down = 0; down < 2; down++) CHECK(encode_matrices(layer, weights, down, matrices, maps + (down ? count : 0)));
  made->bytes = bytes;
  CHECK(group_allocate(layer->group, bytes, (void **)&made->gate_up));
  CHECK(layer->context->backend->upload(layer->context, made->gate_up, maps, bytes));
  made->down = made->gate_up + count;
  made->up_first = weights->up_row < weights->gate_row;
  made->older = layer->maps;
  layer->maps = made;
  made = NULL;
cleanup:
  if (made) group_release(layer->group, made->gate_up, made->gate_up ? bytes : 0);
  free(made);
  free(matrices);
  free(maps);
  return status;
}

void tensor_maps_release(struct moeflow_layer *layer) {
  while (layer->maps) {
    struct tensor_maps *maps = layer->maps;
    layer->maps = maps->older;
    group_release(layer->group, maps->gate_up, maps->bytes);
    free(maps);
  }
}
