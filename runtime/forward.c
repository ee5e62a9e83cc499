/* moeflow_forward: one step, from this rank's tokens to their owners and back. Nothing here allocates, synchronises, reads
 * the environment or waits, so a step may be captured into a graph. */
#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "one_sided.h"

#define ROUTER_THREADS 128
#define REDUCE_THREADS 256
#define IDENTITY_BLOCKS_MAX 1024

/* What one step's kernels have in common. */
struct step {
  struct moeflow_layer *layer;
  struct moeflow_group *group;
  struct moeflow_context *context;
  struct group_lane *lane;
  const struct spec *spec;
  const moeflow_forward_args *args;
  int tokens; /* of this rank; 0 when it joins with an error mark */
  int tokens_max;
  int rows; /* R */
  int captured;
  uint32_t row_flags;
  int64_t entries; /* ranks * R * K */
  struct plan_bucket bucket;
  enum kernel_id kernel; /* what computes the experts: one of both forms of experts, or gate_up with down behind it */
  int variant;           /* of `kernel` */
  int tile_tokens;       /* of its lists */
  int parts;             /* of its outputs */
  int fused;             /* the step in three launches */
  struct moeflow_rows_in in;
};

/* ---- Grids ---- */

static int64_t blocks_for(int64_t items, int64_t per_block) {
  return (items + per_block - 1) / per_block;
}

/* Blocks of a grouped GEMM with `columns` outputs a row: every tile there may be, times the blocks across its columns. */
static int64_t gemm_blocks(const struct plan *plan, const struct plan_bucket *bucket, enum kernel_id kernel, int64_t entries,
                           int local_experts, int64_t columns) {
  const int number = kernel == KERNEL_GATE_UP ? bucket->gate_up : bucket->down;
  const struct plan_variant *variant = plan_variant(plan, kernel, number);
  return moeflow_tiles_max(entries, local_experts, variant ? variant->tile_tokens : SPEC_ONLY_TILE_TOKENS) *
         blocks_for(columns, variant ? variant->tile_rows : columns);
}

/* Tickets of an experts kernel, were all its down units cut into the smallest pieces: it counts them in int32. Sums: the
 * last group of columns may reach as far again beyond the row. */
static int64_t experts_tickets(const struct plan *plan, enum kernel_id kernel, int n, int64_t entries, int local_experts) {
  const struct plan_variant *variant = plan_variant(plan, kernel, n);
  if (!variant) return 0;
  const int64_t up = blocks_for(2 * (int64_t)plan->spec.intermediate, variant->tile_rows);
  const int64_t down = blocks_for(plan->spec.hidden, variant->tile_rows) * blocks_for(variant->tile_rows, MOEFLOW_UNIT_ROWS);
  const int64_t sums =
      2 * blocks_for(entries / plan->spec.top_k, MOEFLOW_SUM_ROWS) * blocks_for(plan->spec.hidden, MOEFLOW_SUM_COLUMNS);
  return moeflow_tiles_max(entries, local_experts, variant->tile_tokens) * (up + down * variant->parts) + sums;
}

static int64_t most_of(const int64_t *values, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; i++) most = values[i] > most ? values[i] : most;
  return most;
}

moeflow_status layer_check_grids(const struct moeflow_layer *layer, int tokens_max) {
  const struct plan *plan = &layer->context->plan;
  for (int tokens = 1, rows = 0; rows < layer_rows(layer->group, tokens_max); tokens = rows + 1) {
    rows = layer_rows(layer->group, tokens);
    const int64_t received = (int64_t)layer->group->ranks * rows, entries = received * plan->spec.top_k;
    const struct plan_bucket *bucket = plan_bucket_for(plan, received);
    const int64_t blocks[] = {
        gemm_blocks(plan, bucket, KERNEL_GATE_UP, entries, layer->local_experts, plan->spec.intermediate),
        gemm_blocks(plan, bucket, KERNEL_DOWN, entries, layer->local_experts, plan->spec.hidden),
        experts_tickets(plan, KERNEL_EXPERTS, bucket->experts, entries, layer->local_experts),
        experts_tickets(plan, KERNEL_EXPERTS_STREAM, bucket->experts_stream, entries, layer->local_experts),
    };
    const int64_t counts = blocks_for(received, MOEFLOW_CHUNK_ROWS) * layer->local_experts;
    if (counts > MOEFLOW_ENTRIES_MAX) {
      return status_set(MOEFLOW_ERROR_UNSUPPORTED, "%d ranks x %d rows for %d local experts need %lld counts, more than %d",
                        layer->group->ranks, rows, layer->local_experts, (long long)counts, MOEFLOW_ENTRIES_MAX);
    }
    const int64_t most = most_of(blocks, sizeof blocks / sizeof *blocks);
    if (most <= INT32_MAX) continue;
    return status_set(MOEFLOW_ERROR_UNSUPPORTED,
                      "%d ranks x %d rows need %lld blocks or units of work in one launch, more than 2^31 - 1",
                      layer->group->ranks, rows, (long long)most);
  }
  return MOEFLOW_OK;
}

