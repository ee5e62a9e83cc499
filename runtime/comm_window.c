/* The window transport: ranks are processes of one host, whose GPUs reach each other's memory. One-sided: kernels store
 * straight into the peers' windows and raise flags there. Ranks may share a GPU, which then runs their processes in turns.
 *
 * The host's part is in meeting.c, where the ranks meet, and window_memory.c, the kinds of memory that processes share. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "meeting.h"
#include "one_sided.h"
#include "unique_id.h"
#include "window_memory.h"

#define WINDOW_MARK "moeflow window id"
#define TOKEN 0x6d6f6500u /* of the self-test; no value that fresh memory has */

struct lane_window {
  struct window_span *spans; /* [ranks], mine among them; NULL: free */
  struct group_lane *lane;   /* once the peers' are open */
};

struct comm_window {
  struct comm comm;
  struct moeflow_group *group;
  struct moeflow_context *context;
  struct meeting *meeting;
  const struct window_source *source;
  struct lane_window lanes[GROUP_LANES_MAX];
};

static struct comm_window *window_of(struct comm *comm) {
  return (struct comm_window *)comm;
}

moeflow_status comm_window_unique_id(moeflow_unique_id *id) {
  return unique_id_make(id, WINDOW_MARK);
}

int comm_window_made(const moeflow_unique_id *id) {
  return unique_id_has(id, WINDOW_MARK);
}

/* ---- Memory of all ranks ---- */

static moeflow_status open_peers(struct comm_window *window, const struct window_ticket *tickets, const int *fds,
                                 struct window_span *spans) {
  const struct moeflow_group *group = window->group;
  for (int r = 0; r < group->ranks; r++) {
    if (r == group->rank) continue;
    moeflow_status status = window->source->open(window->context, &tickets[r], fds[r], &spans[r]);
    if (status != MOEFLOW_OK) return status_prefix(status, "rank %d's memory", r);
  }
  return MOEFLOW_OK;
}

/* Collective: beside my own span, those of the others. */
static moeflow_status share(struct comm_window *window, struct window_span *spans) {
  struct moeflow_group *group = window->group;
  struct window_ticket mine = {0}, *tickets = calloc((size_t)group->ranks, sizeof *tickets);
  int *fds = calloc((size_t)group->ranks, sizeof *fds), fd = -1;
  moeflow_status status = status_set(MOEFLOW_ERROR_MEMORY, "no memory for the tickets of %d ranks", group->ranks);
  for (int r = 0; fds && r < group->ranks; r++) fds[r] = -1;
  if (tickets && fds) status = window->source->share(&spans[group->rank], &mine, &fd);
  CHECK(group_agree(group, status));
  CHECK(meeting_gather(window->meeting, &mine, sizeof mine, tickets));
  if (window->source->by_file) CHECK(meeting_fds(window->meeting, fd, fds));
  CHECK(group_agree(group, open_peers(window, tickets, fds, spans)));
cleanup:
  for (int r = 0; fds && r < group->ranks; r++) {
    if (fds[r] >= 0) close(fds[r]);
  }
  if (fd >= 0) close(fd);
  free(fds);
  free(tickets);
  return status;
}

static uint32_t token(int from, int to) {
  return TOKEN + (uint32_t)from * 0x9e3779b9u + (uint32_t)to * 0x85ebca6bu;
}

static moeflow_status write_tokens(struct comm_window *window, const struct window_span *spans, size_t offset) {
  const struct moeflow_group *group = window->group;
  moeflow_status status = MOEFLOW_OK;
  for (int r = 0; r < group->ranks && status == MOEFLOW_OK; r++) {
    const uint32_t word = token(group->rank, r);
    void *slot = spans[r].memory + offset + (size_t)group->rank * sizeof word;
    status = window->context->backend->upload(window->context, slot, &word, sizeof word);
  }
  return status;
}

/* And leaves zeros again. */
static moeflow_status read_tokens(struct comm_window *window, const struct window_span *spans, size_t offset) {
  moeflow_status status = MOEFLOW_OK;
  const struct moeflow_group *group = window->group;
  const struct backend *backend = window->context->backend;
  void *slots = spans[group->rank].memory + offset;
  const size_t bytes = (size_t)group->ranks * sizeof(uint32_t);
  uint32_t *words = malloc(bytes);
  if (!words) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d words", group->ranks);
  CHECK(backend->download(window->context, words, slots, bytes));
  for (int r = 0; r < group->ranks; r++) {
    if (words[r] == token(r, group->rank)) continue;
    FAIL(MOEFLOW_ERROR_ENVIRONMENT,
         "what rank %d stored into rank %d's window is not there (memory %s): 0x%08x in place of 0x%08x", r, group->rank,
         window->source->name, words[r], token(r, group->rank));
  }
  CHECK(backend->zero(window->context, slots, bytes));
cleanup:
  free(words);
  return status;
}

