/* Layers: where experts live. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "sha256.h"
#include "tensor_map.h"

#define REPLICAS_MAX 1024

int layer_rows(const struct moeflow_group *group, int tokens_max) {
  int64_t rows = 1;
  while (rows < tokens_max) rows *= 2;
  return (int)(rows < group->capacity ? rows : group->capacity);
}

int64_t layer_token_bytes(const struct moeflow_layer *layer, enum moeflow_phase phase) {
  const struct spec *spec = &layer->context->plan.spec;
  if (phase == MOEFLOW_PHASE_DISPATCH) return spec_row_bytes(spec);
  return spec_return_row_bytes(spec) * spec_return_rows_per_token(spec);
}

int64_t layer_block_bytes(const struct moeflow_layer *layer, enum moeflow_phase phase, int rows) {
  if (layer->group->comm->ops->one_sided) return group_block_bytes(layer->group, phase);
  return rows * layer_token_bytes(layer, phase);
}

/* ---- Places ---- */

static void fill_linear(const struct moeflow_layer *layer, int32_t *places) {
  const int64_t experts = layer->context->plan.spec.experts, ranks = layer->group->ranks;
  for (int64_t owner = 0; owner < ranks; owner++) {
    const int64_t first = owner * experts / ranks, end = (owner + 1) * experts / ranks;
    for (int64_t e = first; e < end; e++) places[e] = moeflow_place((int32_t)owner, (int32_t)(e - first));
  }
}

/* One expert's replicas: gaps are at the end, each slot is in range and taken once. One without any is skipped by pack. */
static moeflow_status check_replicas(const struct moeflow_layer *layer, int expert, const int32_t *places, uint8_t *taken) {
  const struct moeflow_group *group = layer->group;
  int ended = 0;
  for (int j = 0; j < layer->replicas; j++) {
    const int32_t place = places[(size_t)expert * (size_t)layer->replicas + (size_t)j];
    if (place == MOEFLOW_PLACE_NONE) {
      ended = 1;
      continue;
    }
    const int owner = moeflow_place_owner(place), slot = moeflow_place_slot(place);
    if (place < 0 || ended || owner >= group->ranks || slot >= group->local_experts_max) {
      return status_set(
          MOEFLOW_ERROR_ARGUMENT,
          "places: expert %d, replica %d: rank %d, slot %d (0x%08x); there are %d ranks of at most %d slots, and -1 "
          "only stands behind an expert's replicas",
          expert, j, owner, slot, (unsigned)place, group->ranks, group->local_experts_max);
    }
    uint8_t *mark = &taken[(size_t)owner * (size_t)group->local_experts_max + (size_t)slot];
    if (*mark) return status_set(MOEFLOW_ERROR_ARGUMENT, "places: rank %d, slot %d is given to two experts", owner, slot);
    *mark = 1;
  }
  return MOEFLOW_OK;
}

/* Slots of a rank are 0 .. n - 1: the weights are stacked by slot. */
static moeflow_status count_slots(const struct moeflow_group *group, const uint8_t *taken, int *mine) {
  for (int owner = 0; owner < group->ranks; owner++) {
    const uint8_t *row = taken + (size_t)owner * (size_t)group->local_experts_max;
    int count = 0, last = 0;
    for (int slot = 0; slot < group->local_experts_max; slot++) {
      count += row[slot];
      if (row[slot]) last = slot + 1;
    }
    if (count != last) {
      return status_set(MOEFLOW_ERROR_ARGUMENT, "places: rank %d uses slots up to %d and only %d of them", owner, last - 1,
                        count);
    }
    if (owner == group->rank) *mine = count;
  }
  return MOEFLOW_OK;
}

static moeflow_status check_places(struct moeflow_layer *layer) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = layer->group;
  uint8_t *taken = calloc((size_t)group->ranks * (size_t)group->local_experts_max, 1);
  if (!taken) FAIL(MOEFLOW_ERROR_MEMORY, "no memory to check the places");
  for (int e = 0; e < layer->context->plan.spec.experts; e++) CHECK(check_replicas(layer, e, layer->places_host, taken));
  CHECK(count_slots(group, taken, &layer->local_experts));
cleanup:
  free(taken);
  return status;
}

static size_t places_bytes(const struct moeflow_layer *layer) {
  return (size_t)layer->context->plan.spec.experts * (size_t)layer->replicas * sizeof(int32_t);
}