/* ---- The kernels, in the order of a step ---- */

static moeflow_status launch(const struct step *step, enum kernel_id kernel, int variant, int64_t blocks, void *params) {
  const struct launch launch = {.layer = step->layer,
                                .kernel = kernel,
                                .variant = variant,
                                .blocks = blocks,
                                .params = params,
                                .stream = step->args->stream};
  return step->context->backend->launch(step->context, &launch);
}

static int takes_logits(const struct step *step) {
  return step->args->logits != NULL;
}

static struct moeflow_router_params router_params(const struct step *step) {
  return (struct moeflow_router_params){
      .lane = step->lane->state,
      .logits = step->args->logits,
      .bias = step->spec->correction_bias ? step->layer->correction_bias : NULL,
      .ids = step->lane->ids,
      .weights = step->lane->weights,
      .tokens = step->tokens,
      .logits_bf16 = step->args->logits_dtype == MOEFLOW_DTYPE_BFLOAT16,
  };
}

static moeflow_status route(const struct step *step) {
  if (!takes_logits(step) || step->tokens == 0) return MOEFLOW_OK;
  const struct plan_variant *variant = plan_variant(&step->context->plan, KERNEL_ROUTER, 0);
  struct moeflow_router_params params = router_params(step);
  return launch(step, KERNEL_ROUTER, 0, blocks_for(step->tokens, (variant ? variant->threads : ROUTER_THREADS) / 32),
                &params);
}

static int64_t out_block_bytes(const struct step *step, enum moeflow_phase phase) {
  return step->group->comm->ops->one_sided ? 0 : layer_block_bytes(step->layer, phase, step->rows);
}

static struct moeflow_pack_params pack_params(const struct step *step) {
  const int routed = takes_logits(step);
  return (struct moeflow_pack_params){
      .lane = step->lane->state,
      .record = step->lane->record_device,
      .hidden = step->args->hidden,
      .ids = routed ? step->lane->ids : step->args->ids,
      .weights = routed ? step->lane->weights : step->args->weights,
      .places = step->layer->places,
      .token_places = step->lane->token_places,
      .token_weights = step->lane->token_weights,
      .out = {step->lane->dispatch_targets, out_block_bytes(step, MOEFLOW_PHASE_DISPATCH)},
      .tokens = step->tokens,
      .tokens_max = step->tokens_max,
      .rank = step->group->rank,
      .ranks = step->group->ranks,
      .replicas = step->layer->replicas,
      .ids_int64 = !routed && step->args->ids_dtype == MOEFLOW_DTYPE_INT64,
      .flags = step->row_flags,
      .broadcast = step->group->comm->ops->broadcast,
  };
}

static int64_t token_blocks(const struct step *step) {
  return step->tokens > 0 ? step->tokens : 1;
}

static moeflow_status pack(const struct step *step) {
  struct moeflow_pack_params params = pack_params(step);
  return launch(step, KERNEL_PACK, 0, token_blocks(step), &params);
}

static moeflow_status exchange(const struct step *step, enum moeflow_phase phase) {
  return step->group->comm->ops->exchange(step->group->comm, step->lane, phase, step->rows,
                                          layer_token_bytes(step->layer, phase), step->args->stream);
}

static moeflow_status index_entries(const struct step *step) {
  struct moeflow_expert_index_params params = {
      .lane = step->lane->state,
      .record = step->lane->record_device,
      .in = step->in,
      .chunk_counts = step->lane->chunk_counts,
      .local_experts = step->layer->local_experts,
  };
  const int64_t rows = (int64_t)step->group->ranks * step->rows;
  return launch(step, KERNEL_EXPERT_INDEX, 0, blocks_for(rows, MOEFLOW_CHUNK_ROWS), &params);
}

