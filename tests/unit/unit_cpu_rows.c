/* CPU kernels pack, expert_index and expert_prepare, one by one, over buffers that hold garbage where nothing was written.
 */
#include "cpu.h"
#include "test.h"

#define H 16
#define K 3
#define E 5
#define RANKS 2
#define ROWS 70 /* more than one chunk of rows per source */

static struct spec spec = {.hidden = H, .intermediate = 8, .experts = E, .top_k = K};
static const struct cpu_call call = {.spec = &spec, .threads = 1};

static struct moeflow_lane lane;
static struct moeflow_record record;
static uint8_t received[RANKS][ROWS][256] __attribute__((aligned(128)));
static int32_t token_places[ROWS * K];
static float token_weights[ROWS * K];

static void reset(uint32_t epoch) {
  memset(&lane, 0, sizeof lane);
  memset(&record, 0, sizeof record);
  memset(received, 0xff, sizeof received);
  memset(token_places, 0xff, sizeof token_places);
  lane.epoch = epoch;
}

/* ---- pack ---- */

/* One element more than there are experts: whoever takes id E for an expert finds a place. */
static const int32_t places[E + 1] = {0 << 16 | 0, 0 << 16 | 1, 1 << 16 | 0, 1 << 16 | 1, MOEFLOW_PLACE_NONE, 0};

struct sent { /* what pack is given, by a source of rank 1, two-sided: both peers' blocks in one send buffer */
  uint16_t hidden[4][H];
  int32_t ids[4][K];
  int64_t ids64[4][K];
  float weights[4][K];
};

static void fill_sent(struct sent *sent) {
  static const int32_t ids[4][K] = {{0, 1, 0}, {2, -1, 5}, {3, 0, INT32_MAX}, {4, INT32_MIN, 2}};
  static const float weights[4][K] = {{0.3f, 0.25f, 1}, {1, 1, 1}, {1, 0.0f, 1}, {1, 1, -0.0f}};
  for (int t = 0; t < 4; t++) {
    for (int i = 0; i < H; i++) sent->hidden[t][i] = (uint16_t)(0x3f00 + 16 * t + i);
  }
  memcpy(sent->ids, ids, sizeof ids);
  memcpy(sent->weights, weights, sizeof weights);
  for (int i = 0; i < 4 * K; i++) sent->ids64[i / K][i % K] = ids[i / K][i % K];
}

static struct moeflow_pack_params pack_params(const struct sent *sent, uint8_t **targets, int tokens) {
  targets[0] = targets[1] = &received[0][0][0];
  return (struct moeflow_pack_params){.lane = &lane,
                                      .record = &record,
                                      .hidden = (const uint8_t *)sent->hidden,
                                      .ids = sent->ids,
                                      .weights = &sent->weights[0][0],
                                      .places = places,
                                      .token_places = token_places,
                                      .token_weights = token_weights,
                                      .out = {targets, sizeof received[0]},
                                      .tokens = tokens,
                                      .tokens_max = 9,
                                      .rank = 1,
                                      .ranks = RANKS,
                                      .replicas = 1};
}

static void expect_row(int peer, int t, const int32_t *want_places, const struct sent *sent) {
  const uint8_t *row = received[peer][t];
  struct moeflow_row_header header;
  memcpy(&header, row, sizeof header);
  EXPECT(header.epoch == 7 && header.rows_sent == 4 && header.tokens_max == 9 && header.flags == 0, "header to %d of %d",
         peer, t);
  EXPECT(!memcmp(row + 16, want_places, 4 * K), "places to %d of token %d", peer, t);
  EXPECT(!memcmp(row + 16 + 4 * K, sent->weights[t], 4 * K), "weights to %d of token %d", peer, t);
  int owner = 0;
  for (int k = 0; k < K; k++) owner |= want_places[k] >= 0 && want_places[k] >> 16 == peer;
  if (owner)
    EXPECT(!memcmp(row + 128, sent->hidden[t], 2 * H), "hidden to %d of token %d", peer, t);
  else
    EXPECT(row[128] == 0xff && row[128 + 2 * H - 1] == 0xff, "no hidden to %d of token %d", peer, t);
}

static void test_pack(int ids_int64) {
  static const int32_t want[4][K] = {{0, 1, 0}, {1 << 16, -1, -1}, {1 << 16 | 1, -1, -1}, {-1, -1, -1}};
  struct sent sent;
  uint8_t *targets[RANKS];
  reset(7);
  fill_sent(&sent);
  struct moeflow_pack_params p = pack_params(&sent, targets, 4);
  if (ids_int64) {
    p.ids = sent.ids64;
    p.ids_int64 = 1;
    sent.ids64[1][2] = INT64_C(1) << 32; /* its low word is expert 0 */
  }
  cpu_pack(&call, &p);
  for (int t = 0; t < 4; t++) {
    for (int peer = 0; peer < RANKS; peer++) expect_row(peer, t, want[t], &sent);
    EXPECT(!memcmp(token_places + t * K, want[t], 4 * K), "kept places of token %d", t);
  }
  EXPECT(received[0][4][0] == 0xff && received[1][4][0] == 0xff, "a row beyond the tokens");
  EXPECT(record.started == 7, "record");
}

