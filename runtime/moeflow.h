/* MoEFlow: the fixed-capacity expert-parallel layer. The one public header.
 *
 * A context (one plan on one device) makes groups (ranks that exchange rows), groups carry layers, and a layer's forward
 * takes this rank's tokens to the experts' owners and brings the weighted sums home:
 *
 *     moeflow_open -> moeflow_group_create -> moeflow_layer_create -> moeflow_layer_bind -> moeflow_prepare
 *     -> moeflow_forward (eager, or captured into a CUDA graph and replayed) -> destroy in the opposite order
 *
 * C99, no CUDA header: streams and communicators travel as void pointers. Sizes are in bytes unless a name says otherwise.
 * Notation: H hidden width of a row, I intermediate width, E experts, K choices a token, C capacity in tokens a rank.
 *
 * Threads: a context may be used from any thread. A group and its layers belong to one thread at a time, except
 * moeflow_poll and moeflow_abort, which any thread may call while another is inside moeflow_forward.
 * Errors: every call returns a status; moeflow_last_error() holds the calling thread's last message: what failed, why with
 * numbers, what to run. No call exits, aborts, raises a signal or prints (messages go to the log callback, if any).
 * Processes: nothing survives fork(); create contexts in the child, and fork before the parent's first CUDA call.
 */
#ifndef MOEFLOW_H
#define MOEFLOW_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOEFLOW_VERSION_MAJOR 0
#define MOEFLOW_VERSION_MINOR 1
#define MOEFLOW_VERSION_PATCH 0

#if defined(__GNUC__)
#define MOEFLOW_API __attribute__((visibility("default")))
#else
#define MOEFLOW_API
#endif

/* Fixed numbers: they are part of the ABI and never reused. */
typedef enum moeflow_status {
  MOEFLOW_OK = 0,
  MOEFLOW_ERROR_INTERNAL = 1,    /* a bug in MoEFlow */
  MOEFLOW_ERROR_ARGUMENT = 2,    /* an argument breaks its documented rule */
  MOEFLOW_ERROR_FORMAT = 3,      /* a plan or spec text cannot be read */
  MOEFLOW_ERROR_CAPACITY = 4,    /* tokens_max above the group's capacity */
  MOEFLOW_ERROR_ENVIRONMENT = 5, /* driver, GPU or NCCL missing or too old */
  MOEFLOW_ERROR_CACHE = 6,       /* no cubin for this model and GPU, or a damaged or untrusted one */
  MOEFLOW_ERROR_TIMEOUT = 7,     /* a peer stayed silent */
  MOEFLOW_ERROR_PEER = 8,        /* a peer reported a failure, or the group is poisoned */
  MOEFLOW_ERROR_MISMATCH = 9,    /* ranks disagree on something they must share; the message names the field */
  MOEFLOW_ERROR_STATE = 10,      /* right call, wrong moment: not bound, not prepared, still in use, destroyed */
  MOEFLOW_ERROR_MEMORY = 11,     /* host or device memory ran out; nothing was kept */
  MOEFLOW_ERROR_CUDA = 12,       /* a driver call failed */
  MOEFLOW_ERROR_NCCL = 13,       /* an NCCL call failed */
  MOEFLOW_ERROR_UNSUPPORTED = 14 /* legal, but not in this version */
} moeflow_status;

typedef enum moeflow_backend { MOEFLOW_BACKEND_CUDA = 0, MOEFLOW_BACKEND_CPU = 1 } moeflow_backend;