static void note_lists(const struct step *step) {
  step->lane->listed_layer = step->layer;
  step->lane->listed_rows = step->rows;
  step->lane->listed_tile_tokens = step->tile_tokens;
}

static moeflow_status place_entries(const struct step *step) {
  struct moeflow_expert_prepare_params params = {
      .lane = step->lane->state,
      .in = step->in,
      .chunk_counts = step->lane->chunk_counts,
      .expert_offsets = step->lane->expert_offsets,
      .entries = step->lane->entries,
      .positions = step->lane->positions,
      .tiles = step->lane->tiles,
      .tile_count = step->lane->tile_count,
      .expert_load = step->layer->expert_load,
      .local_experts = step->layer->local_experts,
      .tile_tokens = step->tile_tokens,
  };
  const int64_t rows = (int64_t)step->group->ranks * step->rows;
  note_lists(step);
  return launch(step, KERNEL_EXPERT_PREPARE, 0, blocks_for(rows, MOEFLOW_CHUNK_ROWS), &params);
}

static moeflow_status gate_up(const struct step *step) {
  struct moeflow_gate_up_params params = {
      .lane = step->lane->state,
      .in = step->in,
      .entries = step->lane->entries,
      .tiles = step->lane->tiles,
      .tile_count = step->lane->tile_count,
      .weights = step->layer->weights.gate_up,
      .gate_row = step->layer->weights.gate_row,
      .up_row = step->layer->weights.up_row,
      .row_step = step->layer->weights.row_step,
      .activations = step->lane->activations,
  };
  return launch(step, KERNEL_GATE_UP, step->bucket.gate_up,
                gemm_blocks(&step->context->plan, &step->bucket, KERNEL_GATE_UP, step->entries, step->layer->local_experts,
                            step->spec->intermediate),
                &params);
}

static moeflow_status down(const struct step *step) {
  struct moeflow_down_params params = {
      .lane = step->lane->state,
      .activations = step->lane->activations,
      .tiles = step->lane->tiles,
      .tile_count = step->lane->tile_count,
      .weights = step->layer->weights.down,
      .outputs = step->lane->outputs,
  };
  return launch(step, KERNEL_DOWN, step->bucket.down,
                gemm_blocks(&step->context->plan, &step->bucket, KERNEL_DOWN, step->entries, step->layer->local_experts,
                            step->spec->hidden),
                &params);
}

static int64_t part_stride(const struct step *step) {
  return step->entries * step->spec->hidden;
}

/* The experts kernel adds a row's outputs itself, where something is to be added. */
static int sums_itself(const struct step *step) {
  const int measuring = (step->args->flags & MOEFLOW_FORWARD_EXPERTS) != 0;
  return step->kernel == KERNEL_EXPERTS && !step->layer->separate_sums && !(step->args->flags & MOEFLOW_FORWARD_IDENTITY) &&
         step->spec->reduce == SPEC_REDUCE_OWNER && (!measuring || step->args->out);
}

/* Rows without an entry here: what peers do not read is not written. */
static enum moeflow_write_empty write_empty(const struct step *step) {
  if (step->args->flags & MOEFLOW_FORWARD_EXPERTS) return MOEFLOW_EMPTY_PLAIN;
  return step->group->comm->ops->broadcast ? MOEFLOW_EMPTY_ZERO : MOEFLOW_EMPTY_SKIPPED;
}

/* Where a step's weighted sums go: return rows, or with FORWARD_EXPERTS plain rows [ranks * R, H] bf16. */
static struct moeflow_rows_out sums_out(const struct step *step) {
  if (step->args->flags & MOEFLOW_FORWARD_EXPERTS) return (struct moeflow_rows_out){step->args->out, 0};
  return (struct moeflow_rows_out){step->lane->return_targets, out_block_bytes(step, MOEFLOW_PHASE_RETURN)};
}

/* gate_up, down and perhaps the rows' sums in one launch of as many blocks as the device holds: they deal out the work among
 * themselves. */
