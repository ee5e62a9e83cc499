/* The experts kernel's host side on a fake GPU: tensor maps of every layout of weights, what is launched at how many rows,
 * MOEFLOW_FORWARD_EXPERTS, and packed weights. One rank. */
#include "driver.h"
#include "fakes/fake_world.h"

#define H 512
#define I 256
#define E 16
#define K 4
#define ROW (2 * H) /* bytes of a packed gate_up row */
#define DOWN_ROW (2 * I)

static struct plan plan;
static moeflow_context *context;
static moeflow_group *group;
static moeflow_layer *layer;

static void open_world(void (*make_plan)(const struct spec *, const char *, struct plan *), const struct spec *spec,
                       int capacity) {
  moeflow_open_config config = fake_open_config();
  moeflow_group_config group_config = MOEFLOW_GROUP_CONFIG_INIT;
  moeflow_unique_id id;
  fake_load("fake_nccl");
  make_plan(spec, "sm_90a", &plan);
  EXPECT_OK(moeflow_open(&config, &context));
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));
  group_config.capacity = capacity;
  group_config.transport = MOEFLOW_TRANSPORT_LOCAL;
  group_config.unique_id = &id;
  group_config.lanes = 2;
  EXPECT_OK(moeflow_group_create(&context, 1, &group_config, &group));
  EXPECT_OK(moeflow_layer_create(group, context, NULL, &layer));
}

static void close_world(void) {
  EXPECT_OK(moeflow_layer_destroy(layer));
  EXPECT_OK(moeflow_group_destroy(group));
  EXPECT_OK(moeflow_close(context));
  EXPECT(cuda->live == 0, "%d pieces of the driver are not given back", cuda->live);
}

static moeflow_weights plain_weights(void) {
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = (void *)0x1000000;
  weights.down = (void *)0x8000000;
  return weights;
}

static void open_bound(int capacity) {
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  open_world(fake_plan_experts, &spec, capacity);
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT_OK(moeflow_prepare(&layer, 1, 0));
}

/* ---- Tensor maps ---- */

static struct fake_tensor_map read_map(const struct moeflow_tensor_map *maps, int expert) {
  struct fake_tensor_map map;
  memcpy(&map, &maps[expert], sizeof map);
  EXPECT(map.magic == FAKE_TENSOR_MAP, "expert %d has no map", expert);
  return map;
}

static void expect_gate_up(int expert, uintptr_t base, uint64_t row, uint64_t between, uint64_t group_of_rows) {
  const struct fake_tensor_map map = read_map(layer->maps->gate_up, expert);
  EXPECT(map.dimensions == 4 && map.swizzle == 3 && map.promotion == 2 && map.fill == 0, "%d dimensions, swizzle %d",
         map.dimensions, map.swizzle);
  EXPECT((uintptr_t)map.base == base, "expert %d at %p, want %#zx", expert, map.base, (size_t)base);
  EXPECT(map.size[0] == H && map.size[1] == 8 && map.size[2] == 2 && map.size[3] == I / 8, "[%llu][%llu][%llu][%llu]",
         map.size[3], map.size[2], map.size[1], map.size[0]);
  EXPECT(map.stride[0] == row && map.stride[1] == between && map.stride[2] == group_of_rows, "strides %llu, %llu, %llu",
         map.stride[0], map.stride[1], map.stride[2]);
  EXPECT(map.box[0] == 64 && map.box[1] == 8 && map.box[2] == 2 && map.box[3] == 4, "box %u, %u, %u, %u", map.box[0],
         map.box[1], map.box[2], map.box[3]);
}

static void expect_down(int expert, uintptr_t base, uint64_t row) {
  const struct fake_tensor_map map = read_map(layer->maps->down, expert);
  EXPECT(map.dimensions == 2 && map.swizzle == 3 && map.promotion == 2 && map.fill == 0, "%d dimensions", map.dimensions);
  EXPECT((uintptr_t)map.base == base && map.stride[0] == row, "expert %d at %p, rows of %llu", expert, map.base,
         map.stride[0]);
  EXPECT(map.size[0] == I && map.size[1] == H && map.box[0] == 64 && map.box[1] == 64, "[%llu][%llu]", map.size[1],
         map.size[0]);
}