typedef enum moeflow_transport {
  MOEFLOW_TRANSPORT_AUTO = 0,      /* the best that the group's topology allows; the log says which and why */
  MOEFLOW_TRANSPORT_NCCL = 1,      /* one all-to-all out, one back */
  MOEFLOW_TRANSPORT_WINDOW = 2,    /* one-sided: kernels store into the memory of the other ranks' GPUs. Ranks are processes of
                                      one user and one host, in one network namespace, whose GPUs can reach each other's memory;
                                      several may share a GPU, which then runs them in turns, slowly. CUDA */
  MOEFLOW_TRANSPORT_ALLGATHER = 3, /* all-gather out, reduce-scatter back: every row to all ranks, and NCCL adds the owners'
                                      sums in an order of its own, each time rounded to the return dtype. The same bits run to
                                      run. CUDA; not for `reduce: choices`, COMBINE_RING, or models of different return dtypes
                                      in one group (MOEFLOW_ERROR_UNSUPPORTED) */
  MOEFLOW_TRANSPORT_LOCAL = 4      /* all ranks are threads of this process, on one GPU or on the CPU. They wait for each other
                                      on the device: on a GPU each rank and lane needs a non-blocking stream of its own */
} moeflow_transport;

typedef enum moeflow_dtype {
  MOEFLOW_DTYPE_FLOAT32 = 0,
  MOEFLOW_DTYPE_BFLOAT16 = 1,
  MOEFLOW_DTYPE_INT32 = 2,
  MOEFLOW_DTYPE_INT64 = 3
} moeflow_dtype;

/* Where gate row i and up row i of an expert's gate_up matrix stand. */
typedef enum moeflow_gate_up_order {
  MOEFLOW_GATE_UP = 0,     /* gate rows [0, I), then up rows [I, 2I) */
  MOEFLOW_UP_GATE = 1,     /* up rows first */
  MOEFLOW_INTERLEAVED = 2  /* gate row i at 2i, up row i at 2i + 1 */
} moeflow_gate_up_order;

/* How the source adds the owners' partial sums. */
typedef enum moeflow_combine {
  MOEFLOW_COMBINE_PLAN = 0, /* what the model's `reduce` says: owners in ascending rank, or choices in order; FP32 */
  MOEFLOW_COMBINE_RING = 1  /* from rank + 1 around the ring, each sum rounded to bf16; for comparison, `reduce: owner` only */
} moeflow_combine;

typedef enum moeflow_log_level {
  MOEFLOW_LOG_ERROR = 0,
  MOEFLOW_LOG_WARNING = 1,
  MOEFLOW_LOG_INFO = 2,
  MOEFLOW_LOG_DEBUG = 3
} moeflow_log_level;

typedef struct moeflow_context moeflow_context;
typedef struct moeflow_group moeflow_group;
typedef struct moeflow_layer moeflow_layer;

typedef void (*moeflow_log_fn)(void *user, moeflow_log_level level, const char *message);

/* Device memory for groups and layers. `allocate` returns NULL when it cannot; alignment is a power of two up to 256. */
typedef struct moeflow_allocator {
  void *(*allocate)(void *user, size_t bytes, size_t alignment);
  void (*release)(void *user, void *memory, size_t bytes);
  void *user;
} moeflow_allocator;

/* ---- Library ---- */

/* major * 10000 + minor * 100 + patch of the loaded library. */
MOEFLOW_API int moeflow_version(void);

/* The name of a status, such as "MOEFLOW_ERROR_CAPACITY". Never NULL; static storage. */
MOEFLOW_API const char *moeflow_status_name(moeflow_status status);

/* This thread's last error message, "" before the first. Valid until this thread's next failing call. */
MOEFLOW_API const char *moeflow_last_error(void);

/* How this library was built, one JSON object: {"version", "sha", "dirty", "trees": {"templates", "runtime", "gen"},
 * "compiler"}. Static storage. */
MOEFLOW_API const char *moeflow_build_info(void);

/* ---- Context: one plan on one device ---- */

