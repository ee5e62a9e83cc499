/* All ranks of a layer as threads of this process on the CPU backend, through the public interface: for tests.
 * world_open -> step_fill, world_step, step_expect as often as wanted -> world_close. */
#ifndef MOEFLOW_CPU_WORLD_H
#define MOEFLOW_CPU_WORLD_H

#include <pthread.h>

#include "moeflow.h"
#include "random.h"
#include "reference.h"
#include "spec.h"
#include "test.h"

#define WORLD_RANKS_MAX 8
#define WORLD_SEED 77
#define UNUSED __attribute__((unused))

enum world_weights { WORLD_STACKED, WORLD_POINTERS, WORLD_LENT };

struct world_rank {
  moeflow_context *context;
  moeflow_group *group;
  moeflow_layer *layer;
  uint16_t *matrices[2];    /* this rank's experts, stacked: gate_up, down */
  const void **pointers[2]; /* [local experts] */
  int64_t *load;
  int local_experts;
  moeflow_status status;
  char message[512];
};

struct world {
  /* set these; zero means the default */
  struct spec spec;
  int ranks, capacity, lanes, timeout_ms, replicas;
  const char *flight; /* rank 0's flight record */
  moeflow_combine combine;
  const int32_t *places;
  moeflow_gate_up_order order;
  int pad; /* strides larger than the matrices */
  enum world_weights weights;
  const float *bias;
  struct world_rank rank[WORLD_RANKS_MAX];
  moeflow_unique_id id;
};

struct step {
  int tokens[WORLD_RANKS_MAX], tokens_max, lane;
  unsigned flags;
  int ids_int64;
  uint16_t *hidden[WORLD_RANKS_MAX], *out[WORLD_RANKS_MAX];
  int32_t *ids[WORLD_RANKS_MAX];
  float *weights[WORLD_RANKS_MAX];
  float *logits[WORLD_RANKS_MAX]; /* not NULL: the router chooses, and ids and weights are what it should choose */
  moeflow_status forward[WORLD_RANKS_MAX], poll[WORLD_RANKS_MAX];
  char forward_message[WORLD_RANKS_MAX][512], poll_message[WORLD_RANKS_MAX][512];
};

UNUSED static struct spec world_spec(int hidden, int intermediate, int experts, int top_k) {
  return (struct spec){.name = "test",
                       .hidden = hidden,
                       .intermediate = intermediate,
                       .experts = experts,
                       .top_k = top_k,
                       .activation = SPEC_SWIGLU,
                       .score = SPEC_SIGMOID,
                       .groups = 1,
                       .top_groups = 1,
                       .scale = 1};
}

/* ---- One thread per rank ---- */

struct world_thread {
  void (*run)(struct world *world, int rank, void *argument);
  struct world *world;
  int rank;
  void *argument;
};

static void *world_thread_main(void *argument) {
  struct world_thread *thread = argument;
  thread->run(thread->world, thread->rank, thread->argument);
  return NULL;
}

UNUSED static void world_each(struct world *world, void (*run)(struct world *, int, void *), void *argument) {
  pthread_t threads[WORLD_RANKS_MAX];
  struct world_thread arguments[WORLD_RANKS_MAX];
  for (int r = 0; r < world->ranks; r++) {
    arguments[r] = (struct world_thread){run, world, r, argument};
    pthread_create(&threads[r], NULL, world_thread_main, &arguments[r]);
  }
  for (int r = 0; r < world->ranks; r++) pthread_join(threads[r], NULL);
}

/* ---- Weights ---- */

/* Element of an expert's matrix, gate rows first. */
static uint16_t world_element(const struct spec *spec, int expert, int down, int row, int column) {
  const uint32_t key = moeflow_random_row(WORLD_SEED, (uint32_t)expert, (uint32_t)down, (uint32_t)row);
  return moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)column),
                             moeflow_random_shift(down ? spec->intermediate : spec->hidden));
}

UNUSED static void world_reference_weights(void *user, int expert, int down, uint16_t *matrix) {
  const struct spec *spec = &((struct world *)user)->spec;
  const int rows = down ? spec->hidden : 2 * spec->intermediate, columns = down ? spec->intermediate : spec->hidden;
  for (int row = 0; row < rows; row++) {
    for (int c = 0; c < columns; c++) matrix[(size_t)row * columns + c] = world_element(spec, expert, down, row, c);
  }
}