/* Where element (row of the 2I, in the map's order) lies must be where the order of the weights says. */
static void test_orders(void) {
  static const struct {
    moeflow_gate_up_order order;
    uint64_t row, between, group_of_rows;
    int up_first;
  } cases[] = {
      {MOEFLOW_GATE_UP, ROW, I * ROW, 8 * ROW, 0},
      {MOEFLOW_UP_GATE, ROW, I * ROW, 8 * ROW, 1},
      {MOEFLOW_INTERLEAVED, 2 * ROW, ROW, 16 * ROW, 0},
  };
  struct spec spec = fake_spec();
  open_world(fake_plan_experts, &spec, 100);
  EXPECT(context->multiprocessors == 132, "%d", context->multiprocessors);
  for (int i = 0; i < 3; i++) {
    moeflow_weights weights = plain_weights();
    weights.order = cases[i].order;
    EXPECT_OK(moeflow_layer_bind(layer, &weights));
    for (int e = 0; e < E; e++) {
      expect_gate_up(e, 0x1000000 + (uintptr_t)e * 2 * I * ROW, cases[i].row, cases[i].between, cases[i].group_of_rows);
      expect_down(e, 0x8000000 + (uintptr_t)e * H * DOWN_ROW, DOWN_ROW);
    }
    EXPECT(layer->maps->up_first == cases[i].up_first, "order %d", i);
  }
  close_world();
}

static void test_strides_and_pointers(void) {
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  const void *gate_up[E], *down[E];
  open_world(fake_plan_experts, &spec, 100);
  weights.gate_up_row_stride = ROW + 32;
  weights.gate_up_expert_stride = 1 << 21;
  weights.down_row_stride = DOWN_ROW + 16;
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  expect_gate_up(3, 0x1000000 + 3 * (1 << 21), ROW + 32, I * (ROW + 32), 8 * (ROW + 32));
  expect_down(3, 0x8000000 + 3 * H * (DOWN_ROW + 16), DOWN_ROW + 16);
  for (int e = 0; e < E; e++) {
    gate_up[e] = (void *)(0x40000000 - (uintptr_t)e * 0x200000);
    down[e] = (void *)(0x50000000 + (uintptr_t)e * 0x200010);
  }
  weights = plain_weights();
  weights.gate_up_experts = gate_up;
  weights.down_experts = down;
  weights.order = MOEFLOW_UP_GATE;
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  for (int e = 0; e < E; e++) {
    expect_gate_up(e, (uintptr_t)gate_up[e], ROW, I * ROW, 8 * ROW);
    expect_down(e, (uintptr_t)down[e], DOWN_ROW);
  }
  close_world();
}

/* What cannot be mapped leaves the weights that were bound before. */
static void test_bad_maps(void) {
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  const void *pointers[E];
  open_world(fake_plan_experts, &spec, 100);
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  const struct tensor_maps *maps = layer->maps;
  for (int e = 0; e < E; e++) pointers[e] = (void *)(0x40000000 + (uintptr_t)e * 0x200000);
  weights.down_experts = pointers;
  pointers[7] = NULL;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ARGUMENT, "down_experts: the pointer of local expert 7");
  pointers[7] = (void *)0x40000008;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_CUDA, "down of local expert 7 at 0x40000008");
  cuda->fail_encode = 5;
  weights = plain_weights();
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_CUDA, "gate_up of local expert 4 at 0x1200000");
  cuda->fail_allocation = 1;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_MEMORY, "bytes");
  driver.cuTensorMapEncodeTiled = NULL;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ENVIRONMENT, "no cuTensorMapEncodeTiled");
  EXPECT(layer->maps == maps && layer->weights.down.base == (const void *)0x8000000 && !layer->weights.down.experts,
         "the first binding stays");
  close_world();
}

/* A captured graph holds the address of its maps: they stay as they were while the layer lives. */
static void test_rebind(void) {
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  open_world(fake_plan_experts, &spec, 100);
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  const struct moeflow_tensor_map *old = layer->maps->gate_up;
  weights.gate_up = (void *)0x20000000;
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT((uintptr_t)read_map(old, 0).base == 0x1000000, "the older map is unchanged");
  EXPECT((uintptr_t)read_map(layer->maps->gate_up, 0).base == 0x20000000, "the newer one has the new address");
  close_world();
}