typedef struct moeflow_open_config {
  size_t size;              /* sizeof(moeflow_open_config), set by the macro below */
  moeflow_backend backend;
  int device;               /* CUDA: device ordinal */
  const char *model;        /* model name, looked up with dtype and the GPU's architecture among the cache's plans */
  const char *dtype;        /* "bf16" */
  const char *cache;        /* cache directory; NULL: MOEFLOW_CACHE_DIR, else $XDG_CACHE_HOME/moeflow, else ~/.cache/moeflow */
  const char *plan;         /* path of a plan file; overrides model, dtype and cache lookup of the plan. With cache = NULL, a
                               plan that lies in <directory>/plans/ brings <directory> as its cache */
  const char *spec;         /* CPU backend only: canonical spec text (`moeflow-gen explain --format spec`), needs no cache */
  moeflow_log_fn log;       /* may be NULL; called on the thread that logs */
  void *log_user;
} moeflow_open_config;
#define MOEFLOW_OPEN_CONFIG_INIT \
  { sizeof(moeflow_open_config), MOEFLOW_BACKEND_CUDA, 0, NULL, "bf16", NULL, NULL, NULL, NULL, NULL }

/* Opens a plan. CUDA: retains the device's primary context and verifies every cubin's hash; never compiles, never writes.
 * A missing plan or cubin is MOEFLOW_ERROR_CACHE with the `moeflow-gen build` line to run. Strings are copied. */
MOEFLOW_API moeflow_status moeflow_open(const moeflow_open_config *config, moeflow_context **context);

/* MOEFLOW_ERROR_STATE while groups of the context live. NULL is allowed. */
MOEFLOW_API moeflow_status moeflow_close(moeflow_context *context);

/* The model's canonical spec text, lines of `key value`. Owned by the context. */
MOEFLOW_API const char *moeflow_context_spec(const moeflow_context *context);

/* ---- Group: ranks that exchange rows ---- */

#define MOEFLOW_UNIQUE_ID_BYTES 128
typedef struct moeflow_unique_id { char bytes[MOEFLOW_UNIQUE_ID_BYTES]; } moeflow_unique_id;

typedef struct moeflow_group_config {
  size_t size;
  int rank;                           /* 0 .. ranks - 1 */
  int ranks;                          /* EP size, 1 .. E */
  int capacity;                       /* C: most tokens a rank may bring to one step */
  int lanes;                          /* micro-batches in flight: 1 or 2 */
  moeflow_transport transport;
  const moeflow_unique_id *unique_id; /* the same on all ranks; from moeflow_get_unique_id on one of them, for this transport
                                         (WINDOW also takes NCCL's). AUTO takes the transport that the id was made for */
  void *nccl_comm;                    /* an ncclComm_t to adopt instead of unique_id: never freed here; lanes must be 1 */
  int timeout_ms;                     /* bound of every wait for a peer; 0: 30000. NCCL's exchanges on the device have none:
                                         moeflow_poll tells that one is stuck, and moeflow_abort ends it */
  int local_experts_max;              /* most local slots of any layer; 0: ceil(E / ranks) */
  const moeflow_allocator *allocator; /* copied; NULL: the driver's own (CUDA), the C library's (CPU). WINDOW takes what peers
                                         store into from the driver all the same */
  moeflow_group *workspace_of;        /* a group of this rank on the same device, whose lanes' activations and outputs are used
                                         instead of own ones; its shapes and capacity must be large enough. Steps of both on
                                         one lane must be ordered by the caller, on one stream. It must outlive this group */
  const char *flight;                 /* a file that moeflow_poll writes once, when it first finds the group poisoned over a
                                         one-sided transport: flags and headers of all peers, for `moeflow-run --explain-hang`.
                                         A path of this rank's own; copied; NULL: none. The log says where it is */
} moeflow_group_config;
#define MOEFLOW_GROUP_CONFIG_INIT \
  { sizeof(moeflow_group_config), 0, 1, 128, 1, MOEFLOW_TRANSPORT_AUTO, NULL, NULL, 0, 0, NULL, NULL, NULL }

/* A fresh id for a group, to be carried to the other ranks by the caller. */
MOEFLOW_API moeflow_status moeflow_get_unique_id(moeflow_transport transport, moeflow_unique_id *id);

