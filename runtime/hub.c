#include "hub.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "deadline.h"
#include "fingerprint.h"
#include "status.h"

struct kept {
  struct hub_memory memory;
  struct kept *next;
};

struct hub {
  struct hub *next; /* in `hubs` */
  moeflow_unique_id id;
  int listed; /* in `hubs`: it has an id */
  int ranks;
  int present;     /* ranks that joined and have not left */
  int came;        /* ranks that tried to join */
  int64_t expires; /* a broken hub stays so long for ranks that come late, to tell them why */
  int arrived;     /* ranks that are in the present gather */
  unsigned round;  /* gathers completed */
  int broken;      /* somebody gave up: why, for the others */
  moeflow_status broken_status;
  char broken_why[256];
  size_t bytes;    /* of the present gather */
  char *joined;    /* [ranks] */
  char *here;      /* [ranks]: arrived in the present gather */
  uint8_t *slots;  /* [ranks][FINGERPRINT_BYTES_MAX], being filled */
  uint8_t *result; /* the same of the last completed gather: it stays until all have come to the next one */
  struct kept *kept;
  pthread_cond_t changed;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct hub *hubs;

static struct timespec in_ms(int timeout_ms) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  at.tv_sec += timeout_ms / 1000;
  at.tv_nsec += timeout_ms % 1000 * 1000000L;
  if (at.tv_nsec >= 1000000000L) {
    at.tv_sec++;
    at.tv_nsec -= 1000000000L;
  }
  return at;
}

/* ---- Making and finding ---- */

static void hub_free(struct hub *hub) {
  if (!hub) return;
  free(hub->joined);
  free(hub->here);
  free(hub->slots);
  free(hub->result);
  pthread_cond_destroy(&hub->changed);
  free(hub);
}

static struct hub *hub_new(const moeflow_unique_id *id, int ranks) {
  struct hub *hub = calloc(1, sizeof *hub);
  pthread_condattr_t attributes;
  if (!hub) return NULL;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&hub->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  if (id) hub->id = *id;
  hub->ranks = ranks;
  hub->joined = calloc((size_t)ranks, 1);
  hub->here = calloc((size_t)ranks, 1);
  hub->slots = calloc((size_t)ranks, FINGERPRINT_BYTES_MAX);
  hub->result = calloc((size_t)ranks, FINGERPRINT_BYTES_MAX);
  if (hub->joined && hub->here && hub->slots && hub->result) return hub;
  hub_free(hub);
  return NULL;
}

static struct hub *find(const moeflow_unique_id *id) {
  for (struct hub *hub = hubs; hub && id; hub = hub->next) {
    if (!memcmp(&hub->id, id, sizeof *id)) return hub;
  }
  return NULL;
}

static void unlink_hub(struct hub *hub) {
  struct hub **at = &hubs;
  while (*at && *at != hub) at = &(*at)->next;
  if (*at) *at = hub->next;
}

/* Nobody is in it, and nobody is left to be told why. */
static int is_over(const struct hub *hub) {
  return !hub->present && (hub->came >= hub->ranks || deadline_passed(hub->expires));
}

static void remove_old(void) {
  for (struct hub *next, *hub = hubs; hub; hub = next) {
    next = hub->next;
    if (!is_over(hub)) continue;
    unlink_hub(hub);
    hub_free(hub);
  }
}

/* ---- Failing together ---- */

static moeflow_status broken(const struct hub *hub) {
  return status_set(hub->broken_status, "%s", hub->broken_why);
}

/* The first reason stays. */
static moeflow_status break_hub(struct hub *hub, moeflow_status status, const char *why) {
  if (!hub->broken) {
    hub->broken = 1;
    hub->broken_status = status;
    snprintf(hub->broken_why, sizeof hub->broken_why, "%s", why);
    pthread_cond_broadcast(&hub->changed);
  }
  return broken(hub);
}

static moeflow_status break_for_missing(struct hub *hub, const char *came, const char *what, int timeout_ms) {
  char why[256], list[128] = "";
  size_t length = 0;
  for (int rank = 0; rank < hub->ranks && length < sizeof list - 16; rank++) {
    if (!came[rank]) length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", length ? ", " : "", rank);
  }
  snprintf(why, sizeof why, "rank %s of %d did not %s within %d ms", list, hub->ranks, what, timeout_ms);
  return break_hub(hub, MOEFLOW_ERROR_TIMEOUT, why);
}

/* ---- Joining ---- */

static int all_joined(const struct hub *hub) {
  return !memchr(hub->joined, 0, (size_t)hub->ranks);
}

static moeflow_status join_locked(struct hub *hub, int rank, int ranks) {
  char why[256];
  if (hub->broken) return broken(hub);
  if (all_joined(hub)) { /* a stranger: the group goes on without it */
    return status_set(MOEFLOW_ERROR_ARGUMENT,
                      "rank %d comes to a group that is complete: its unique_id is used a second time", rank);
  }
  if (hub->ranks != ranks) {
    snprintf(why, sizeof why, "ranks disagree on ranks: rank %d says %d, the others %d", rank, ranks, hub->ranks);
    return break_hub(hub, MOEFLOW_ERROR_MISMATCH, why);
  }
  if (hub->joined[rank]) {
    snprintf(why, sizeof why, "two ranks of the group say they are rank %d", rank);
    return break_hub(hub, MOEFLOW_ERROR_ARGUMENT, why);
  }
  hub->joined[rank] = 1;
  hub->present++;
  pthread_cond_broadcast(&hub->changed);
  return MOEFLOW_OK;
}