static void test_no_maps(void) { /* a plan without experts asks nothing of the driver */
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  open_world(fake_plan, &spec, 100);
  driver.cuTensorMapEncodeTiled = NULL;
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT(!layer->maps);
  close_world();
}

/* ---- Steps ---- */

static moeflow_forward_args step_args(int tokens, int tokens_max) {
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = tokens;
  args.tokens_max = tokens_max;
  args.hidden = args.out = (void *)0x10000;
  args.ids = (void *)0x20000;
  args.weights = (void *)0x30000;
  args.stream = &cuda->legacy;
  return args;
}

/* The launch of `kernel` since call `from`, whose parameters are copied; its log entry, NULL when there is none. */
static const struct fake_call *find_launch(int from, const char *kernel, void *params, size_t bytes) {
  for (int i = from; i < cuda->call_count; i++) {
    if (strcmp(cuda->calls[i].name, "cuLaunchKernel") || strcmp(cuda->calls[i].kernel, kernel)) continue;
    memcpy(params, cuda->calls[i].params, bytes);
    return &cuda->calls[i];
  }
  return NULL;
}

/* The log from call `from` on: a fused step, whose kernels all wait for the one before by themselves, and nothing else. */
static void expect_fused(int from, int64_t tokens) {
  static const char *const names[] = {"moeflow_dispatch", "moeflow_experts", "moeflow_return_combine"};
  EXPECT(cuda->call_count - from == 3, "%d calls", cuda->call_count - from);
  for (int i = 0; i < 3 && from + i < cuda->call_count; i++) {
    const struct fake_call *call = &cuda->calls[from + i];
    EXPECT(!strcmp(call->kernel, names[i]) && call->early, "call %d is %s", i, call->kernel);
    EXPECT(i == 1 || call->blocks == tokens, "%s: %u blocks, want %lld", names[i], call->blocks, (long long)tokens);
  }
}

/* parts: of the outputs that owner_reduce adds; 0: the experts kernel adds them itself. */
static void expect_lists(int from, int tile_tokens, int parts) {
  struct moeflow_expert_prepare_params prepare;
  struct moeflow_owner_reduce_params reduce;
  EXPECT(find_launch(from, "moeflow_expert_prepare", &prepare, sizeof prepare) && prepare.tile_tokens == tile_tokens,
         "tiles of %d, want %d", prepare.tile_tokens, tile_tokens);
  const struct fake_call *call = find_launch(from, "moeflow_owner_reduce", &reduce, sizeof reduce);
  EXPECT(parts ? call && reduce.parts == parts && !reduce.write_empty : !call, "want %d parts", parts);
}