/* Collective: every rank calls it, each from its own process or (LOCAL) its own thread. Allocates all that the group will
 * ever use, sized for the largest of `contexts` (one per model shape; all on the same device and backend). Ranks compare
 * protocol, capacity, EP, row bytes, transport and NCCL version: a difference is MOEFLOW_ERROR_MISMATCH on all ranks and
 * the message names the first differing field. A rank that never comes is MOEFLOW_ERROR_TIMEOUT.
 * WINDOW: where device memory cannot be shared it is MOEFLOW_ERROR_CUDA or _ENVIRONMENT, on the other ranks
 * MOEFLOW_ERROR_PEER, and the message has what each way of sharing said. */
MOEFLOW_API moeflow_status moeflow_group_create(moeflow_context *const *contexts, int context_count,
                                                const moeflow_group_config *config, moeflow_group **group);

/* Destroy captured graphs first: a graph that still holds the group's kernels must not be replayed after this. This rank's
 * steps must have ended. Over NCCL it waits, at most the group's timeout, for captured graphs to go and for the host's other
 * ranks to leave as well. WINDOW waits as long for all ranks to come to this call, unless one has ended. With LOCAL, buffers
 * that peers may still write are kept until the last rank leaves, whose thread then calls this group's allocator.
 * MOEFLOW_ERROR_STATE while layers of the group live. NULL is allowed. */
MOEFLOW_API moeflow_status moeflow_group_destroy(moeflow_group *group);

/* Waits, at most timeout_ms, for the steps enqueued so far to finish, replays included. MOEFLOW_OK when they have.
 * MOEFLOW_ERROR_TIMEOUT names the phase and step that is stuck, and the silent peer where the transport can tell.
 * MOEFLOW_ERROR_PEER: a peer brought an error mark (named), or the group is poisoned (why, by whom, at which step).
 * MOEFLOW_ERROR_ARGUMENT: `lend` gave no weights. timeout_ms = 0 only looks. The last kernel may still be writing `out`: who
 * reads it is ordered by the stream, as behind any kernel. A replay whose first kernel has not begun leaves no trace and is
 * not waited for: synchronise with its stream where that matters. Any thread. */
MOEFLOW_API moeflow_status moeflow_poll(moeflow_group *group, int timeout_ms);

/* Gives the group up from any thread: waits on peers end, the group is poisoned, peers learn of it where they can (LOCAL: with
 * this rank's next kernel; WINDOW: at once). Over NCCL
 * its communicators are aborted, so that graphs captured with them must not be replayed; an adopted one is the caller's to
 * abort, which is what ends a wait inside it. */
MOEFLOW_API moeflow_status moeflow_abort(moeflow_group *group);

/* ---- Layer ---- */

typedef struct moeflow_layer_config {
  size_t size;
  moeflow_combine combine;
  /* Where experts live: places[e * replicas + j] = owner rank << 16 | local slot, or -1 for no further replica; a hash of
   * (source rank, token) picks one replica, and an expert with none is skipped and contributes zero. The same on all ranks;
   * copied. NULL: expert e of rank r for r * E / ranks <= e < (r + 1) * E / ranks, slots in order. */
  const int32_t *places;
  int replicas;
} moeflow_layer_config;
#define MOEFLOW_LAYER_CONFIG_INIT { sizeof(moeflow_layer_config), MOEFLOW_COMBINE_PLAN, NULL, 1 }

/* `context` is one of those the group was created with. Local: no communication. */
MOEFLOW_API moeflow_status moeflow_layer_create(moeflow_group *group, moeflow_context *context,
                                                const moeflow_layer_config *config, moeflow_layer **layer);

/* Its steps must have ended, and graphs captured with it be gone: its places are freed. NULL is allowed. */
MOEFLOW_API moeflow_status moeflow_layer_destroy(moeflow_layer *layer);