/* Collective self-test: everybody stores a word into every window, at slots of its own from `offset` on. */
static moeflow_status test(struct comm_window *window, const struct window_span *spans, size_t offset) {
  moeflow_status status = group_agree(window->group, write_tokens(window, spans, offset));
  return status == MOEFLOW_OK ? group_agree(window->group, read_tokens(window, spans, offset)) : status;
}

static void let_go(struct comm_window *window, struct window_span *spans, int of_mine) {
  for (int r = 0; spans && r < window->group->ranks; r++) {
    if ((r == window->group->rank) == of_mine) window->source->release(window->context, &spans[r]);
  }
}

/* Collective, bounded: behind it no other rank reaches this one's memory. Without the others after an error or the timeout:
 * memory that they still have open then goes with their processes. */
static void part(struct comm_window *window) {
  char byte = 0, *all = calloc((size_t)window->group->ranks, 1);
  if (!all || !window->meeting || meeting_gather(window->meeting, &byte, 1, all) != MOEFLOW_OK) {
    context_log(window->context, MOEFLOW_LOG_WARNING, "rank %d leaves without the others: %s", window->group->rank,
                moeflow_last_error());
  }
  free(all);
}

/* ---- Creation: the first kind of memory that works for all ranks ---- */

static moeflow_status try_source(struct comm_window *window, struct window_span *spans) {
  moeflow_status status = MOEFLOW_OK;
  struct moeflow_group *group = window->group;
  const size_t bytes = (size_t)group->ranks * sizeof(uint32_t);
  CHECK(group_agree(group, window->source->allocate(window->context, bytes, &spans[group->rank])));
  CHECK(share(window, spans));
  CHECK(test(window, spans, 0));
cleanup:
  return status;
}

static moeflow_status choose_source(struct comm_window *window) {
  struct moeflow_group *group = window->group;
  struct window_span *spans = calloc((size_t)group->ranks, sizeof *spans);
  moeflow_status status = spans ? MOEFLOW_OK : status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d spans", group->ranks);
  char why[1024] = "";
  size_t length = 0;
  CHECK(group_agree(group, status));
  for (int i = 0; i < WINDOW_SOURCES; i++) {
    window->source = &window_sources[i];
    status = try_source(window, spans);
    if (status != MOEFLOW_OK) {
      length += (size_t)snprintf(why + length, sizeof why - length, "%s%s: %.400s", length ? "; " : "", window->source->name,
                                 moeflow_last_error());
    }
    let_go(window, spans, 0);
    part(window);
    let_go(window, spans, 1);
    if (status == MOEFLOW_OK) break;
  }
  if (status != MOEFLOW_OK) FAIL(status, "the ranks' processes cannot share device memory: %s", why);
  context_log(window->context, MOEFLOW_LOG_INFO, "rank %d: window memory %s%s%s", group->rank, window->source->name,
              length ? ", since others fail: " : ", the first choice", why);
cleanup:
  free(spans);
  return status;
}

static moeflow_status window_create(struct moeflow_group *group, const moeflow_group_config *config, struct comm **comm) {
  moeflow_status status = MOEFLOW_OK;
  struct comm_window *window = calloc(1, sizeof *window);
  *comm = NULL;
  if (!window) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for the window transport");
  window->comm.ops = &comm_window;
  window->group = group;
  window->context = group->contexts[0];
  *comm = &window->comm; /* the group destroys it, also after a failure */
  CHECK(meeting_join(config->unique_id, group->rank, group->ranks, group->timeout_ms, &window->meeting));
  CHECK(choose_source(window));
cleanup:
  return status;
}

static moeflow_status window_gather(struct comm *comm, const void *mine, size_t bytes, void *all) {
  return meeting_gather(window_of(comm)->meeting, mine, bytes, all);
}

/* ---- A lane's window ---- */