static moeflow_status experts(const struct step *step) {
  const struct moeflow_layer *layer = step->layer;
  const int packed = step->kernel == KERNEL_EXPERTS_STREAM;
  const struct plan_variant *variant = plan_variant(&step->context->plan, step->kernel, step->variant);
  struct moeflow_experts_params params = {
      .lane = step->lane->state,
      .in = step->in,
      .entries = step->lane->entries,
      .tiles = step->lane->tiles,
      .tile_count = step->lane->tile_count,
      .entry_count = step->lane->expert_offsets + step->layer->local_experts,
      .control = step->lane->control,
      .activations = step->lane->activations,
      .outputs = step->lane->outputs,
      .part_stride = part_stride(step),
      .tiles_max = step->lane->tiles_max,
      .positions = step->lane->positions,
      .out = sums_out(step),
      .sum = sums_itself(step),
      .write_empty = write_empty(step),
      .record = step->lane->record_device,
      .expert_load = layer->expert_load,
      .local_experts = layer->local_experts,
      .fused = step->fused,
  };
  int64_t blocks = (int64_t)step->context->multiprocessors * variant->residency;
  if (step->fused) {
    params.peers = one_sided_peers(step->group, step->lane);
    blocks = group_waiting_blocks(step->group, variant->residency);
  }
  if (packed) {
    params.gate_up_packed = layer->weights.gate_up;
    params.down_packed = layer->weights.down;
  } else {
    params.gate_up = layer->maps->gate_up;
    params.down = layer->maps->down;
    params.up_first = layer->maps->up_first;
  }
  if (step->parts * params.part_stride > step->lane->outputs_max) {
    return status_set(MOEFLOW_ERROR_INTERNAL, "%d parts of %lld outputs, and the lane was made for %lld", step->parts,
                      (long long)params.part_stride, (long long)step->lane->outputs_max);
  }
  return launch(step, step->kernel, step->variant, blocks, &params);
}

static moeflow_status identity(const struct step *step) {
  struct moeflow_identity_params params = {
      .lane = step->lane->state,
      .in = step->in,
      .entries = step->lane->entries,
      .expert_offsets = step->lane->expert_offsets,
      .outputs = step->lane->outputs,
      .local_experts = step->layer->local_experts,
  };
  return launch(step, KERNEL_IDENTITY, 0, step->entries < IDENTITY_BLOCKS_MAX ? step->entries : IDENTITY_BLOCKS_MAX,
                &params);
}

static moeflow_status run_experts(const struct step *step) {
  if (step->layer->local_experts == 0) return MOEFLOW_OK; /* nothing can come here */
  if (step->args->flags & MOEFLOW_FORWARD_IDENTITY) return identity(step);
  if (step->kernel != KERNEL_GATE_UP) return experts(step);
  moeflow_status status = gate_up(step);
  return status == MOEFLOW_OK ? down(step) : status;
}

/* A row's columns are spread over blocks: few rows alone would leave most of the device idle. */
static int64_t reduce_blocks(const struct step *step) {
  const struct plan_variant *variant = plan_variant(&step->context->plan, KERNEL_OWNER_REDUCE, 0);
  return (int64_t)step->group->ranks * step->rows *
         blocks_for(step->spec->hidden, 8 * (variant ? variant->threads : REDUCE_THREADS));
}

static moeflow_status reduce(const struct step *step) {
  struct moeflow_owner_reduce_params params = {
      .lane = step->lane->state,
      .in = step->in,
      .positions = step->lane->positions,
      .outputs = step->lane->outputs,
      .part_stride = part_stride(step),
      .out = sums_out(step),
      .parts = step->parts,
      .write_empty = write_empty(step),
  };
  if (sums_itself(step)) return MOEFLOW_OK;
  return launch(step, KERNEL_OWNER_REDUCE, 0, reduce_blocks(step), &params);
}

static struct moeflow_combine_params combine_params(const struct step *step) {
  return (struct moeflow_combine_params){
      .lane = step->lane->state,
      .record = step->lane->record_device,
      .token_places = step->lane->token_places,
      .token_weights = step->lane->token_weights,
      .returned = step->lane->returned,
      .block_bytes = layer_block_bytes(step->layer, MOEFLOW_PHASE_RETURN, step->rows),
      .out = step->args->out,
      .tokens = step->tokens,
      .rank = step->group->rank,
      .ranks = step->group->ranks,
      .eager = !step->captured,
      .added = step->group->comm->ops->broadcast,
  };
}

static moeflow_status combine(const struct step *step) {
  struct moeflow_combine_params params = combine_params(step);
  const enum kernel_id kernel = step->layer->combine == MOEFLOW_COMBINE_RING ? KERNEL_COMBINE_RING : KERNEL_COMBINE;
  return launch(step, kernel, 0, token_blocks(step), &params);
}

/* ---- The fused pipeline: three launches, chained so that each is set up while the one before ends ---- */

