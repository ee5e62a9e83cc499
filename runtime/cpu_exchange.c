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

static void raise_flags(const struct moeflow_exchange_params *p, int word, uint32_t value) {
  for (int peer = 0; peer < p->ranks; peer++) {
    __atomic_store_n(p->peer_flags[peer] + (int64_t)word * p->ranks + p->rank, value, __ATOMIC_RELEASE);
  }
}

static uint32_t flag(const struct moeflow_exchange_params *p, int word, int source) {
  return __atomic_load_n(p->flags + (int64_t)word * p->ranks + source, __ATOMIC_ACQUIRE);
}

/* Whoever caught it from a peer of its own is named only when nobody else is. */
static int poisoned_peer(const struct moeflow_exchange_params *p) {
  int caught = -1;
  for (int source = 0; source < p->ranks; source++) {
    const uint32_t mark = flag(p, 2, source);
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

/* Waits for one source; 0 when its flag is up, 1 when the lane is poisoned instead. */
static int wait_for(const struct moeflow_exchange_params *p, int word, int source, uint64_t begin) {
  const uint32_t epoch = p->lane->epoch;
  const enum moeflow_phase phase = (enum moeflow_phase)p->phase;
  for (int looks = 0;; looks += looks < YIELDS) {
    const uint32_t seen = flag(p, word, source);
    const int up = (int32_t)(seen - epoch) >= 0; /* right across the wrap of epochs */
    const int peer = poisoned_peer(p);           /* written before the flag, so a raised flag never hides it */
    if (peer >= 0)
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_PEER, (uint32_t)peer, phase, 0, flag(p, 2, peer));
    else if (up)
      return 0;
    else if (p->abort && __atomic_load_n(p->abort, __ATOMIC_ACQUIRE))
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_ABORT, (uint32_t)p->rank, phase, 0, 0);
    else if (now_ns() - begin > p->timeout_ns)
      cpu_poison(p->lane, p->record, MOEFLOW_POISON_TIMEOUT, (uint32_t)source, phase, epoch, seen);
    if (cpu_poisoned(p->lane)) return 1;
    pause_between_looks(looks);
  }
}

moeflow_status cpu_exchange(const struct cpu_call *call, const void *params) {
  const struct moeflow_exchange_params *p = params;
  const int word = p->phase == MOEFLOW_PHASE_DISPATCH ? 0 : 1;
  const uint32_t poison = cpu_poisoned(p->lane);
  (void)call;
  if (poison) raise_flags(p, 2, poison);
  raise_flags(p, word, p->lane->epoch);
  if (poison) return MOEFLOW_OK;
  const uint64_t begin = now_ns();
  for (int source = 0; source < p->ranks; source++) {
    if (wait_for(p, word, source, begin)) break;
  }
  return MOEFLOW_OK;
}