static int world_place(const struct world *world, int expert, int replica) {
  if (world->places) return world->places[expert * world->replicas + replica];
  const int owner = reference_linear_owner(world->spec.experts, world->ranks, expert);
  int first = expert;
  while (first > 0 && reference_linear_owner(world->spec.experts, world->ranks, first - 1) == owner) first--;
  return owner << 16 | (expert - first);
}

/* The expert in a rank's slot, -1 when there is none. */
static int world_slot_expert(const struct world *world, int rank, int slot) {
  for (int e = 0; e < world->spec.experts; e++) {
    for (int j = 0; j < world->replicas; j++) {
      if (world_place(world, e, j) == (rank << 16 | slot)) return e;
    }
  }
  return -1;
}

static int world_stored_row(const struct world *world, int down, int row) {
  const int i = world->spec.intermediate, up = row >= i;
  if (down || world->order == MOEFLOW_GATE_UP) return row;
  return world->order == MOEFLOW_UP_GATE ? (up ? row - i : row + i) : (up ? 2 * (row - i) + 1 : 2 * row);
}

static void world_make_matrices(struct world *world, int rank, int down, int64_t *expert_stride, int64_t *row_stride) {
  struct world_rank *mine = &world->rank[rank];
  const struct spec *spec = &world->spec;
  const int rows = down ? spec->hidden : 2 * spec->intermediate, columns = down ? spec->intermediate : spec->hidden;
  *row_stride = columns + 8 * world->pad;
  *expert_stride = (rows + world->pad) * *row_stride;
  const size_t bytes = (size_t)(mine->local_experts * *expert_stride) * sizeof(uint16_t);
  mine->matrices[down] = aligned_alloc(64, (bytes / 64 + 1) * 64);
  mine->pointers[down] = calloc((size_t)mine->local_experts + 1, sizeof *mine->pointers[down]);
  memset(mine->matrices[down], 0xff, (bytes / 64 + 1) * 64); /* NaN in the padding */
  for (int slot = 0; slot < mine->local_experts; slot++) {
    const int expert = world_slot_expert(world, rank, slot);
    uint16_t *to = mine->matrices[down] + slot * *expert_stride;
    mine->pointers[down][slot] = to;
    for (int row = 0; row < rows && expert >= 0; row++) {
      uint16_t *stored = to + world_stored_row(world, down, row) * *row_stride;
      for (int c = 0; c < columns; c++) stored[c] = world_element(spec, expert, down, row, c);
    }
  }
}

static const void *world_lend(void *user, int local_expert, int down) {
  return ((struct world_rank *)user)->pointers[down][local_expert];
}

static moeflow_status world_bind(struct world *world, int rank) {
  struct world_rank *mine = &world->rank[rank];
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  int64_t expert_stride[2], row_stride[2];
  mine->local_experts = moeflow_layer_local_experts(mine->layer);
  for (int down = 0; down < 2; down++) world_make_matrices(world, rank, down, &expert_stride[down], &row_stride[down]);
  mine->load = calloc((size_t)mine->local_experts + 1, sizeof *mine->load);
  weights.order = world->order;
  weights.correction_bias = world->bias;
  weights.expert_load = mine->load;
  if (world->weights == WORLD_LENT) {
    weights.lend = world_lend;
    weights.lend_user = mine;
    return moeflow_layer_bind(mine->layer, &weights);
  }
  if (world->weights == WORLD_POINTERS) {
    weights.gate_up_experts = mine->pointers[0];
    weights.down_experts = mine->pointers[1];
  } else {
    weights.gate_up = mine->matrices[0];
    weights.down = mine->matrices[1];
  }
  weights.gate_up_row_stride = 2 * row_stride[0];
  weights.gate_up_expert_stride = 2 * expert_stride[0];
  weights.down_row_stride = 2 * row_stride[1];
  weights.down_expert_stride = 2 * expert_stride[1];
  return moeflow_layer_bind(mine->layer, &weights);
}