static moeflow_status make_places(struct moeflow_layer *layer, const moeflow_layer_config *config) {
  moeflow_status status = MOEFLOW_OK;
  uint8_t digest[32];
  layer->replicas = config->places ? config->replicas : 1;
  if (layer->replicas < 1 || layer->replicas > REPLICAS_MAX) {
    FAIL(MOEFLOW_ERROR_ARGUMENT, "replicas is %d and must be 1 to %d", layer->replicas, REPLICAS_MAX);
  }
  layer->places_host = malloc(places_bytes(layer));
  if (!layer->places_host) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %zu bytes of places", places_bytes(layer));
  if (config->places) {
    memcpy(layer->places_host, config->places, places_bytes(layer));
  } else {
    fill_linear(layer, layer->places_host);
  }
  CHECK(check_places(layer));
  sha256(layer->places_host, places_bytes(layer), digest);
  sha256_hex(digest, layer->places_hash);
  CHECK(group_allocate(layer->group, places_bytes(layer), (void **)&layer->places));
  CHECK(layer->context->backend->upload(layer->context, layer->places, layer->places_host, places_bytes(layer)));
cleanup:
  return status;
}

/* ---- Create and destroy ---- */

static void tear_down(struct moeflow_layer *layer) {
  for (int i = 0; i < layer->group->lane_count; i++) {
    struct group_lane *lane = &layer->group->lanes[i];
    if (lane->listed_layer == layer) lane->listed_layer = NULL;
  }
  tensor_maps_release(layer);
  group_release(layer->group, layer->places, layer->places ? places_bytes(layer) : 0);
  free(layer->places_host);
  atomic_fetch_sub(&layer->group->layers, 1);
  handle_destroy(layer, HANDLE_LAYER);
}

static moeflow_status check_layer_config(const struct moeflow_group *group, const struct moeflow_context *context,
                                         const moeflow_layer_config *config) {
  int known = 0;
  for (int i = 0; i < group->context_count; i++) known |= group->contexts[i] == context;
  if (!known) return status_set(MOEFLOW_ERROR_ARGUMENT, "the context is none of those that the group was created with");
  if (config->combine != MOEFLOW_COMBINE_PLAN && config->combine != MOEFLOW_COMBINE_RING) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "combine %d is neither PLAN (0) nor RING (1)", (int)config->combine);
  }
  if (config->combine == MOEFLOW_COMBINE_RING && context->plan.spec.reduce != SPEC_REDUCE_OWNER) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "the ring combine adds owners' sums, and %s returns choices",
                      context->plan.spec.name);
  }
  if (config->combine == MOEFLOW_COMBINE_RING && group->comm->ops->broadcast) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "the ring combine is not for the %s transport, which adds the sums itself",
                      group->comm->ops->name);
  }
  return MOEFLOW_OK;
}

moeflow_status moeflow_layer_create(moeflow_group *group, moeflow_context *context, const moeflow_layer_config *config_given,
                                    moeflow_layer **layer_out) {
  moeflow_status status = MOEFLOW_OK;
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  struct moeflow_layer *layer = NULL;
  int entered = 0;
  if (!layer_out) return status_set(MOEFLOW_ERROR_ARGUMENT, "the place for the layer is NULL");
  *layer_out = NULL;
  CHECK(handle_check(group, HANDLE_GROUP));
  CHECK(handle_check(context, HANDLE_CONTEXT));
  if (config_given) CHECK(config_read(config_given, &config, sizeof config, "moeflow_layer_config"));
  CHECK(check_layer_config(group, context, &config));
  layer = handle_create(HANDLE_LAYER, sizeof *layer);
  if (!layer) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for a layer of %zu bytes", sizeof *layer);
  layer->group = group;
  layer->context = context;
  layer->combine = config.combine;
  atomic_fetch_add(&group->layers, 1);
  CHECK(context_enter(context));
  entered = 1;
  CHECK(make_places(layer, &config));
  *layer_out = layer;
cleanup:
  if (status != MOEFLOW_OK && layer) tear_down(layer);
  if (entered) context_leave(context);
  return status;
}

moeflow_status moeflow_layer_destroy(moeflow_layer *layer) {
  moeflow_status status = MOEFLOW_OK;
  if (!layer) return status;
  CHECK(handle_check(layer, HANDLE_LAYER));
  struct moeflow_context *context = layer->context;
  CHECK(context_enter(context));
  tear_down(layer);
  context_leave(context);
cleanup:
  return status;
}

int moeflow_layer_local_experts(const moeflow_layer *layer) {
  return handle_check(layer, HANDLE_LAYER) == MOEFLOW_OK ? layer->local_experts : -1;
}