static void test_step(void) {
  struct moeflow_experts_params experts;
  char any[256];
  open_bound(100);
  const struct group_lane *lane = &group->lanes[1];
  moeflow_forward_args args = step_args(5, 5);
  args.lane = 1;
  int from = cuda->call_count; /* 8 received rows: the first experts variant, 4 parts of 8 * 4 * 512 floats */
  EXPECT_OK(moeflow_forward(layer, &args));
  const struct fake_call *call = find_launch(from, "moeflow_experts", &experts, sizeof experts);
  EXPECT(call && call->blocks == 132 && call->threads == 384 && call->shared_bytes == 65536, "the persistent grid");
  expect_fused(from, 5);
  EXPECT(experts.fused && experts.local_experts == layer->local_experts && experts.record == lane->record_device);
  EXPECT(experts.peers.flags == lane->flags && experts.peers.peer_flags == lane->peer_flags &&
         experts.peers.words == group->flag_words && experts.peers.ranks == 1);
  EXPECT(experts.lane == lane->state && experts.in.base == lane->received && experts.in.rows == 8);
  EXPECT(experts.entries == lane->entries && experts.tiles == lane->tiles && experts.tile_count == lane->tile_count);
  EXPECT(experts.gate_up == layer->maps->gate_up && experts.down == layer->maps->down && experts.up_first == 0);
  EXPECT(experts.control == lane->control && experts.tiles_max == lane->tiles_max);
  EXPECT(experts.activations == lane->activations && experts.outputs == lane->outputs);
  EXPECT(experts.part_stride == 8 * K * H && 4 * experts.part_stride <= lane->outputs_max);
  EXPECT(experts.sum == 1 && experts.write_empty == 0 && experts.positions == lane->positions &&
         experts.out.targets == lane->return_targets);
  args.flags = MOEFLOW_FORWARD_STEPWISE;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(cuda->call_count - from == 7 && !find_launch(from, "moeflow_gate_up", any, 0), "in place of gate_up and down");
  EXPECT(find_launch(from, "moeflow_experts", &experts, sizeof experts) && !experts.fused && experts.sum);
  for (int i = from; i < cuda->call_count; i++) {
    EXPECT(cuda->calls[i].early == !strcmp(cuda->calls[i].kernel, "moeflow_experts"), "%s does not", cuda->calls[i].kernel);
  }
  expect_lists(from, 8, 0);

  args = step_args(40, 40); /* 64 received rows: the second, with two blocks a multiprocessor */
  args.flags = MOEFLOW_FORWARD_STEPWISE;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  call = find_launch(from, "moeflow_experts", &experts, sizeof experts);
  EXPECT(call && call->blocks == 264 && call->threads == 256 && experts.part_stride == 64 * K * H, "the second variant");
  expect_lists(from, 32, 0);

  args = step_args(65, 0); /* 100: the portable form */
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(!find_launch(from, "moeflow_experts", &experts, 0) && find_launch(from, "moeflow_gate_up", any, 0) &&
         find_launch(from, "moeflow_down", any, 0));
  expect_lists(from, 32, 1);

  args = step_args(5, 5); /* identity has outputs of one part */
  args.flags = MOEFLOW_FORWARD_IDENTITY;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(find_launch(from, "moeflow_identity", any, 0) && !find_launch(from, "moeflow_experts", any, 0));
  expect_lists(from, 8, 1);
  close_world();
}

/* The lane holds every part of as many rows as the bucket serves, and no more of larger steps. */
static void test_workspace(void) {
  open_bound(20); /* 4 parts up to 16 rows are more than one of 20 */
  EXPECT(group->lanes[0].outputs_max == 4 * 16 * K * H, "%lld floats", (long long)group->lanes[0].outputs_max);
  /* 80 entries for 16 experts in tiles of 8 */
  EXPECT(group->lanes[0].tiles_max == 16 + 10, "%d tiles", group->lanes[0].tiles_max);
  const struct moeflow_experts_control *control = group->lanes[0].control;
  const uint32_t *done = (const uint32_t *)(control + 1);
  EXPECT((uintptr_t)control % 128 == 0 && control->launches == 0 && control->left == 0 && control->tickets == 0);
  for (int i = 0; i < 2 * 26; i++) EXPECT(done[i] == 0, "counter %d", i);
  EXPECT((const uint8_t *)(done + 2 * 26) <= (const uint8_t *)group->lanes[0].arena + group->lanes[0].arena_bytes);
  context->plan.buckets[0].rows_max = 20; /* a white-box change behind the lane's back is noticed */
  context->plan.buckets[1].rows_max = 40;
  moeflow_forward_args args = step_args(20, 20);
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_INTERNAL, "4 parts of 40960 outputs");
  close_world();
  open_bound(100);
  EXPECT(group->lanes[0].outputs_max == 100 * K * H, "%lld floats", (long long)group->lanes[0].outputs_max);
  close_world();
}

/* ---- MOEFLOW_FORWARD_EXPERTS ---- */

static moeflow_forward_args again_args(int tokens_max, void *out) {
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = -7; /* ignored, as all the inputs are */
  args.tokens_max = tokens_max;
  args.out = out;
  args.stream = &cuda->legacy;
  args.flags = MOEFLOW_FORWARD_EXPERTS;
  return args;
}