/* ---- Open and close ---- */

static void world_note(struct world *world, int rank, moeflow_status status) {
  struct world_rank *mine = &world->rank[rank];
  if (mine->status != MOEFLOW_OK || status == MOEFLOW_OK) return;
  mine->status = status;
  snprintf(mine->message, sizeof mine->message, "%s", moeflow_last_error());
}

UNUSED static moeflow_status world_context(const struct spec *spec, moeflow_context **context) {
  char text[SPEC_TEXT_MAX];
  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  const moeflow_status status = spec_write(spec, text);
  if (status != MOEFLOW_OK) return status;
  config.backend = MOEFLOW_BACKEND_CPU;
  config.spec = text;
  return moeflow_open(&config, context);
}

static moeflow_status world_make_layer(struct world *world, int rank) {
  struct world_rank *mine = &world->rank[rank];
  moeflow_layer_config config = MOEFLOW_LAYER_CONFIG_INIT;
  config.combine = world->combine;
  config.places = world->places;
  config.replicas = world->replicas;
  const moeflow_status status = moeflow_layer_create(mine->group, mine->context, &config, &mine->layer);
  return status == MOEFLOW_OK ? world_bind(world, rank) : status;
}

static void world_open_rank(struct world *world, int rank, void *argument) {
  struct world_rank *mine = &world->rank[rank];
  moeflow_group_config config = MOEFLOW_GROUP_CONFIG_INIT;
  (void)argument;
  config.rank = rank;
  config.ranks = world->ranks;
  config.capacity = world->capacity;
  config.lanes = world->lanes;
  config.transport = MOEFLOW_TRANSPORT_LOCAL;
  config.unique_id = &world->id;
  config.timeout_ms = world->timeout_ms;
  config.flight = rank == 0 ? world->flight : NULL;
  for (int i = 0; world->places && i < world->spec.experts * world->replicas; i++) {
    const int slot = world->places[i] < 0 ? -1 : world->places[i] & 0xffff;
    if (config.local_experts_max < slot + 1) config.local_experts_max = slot + 1;
  }
  world_note(world, rank, world_context(&world->spec, &mine->context));
  if (mine->status == MOEFLOW_OK) world_note(world, rank, moeflow_group_create(&mine->context, 1, &config, &mine->group));
  if (mine->status == MOEFLOW_OK) world_note(world, rank, world_make_layer(world, rank));
  if (mine->status == MOEFLOW_OK) world_note(world, rank, moeflow_prepare(&mine->layer, 1, 0));
}

static void world_open(struct world *world) {
  if (!world->lanes) world->lanes = 1;
  if (!world->replicas) world->replicas = 1;
  if (!world->timeout_ms) world->timeout_ms = 60000;
  EXPECT(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &world->id) == MOEFLOW_OK, "%s", moeflow_last_error());
  world_each(world, world_open_rank, NULL);
  for (int r = 0; r < world->ranks; r++)
    EXPECT(world->rank[r].status == MOEFLOW_OK, "rank %d: %s", r, world->rank[r].message);
}

static void world_close_rank(struct world *world, int rank, void *argument) {
  struct world_rank *mine = &world->rank[rank];
  (void)argument;
  world_note(world, rank, moeflow_layer_destroy(mine->layer));
  world_note(world, rank, moeflow_group_destroy(mine->group));
  world_note(world, rank, moeflow_close(mine->context));
  for (int down = 0; down < 2; down++) {
    free(mine->matrices[down]);
    free(mine->pointers[down]);
  }
  free(mine->load);
}

static void world_close(struct world *world) {
  for (int r = 0; r < world->ranks; r++) world->rank[r].status = MOEFLOW_OK;
  world_each(world, world_close_rank, NULL);
  for (int r = 0; r < world->ranks; r++)
    EXPECT(world->rank[r].status == MOEFLOW_OK, "rank %d: %s", r, world->rank[r].message);
}

/* ---- A step ---- */

static uint32_t step_draw(int seed, int rank, int number) {
  return moeflow_random_bits(moeflow_random_row((uint64_t)seed, (uint32_t)rank, MOEFLOW_RANDOM_LOGITS, 0), (uint32_t)number);
}