/* A token a block, as far as blocks may wait or must raise flags. */
static int64_t fused_blocks(const struct step *step) {
  const int64_t tokens = token_blocks(step), most = group_waiting_blocks(step->group, 1);
  return tokens < most ? tokens : most;
}

static moeflow_status dispatch(const struct step *step) {
  struct moeflow_dispatch_params params = {
      .pack = pack_params(step),
      .router = router_params(step),
      .peers = one_sided_peers(step->group, step->lane),
  };
  return launch(step, KERNEL_DISPATCH, 0, fused_blocks(step), &params);
}

static moeflow_status return_combine(const struct step *step) {
  struct moeflow_return_combine_params params = {
      .combine = combine_params(step),
      .peers = one_sided_peers(step->group, step->lane),
  };
  return launch(step, KERNEL_RETURN_COMBINE, 0, fused_blocks(step), &params);
}

static moeflow_status run_fused(const struct step *step) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(dispatch(step));
  note_lists(step);
  CHECK(experts(step));
  CHECK(return_combine(step));
cleanup:
  return status;
}

/* Where the experts kernel can do all that lies between the exchanges, and make its lists in the shared memory that it has.
 * What peers see is the same with and without. */
static int can_fuse(const struct step *step) {
  const struct moeflow_layer *layer = step->layer;
  const struct plan_variant *variant = plan_variant(&step->context->plan, step->kernel, step->variant);
  return step->group->comm->ops->one_sided && step->kernel == KERNEL_EXPERTS && plan_fuses(&step->context->plan) &&
         !layer->separate_sums && layer->combine == MOEFLOW_COMBINE_PLAN && layer->local_experts > 0 && !step->args->flags &&
         step->entries <= MOEFLOW_FUSED_ENTRIES_MAX &&
         moeflow_fused_shared_bytes(step->entries, layer->local_experts) <= variant->shared_bytes;
}

static moeflow_status run_step(const struct step *step) {
  moeflow_status status = MOEFLOW_OK;
  if (step->fused) return run_fused(step);
  CHECK(route(step));
  CHECK(pack(step));
  CHECK(exchange(step, MOEFLOW_PHASE_DISPATCH));
  CHECK(index_entries(step));
  CHECK(place_entries(step));
  CHECK(run_experts(step));
  CHECK(reduce(step));
  CHECK(exchange(step, MOEFLOW_PHASE_RETURN));
  CHECK(combine(step));
cleanup:
  return status;
}

/* What lies between the exchanges, on rows and lists that are there already. */
static moeflow_status run_experts_again(const struct step *step) {
  moeflow_status status = run_experts(step);
  return status == MOEFLOW_OK && step->args->out ? reduce(step) : status;
}

/* A launch failed on the way: this rank cannot end the step, so its group is given up. Peers that can be told are told now.
 */
static void abandon(const struct step *step) {
  group_poison(step->group);
  if (!step->group->comm->ops->one_sided) return;
  exchange(step, MOEFLOW_PHASE_DISPATCH); /* a peer may still wait for either flag */
  exchange(step, MOEFLOW_PHASE_RETURN);
}

/* ---- Arguments ---- */

/* What is refused without a step: the peers either refuse it too, or this rank has nothing to step with. */
static moeflow_status check_refused(const struct moeflow_layer *layer, const moeflow_forward_args *args) {
  const struct moeflow_group *group = layer->group;
  if (!layer->bound) return status_set(MOEFLOW_ERROR_STATE, "the layer has no weights; call moeflow_layer_bind first");
  if (!layer->prepared_tokens)
    return status_set(MOEFLOW_ERROR_STATE, "the layer is not prepared; call moeflow_prepare first");
  if (args->lane < 0 || args->lane >= group->lane_count) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "lane %d does not exist: the group has %d", args->lane, group->lane_count);
  }
  if (args->tokens_max < 0 || args->tokens_max > group->capacity) {
    return status_set(MOEFLOW_ERROR_CAPACITY, "tokens_max is %d and the group's capacity %d; create the group with more",
                      args->tokens_max, group->capacity);
  }
  const int tokens_max = args->tokens_max ? args->tokens_max : group->capacity;
  if (tokens_max > layer->prepared_tokens) {
    return status_set(MOEFLOW_ERROR_STATE, "tokens_max is %d and the layer was prepared for %d; prepare it for more",
                      tokens_max, layer->prepared_tokens);
  }
  return MOEFLOW_OK;
}