static void test_again(void) {
  struct moeflow_owner_reduce_params reduce;
  struct moeflow_experts_params experts;
  open_bound(100);
  moeflow_forward_args step = step_args(3, 5), args = again_args(5, (void *)0x70000);
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "run a whole step of it first");
  EXPECT_OK(moeflow_forward(layer, &step));
  int from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(cuda->call_count - from == 1 && find_launch(from, "moeflow_experts", &experts, sizeof experts), "experts alone");
  EXPECT((const void *)experts.out.targets == (const void *)0x70000 && experts.out.block_bytes == 0 && experts.sum == 1 &&
             experts.write_empty == 1,
         "sums into plain rows");
  layer->separate_sums = 1;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(cuda->call_count - from == 2 && find_launch(from, "moeflow_experts", &experts, sizeof experts) && !experts.sum);
  EXPECT(find_launch(from, "moeflow_owner_reduce", &reduce, sizeof reduce), "the sums by themselves");
  EXPECT((const void *)reduce.out.targets == (const void *)0x70000 && reduce.out.block_bytes == 0 &&
             reduce.write_empty == 1 && reduce.parts == 4 && reduce.part_stride == 8 * K * H,
         "into plain rows");
  layer->separate_sums = 0;
  args.out = NULL;
  args.tokens_max = 7; /* the same R */
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(cuda->call_count - from == 1 && find_launch(from, "moeflow_experts", &experts, sizeof experts) && !experts.sum,
         "without `out` no sums");
  cuda->capturing = 1;
  from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(cuda->call_count - from == 1);
  cuda->capturing = 0;
  EXPECT(atomic_load(&group->lanes[0].eager) == 1, "only whole steps count: %u", atomic_load(&group->lanes[0].eager));
  close_world();
}

static void test_again_refused(void) {
  open_bound(100);
  moeflow_forward_args step = step_args(3, 5), args = again_args(5, NULL);
  EXPECT_OK(moeflow_forward(layer, &step));
  const int from = cuda->call_count;
  args.tokens_max = 40;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "lane 0 holds no rows of this layer at tokens_max 40");
  args.tokens_max = 9; /* R is 16, not 8; the same variant serves both */
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "at tokens_max 9");
  args.tokens_max = 5;
  args.lane = 1;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "lane 1 holds no rows");
  args.lane = 2;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_ARGUMENT, "lane 2 does not exist");
  args = again_args(5, (void *)0x70008);
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_ARGUMENT, "out is at");
  args = again_args(5, NULL);
  args.flags |= MOEFLOW_FORWARD_IDENTITY;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_ARGUMENT, "goes with no other");
  args.flags = 4;
  args.tokens_max = 101;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_CAPACITY, "101");
  args = again_args(5, NULL);
  context->plan.buckets[0].experts = 1; /* lists of other tiles */
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "run a whole step");
  EXPECT(cuda->call_count == from, "nothing was launched, and no peer is told");
  EXPECT_OK(moeflow_forward(layer, &step));
  EXPECT_OK(moeflow_forward(layer, &args));
  cuda->fail_launch = 1;
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_CUDA, "kernel experts");
  EXPECT(group->lanes[0].state->poison == 0, "no step was begun: the group stays");
  close_world();
}

/* Choices go home one by one: owner_reduce hands them out, and the experts kernel sums nothing. */
static void test_choices(void) {
  struct spec spec = fake_spec();
  struct moeflow_experts_params experts;
  moeflow_weights weights = plain_weights();
  spec.reduce = SPEC_REDUCE_CHOICES;
  open_world(fake_plan_experts, &spec, 100);
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT_OK(moeflow_prepare(&layer, 1, 0));
  moeflow_forward_args step = step_args(3, 5), args = again_args(5, NULL);
  const int from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &step));
  EXPECT(find_launch(from, "moeflow_experts", &experts, sizeof experts) && !experts.sum, "a choice is not summed");
  expect_lists(from, 8, 4);
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_UNSUPPORTED, "returns choices");
  close_world();
}

