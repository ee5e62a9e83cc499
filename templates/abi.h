/* What host and device must agree on: the packed row, the lane's state, one parameter struct per kernel.
 *
 * Read by C11 (runtime/, gen/), by NVRTC (templates/) and by the CPU emulator (tests/emulated/). Pointers are device addresses
 * (the CPU backend: host addresses); every struct has the same layout in all three, asserted at the end.
 */
#ifndef MOEFLOW_ABI_H
#define MOEFLOW_ABI_H

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define MOEFLOW_FN __host__ __device__ constexpr inline
#else
#include <stdint.h>
#ifdef __cplusplus
#define MOEFLOW_FN constexpr inline
#else
#define MOEFLOW_FN static inline
#endif
#endif

#define MOEFLOW_PROTOCOL 2u /* meaning of rows, headers and phases; part of the ranks' fingerprint */

/* ---- The packed row: [header][hidden][scales], each part padded to 128 bytes ---- */

#define MOEFLOW_ROW_ALIGN 128
#define MOEFLOW_CHOICES_MAX 32

struct moeflow_row_header { /* then int32 ids[K] (owner << 16 | local slot, -1 = none), then float weights[K] */
  uint32_t epoch;           /* the step that wrote the row; other epochs are stale */
  uint32_t rows_sent;       /* rows that this source sent in this step: row t counts only if t < rows_sent */
  uint32_t tokens_max;      /* must equal the receiver's */
  uint32_t flags;           /* MOEFLOW_ROW_* */
};

#define MOEFLOW_ROW_FAILED 1u   /* the source joined with 0 rows after a bad argument; peers go on */
#define MOEFLOW_ROW_POISONED 2u /* the source's group is poisoned; receivers become so */

MOEFLOW_FN int64_t moeflow_align(int64_t bytes) {
  return (bytes + MOEFLOW_ROW_ALIGN - 1) / MOEFLOW_ROW_ALIGN * MOEFLOW_ROW_ALIGN;
}
MOEFLOW_FN int64_t moeflow_row_ids_offset(void) { return 16; }
MOEFLOW_FN int64_t moeflow_row_weights_offset(int top_k) { return 16 + 4 * (int64_t)top_k; }
MOEFLOW_FN int64_t moeflow_row_hidden_offset(int top_k) { return moeflow_align(16 + 8 * (int64_t)top_k); }
/* element_bytes of the dispatch dtype (bf16 2); scale_bytes: all scales of a row (bf16: 0) */
MOEFLOW_FN int64_t moeflow_row_scales_offset(int top_k, int hidden, int element_bytes) {
  return moeflow_row_hidden_offset(top_k) + moeflow_align((int64_t)hidden * element_bytes);
}
MOEFLOW_FN int64_t moeflow_row_bytes(int top_k, int hidden, int element_bytes, int scale_bytes) {
  return moeflow_row_scales_offset(top_k, hidden, element_bytes) + moeflow_align(scale_bytes);
}
/* A returned row: H values of the return dtype (bf16 2, fp32 4), padded. `reduce: choices` returns K of them a token. */
MOEFLOW_FN int64_t moeflow_return_row_bytes(int hidden, int element_bytes) {
  return moeflow_align((int64_t)hidden * element_bytes);
}

/* A place: where an expert lives. */
#define MOEFLOW_PLACE_NONE (-1)
MOEFLOW_FN int32_t moeflow_place(int32_t owner, int32_t slot) { return (int32_t)((uint32_t)owner << 16 | (uint32_t)slot); }
MOEFLOW_FN int32_t moeflow_place_owner(int32_t place) { return place >> 16; }
MOEFLOW_FN int32_t moeflow_place_slot(int32_t place) { return place & 0xffff; }

/* Which of `count` replicas serves token t of rank s: a mix of both (the finaliser of MurmurHash3, public domain). */
MOEFLOW_FN uint32_t moeflow_replica(uint32_t source, uint32_t token, uint32_t count) {
  uint32_t h = source * 0x9e3779b9u + token;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return (h ^ (h >> 16)) % count;
}

/* ---- State of a lane, in device memory; of its record, in host memory that the device writes ---- */

enum moeflow_phase { /* what a step has reached or waits for */
  MOEFLOW_PHASE_IDLE = 0,
  MOEFLOW_PHASE_DISPATCH = 1, /* rows on their way out */
  MOEFLOW_PHASE_EXPERTS = 2,
  MOEFLOW_PHASE_RETURN = 3 /* rows on their way home */
};