/* How many experts this rank owns (slots 0 .. n - 1), by the layer's places. */
MOEFLOW_API int moeflow_layer_local_experts(const moeflow_layer *layer);

/* CPU backend only: lends one local expert's gate_up (down = 0) or down (down = 1) matrix, packed, just before it is used,
 * so that a caller can make weights on the fly. Called from several threads at once; the matrix must hold until the same
 * thread's next call. NULL fails the step. */
typedef const void *(*moeflow_lend_fn)(void *user, int local_expert, int down);

/* Borrowed weights: never copied or freed; they must outlive the layer's last step and may be rewritten in place between
 * steps. bf16; a matrix row is contiguous; addresses and strides are multiples of 16. gate_up is [2I, H] and down [H, I]
 * per local expert. Give either a base and expert strides, or device arrays of per-expert pointers, or (CPU) `lend`. */
typedef struct moeflow_weights {
  size_t size;
  const void *gate_up;
  int64_t gate_up_expert_stride;       /* 0: packed, 2I rows */
  int64_t gate_up_row_stride;          /* 0: packed, H elements */
  const void *down;
  int64_t down_expert_stride;          /* 0: packed, H rows */
  int64_t down_row_stride;             /* 0: packed, I elements */
  const void *const *gate_up_experts;  /* device array of pointers, one per local expert; overrides base and expert stride.
                                          Read when bound, and must be written by then: bind again to change a pointer */
  const void *const *down_experts;
  moeflow_lend_fn lend;                /* CPU backend; overrides all of the above */
  void *lend_user;
  moeflow_gate_up_order order;
  const float *correction_bias;        /* [E] FP32, for models with router.correction_bias; needed only with logits */
  const void *gate_up_bias;            /* reserved: must be NULL in this version */
  const void *down_bias;               /* reserved: must be NULL in this version */
  int64_t *expert_load;                /* [local experts], optional: each step adds the (token, choice) pairs per slot */
  int packed;                          /* 1: gate_up and down are as moeflow_layer_pack left them: no row strides, no order;
                                          an expert stride of 0 is the packed size */
} moeflow_weights;
#define MOEFLOW_WEIGHTS_INIT \
  { sizeof(moeflow_weights), NULL, 0, 0, NULL, 0, 0, NULL, NULL, NULL, NULL, MOEFLOW_GATE_UP, NULL, NULL, NULL, NULL, 0 }

/* May be called again between steps; a captured graph keeps the weights that it was captured with. On a GPU each binding may
 * take some device memory (256 bytes a local expert), which stays until the layer is destroyed; it copies to the device on a
 * stream of its own and blocks for that, so it does not go into a capture. */
MOEFLOW_API moeflow_status moeflow_layer_bind(moeflow_layer *layer, const moeflow_weights *weights);

/* Packed weights, opt-in: a plan built with `moeflow-gen build --packed` has kernels that read weights in the order in which
 * tensor cores take them. Others, and the CPU backend: MOEFLOW_ERROR_UNSUPPORTED. Bytes of one local expert's matrices: */
MOEFLOW_API moeflow_status moeflow_layer_packed_bytes(const moeflow_layer *layer, int64_t *gate_up_bytes, int64_t *down_bytes);

/* Enqueues the packing of local experts first .. first + count - 1 of plain weights, described as for moeflow_layer_bind, into
 * the caller's memory: one expert after the other, from to_gate_up and to_down on, which are multiples of 16. In the order of
 * `stream`; may be captured. `plain` is read during the call, the matrices that it names while the kernels run. `plain` not as
 * moeflow_layer_bind wants it, experts that the layer does not have and memory that is missing or misaligned are
 * MOEFLOW_ERROR_ARGUMENT, and then nothing is enqueued. */
MOEFLOW_API moeflow_status moeflow_layer_pack(moeflow_layer *layer, const moeflow_weights *plain, int local_expert_first,
                                              int count, void *to_gate_up, void *to_down, void *stream);