static moeflow_status window_allocate(struct comm *comm, size_t bytes, void **memory) {
  struct comm_window *window = window_of(comm);
  struct moeflow_group *group = window->group;
  struct lane_window *at = window->lanes;
  while (at->spans) at++; /* one for each of the group's lanes */
  at->spans = calloc((size_t)group->ranks, sizeof *at->spans);
  *memory = NULL;
  if (!at->spans) return status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d spans", group->ranks);
  struct window_span *mine = &at->spans[group->rank];
  moeflow_status status = window->source->allocate(window->context, bytes, mine);
  if (status == MOEFLOW_OK) *memory = mine->memory;
  return status;
}

/* All lanes' at once: they have ended together. */
static void leave(struct comm_window *window) {
  if (!window->lanes[0].spans) return;
  for (int i = 0; i < GROUP_LANES_MAX; i++) let_go(window, window->lanes[i].spans, 0);
  part(window);
  for (int i = 0; i < GROUP_LANES_MAX; i++) {
    let_go(window, window->lanes[i].spans, 1);
    free(window->lanes[i].spans);
    window->lanes[i] = (struct lane_window){NULL, NULL};
  }
}

static void window_release(struct comm *comm, void *memory, size_t bytes) {
  (void)memory, (void)bytes;
  leave(window_of(comm));
}

static void window_destroy(struct comm *comm) {
  struct comm_window *window = window_of(comm);
  if (!window) return;
  leave(window); /* of windows that the group never came to have */
  meeting_leave(window->meeting);
  free(window);
}

/* Parts of the windows stand at the same places on all ranks: their sizes are part of the fingerprint. */
static void *at_peer(const struct lane_window *lane, int peer, const void *part_of_mine) {
  return lane->spans[peer].memory + ((const uint8_t *)part_of_mine - (const uint8_t *)lane->lane->window);
}

static moeflow_status window_attach(struct comm *comm, struct group_lane *lane) {
  moeflow_status status = MOEFLOW_OK;
  struct comm_window *window = window_of(comm);
  struct moeflow_group *group = window->group;
  struct lane_window *mine = window->lanes;
  struct one_sided_peer *peers = calloc((size_t)group->ranks, sizeof *peers);
  while (mine->spans[group->rank].memory != lane->window) mine++;
  CHECK(group_agree(group, peers ? MOEFLOW_OK : status_set(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks", group->ranks)));
  CHECK(share(window, mine->spans));
  const uint32_t *marks = lane->flags + moeflow_mark_at(0, group->ranks, group->flag_words);
  CHECK(test(window, mine->spans, (size_t)((const uint8_t *)marks - (const uint8_t *)lane->window)));
  mine->lane = lane;
  for (int r = 0; r < group->ranks; r++) {
    peers[r].received = at_peer(mine, r, lane->received);
    peers[r].returned = at_peer(mine, r, lane->returned);
    peers[r].flags = at_peer(mine, r, lane->flags);
  }
  CHECK(one_sided_attach(group, lane, peers));
cleanup:
  free(peers);
  return status;
}

/* ---- A step ---- */

static moeflow_status window_exchange(struct comm *comm, struct group_lane *lane, enum moeflow_phase phase, int rows,
                                      int64_t row_bytes, void *stream) {
  (void)rows; /* the kernels before have stored them */
  (void)row_bytes;
  return one_sided_exchange(window_of(comm)->group, lane, phase, stream);
}

static moeflow_status window_health(struct comm *comm) {
  (void)comm; /* whatever happens is in the lanes' records */
  return MOEFLOW_OK;
}

/* No kernel of this rank may ever run again, so the host tells the peers. */
static void window_abort(struct comm *comm) {
  struct comm_window *window = window_of(comm);
  for (int i = 0; i < GROUP_LANES_MAX; i++) {
    const struct lane_window *lane = &window->lanes[i];
    for (int r = 0; lane->lane && r < window->group->ranks; r++) {
      one_sided_give_up(window->group, lane->lane, at_peer(lane, r, lane->lane->flags));
    }
  }
}

const struct comm_ops comm_window = {
    .name = "window",
    .one_sided = 1,
    .create = window_create,
    .destroy = window_destroy,
    .gather = window_gather,
    .attach = window_attach,
    .exchange = window_exchange,
    .health = window_health,
    .abort = window_abort,
    .window_allocate = window_allocate,
    .window_release = window_release,
};