enum moeflow_poison { /* why a group is unusable; the first cause stays */
  MOEFLOW_POISON_NONE = 0,
  MOEFLOW_POISON_PEER = 1,       /* a peer said it is poisoned */
  MOEFLOW_POISON_TOKENS_MAX = 2, /* mine, theirs: tokens_max */
  MOEFLOW_POISON_EPOCH = 3,      /* mine, theirs: step numbers; the ranks are out of step */
  MOEFLOW_POISON_TIMEOUT = 4,    /* the peer stayed silent in `phase` */
  MOEFLOW_POISON_ABORT = 5,      /* moeflow_abort */
  MOEFLOW_POISON_LEND = 6        /* CPU: no weights were lent; mine: local expert, theirs: 1 for down */
};

struct moeflow_lane { /* device memory; epoch is bumped by combine, the last kernel of a step */
  uint32_t epoch;
  uint32_t poison; /* enum moeflow_poison; every kernel returns at once when it is set */
  uint32_t steps;  /* eager steps ended since creation, copied into the record */
  uint32_t returning; /* fused: the epoch, for return_combine, whose other blocks read it while one bumps the word above */
  uint32_t reserved[28];
};

struct moeflow_record { /* pinned host memory, one per lane; read by moeflow_poll */
  uint32_t started;     /* epoch of the last step whose pack ran */
  uint32_t received;    /* epoch of the last step whose rows arrived */
  uint32_t finished;    /* epoch of the last step that ended */
  uint32_t steps;       /* steps ended since creation, replays not counted */
  uint32_t failed_peer; /* 1 + the last peer that sent MOEFLOW_ROW_FAILED, 0 = none */
  uint32_t failed_step;
  uint32_t poison;      /* enum moeflow_poison, written last; the rest says more: */
  uint32_t peer;
  uint32_t phase;
  uint32_t step;
  uint32_t mine;
  uint32_t theirs;
  uint32_t reserved[20];
};

/* ---- Flags of one-sided transports ----
 * A rank's flag block of a lane: for each phase and source `words` epochs, then a poison mark by source. Block c of a grid of G
 * raises words c, c + G, ... at every peer once what it stored there can be seen, so that nobody counts blocks; who waits,
 * waits for all words of all sources. A word is up when it is the step's epoch or a later one, across the wrap. A poisoned
 * rank's words are up for ever: it adds MOEFLOW_FLAG_POISONED, which no healthy rank comes near, and its mark says why. */

#define MOEFLOW_FLAG_POISONED 0x40000000u
#define MOEFLOW_FLAG_AHEAD 0x20000000 /* words that are so far ahead of the epoch are a poisoned rank's */

MOEFLOW_FN int64_t moeflow_flag_at(int phase, int source, int ranks, int words) { /* of the source's first word */
  return ((phase == MOEFLOW_PHASE_RETURN ? ranks : 0) + (int64_t)source) * words;
}
MOEFLOW_FN int64_t moeflow_mark_at(int source, int ranks, int words) { return 2 * (int64_t)ranks * words + source; }
MOEFLOW_FN int64_t moeflow_flag_block(int ranks, int words) { return moeflow_mark_at(ranks, ranks, words); } /* its words */

/* How a kernel tells its peers and awaits them. */
struct moeflow_peers {
  uint32_t *const *peer_flags;    /* [ranks], device memory: each rank's flag block */
  uint32_t *flags;                /* mine */
  const volatile uint32_t *abort; /* host memory; non-zero ends a wait */
  uint64_t timeout_ns;
  int32_t words;                  /* at least the blocks of any grid that raises flags */
  int32_t rank;
  int32_t ranks;
  int32_t reserved;
};

/* ---- Work lists on the owner ----
 * A received row (source s, token t) has the number r = s * rows + t. An entry is one (row, choice) pair that this rank must
 * compute: number r * K + k. Its position in expert-major order (experts ascending, entries ascending within one) indexes
 * the activations and the down output. */

#define MOEFLOW_LOCAL_EXPERTS_MAX 4096 /* slots that a rank may own: their counts stand in shared memory */
#define MOEFLOW_CHUNK_ROWS 64 /* rows that one block of expert_index and expert_prepare handles */

struct moeflow_tile { /* at most tile_tokens consecutive positions of one local expert */
  int32_t expert;
  int32_t begin;
  int32_t end;
  int32_t reserved;
};