static moeflow_status check_routing(const struct moeflow_layer *layer, const moeflow_forward_args *args) {
  if (args->logits) {
    if (args->ids || args->weights) return status_set(MOEFLOW_ERROR_ARGUMENT, "give logits, or ids and weights, not both");
    if (args->logits_dtype != MOEFLOW_DTYPE_FLOAT32 && args->logits_dtype != MOEFLOW_DTYPE_BFLOAT16) {
      return status_set(MOEFLOW_ERROR_ARGUMENT, "logits_dtype %d is neither FLOAT32 nor BFLOAT16", (int)args->logits_dtype);
    }
    if (layer->context->plan.spec.correction_bias && !layer->correction_bias) {
      return status_set(MOEFLOW_ERROR_ARGUMENT, "%s routes with a correction bias, and the layer was bound without one",
                        layer->context->plan.spec.name);
    }
    return MOEFLOW_OK;
  }
  if (!args->ids || !args->weights) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "ids %p and weights %p for %d tokens: give both, or logits", args->ids,
                      (const void *)args->weights, args->tokens);
  }
  if (args->ids_dtype != MOEFLOW_DTYPE_INT32 && args->ids_dtype != MOEFLOW_DTYPE_INT64) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "ids_dtype %d is neither INT32 nor INT64", (int)args->ids_dtype);
  }
  return MOEFLOW_OK;
}

static moeflow_status check_pointer(const char *name, const void *pointer, size_t align) {
  if (!pointer) return status_set(MOEFLOW_ERROR_ARGUMENT, "%s is NULL", name);
  if ((uintptr_t)pointer % align == 0) return MOEFLOW_OK;
  return status_set(MOEFLOW_ERROR_ARGUMENT, "%s is at %p, which is no multiple of %zu", name, pointer, align);
}

/* What makes this rank join with 0 rows and an error mark. */
static moeflow_status check_args(const struct moeflow_layer *layer, const moeflow_forward_args *args, int tokens_max) {
  moeflow_status status = MOEFLOW_OK;
  if (args->flags & ~(unsigned)(MOEFLOW_FORWARD_IDENTITY | MOEFLOW_FORWARD_STEPWISE))
    FAIL(MOEFLOW_ERROR_ARGUMENT, "flags 0x%x are unknown", args->flags);
  if (args->tokens < 0)
    FAIL(MOEFLOW_ERROR_ARGUMENT, "tokens is %d; it must be 0 to tokens_max %d", args->tokens, tokens_max);
  if (args->tokens > tokens_max) {
    FAIL(MOEFLOW_ERROR_ARGUMENT,
         "tokens is %d, more than tokens_max %d (0 means the group's capacity, %d); bring fewer, give all ranks a larger "
         "tokens_max, or create the group with more capacity",
         args->tokens, tokens_max, layer->group->capacity);
  }
  if (args->tokens == 0) goto cleanup;
  CHECK(check_pointer("hidden", args->hidden, 16));
  CHECK(check_pointer("out", args->out, 16));
  CHECK(check_routing(layer, args));
  if (args->logits) {
    CHECK(check_pointer("logits", args->logits, args->logits_dtype == MOEFLOW_DTYPE_FLOAT32 ? 4 : 2));
  } else {
    CHECK(check_pointer("ids", args->ids, args->ids_dtype == MOEFLOW_DTYPE_INT64 ? 8 : 4));
    CHECK(check_pointer("weights", args->weights, 4));
  }
cleanup:
  return status;
}

/* MOEFLOW_FORWARD_EXPERTS: this rank alone; what is wrong stays here. */
static moeflow_status check_again(const struct step *step) {
  const struct group_lane *lane = step->lane;
  const moeflow_forward_args *args = step->args;
  if (args->flags != MOEFLOW_FORWARD_EXPERTS) {
    return status_set(MOEFLOW_ERROR_ARGUMENT, "flags 0x%x: MOEFLOW_FORWARD_EXPERTS goes with no other", args->flags);
  }
  if (step->spec->reduce != SPEC_REDUCE_OWNER) {
    return status_set(MOEFLOW_ERROR_UNSUPPORTED, "MOEFLOW_FORWARD_EXPERTS sums at the owner, and %s returns choices",
                      step->spec->name);
  }
  if (args->out && (uintptr_t)args->out % 16) return check_pointer("out", args->out, 16);
  if (lane->listed_layer == step->layer && lane->listed_rows == step->rows &&
      lane->listed_tile_tokens == step->tile_tokens) {
    return MOEFLOW_OK;
  }
  return status_set(MOEFLOW_ERROR_STATE,
                    "lane %d holds no rows of this layer at tokens_max %d: run a whole step of it first, then "
                    "MOEFLOW_FORWARD_EXPERTS",
                    args->lane, step->tokens_max);
}