/* One row with everything serves all ranks, also where nobody owns a choice. */
static void test_pack_broadcast(void) {
  static const int32_t want[4][K] = {{0, 1, 0}, {1 << 16, -1, -1}, {1 << 16 | 1, -1, -1}, {-1, -1, -1}};
  struct sent sent;
  uint8_t *targets[RANKS];
  reset(7);
  fill_sent(&sent);
  struct moeflow_pack_params p = pack_params(&sent, targets, 4);
  p.broadcast = 1;
  cpu_pack(&call, &p);
  for (int t = 0; t < 4; t++) {
    EXPECT(!memcmp(received[0][t] + 16, want[t], sizeof want[t]), "places of token %d", t);
    EXPECT(!memcmp(received[0][t] + 128, sent.hidden[t], 2 * H), "hidden of token %d", t);
  }
  EXPECT(received[0][4][0] == 0xff && received[1][0][0] == 0xff, "nothing else");
}

static void test_pack_without_tokens(void) {
  struct sent sent;
  uint8_t *targets[RANKS];
  struct moeflow_row_header header;
  reset(7);
  fill_sent(&sent);
  struct moeflow_pack_params p = pack_params(&sent, targets, 0);
  p.flags = MOEFLOW_ROW_FAILED;
  cpu_pack(&call, &p);
  memcpy(&header, received[0][0], sizeof header);
  EXPECT(header.epoch == 7 && header.rows_sent == 0 && header.tokens_max == 9 && header.flags == MOEFLOW_ROW_FAILED,
         "failed");
  lane.poison = MOEFLOW_POISON_TIMEOUT;
  p.tokens = 4;
  p.flags = 0;
  cpu_pack(&call, &p);
  memcpy(&header, received[1][0], sizeof header);
  EXPECT(header.rows_sent == 0 && header.flags == MOEFLOW_ROW_POISONED, "poisoned: %u rows", header.rows_sent);
  EXPECT(received[1][0][128] == 0xff && received[1][1][0] == 0xff, "and nothing else");
  memset(received, 0xff, sizeof received);
  p.out.block_bytes = 0;
  cpu_pack(&call, &p);
  EXPECT(received[0][0][0] == 0xff, "one-sided: not into rows that a peer may still read");
}

static void test_replicas(void) {
  static const int32_t two[E * 2] = {0, 1 << 16, 0 << 16 | 1, -1, 2 << 16, -1, -1, -1, -1, 0};
  struct sent sent;
  uint8_t *targets[RANKS];
  int hits[2] = {0, 0};
  reset(1);
  fill_sent(&sent);
  struct moeflow_pack_params p = pack_params(&sent, targets, 4);
  int32_t ids[ROWS][K];
  float weights[ROWS][K];
  static uint16_t hidden[ROWS][H];
  for (int t = 0; t < ROWS; t++) {
    for (int k = 0; k < K; k++) weights[t][k] = 1;
    ids[t][0] = 0, ids[t][1] = 1, ids[t][2] = 2 + t % 3;
  }
  p.ids = ids;
  p.weights = &weights[0][0];
  p.hidden = (const uint8_t *)hidden;
  p.places = two;
  p.replicas = 2;
  p.tokens = ROWS;
  cpu_pack(&call, &p);
  for (int t = 0; t < ROWS; t++) {
    const int32_t place = token_places[t * K];
    EXPECT(place == two[moeflow_replica(1, (uint32_t)t, 2)], "token %d", t);
    hits[place >> 16]++;
    EXPECT(token_places[t * K + 1] == 1, "a single replica");
    EXPECT(token_places[t * K + 2] == -1, "owner 2 of 2 ranks, no owner, and a list that begins with none");
  }
  EXPECT(hits[0] > ROWS / 4 && hits[1] > ROWS / 4, "both replicas serve: %d and %d", hits[0], hits[1]);
}

/* ---- expert_index and expert_prepare ---- */

#define CHUNKS ((RANKS * ROWS + MOEFLOW_CHUNK_ROWS - 1) / MOEFLOW_CHUNK_ROWS)
#define LOCAL 4
#define ENTRIES (RANKS * ROWS * K)

static struct lists {
  int32_t chunk_counts[CHUNKS * LOCAL], offsets[LOCAL + 1], entries[ENTRIES], positions[ENTRIES], tile_count;
  struct moeflow_tile tiles[ENTRIES + LOCAL];
  int64_t load[LOCAL];
} lists;

static void put_row(int source, int t, uint32_t epoch, uint32_t rows_sent, const int32_t *row_places) {
  const struct moeflow_row_header header = {epoch, rows_sent, 9, 0};
  memcpy(received[source][t], &header, sizeof header);
  memcpy(received[source][t] + 16, row_places, 4 * K);
}