/* Most tiles for `entries` entries: each expert may leave one tile partly filled. */
MOEFLOW_FN int64_t moeflow_tiles_max(int64_t entries, int64_t local_experts, int tile_tokens) {
  return (entries < local_experts ? entries : local_experts) + entries / tile_tokens;
}

/* Dynamic shared memory of a grouped GEMM block: a ring of `stages` tiles, each `matrices` weight tiles (gate_up 2: gate and
 * up; down 1) of tile_rows and one row tile of tile_tokens, tile_depth bf16 wide. */
MOEFLOW_FN int64_t moeflow_gemm_shared_bytes(int matrices, int tile_tokens, int tile_rows, int tile_depth, int stages) {
  return (int64_t)stages * (matrices * (int64_t)tile_rows + tile_tokens) * tile_depth * 2;
}

/* ---- The experts kernel: gate_up, down and the weighted sums of all tiles in one launch, dealt out as tickets ----
 * Its blocks take tickets in order: first every gate_up unit, tile by tile, then the down units, then the sums. A unit is up to
 * tile_rows weight rows of one tile, or twice as many where tiles are full; a down unit also covers only one of `parts` equal pieces of the depth, whose sums stand
 * apart in `outputs` and are added in order. What waits for other units waits for earlier tickets, and whoever holds one of
 * those runs.
 *
 * Outputs written to memory cost far more than their bytes among weights streaming in, so where there are many, down units
 * come in groups of columns: the rows' sums over a group follow one group behind, and three groups' outputs, which stay in
 * the L2, serve all of them in turn. */

#define MOEFLOW_UNIT_ROWS 64    /* tile_rows is a multiple of it: the rows that one warpgroup's MMA takes */
#define MOEFLOW_COLUMN_DEPTH 64 /* bf16 of a row that one bulk copy takes: the 128 bytes that the swizzle permutes */
#define MOEFLOW_GATE_ROWS 8     /* so many gate rows and so many up rows alternate in what a copy takes */
#define MOEFLOW_PARTS_MAX 8
#define MOEFLOW_GROUPS_MAX 16
#define MOEFLOW_GROUP_COLUMNS 256       /* a group is a multiple of it, as it is of every tile_rows */
#define MOEFLOW_GROUP_SLOTS 3           /* groups whose outputs exist at a time */
#define MOEFLOW_GROUP_BYTES (1ll << 20) /* of outputs: what a group should not exceed */
#define MOEFLOW_SUM_ROWS 16             /* a sum unit: so many received rows, so many columns */
#define MOEFLOW_SUM_COLUMNS 128

/* Device memory, one per lane, zero when made. The launch with number n (its parity) uses half n % 2 and clears the other; the
 * last block to leave clears what every block is through with. */
struct moeflow_experts_control {
  uint32_t launches; /* that have ended */
  uint32_t left;     /* blocks of this launch that are through */
  uint32_t tickets;  /* taken */
  uint32_t down_done[2][MOEFLOW_GROUPS_MAX]; /* down units that have stored their outputs */
  uint32_t sums_done[2][MOEFLOW_GROUPS_MAX];
  uint32_t reserved[29];
  /* uint32_t gate_up_done[2][tiles_max]: gate_up units of each tile that have stored their activations */
};

/* A driver's CUtensorMap: what a bulk tensor copy reads. Copies take MOEFLOW_UNIT_ROWS rows by MOEFLOW_COLUMN_DEPTH bf16 with
 * the 128-byte swizzle, from one local expert's matrix. gate_up: [I / 8][2][8][H], so that 8 gate rows and their 8 up rows
 * alternate; down: [H][I]. */
struct moeflow_tensor_map {
  uint64_t words[16];
};

/* Dynamic shared memory of the ring. A stage holds tile_rows weight rows and a tile's received rows, tile_depth bf16 wide where
 * the tile is at most MOEFLOW_DEEP_TILE rows, and wider tiles as deep as fits, a column at least. 1024 for the alignment that the
 * swizzle wants. */
#define MOEFLOW_DEEP_TILE 32
MOEFLOW_FN int64_t moeflow_experts_stage_bytes(int tile_tokens, int tile_rows, int tile_depth) {
  const int64_t deep = (tile_rows + (tile_tokens < MOEFLOW_DEEP_TILE ? tile_tokens : MOEFLOW_DEEP_TILE)) * (int64_t)tile_depth * 2;
  const int64_t wide = (tile_rows + tile_tokens) * (int64_t)MOEFLOW_COLUMN_DEPTH * 2;
  return deep > wide ? deep : wide;
}
MOEFLOW_FN int64_t moeflow_experts_shared_bytes(int tile_tokens, int tile_rows, int tile_depth, int stages) {
  return stages * moeflow_experts_stage_bytes(tile_tokens, tile_rows, tile_depth) + 1024;
}

