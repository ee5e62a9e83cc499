/* moeflow_prepare: ranks compare their layers, then everything that a step needs is loaded and connected. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fingerprint.h"
#include "internal.h"

/* What this rank can check alone; its verdict is shared, so that nobody waits for a rank that has already failed. */
static moeflow_status check_layers(moeflow_layer *const *layers, int count, int tokens_max) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = layers[0]->group;
  for (int i = 1; i < count; i++) {
    CHECK(handle_check(layers[i], HANDLE_LAYER));
    if (layers[i]->group != group) FAIL(MOEFLOW_ERROR_ARGUMENT, "layer %d belongs to another group than layer 0", i);
  }
  for (int i = 0; i < count; i++) {
    if (!layers[i]->bound) FAIL(MOEFLOW_ERROR_STATE, "layer %d has no weights; call moeflow_layer_bind first", i);
  }
  if (tokens_max < 0 || tokens_max > group->capacity) {
    FAIL(MOEFLOW_ERROR_CAPACITY, "tokens_max is %d and the group's capacity %d; create the group with more", tokens_max,
         group->capacity);
  }
  if (atomic_load(&((struct moeflow_group *)group)->aborted)) {
    FAIL(MOEFLOW_ERROR_PEER, "the group was aborted; destroy it and create it anew");
  }
cleanup:
  return status;
}

/* ---- What must be the same on all ranks ---- */

struct call_print {
  int64_t layers, tokens_max;
};
static const struct fingerprint_field call_fields[] = {
    FINGERPRINT_NUMBER(struct call_print, layers, "the number of layers to prepare"),
    FINGERPRINT_NUMBER(struct call_print, tokens_max, "tokens_max to prepare"),
};

struct layer_print {
  int64_t combine, replicas;
  char spec[65], plan[65], places[65];
};
static const struct fingerprint_field layer_fields[] = {
    FINGERPRINT_HASH(struct layer_print, spec, "the layer's model (hash of its spec)"),
    FINGERPRINT_HASH(struct layer_print, plan, "the layer's cubins (hash of their plan)"),
    FINGERPRINT_NUMBER(struct layer_print, combine, "the layer's combine"),
    FINGERPRINT_NUMBER(struct layer_print, replicas, "the layer's replicas"),
    FINGERPRINT_HASH(struct layer_print, places, "the layer's places of experts"),
};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static moeflow_status compare(struct moeflow_group *group, const void *mine, size_t bytes,
                              const struct fingerprint_field *fields, size_t field_count) {
  moeflow_status status = MOEFLOW_OK;
  void *all = calloc((size_t)group->ranks, bytes);
  if (!all) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d fingerprints", group->ranks);
  CHECK(group->comm->ops->gather(group->comm, mine, bytes, all));
  CHECK(fingerprint_compare(all, bytes, group->ranks, fields, field_count));
cleanup:
  free(all);
  return status;
}

static moeflow_status compare_layer(const struct moeflow_layer *layer, int number) {
  struct layer_print mine;
  memset(&mine, 0, sizeof mine);
  mine.combine = layer->combine;
  mine.replicas = layer->replicas;
  memcpy(mine.spec, layer->context->spec_hash, sizeof mine.spec);
  memcpy(mine.plan, layer->context->plan_hash, sizeof mine.plan);
  memcpy(mine.places, layer->places_hash, sizeof mine.places);
  moeflow_status status = compare(layer->group, &mine, sizeof mine, layer_fields, COUNT(layer_fields));
  return status == MOEFLOW_OK ? status : status_prefix(status, "layer %d", number);
}

/* ---- Making ready ---- */

static moeflow_status load(moeflow_layer *const *layers, int count, int tokens_max) {
  for (int i = 0; i < count; i++) {
    struct moeflow_context *context = layers[i]->context;
    moeflow_status status = layer_check_grids(layers[i], tokens_max);
    if (status == MOEFLOW_OK) status = context->backend->prepare(context);
    if (status != MOEFLOW_OK) return status;
  }
  return MOEFLOW_OK;
}

/* Once a group, before its first step: the exchange overwrites receive buffers, and no step is under way yet. */
static moeflow_status connect(struct moeflow_group *group, int rows) {
  if (group->connected || !group->comm->ops->connect) return MOEFLOW_OK;
  for (int i = 0; i < group->lane_count; i++) {
    moeflow_status status = group->comm->ops->connect(group->comm, &group->lanes[i], rows);
    if (status != MOEFLOW_OK) return status;
  }
  group->connected = 1;
  return MOEFLOW_OK;
}

moeflow_status moeflow_prepare(moeflow_layer *const *layers, int layer_count, int tokens_max) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_group *group = NULL;
  if (!layers || layer_count < 1) return status_set(MOEFLOW_ERROR_ARGUMENT, "no layers to prepare");
  status = handle_check(layers[0], HANDLE_LAYER);
  if (status != MOEFLOW_OK) return status;
  group = layers[0]->group;
  const int tokens = tokens_max ? tokens_max : group->capacity;
  const struct call_print call = {layer_count, tokens};
  status = context_enter(layers[0]->context);
  if (status != MOEFLOW_OK) return status;
  CHECK(group_agree(group, check_layers(layers, layer_count, tokens_max)));
  CHECK(compare(group, &call, sizeof call, call_fields, COUNT(call_fields)));
  for (int i = 0; i < layer_count; i++) CHECK(compare_layer(layers[i], i));
  CHECK(group_agree(group, load(layers, layer_count, tokens)));
  CHECK(connect(group, layer_rows(group, tokens)));
  for (int i = 0; i < layer_count; i++) {
    if (layers[i]->prepared_tokens < tokens) layers[i]->prepared_tokens = tokens;
  }
cleanup:
  context_leave(layers[0]->context);
  return status;
}
