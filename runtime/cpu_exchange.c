/* The flags of the local transport: rows were stored at the peers already, a flag tells them so. */
#include <sched.h>
#include <time.h>

#include "cpu.h"

#define YIELDS 256 /* tries before a wait starts to sleep between looks */

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void raise_words(const struct moeflow_peers *peers, int64_t first, int words, uint32_t value) {
  for (int peer = 0; peer < peers->ranks; peer++) {
    for (int i = 0; i < words; i++) __atomic_store_n(peers->peer_flags[peer] + first + i, value, __ATOMIC_RELEASE);
  }
}

static uint32_t word_at(const struct moeflow_peers *peers, int64_t at) {
  return __atomic_load_n(peers->flags + at, __ATOMIC_ACQUIRE);
}

static uint32_t mark_of(const struct moeflow_peers *peers, int source) {
  return word_at(peers, moeflow_mark_at(source, peers->ranks, peers->words));
}

/* The first of the source's words that is not up, else the last. */
static uint32_t flag_of(const struct moeflow_peers *peers, int phase, int source, uint32_t epoch) {
  const int64_t first = moeflow_flag_at(phase, source, peers->ranks, peers->words);
  uint32_t seen = epoch;
  for (int i = 0; i < peers->words && (int32_t)(seen - epoch) >= 0; i++) seen = word_at(peers, first + i);
  return seen;
}

/* Whoever caught it from a peer of its own is named only when nobody else is. */
static int poisoned_peer(const struct moeflow_peers *peers) {
  int caught = -1;
  for (int source = 0; source < peers->ranks; source++) {
    const uint32_t mark = mark_of(peers, source);
    if (mark && mark != MOEFLOW_POISON_PEER) return source;
    if (mark && caught < 0) caught = source;
  }
  return caught;
}

static void pause_between_looks(int looks) {
  const struct timespec nap = {0, 50000};
  if (looks < YIELDS)
    sched_yield();
  else
    nanosleep(&nap, NULL);
}

/* Waits for one source; 0 when its flags are up, 1 when the lane is poisoned instead. */
static int wait_for(const struct moeflow_exchange_params *p, int source, uint64_t begin) {
  const struct moeflow_peers *peers = &p->peers;
  const uint32_t epoch = p->lane->epoch;
  const enum moeflow_phase phase = (enum moeflow_phase)p->phase;
  for (int looks = 0;; looks += looks < YIELDS) {
    const uint32_t seen = flag_of(peers, phase, source, epoch);
    const int up = (int32_t)(seen - epoch) >= 0; /* right across the wrap of epochs */
    const int peer = poisoned_peer(peers);       /* written before the flag, so a raised flag never hides it */
    if (peer >= 0)
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_PEER, (uint32_t)peer, phase, 0, mark_of(peers, peer));
    else if (up)
      return 0;
    else if (peers->abort && __atomic_load_n(peers->abort, __ATOMIC_ACQUIRE))
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_ABORT, (uint32_t)peers->rank, phase, 0, 0);
    else if (now_ns() - begin > peers->timeout_ns)
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_TIMEOUT, (uint32_t)source, phase, epoch, seen);
    if (cpu_poisoned(p->lane)) return 1;
    pause_between_looks(looks);
  }
}

moeflow_status cpu_exchange(const struct cpu_call *call, const void *params) {
  const struct moeflow_exchange_params *p = params;
  const struct moeflow_peers *peers = &p->peers;
  const uint32_t poison = cpu_poisoned(p->lane);
  (void)call;
  if (poison) raise_words(peers, moeflow_mark_at(peers->rank, peers->ranks, peers->words), 1, poison);
  raise_words(peers, moeflow_flag_at(p->phase, peers->rank, peers->ranks, peers->words), peers->words,
              poison ? p->lane->epoch + MOEFLOW_FLAG_POISONED : p->lane->epoch);
  if (poison) return MOEFLOW_OK;
  const uint64_t begin = now_ns();
  for (int source = 0; source < peers->ranks; source++) {
    if (wait_for(p, source, begin)) break;
  }
  return MOEFLOW_OK;
}