/* Shared memory in which the experts kernel makes its lists, before the ring needs it (with `fused`): two words an expert, three
 * half words an entry. */
#define MOEFLOW_FUSED_ENTRIES_MAX 8192 /* beyond, one block after the other does what several kernels do side by side */
MOEFLOW_FN int64_t moeflow_fused_shared_bytes(int64_t entries, int local_experts) {
  return 8 * (int64_t)local_experts + 6 * entries;
}

/* ---- Packed weights: what experts_stream reads ----
 * A fragment is 16 rows by 16 values as the MMA's lanes hold them, 16 bytes each: lane l has, in pairs, values 2 q and 2 q + 1
 * of rows g and g + 8, then values 2 q + 8 and 2 q + 9 of the same rows (g = l / 4, q = l % 4). The fragments of 16 rows stand
 * one after the other along the depth, an even number of them; zeros fill what the matrix does not. The matrix of gate_up has
 * 2I rows: eight of gate, their eight of up, and so on. */

#define MOEFLOW_FRAGMENT_ROWS 16
#define MOEFLOW_FRAGMENT_BYTES 512
#define MOEFLOW_STEP_DEPTH 32 /* values that two fragments cover */

MOEFLOW_FN int64_t moeflow_packed_steps(int64_t depth) { return (depth + MOEFLOW_STEP_DEPTH - 1) / MOEFLOW_STEP_DEPTH; }
MOEFLOW_FN int64_t moeflow_packed_bytes(int64_t rows, int64_t depth) { /* of one matrix; a multiple of 1024 */
  return (rows + MOEFLOW_FRAGMENT_ROWS - 1) / MOEFLOW_FRAGMENT_ROWS * moeflow_packed_steps(depth) * 2 * MOEFLOW_FRAGMENT_BYTES;
}
MOEFLOW_FN int64_t moeflow_packed_gate_up_bytes(int hidden, int intermediate) {
  return moeflow_packed_bytes(2 * (int64_t)intermediate, hidden);
}
MOEFLOW_FN int64_t moeflow_packed_down_bytes(int hidden, int intermediate) {
  return moeflow_packed_bytes(hidden, intermediate);
}

/* Dynamic shared memory of experts_stream: two chunks of received rows. */
MOEFLOW_FN int64_t moeflow_experts_stream_shared_bytes(int tile_tokens, int tile_depth) {
  return 2 * (int64_t)tile_tokens * tile_depth * 2;
}

/* Rows that came in: row (s, t) is at base + s * block_bytes + t * row bytes. */
struct moeflow_rows_in {
  const uint8_t *base;
  int64_t block_bytes;
  int32_t rows;  /* rows per source that this step may carry (the bucket of tokens_max) */
  int32_t ranks;
  int32_t rank;  /* mine */
  int32_t tokens_max;
};

/* Rows that go out: row t for rank p is at targets[p] + p * block_bytes + t * row bytes. Two-sided transports point all
 * targets at one send buffer; one-sided ones at the peers' buffers, with block_bytes = 0. */
struct moeflow_rows_out {
  uint8_t *const *targets; /* [ranks], device memory */
  int64_t block_bytes;
};

/* One matrix per local expert: expert e's row j is at (experts ? experts[e] : base + e * expert_stride) + j * row_stride. */
struct moeflow_matrix {
  const uint8_t *base;
  const uint8_t *const *experts;
  int64_t expert_stride;
  int64_t row_stride;
};

/* ---- Parameter structs, one per kernel, in the order of a step ---- */

struct moeflow_router_params {
  struct moeflow_lane *lane;
  const void *logits;    /* [tokens, E] */
  const float *bias;     /* [E] or NULL */
  int32_t *ids;          /* out [tokens, K], -1 = fewer than K selectable */
  float *weights;        /* out [tokens, K] */
  int32_t tokens;
  int32_t logits_bf16;   /* else FP32 */
};