static moeflow_status await_all(struct hub *hub, int timeout_ms) {
  struct timespec at = in_ms(timeout_ms);
  while (!all_joined(hub) && !hub->broken) {
    if (pthread_cond_timedwait(&hub->changed, &mutex, &at) == ETIMEDOUT && !all_joined(hub) && !hub->broken) {
      return break_for_missing(hub, hub->joined, "join the group", timeout_ms);
    }
  }
  return hub->broken ? broken(hub) : MOEFLOW_OK;
}

moeflow_status hub_join(const moeflow_unique_id *id, int rank, int ranks, int timeout_ms, struct hub **hub_out) {
  moeflow_status status = MOEFLOW_OK;
  pthread_mutex_lock(&mutex);
  remove_old();
  struct hub *hub = find(id);
  *hub_out = NULL;
  if (!hub) {
    hub = hub_new(id, ranks);
    if (!hub) FAIL(MOEFLOW_ERROR_MEMORY, "no memory for %d ranks to meet", ranks);
    if (id) {
      hub->listed = 1;
      hub->next = hubs;
      hubs = hub;
    }
  }
  hub->came++;
  hub->expires = deadline_in(timeout_ms);
  CHECK(join_locked(hub, rank, ranks));
  *hub_out = hub; /* from here on the caller leaves it, whatever happens */
  CHECK(await_all(hub, timeout_ms));
cleanup:
  remove_old();
  pthread_mutex_unlock(&mutex);
  return status;
}

/* ---- Gathering ---- */

static void complete(struct hub *hub) {
  memcpy(hub->result, hub->slots, (size_t)hub->ranks * FINGERPRINT_BYTES_MAX);
  memset(hub->here, 0, (size_t)hub->ranks);
  hub->arrived = 0;
  hub->round++;
  pthread_cond_broadcast(&hub->changed);
}

static moeflow_status arrive(struct hub *hub, int rank, const void *mine, size_t bytes) {
  if (hub->broken) return broken(hub);
  if (hub->arrived && hub->bytes != bytes) {
    return break_hub(hub, MOEFLOW_ERROR_MISMATCH,
                     "the ranks are in different collective calls: they do not make the same calls in the same order");
  }
  hub->bytes = bytes;
  memcpy(hub->slots + (size_t)rank * FINGERPRINT_BYTES_MAX, mine, bytes);
  hub->here[rank] = 1;
  hub->arrived++;
  if (hub->arrived == hub->ranks) complete(hub);
  return MOEFLOW_OK;
}

moeflow_status hub_gather(struct hub *hub, int rank, const void *mine, size_t bytes, void *all, int timeout_ms) {
  moeflow_status status = MOEFLOW_OK;
  struct timespec at = in_ms(timeout_ms);
  if (bytes > FINGERPRINT_BYTES_MAX) return status_set(MOEFLOW_ERROR_INTERNAL, "a gather of %zu bytes a rank", bytes);
  pthread_mutex_lock(&mutex);
  unsigned round = hub->round;
  CHECK(arrive(hub, rank, mine, bytes));
  while (hub->round == round && !hub->broken) {
    if (pthread_cond_timedwait(&hub->changed, &mutex, &at) == ETIMEDOUT && hub->round == round && !hub->broken) {
      status = break_for_missing(hub, hub->here, "come to a collective call", timeout_ms);
      goto cleanup;
    }
  }
  if (hub->round == round) {
    status = broken(hub);
    goto cleanup;
  }
  for (int r = 0; r < hub->ranks; r++) {
    memcpy((uint8_t *)all + (size_t)r * bytes, hub->result + (size_t)r * FINGERPRINT_BYTES_MAX, bytes);
  }
cleanup:
  pthread_mutex_unlock(&mutex);
  return status;
}

/* ---- Leaving ---- */

void hub_keep(struct hub *hub, const struct hub_memory *memory) {
  struct kept *kept = malloc(sizeof *kept);
  if (!kept) return; /* leaked rather than freed under a peer's store */
  kept->memory = *memory;
  pthread_mutex_lock(&mutex);
  kept->next = hub->kept;
  hub->kept = kept;
  pthread_mutex_unlock(&mutex);
}

void hub_leave(struct hub *hub, hub_release_fn release, void *user) {
  struct kept *kept = NULL;
  if (!hub) return;
  pthread_mutex_lock(&mutex);
  break_hub(hub, MOEFLOW_ERROR_STATE, "a rank has left the group"); /* the others can no longer meet in full */
  if (--hub->present == 0) {
    kept = hub->kept;
    hub->kept = NULL;
    if (!hub->listed) hub_free(hub);
    remove_old();
  }
  pthread_mutex_unlock(&mutex);
  for (struct kept *next; kept; kept = next) {
    next = kept->next;
    release(user, &kept->memory);
    free(kept);
  }
}