/* Lists of a layer that is gone are nobody's, also when another layer gets its address. */
static void test_again_other_layer(void) {
  moeflow_weights weights = plain_weights();
  moeflow_layer *second;
  open_bound(100);
  EXPECT_OK(moeflow_layer_create(group, context, NULL, &second));
  EXPECT_OK(moeflow_layer_bind(second, &weights));
  EXPECT_OK(moeflow_prepare(&second, 1, 0));
  moeflow_forward_args step = step_args(3, 5), args = again_args(5, NULL);
  EXPECT_OK(moeflow_forward(second, &step));
  EXPECT_STATUS(moeflow_forward(layer, &args), MOEFLOW_ERROR_STATE, "holds no rows of this layer");
  EXPECT_OK(moeflow_layer_destroy(second));
  EXPECT(group->lanes[0].listed_layer == NULL);
  close_world();
}

/* ---- Packed weights ---- */

#define PACKED_GATE_UP (2 * I * ROW) /* no tails: as large as plain */
#define PACKED_DOWN (H * DOWN_ROW)

static void test_pack(void) {
  struct spec spec = fake_spec();
  struct moeflow_pack_weights_params params;
  moeflow_weights weights = plain_weights();
  int64_t gate_up_bytes = 0, down_bytes = 0;
  open_world(fake_plan_experts, &spec, 100);
  EXPECT_OK(moeflow_layer_packed_bytes(layer, &gate_up_bytes, &down_bytes));
  EXPECT(gate_up_bytes == PACKED_GATE_UP && down_bytes == PACKED_DOWN, "%lld and %lld", (long long)gate_up_bytes,
         (long long)down_bytes);
  weights.order = MOEFLOW_INTERLEAVED;
  int from = cuda->call_count;
  EXPECT_OK(moeflow_layer_pack(layer, &weights, 3, 2, (void *)0x100000, (void *)0x200000, &cuda->legacy));
  EXPECT(cuda->call_count - from == 2, "two launches");
  for (int down = 0; down < 2 && cuda->call_count - from == 2; down++) {
    const struct fake_call *call = &cuda->calls[from + down];
    memcpy(&params, call->params, sizeof params);
    EXPECT(!strcmp(call->kernel, "moeflow_pack_weights") && call->stream == &cuda->legacy && params.down == down);
    EXPECT(params.first_expert == 3 && params.experts == 2);
    EXPECT(params.gate_row == 0 && params.up_row == 1 && params.row_step == 2);
    EXPECT(params.packed == (uint8_t *)(down ? 0x200000ul : 0x100000ul), "%p", (void *)params.packed);
    EXPECT(params.weights.base == (const uint8_t *)(down ? 0x8000000ul : 0x1000000ul));
    /* 8 warps a block, a fragment of 512 bytes each */
    EXPECT(call->blocks == 2u * (down ? PACKED_DOWN : PACKED_GATE_UP) / 512 / 8 && call->threads == 256, "%u blocks",
           call->blocks);
  }
  from = cuda->call_count;
  EXPECT_OK(moeflow_layer_pack(layer, &weights, 16, 0, (void *)0x100000, (void *)0x200000, NULL));
  EXPECT(cuda->call_count == from, "no experts, nothing to do");
  static const struct {
    int first, count;
    uintptr_t to_gate_up, to_down;
    const char *says;
  } refused[] = {
      {-1, 1, 16, 16, "1 experts from -1 on"},
      {15, 2, 16, 16, "2 experts from 15 on; the layer has 16"},
      {2, -1, 16, 16, "-1 experts"},
      {INT32_MAX, INT32_MAX, 16, 16, "experts from"},
      {0, 1, 0, 16, "not NULL"},
      {0, 1, 16, 24, "multiples of 16"},
  };
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    EXPECT_STATUS(moeflow_layer_pack(layer, &weights, refused[i].first, refused[i].count, (void *)refused[i].to_gate_up,
                                     (void *)refused[i].to_down, NULL),
                  MOEFLOW_ERROR_ARGUMENT, refused[i].says);
  }
  weights.packed = 1;
  EXPECT_STATUS(moeflow_layer_pack(layer, &weights, 0, 1, (void *)16, (void *)16, NULL), MOEFLOW_ERROR_ARGUMENT, "already");
  EXPECT_STATUS(moeflow_layer_packed_bytes(layer, NULL, &down_bytes), MOEFLOW_ERROR_ARGUMENT, "NULL");
  close_world();
}