static void run_lists(int local_experts, int tile_tokens) {
  const struct moeflow_rows_in in = {&received[0][0][0], sizeof received[0], ROWS, RANKS, 1, 9};
  memset(&lists, 0x7f, sizeof lists);
  memset(lists.load, 0, sizeof lists.load);
  const struct moeflow_expert_index_params index = {&lane, &record, in, lists.chunk_counts, local_experts, 0};
  const struct moeflow_expert_prepare_params prepare = {
      &lane,           in,          lists.chunk_counts, lists.offsets, lists.entries,
      lists.positions, lists.tiles, &lists.tile_count,  lists.load,    local_experts,
      tile_tokens};
  cpu_expert_index(&call, &index);
  cpu_expert_prepare(&call, &prepare);
}

/* The same lists by a scan per expert: entries ascending within one. `live` says which rows count. */
static void expect_lists(int local_experts, int tile_tokens, const char *live) {
  int position = 0, tile = 0;
  for (int e = 0; e < local_experts; e++) {
    const int begin = position;
    EXPECT(lists.offsets[e] == position, "offset of expert %d: %d, want %d", e, lists.offsets[e], position);
    for (int entry = 0; entry < ENTRIES; entry++) {
      int32_t place;
      memcpy(&place, received[entry / K / ROWS][entry / K % ROWS] + 16 + 4 * (entry % K), 4);
      if (!live[entry / K] || place != (1 << 16 | e)) continue;
      EXPECT(lists.positions[entry] == position && lists.entries[position] == entry, "entry %d at %d", entry, position);
      lists.positions[entry] = -1; /* seen */
      position++;
    }
    EXPECT(lists.load[e] == position - begin, "load of %d", e);
    for (int at = begin; at < position; at += tile_tokens, tile++) {
      const int end = at + tile_tokens < position ? at + tile_tokens : position;
      EXPECT(lists.tiles[tile].expert == e && lists.tiles[tile].begin == at && lists.tiles[tile].end == end, "tile %d",
             tile);
    }
  }
  EXPECT(lists.offsets[local_experts] == position && lists.tile_count == tile, "%d positions, %d tiles", position, tile);
  EXPECT(tile <= moeflow_tiles_max(ENTRIES, local_experts, tile_tokens), "bound of tiles");
  for (int entry = 0; entry < ENTRIES; entry++) EXPECT(lists.positions[entry] == -1, "entry %d is nobody's", entry);
}

static void test_lists(int local_experts, int tile_tokens) {
  char live[RANKS * ROWS] = {0};
  reset(20);
  for (int r = 0; r < RANKS * ROWS; r++) {
    const int source = r / ROWS, t = r % ROWS;
    const uint32_t sent = source == 0 ? 66 : 1000000; /* source 1 lies about its rows: bounded by the buffer */
    const int32_t row[K] = {1 << 16 | (r % 5), (r % 2) << 16 | (r % 3), r % 7 ? 1 << 16 | (r % 5) : -1};
    const int stale = r % 11 == 5; /* a row of the step before, left by a larger one */
    put_row(source, t, stale ? 19 : 20, sent, row);
    live[r] = !stale && t < (source == 0 ? 66 : ROWS);
  }
  run_lists(local_experts, tile_tokens);
  EXPECT(lane.poison == 0 && record.received == 20, "poison %u", lane.poison);
  expect_lists(local_experts, tile_tokens, live);
}

static void test_headers(void) {
  static const int32_t none[K] = {-1, -1, -1};
  static const struct {
    struct moeflow_row_header header;
    uint32_t poison, mine, theirs;
  } cases[] = {{{20, 1, 9, MOEFLOW_ROW_FAILED}, 0, 0, 0},
               {{19, 1, 9, 0}, MOEFLOW_POISON_EPOCH, 20, 19},
               {{20, 1, 8, 0}, MOEFLOW_POISON_TOKENS_MAX, 9, 8},
               {{20, 0, 9, MOEFLOW_ROW_POISONED}, MOEFLOW_POISON_PEER, 0, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    reset(20);
    put_row(0, 0, 20, 0, none);
    put_row(1, 0, 20, 1, none);
    memcpy(received[1][0], &cases[i].header, sizeof cases[i].header);
    run_lists(LOCAL, 8);
    EXPECT(lane.poison == cases[i].poison && record.poison == cases[i].poison, "case %zu: %u", i, lane.poison);
    EXPECT(record.mine == cases[i].mine && record.theirs == cases[i].theirs, "case %zu: %u, %u", i, record.mine,
           record.theirs);
    if (cases[i].poison) {
      EXPECT(record.peer == 1 && record.step == 20 && record.phase == MOEFLOW_PHASE_DISPATCH, "case %zu", i);
      EXPECT(lists.tile_count == 0x7f7f7f7f, "a poisoned lane lists nothing");
    } else {
      EXPECT(record.failed_peer == 2 && record.failed_step == 20, "failed peer %u", record.failed_peer);
    }
  }
}

int main(void) {
  EXPECT(moeflow_row_bytes(K, H, 2, 0) == 256, "the rows of this test");
  test_pack(0);
  test_pack(1);
  test_pack_broadcast();
  test_pack_without_tokens();
  test_replicas();
  test_lists(LOCAL, 8);
  test_lists(LOCAL, 32);
  test_lists(1, 1);
  test_headers();
  TEST_END;
}