static void *step_memory(size_t count, size_t size) {
  void *memory = aligned_alloc(64, (count * size / 64 + 2) * 64);
  memset(memory, 0xff, (count * size / 64 + 2) * 64);
  return memory;
}

/* Random rows, K distinct experts a token and positive weights, the same for a (rank, token) whatever the world's size. */
static void step_fill(const struct world *world, struct step *step, int seed) {
  const int k_count = world->spec.top_k, experts = world->spec.experts;
  for (int r = 0; r < world->ranks; r++) {
    const size_t tokens = (size_t)step->tokens[r];
    step->hidden[r] = step_memory(tokens, 2 * (size_t)world->spec.hidden);
    step->out[r] = step_memory(tokens, 2 * (size_t)world->spec.hidden);
    step->ids[r] = step_memory(tokens * k_count, sizeof(int32_t));
    step->weights[r] = step_memory(tokens * k_count, sizeof(float));
    for (int t = 0; t < step->tokens[r]; t++) {
      const uint32_t key = moeflow_random_row((uint64_t)seed, (uint32_t)r, MOEFLOW_RANDOM_HIDDEN, (uint32_t)t);
      for (int c = 0; c < world->spec.hidden; c++) {
        step->hidden[r][t * world->spec.hidden + c] = moeflow_random_bf16(moeflow_random_bits(key, (uint32_t)c), 0);
      }
      const uint32_t first = step_draw(seed, r, t) % (uint32_t)experts;
      for (int k = 0; k < k_count; k++) { /* a walk that meets k_count different experts */
        step->ids[r][t * k_count + k] = (int32_t)((first + (uint32_t)(k * (experts / k_count))) % (uint32_t)experts);
        step->weights[r][t * k_count + k] = (float)(1 + step_draw(seed + 1, r, t * k_count + k) % 1000) / 1000;
      }
    }
  }
}

static void step_free(const struct world *world, struct step *step) {
  for (int r = 0; r < world->ranks; r++) {
    free(step->hidden[r]);
    free(step->out[r]);
    free(step->ids[r]);
    free(step->weights[r]);
    free(step->logits[r]);
  }
}

static void step_run_rank(struct world *world, int rank, void *argument) {
  struct step *step = argument;
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  const int choices = step->tokens[rank] * world->spec.top_k;
  int64_t *wide = calloc((size_t)choices + 1, sizeof *wide);
  for (int i = 0; i < choices; i++) wide[i] = step->ids[rank][i];
  args.tokens = step->tokens[rank];
  args.tokens_max = step->tokens_max;
  args.hidden = step->hidden[rank];
  if (step->logits[rank]) {
    args.logits = step->logits[rank];
  } else {
    args.ids = step->ids_int64 ? (const void *)wide : step->ids[rank];
    args.ids_dtype = step->ids_int64 ? MOEFLOW_DTYPE_INT64 : MOEFLOW_DTYPE_INT32;
    args.weights = step->weights[rank];
  }
  args.out = step->out[rank];
  args.lane = step->lane;
  args.flags = step->flags;
  step->forward[rank] = moeflow_forward(world->rank[rank].layer, &args);
  if (step->forward[rank]) snprintf(step->forward_message[rank], 512, "%s", moeflow_last_error());
  step->poll[rank] = moeflow_poll(world->rank[rank].group, 60000);
  if (step->poll[rank]) snprintf(step->poll_message[rank], 512, "%s", moeflow_last_error());
  free(wide);
}

static void world_step(struct world *world, struct step *step) {
  world_each(world, step_run_rank, step);
}

UNUSED static void step_expect_ok(const struct world *world, const struct step *step, const char *what) {
  for (int r = 0; r < world->ranks; r++) {
    EXPECT(step->forward[r] == MOEFLOW_OK, "%s: rank %d: %s", what, r, step->forward_message[r]);
    EXPECT(step->poll[r] == MOEFLOW_OK, "%s: rank %d: %s", what, r, step->poll_message[r]);
  }
}

/* ---- What should have come out ---- */

struct step_tokens { /* all ranks' tokens one after another */
  const struct world *world;
  int count;
  int32_t *sources, *numbers, *ids;
  float *weights;
  uint16_t *hidden, *got, *want;
};