struct moeflow_pack_params {
  struct moeflow_lane *lane;
  struct moeflow_record *record;
  const uint8_t *hidden;     /* [tokens, H] bf16 */
  const void *ids;           /* [tokens, K] int32 or int64, expert numbers */
  const float *weights;      /* [tokens, K] */
  const int32_t *places;     /* [E, replicas] */
  int32_t *token_places;     /* out [tokens, K]: the row's ids, kept for combine */
  float *token_weights;      /* out [tokens, K] */
  struct moeflow_rows_out out;
  int32_t tokens;
  int32_t tokens_max;
  int32_t rank;
  int32_t ranks;
  int32_t replicas;
  int32_t ids_int64;
  uint32_t flags;            /* MOEFLOW_ROW_FAILED or 0 */
  int32_t broadcast;         /* 1: one row for all ranks, at targets[0], always with the hidden state */
};

struct moeflow_exchange_params { /* one-sided transports: raise my flags at every peer, await theirs */
  struct moeflow_lane *lane;
  struct moeflow_record *record;
  struct moeflow_peers peers;
  int32_t phase; /* MOEFLOW_PHASE_DISPATCH or _RETURN */
  int32_t reserved;
};

struct moeflow_dispatch_params { /* fused: router, pack and flags in one launch */
  struct moeflow_pack_params pack;     /* its ids and weights count without logits */
  struct moeflow_router_params router; /* logits: NULL without */
  struct moeflow_peers peers;
};

struct moeflow_expert_index_params { /* headers checked; entries counted per chunk of rows and local expert */
  struct moeflow_lane *lane;
  struct moeflow_record *record;
  struct moeflow_rows_in in;
  int32_t *chunk_counts; /* out [chunks, local_experts] */
  int32_t local_experts;
  int32_t reserved;
};

struct moeflow_expert_prepare_params { /* counts -> offsets; entries placed expert-major; tiles listed */
  struct moeflow_lane *lane;
  struct moeflow_rows_in in;
  const int32_t *chunk_counts;
  int32_t *expert_offsets;    /* out [local_experts + 1] */
  int32_t *entries;           /* out [positions]: entry number at each position */
  int32_t *positions;         /* out [ranks * rows * K]: position of each entry, -1 = not mine */
  struct moeflow_tile *tiles; /* out */
  int32_t *tile_count;        /* out [1] */
  int64_t *expert_load;       /* in/out [local_experts] or NULL */
  int32_t local_experts;
  int32_t tile_tokens;
};

struct moeflow_gate_up_params {
  struct moeflow_lane *lane;
  struct moeflow_rows_in in;
  const int32_t *entries;
  const struct moeflow_tile *tiles;
  const int32_t *tile_count;
  struct moeflow_matrix weights; /* [2I, H] */
  int32_t gate_row;              /* gate row i is row gate_row + i * row_step; up row i is up_row + i * row_step */
  int32_t up_row;
  int32_t row_step;
  int32_t reserved;
  uint16_t *activations;         /* out [positions, I] bf16 */
};

struct moeflow_down_params {
  struct moeflow_lane *lane;
  const uint16_t *activations;
  const struct moeflow_tile *tiles;
  const int32_t *tile_count;
  struct moeflow_matrix weights; /* [H, I] */
  float *outputs;                /* out [positions, H] FP32 */
};

struct moeflow_experts_params { /* both forms of the experts kernel: experts (plain weights) and experts_stream (packed) */
  struct moeflow_lane *lane;
  struct moeflow_rows_in in;
  int32_t *entries; /* the lists; with `fused` the kernel makes them itself */
  struct moeflow_tile *tiles;
  int32_t *tile_count;
  int32_t *entry_count; /* [1]: entries of all tiles */
  const struct moeflow_tensor_map *gate_up; /* [local_experts], device memory; experts_stream: NULL */
  const struct moeflow_tensor_map *down;
  struct moeflow_matrix gate_up_packed; /* experts_stream: fragments, as pack_weights leaves them */
  struct moeflow_matrix down_packed;
  struct moeflow_experts_control *control;
  uint16_t *activations; /* [positions, I] bf16, from gate_up units to down units */
  float *outputs;        /* out [parts][part_stride], each [positions, H] FP32 */
  int64_t part_stride;   /* floats from one part of the outputs to the next */
  int32_t tiles_max;     /* of `control` */
  int32_t up_first;      /* experts: each 8 up rows stand before their gate rows */
  /* experts alone, and only with `sum`: owner_reduce's work, with the same meaning; `outputs` then holds nothing of use */
  int32_t *positions;
  struct moeflow_rows_out out;
  int32_t sum;
  int32_t write_empty;
  /* experts alone, and only with `fused`: the work of both exchanges, expert_index and expert_prepare, with the same meaning */
  struct moeflow_record *record;
  int64_t *expert_load;
  struct moeflow_peers peers;
  int32_t local_experts;
  int32_t fused;
};