static void test_packed_step(void) {
  struct spec spec = fake_spec();
  struct moeflow_experts_params experts;
  moeflow_weights weights = plain_weights();
  open_world(fake_plan_experts, &spec, 100);
  weights.packed = 1;
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT_OK(moeflow_prepare(&layer, 1, 0));
  EXPECT(!layer->maps, "packed weights need no tensor maps");
  static const struct {
    int tokens_max;
    unsigned blocks;
    int tile_tokens, parts;
  } cases[] = {{5, 132, 8, 4}, {40, 264, 32, 1}, {100, 264, 32, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    moeflow_forward_args args = step_args(5, cases[i].tokens_max);
    const int from = cuda->call_count;
    EXPECT_OK(moeflow_forward(layer, &args));
    const struct fake_call *call = find_launch(from, "moeflow_experts_stream", &experts, sizeof experts);
    EXPECT(call && call->blocks == cases[i].blocks && cuda->call_count - from == 8, "tokens_max %d", cases[i].tokens_max);
    EXPECT(!experts.gate_up && !experts.down && experts.gate_up_packed.base == (const uint8_t *)0x1000000);
    EXPECT(experts.gate_up_packed.expert_stride == PACKED_GATE_UP && experts.down_packed.expert_stride == PACKED_DOWN);
    expect_lists(from, cases[i].tile_tokens, cases[i].parts);
  }
  weights = plain_weights(); /* and back */
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  moeflow_forward_args args = step_args(5, 5);
  const int from = cuda->call_count;
  EXPECT_OK(moeflow_forward(layer, &args));
  EXPECT(find_launch(from, "moeflow_experts", &experts, 0) != NULL, "plain weights again");
  close_world();
}

static void test_packed_refused(void) {
  struct spec spec = fake_spec();
  moeflow_weights weights = plain_weights();
  int64_t a, b;
  open_world(fake_plan_experts, &spec, 100);
  weights.packed = 1;
  weights.order = MOEFLOW_UP_GATE;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ARGUMENT, "packed weights have no rows");
  weights.order = MOEFLOW_GATE_UP;
  weights.down_row_stride = DOWN_ROW;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ARGUMENT, "packed weights have no rows");
  weights.down_row_stride = 0;
  weights.gate_up_expert_stride = PACKED_GATE_UP - 16;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ARGUMENT, "packed gate_up: strides of");
  weights.gate_up_expert_stride = 0;
  weights.packed = 2;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_ARGUMENT, "packed is 2");
  weights.packed = 1;
  weights.size = offsetof(moeflow_weights, packed); /* a caller of an older header */
  EXPECT_OK(moeflow_layer_bind(layer, &weights));
  EXPECT(!layer->weights.packed);
  close_world();
  open_world(fake_plan, &spec, 100);
  weights.size = sizeof weights;
  EXPECT_STATUS(moeflow_layer_bind(layer, &weights), MOEFLOW_ERROR_UNSUPPORTED,
                "`name: tiny`: moeflow-gen build MODEL.yaml --dtype bf16 --arch sm_90a --packed");
  EXPECT_STATUS(moeflow_layer_packed_bytes(layer, &a, &b), MOEFLOW_ERROR_UNSUPPORTED, "--packed");
  EXPECT_STATUS(moeflow_layer_pack(layer, &weights, 0, 1, (void *)16, (void *)16, NULL), MOEFLOW_ERROR_UNSUPPORTED,
                "--packed");
  close_world();
}

int main(void) {
  in_child("orders", test_orders);
  in_child("strides and pointers", test_strides_and_pointers);
  in_child("bad maps", test_bad_maps);
  in_child("rebind", test_rebind);
  in_child("no maps", test_no_maps);
  in_child("step", test_step);
  in_child("workspace", test_workspace);
  in_child("again", test_again);
  in_child("again, refused", test_again_refused);
  in_child("choices", test_choices);
  in_child("again, other layer", test_again_other_layer);
  in_child("pack", test_pack);
  in_child("packed step", test_packed_step);
  in_child("packed, refused", test_packed_refused);
  TEST_END;
}
