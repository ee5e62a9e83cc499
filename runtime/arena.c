#include "arena.h"

#define ARENA_ALIGN 256

/* The most of each quantity over the group's contexts, for a full step: C tokens from every rank. */
struct counts {
  int64_t choices; /* C * K */
  int64_t entries; /* ranks * C * K */
  int64_t chunks;
  int64_t tiles;
  int64_t activations; /* entries * I */
  int64_t outputs;     /* entries * H, for each part */
};

static void raise_to(int64_t *most, int64_t value) {
  if (value > *most) *most = value;
}

static void count_tiles(const struct plan *plan, int64_t entries, int local_experts, int64_t *tiles) {
  raise_to(tiles, moeflow_tiles_max(entries, local_experts, SPEC_ONLY_TILE_TOKENS));
  for (int i = 0; i < plan->variant_count; i++) {
    if (!plan->variants[i].tile_tokens) continue;
    raise_to(tiles, moeflow_tiles_max(entries, local_experts, plan->variants[i].tile_tokens));
  }
}

static void count_parts(const struct plan *plan, enum kernel_id kernel, int n, int64_t outputs, int64_t *most) {
  const struct plan_variant *variant = plan_variant(plan, kernel, n);
  if (variant) raise_to(most, variant->parts * outputs);
}

/* Every part of an entry has outputs of its own, and a bucket's variants have entries of its rows only. */
static void count_outputs(const struct plan *plan, int64_t rows, int64_t *outputs) {
  const int64_t row = (int64_t)plan->spec.top_k * plan->spec.hidden;
  raise_to(outputs, rows * row);
  for (int i = 0; i < plan->bucket_count; i++) {
    const struct plan_bucket *bucket = &plan->buckets[i];
    const int64_t served = bucket->rows_max && bucket->rows_max < rows ? bucket->rows_max : rows;
    count_parts(plan, KERNEL_EXPERTS, bucket->experts, served * row, outputs);
    count_parts(plan, KERNEL_EXPERTS_STREAM, bucket->experts_stream, served * row, outputs);
    if (served == rows) break; /* no step has more */
  }
}

static struct counts count(const struct moeflow_group *group) {
  struct counts most = {0};
  int64_t rows = (int64_t)group->ranks * group->capacity;
  most.chunks = (rows + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS;
  for (int i = 0; i < group->context_count; i++) {
    const struct plan *plan = &group->contexts[i]->plan;
    int64_t entries = rows * plan->spec.top_k; /* at most 2^31 - 1: the configuration was checked */
    raise_to(&most.choices, (int64_t)group->capacity * plan->spec.top_k);
    raise_to(&most.entries, entries);
    raise_to(&most.activations, entries * plan->spec.intermediate);
    count_outputs(plan, rows, &most.outputs);
    count_tiles(plan, entries, group->local_experts_max, &most.tiles);
  }
  return most;
}

struct arena {
  uint8_t *base; /* NULL while adding up */
  size_t used;
  int overflow;
};

static void *take(struct arena *arena, int64_t number, size_t size) {
  size_t bytes, end;
  void *memory = arena->base ? arena->base + arena->used : NULL;
  if (number < 0 || __builtin_mul_overflow((size_t)number, size, &bytes) ||
      __builtin_add_overflow(arena->used, bytes, &end) || __builtin_add_overflow(end, ARENA_ALIGN - 1, &end)) {
    arena->overflow = 1;
    return NULL;
  }
  arena->used = end / ARENA_ALIGN * ARENA_ALIGN;
  return memory;
}

/* What peers store into. */
static void cut_window(const struct moeflow_group *group, struct group_lane *lane, struct arena *arena) {
  const struct comm_ops *ops = group->comm->ops;
  const int64_t home = ops->broadcast ? 1 : group->ranks; /* blocks of what comes home */
  const int64_t words = ops->one_sided ? moeflow_flag_block(group->ranks, group->flag_words) : 0;
  lane->flags = take(arena, words, sizeof *lane->flags);
  lane->received = take(arena, group->ranks, (size_t)group_block_bytes(group, MOEFLOW_PHASE_DISPATCH));
  lane->returned = take(arena, home, (size_t)group_block_bytes(group, MOEFLOW_PHASE_RETURN));
}

static void cut_arena(const struct moeflow_group *group, struct group_lane *lane, struct arena *arena) {
  const struct counts most = count(group);
  const int64_t ranks = group->ranks;
  const int two_sided = !group->comm->ops->one_sided;
  const int64_t own = !group->workspace_of;
  const int64_t once = group->comm->ops->broadcast ? 1 : ranks; /* blocks of what goes out */
  const size_t row_block = (size_t)group_block_bytes(group, MOEFLOW_PHASE_DISPATCH);
  const size_t return_block = (size_t)group_block_bytes(group, MOEFLOW_PHASE_RETURN);
  lane->state = take(arena, 1, sizeof *lane->state);
  lane->peer_flags = take(arena, ranks, sizeof *lane->peer_flags);
  lane->dispatch_targets = take(arena, ranks, sizeof *lane->dispatch_targets);
  lane->return_targets = take(arena, ranks, sizeof *lane->return_targets);
  lane->send = two_sided ? take(arena, once, row_block) : NULL;
  lane->return_send = two_sided ? take(arena, ranks, return_block) : NULL;
  lane->ids = take(arena, most.choices, sizeof *lane->ids);
  lane->weights = take(arena, most.choices, sizeof *lane->weights);
  lane->token_places = take(arena, most.choices, sizeof *lane->token_places);
  lane->token_weights = take(arena, most.choices, sizeof *lane->token_weights);
  lane->chunk_counts = take(arena, most.chunks * group->local_experts_max, sizeof *lane->chunk_counts);
  lane->expert_offsets = take(arena, (int64_t)group->local_experts_max + 1, sizeof *lane->expert_offsets);
  lane->entries = take(arena, most.entries, sizeof *lane->entries);
  lane->positions = take(arena, most.entries, sizeof *lane->positions);
  lane->tiles = take(arena, most.tiles, sizeof *lane->tiles);
  lane->tile_count = take(arena, 1, sizeof *lane->tile_count);
  lane->activations = take(arena, own * most.activations, sizeof *lane->activations);
  lane->outputs = take(arena, own * most.outputs, sizeof *lane->outputs);
  lane->activations_max = most.activations;
  lane->outputs_max = most.outputs;
  lane->tiles_max = (int32_t)most.tiles;
  lane->control = take(arena, (int64_t)sizeof *lane->control + 2 * most.tiles * (int64_t)sizeof(uint32_t), 1);
}

moeflow_status arena_measure(const struct moeflow_group *group, struct group_lane *lane) {
  struct arena window = {.base = NULL}, arena = {.base = NULL};
  struct group_lane nowhere;
  cut_window(group, &nowhere, &window);
  cut_arena(group, &nowhere, &arena);
  lane->window_bytes = window.used;
  lane->arena_bytes = arena.used;
  if (!window.overflow && !arena.overflow) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT,
                    "the buffers of a lane exceed the address space: %d ranks, capacity %d, %lld bytes a row", group->ranks,
                    group->capacity, (long long)group->row_bytes_max);
}

void arena_assign(const struct moeflow_group *group, struct group_lane *lane) {
  struct arena window = {.base = lane->window}, arena = {.base = lane->arena};
  cut_window(group, lane, &window);
  cut_arena(group, lane, &arena);
}