struct moeflow_pack_weights_params { /* plain weights to fragments: one launch for gate_up, one for down */
  struct moeflow_matrix weights; /* gate_up: [2I, H]; down: [H, I] */
  uint8_t *packed;               /* out: expert first_expert + i at i * moeflow_packed_.._bytes; a multiple of 16 */
  int32_t first_expert;
  int32_t experts;
  int32_t down;                  /* 1: this is the down matrix; 0: gate_up, and: */
  int32_t gate_row;              /* gate row i is row gate_row + i * row_step; up row i is up_row + i * row_step */
  int32_t up_row;
  int32_t row_step;
};

struct moeflow_identity_params { /* self-test in place of gate_up and down: outputs = the entry's hidden row */
  struct moeflow_lane *lane;
  struct moeflow_rows_in in;
  const int32_t *entries;
  const int32_t *expert_offsets;
  float *outputs;
  int32_t local_experts;
  int32_t reserved;
};

enum moeflow_write_empty { /* what becomes of a received row without an entry here */
  MOEFLOW_EMPTY_SKIPPED = 0, /* nothing is written for it */
  MOEFLOW_EMPTY_PLAIN = 1,   /* zeros; out.targets is itself the address of plain rows [ranks * rows, H] bf16 */
  MOEFLOW_EMPTY_ZERO = 2     /* its return row becomes zeros, since all ranks' are added; not with `reduce: choices` */
};

struct moeflow_owner_reduce_params {
  struct moeflow_lane *lane;
  struct moeflow_rows_in in;
  const int32_t *positions;
  const float *outputs;        /* [parts][part_stride]; the parts of a position are added in order */
  int64_t part_stride;
  struct moeflow_rows_out out; /* return rows; `reduce: choices`: row t * K + k */
  int32_t parts;
  int32_t write_empty;         /* enum moeflow_write_empty */
};

struct moeflow_combine_params {
  struct moeflow_lane *lane;
  struct moeflow_record *record;
  const int32_t *token_places;
  const float *token_weights;
  const uint8_t *returned; /* return row t of owner p at returned + p * block_bytes + t * return row bytes */
  int64_t block_bytes;
  uint8_t *out;            /* [tokens, H] bf16 */
  int32_t tokens;
  int32_t rank;
  int32_t ranks;
  int32_t eager;           /* 0 in a captured step: the host does not know of its replays */
  int32_t added;           /* 1: the owners' sums came as one, in the place of owner 0's; not with `reduce: choices` */
  int32_t reserved;
};

struct moeflow_return_combine_params { /* fused: the wait for returned rows and combine */
  struct moeflow_combine_params combine;
  struct moeflow_peers peers;
};

struct moeflow_fill_params { /* counter-based test values; random.h has the rule */
  uint16_t *out; /* [experts][rows][columns] bf16 */
  uint64_t seed;
  int64_t rows;
  int64_t columns;
  int32_t first_expert;
  int32_t experts;
  int32_t matrix;
  int32_t shift; /* exponent shift: standard deviation about 2^-shift */
};

#ifdef __cplusplus
#define MOEFLOW_STATIC_ASSERT static_assert
#else
#define MOEFLOW_STATIC_ASSERT _Static_assert
#endif
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_row_header) == 16, "row header");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_lane) == 128, "lane");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_record) == 128, "record");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_tile) == 16, "tile");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_router_params) == 48, "router");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_pack_params) == 112, "pack");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_peers) == 48, "peers");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_exchange_params) == 72, "exchange");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_dispatch_params) == 208, "dispatch");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_expert_index_params) == 64, "expert_index");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_expert_prepare_params) == 104, "expert_prepare");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_gate_up_params) == 120, "gate_up");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_down_params) == 72, "down");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_experts_control) == 384, "experts control");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_tensor_map) == 128, "tensor map");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_experts_params) == 296, "experts");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_pack_weights_params) == 64, "pack_weights");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_identity_params) == 72, "identity");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_owner_reduce_params) == 88, "owner_reduce");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_combine_params) == 80, "combine");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_return_combine_params) == 128, "return_combine");
MOEFLOW_STATIC_ASSERT(sizeof(struct moeflow_fill_params) == 48, "fill");
#endif