static void choose_experts(struct step *step) {
  const struct plan_bucket *bucket = &step->bucket;
  const struct plan_variant *variant;
  if (step->layer->weights.packed) {
    step->kernel = KERNEL_EXPERTS_STREAM;
    step->variant = bucket->experts_stream;
  } else if (step->layer->maps && bucket->experts != PLAN_NONE) {
    step->kernel = KERNEL_EXPERTS;
    step->variant = bucket->experts;
  } else {
    step->kernel = KERNEL_GATE_UP;
    step->variant = bucket->gate_up;
  }
  variant = plan_variant(&step->context->plan, step->kernel, step->variant);
  step->tile_tokens = variant ? variant->tile_tokens : SPEC_ONLY_TILE_TOKENS;
  step->parts = variant && !(step->args->flags & MOEFLOW_FORWARD_IDENTITY) ? variant->parts : 1;
}

static void set_up(struct step *step, struct moeflow_layer *layer, const moeflow_forward_args *args) {
  struct moeflow_group *group = layer->group;
  step->layer = layer;
  step->group = group;
  step->context = layer->context;
  step->lane = &group->lanes[args->lane];
  step->spec = &layer->context->plan.spec;
  step->args = args;
  step->tokens = args->tokens;
  step->tokens_max = args->tokens_max ? args->tokens_max : group->capacity;
  step->rows = layer_rows(group, step->tokens_max);
  step->entries = (int64_t)group->ranks * step->rows * step->spec->top_k;
  step->bucket = *plan_bucket_for(&layer->context->plan, (int64_t)group->ranks * step->rows);
  step->in = (struct moeflow_rows_in){
      .base = step->lane->received,
      .block_bytes = layer_block_bytes(layer, MOEFLOW_PHASE_DISPATCH, step->rows),
      .rows = step->rows,
      .ranks = group->ranks,
      .rank = group->rank,
      .tokens_max = step->tokens_max,
  };
  choose_experts(step);
  step->fused = can_fuse(step);
}

static moeflow_status forward_again(struct step *step) {
  moeflow_status status = MOEFLOW_OK;
  CHECK(check_again(step));
  CHECK(context_enter(step->context));
  status = run_experts_again(step);
  context_leave(step->context);
cleanup:
  return status;
}

moeflow_status moeflow_forward(moeflow_layer *layer, const moeflow_forward_args *args_given) {
  moeflow_status status = MOEFLOW_OK, verdict = MOEFLOW_OK;
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  struct step step = {.row_flags = 0};
  CHECK(handle_check(layer, HANDLE_LAYER));
  CHECK(config_read(args_given, &args, sizeof args, "moeflow_forward_args"));
  CHECK(check_refused(layer, &args));
  set_up(&step, layer, &args);
  if (args.flags & MOEFLOW_FORWARD_EXPERTS) {
    status = forward_again(&step);
    goto cleanup;
  }
  verdict = check_args(layer, &args, step.tokens_max);
  if (verdict != MOEFLOW_OK) {
    step.tokens = 0;
    step.row_flags = MOEFLOW_ROW_FAILED;
  }
  CHECK(context_enter(step.context));
  const struct backend *backend = step.context->backend;
  step.captured = backend->capturing && backend->capturing(step.context, args.stream);
  if (!step.captured) atomic_fetch_add(&step.lane->eager, 1);
  status = run_step(&step);
  if (status != MOEFLOW_OK && !step.captured) {
    char message[1024];
    snprintf(message, sizeof message, "%s", moeflow_last_error());
    abandon(&step);
    status_set(status, "%s", message);
  }
  context_leave(step.context);
cleanup:
  if (status != MOEFLOW_OK) return status;
  if (verdict != MOEFLOW_OK) return verdict; /* its message is the last one set */
  if (step.group && atomic_load(&step.group->aborted)) {
    return status_set(MOEFLOW_ERROR_PEER, "the group was aborted; the output is NaN");
  }
  return MOEFLOW_OK;
}