static int step_owner(void *user, int expert, int token) {
  const struct step_tokens *all = user;
  const struct world *world = all->world;
  uint32_t count = 0;
  while ((int)count < world->replicas && world_place(world, expert, (int)count) >= 0) count++;
  if (count == 0) return -1;
  const uint32_t replica = moeflow_replica((uint32_t)all->sources[token], (uint32_t)all->numbers[token], count);
  return world_place(world, expert, (int)replica) >> 16;
}

static struct step_tokens step_gather(const struct world *world, const struct step *step) {
  const int h = world->spec.hidden, k = world->spec.top_k;
  struct step_tokens all = {.world = world};
  for (int r = 0; r < world->ranks; r++) all.count += step->tokens[r];
  const size_t count = (size_t)all.count + 1;
  all.sources = calloc(count, sizeof(int32_t));
  all.numbers = calloc(count, sizeof(int32_t));
  all.ids = calloc(count * k, sizeof(int32_t));
  all.weights = calloc(count * k, sizeof(float));
  all.hidden = calloc(count * h, 2);
  all.got = calloc(count * h, 2);
  all.want = calloc(count * h, 2);
  for (int r = 0, at = 0; r < world->ranks; r++) {
    for (int t = 0; t < step->tokens[r]; t++, at++) {
      all.sources[at] = r;
      all.numbers[at] = t;
      memcpy(all.ids + at * k, step->ids[r] + t * k, 4 * (size_t)k);
      memcpy(all.weights + at * k, step->weights[r] + t * k, 4 * (size_t)k);
      memcpy(all.hidden + at * h, step->hidden[r] + t * h, 2 * (size_t)h);
      memcpy(all.got + at * h, step->out[r] + t * h, 2 * (size_t)h);
    }
  }
  return all;
}

static void step_tokens_free(struct step_tokens *all) {
  free(all->sources);
  free(all->numbers);
  free(all->ids);
  free(all->weights);
  free(all->hidden);
  free(all->got);
  free(all->want);
}

static struct reference_layer world_reference(struct world *world, struct step_tokens *all) {
  const struct spec *spec = &world->spec;
  return (struct reference_layer){.hidden = spec->hidden,
                                  .intermediate = spec->intermediate,
                                  .experts = spec->experts,
                                  .top_k = spec->top_k,
                                  .clamp = spec->activation == SPEC_SWIGLU_CLAMP,
                                  .limit = spec->activation_limit,
                                  .ranks = world->ranks,
                                  .choices = spec->reduce == SPEC_REDUCE_CHOICES,
                                  .return_fp32 = spec->returned == SPEC_WIRE_FP32,
                                  .ring = world->combine == MOEFLOW_COMBINE_RING,
                                  .output_scale = spec->scale_on == SPEC_SCALE_OUTPUT ? spec->scale : 1,
                                  .owner = step_owner,
                                  .owner_user = all,
                                  .weights = world_reference_weights,
                                  .weights_user = world};
}

UNUSED static void step_expect(struct world *world, const struct step *step, const char *what) {
  struct step_tokens all = step_gather(world, step);
  struct reference_layer reference = world_reference(world, &all);
  struct reference_difference difference;
  reference.identity = (step->flags & MOEFLOW_FORWARD_IDENTITY) != 0;
  step_expect_ok(world, step, what);
  EXPECT(reference_run(&reference, all.count, all.hidden, all.ids, all.weights, all.sources, all.want, NULL, 2) == 0,
         "memory");
  reference_compare(all.got, all.want, all.count, world->spec.hidden, &difference);
  EXPECT(reference_close(&difference), "%s: %d ranks: l2 %g (row %d); row %d (rank %d token %d) column %d: %g, want %g",
         what, world->ranks, difference.l2, difference.l2_row, difference.row, all.sources[difference.row],
         all.numbers[difference.row], difference.column, difference.got, difference.want);
  for (int r = 0; r < world->ranks; r++) {
    EXPECT(step->out[r][(size_t)step->tokens[r] * world->spec.hidden] == 0xffff, "%s: rank %d: written past its rows", what,
           r);
  }
  step_tokens_free(&all);
}
#endif
