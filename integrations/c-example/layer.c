/* One expert-parallel MoE layer on the CPU backend: two ranks, each in a thread of this process, built from the installed
 * package alone. On GPUs the same calls take device pointers, a stream, and one process per rank.
 *
 * All matrices are identities and all inputs are 1, so each expert gives silu(1) * 1 = 0.731, and so must the layer. */
#include <moeflow.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, TOKENS = 3, HIDDEN = 128, INTERMEDIATE = 128, EXPERTS = 4, TOP_K = 2, LOCAL = EXPERTS / RANKS };
enum { ONE = 0x3f80, SILU_OF_ONE = 0x3f3b }; /* bf16 bits */

static moeflow_context *context;
static moeflow_unique_id id;

static void check(moeflow_status status) {
  if (status == MOEFLOW_OK) return;
  fprintf(stderr, "%s: %s\n", moeflow_status_name(status), moeflow_last_error());
  exit(1);
}

static _Alignas(16) uint16_t gate_up[LOCAL][2][INTERMEDIATE][HIDDEN], down[LOCAL][HIDDEN][INTERMEDIATE]; /* both ranks' */

static void *run_rank(void *argument) {
  int rank = *(int *)argument;
  moeflow_group_config group_config = MOEFLOW_GROUP_CONFIG_INIT;
  group_config.rank = rank;
  group_config.ranks = RANKS;
  group_config.capacity = TOKENS;
  group_config.transport = MOEFLOW_TRANSPORT_LOCAL;
  group_config.unique_id = &id;
  moeflow_group *group;
  check(moeflow_group_create(&context, 1, &group_config, &group));

  moeflow_layer_config layer_config = MOEFLOW_LAYER_CONFIG_INIT;
  moeflow_layer *layer;
  check(moeflow_layer_create(group, context, &layer_config, &layer));
  moeflow_weights weights = MOEFLOW_WEIGHTS_INIT;
  weights.gate_up = gate_up;
  weights.down = down;
  check(moeflow_layer_bind(layer, &weights));
  check(moeflow_prepare(&layer, 1, 0));

  static _Alignas(16) uint16_t hidden[RANKS][TOKENS * HIDDEN], out[RANKS][TOKENS * HIDDEN];
  int32_t ids[TOKENS][TOP_K] = {{0, 1}, {1, 2}, {3, 0}};
  float choice_weights[TOKENS][TOP_K] = {{0.5f, 0.5f}, {0.25f, 0.75f}, {0.5f, 0.5f}};
  for (int i = 0; i < TOKENS * HIDDEN; i++) hidden[rank][i] = ONE;
  moeflow_forward_args args = MOEFLOW_FORWARD_ARGS_INIT;
  args.tokens = TOKENS;
  args.hidden = hidden[rank];
  args.ids = ids;
  args.weights = choice_weights[0];
  args.out = out[rank];
  check(moeflow_forward(layer, &args));
  check(moeflow_poll(group, 10000));

  long wrong = 0;
  for (int i = 0; i < TOKENS * HIDDEN; i++) wrong += out[rank][i] != SILU_OF_ONE;
  printf("rank %d: %d tokens through %d experts on %d ranks, %ld wrong values\n", rank, TOKENS, EXPERTS, RANKS, wrong);
  check(moeflow_layer_destroy(layer));
  check(moeflow_group_destroy(group));
  return wrong ? argument : NULL;
}

int main(int argc, char **argv) {
  if (argc != 2) return fprintf(stderr, "usage: layer SPEC, made by: moeflow-gen explain tiny.yaml --format spec\n"), 2;
  static char text[4096];
  FILE *file = fopen(argv[1], "r");
  if (!file || !fread(text, 1, sizeof text - 1, file)) return fprintf(stderr, "cannot read %s\n", argv[1]), 3;
  fclose(file);

  for (int e = 0; e < LOCAL; e++)
    for (int i = 0; i < INTERMEDIATE; i++) gate_up[e][0][i][i] = gate_up[e][1][i][i] = down[e][i][i] = ONE;

  moeflow_open_config config = MOEFLOW_OPEN_CONFIG_INIT;
  config.backend = MOEFLOW_BACKEND_CPU;
  config.spec = text;
  check(moeflow_open(&config, &context));
  check(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));

  pthread_t threads[RANKS];
  int ranks[RANKS] = {0, 1}, failed = 0;
  for (int r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run_rank, &ranks[r]);
  for (int r = 0; r < RANKS; r++) {
    void *wrong;
    pthread_join(threads[r], &wrong);
    failed |= wrong != NULL;
  }
  check(moeflow_close(context));
  return failed ? 4 : 0;
}