/* Collective. Ranks compare the layers' models and cubins (MOEFLOW_ERROR_MISMATCH on all ranks), then everything that
 * forward needs for up to tokens_max tokens is loaded and connected, so that nothing happens lazily later, for example
 * inside a capture. tokens_max = 0 means the capacity. Blocks, at most the group's timeout for each meeting of the ranks. */
MOEFLOW_API moeflow_status moeflow_prepare(moeflow_layer *const *layers, int layer_count, int tokens_max);

/* ---- Forward ---- */

typedef enum moeflow_forward_flags {
  MOEFLOW_FORWARD_IDENTITY = 1, /* self-test: every expert returns its input row; checks all but the GEMMs bit for bit */
  /* For measurement: what this rank alone computes between the exchanges, once more, on the rows that the last whole step of
   * this lane and layer received with the same tokens_max: the experts and, unless `out` is NULL, their weighted sums into
   * out, [ranks * R, H] bf16, where a step moves R rows a rank (a power of two >= tokens_max, at most C). Rows that nobody
   * sent, and rows without an expert of this rank, are zero. No exchange; may be captured; goes with no other flag; tokens,
   * hidden, ids, weights and logits are ignored. In a poisoned group nothing is written. `reduce: choices` is
   * MOEFLOW_ERROR_UNSUPPORTED. */
  MOEFLOW_FORWARD_EXPERTS = 2,
  /* For comparison: one kernel after the other also where a step could be three launches. The result is the same bit for bit, and
   * ranks may differ in it. */
  MOEFLOW_FORWARD_STEPWISE = 4
} moeflow_forward_flags;

typedef struct moeflow_forward_args {
  size_t size;
  int tokens;                  /* live tokens of this rank, 0 .. tokens_max; 0 still takes part */
  int tokens_max;              /* the same on all ranks, 0 .. C; 0 means C. It alone decides wire format and rows moved */
  const void *hidden;          /* [tokens, H] bf16, 16-byte aligned; may be NULL with 0 tokens */
  const void *ids;             /* [tokens, K] ids_dtype, in [0, E); others are skipped and contribute exactly zero */
  moeflow_dtype ids_dtype;     /* INT32 or INT64 */
  const float *weights;        /* [tokens, K] FP32; a choice whose weight is exactly 0 is skipped */
  const void *logits;          /* [tokens, E] instead of ids and weights: the layer's router chooses */
  moeflow_dtype logits_dtype;  /* FLOAT32 or BFLOAT16 */
  void *out;                   /* [tokens, H] bf16, 16-byte aligned; may be `hidden` */
  int lane;                    /* 0 .. lanes - 1 */
  void *stream;                /* CUstream / cudaStream_t; NULL is the legacy default stream. CPU: ignored */
  unsigned flags;              /* moeflow_forward_flags */
} moeflow_forward_args;
#define MOEFLOW_FORWARD_ARGS_INIT \
  { sizeof(moeflow_forward_args), 0, 0, NULL, NULL, MOEFLOW_DTYPE_INT32, NULL, NULL, MOEFLOW_DTYPE_FLOAT32, NULL, 0, NULL, 0 }

/* Enqueues one step on the stream (CPU backend: runs it). Every rank of the group calls it the same number of times, in the
 * same order of layers per lane. No allocation, lookup, environment read or synchronisation; may be captured.
 * Refused on this rank alone and without a step: a destroyed, unbound or unprepared layer, args that are NULL or have a bad
 * size, a bad lane, and tokens_max outside 0 .. C (MOEFLOW_ERROR_CAPACITY; the same on all ranks, since tokens_max is). Any
 * other bad argument returns an error here, and the step is joined with 0 rows and an error mark, so that peers finish and
 * their moeflow_poll names this rank. In a poisoned group the output is NaN. */
MOEFLOW_API moeflow_status moeflow_forward(moeflow_layer *layer, const moeflow_forward_args *args);

#ifdef __cplusplus
}
#endif
#endif
