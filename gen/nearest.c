#include "nearest.h"

#include <string.h>

#include "status.h"

/* The value on a line `key value\n` of canonical text; returns the next line. */
static const char *take_value(const char *line, char value[SPEC_NAME_MAX + 1]) {
  const char *from = strchr(line, ' ') + 1, *end = strchr(line, '\n');
  memcpy(value, from, (size_t)(end - from));
  value[end - from] = 0;
  return end + 1;
}

void nearest_fields(const struct plan *cached, const struct plan *wanted, nearest_field each, void *user) {
  char texts[2][SPEC_TEXT_MAX], values[2][SPEC_NAME_MAX + 1];
  const char *lines[2] = {texts[0], texts[1]};
  if (strcmp(cached->arch, wanted->arch)) each(user, "arch", cached->arch, wanted->arch);
  if (spec_write(&cached->spec, texts[0]) != MOEFLOW_OK || spec_write(&wanted->spec, texts[1]) != MOEFLOW_OK) return;
  for (int i = 0; i < SPEC_FIELDS; i++) {
    for (int side = 0; side < 2; side++) lines[side] = take_value(lines[side], values[side]);
    if (strcmp(values[0], values[1])) each(user, spec_fields[i].key, values[0], values[1]);
  }
}

static void count_field(void *user, const char *key, const char *cached, const char *wanted) {
  (void)key, (void)cached, (void)wanted;
  ++*(int *)user;
}

/* Variants whose entry is another, or all of one more than the other has. */
static int differing_variants(const struct plan *cached, const struct plan *wanted) {
  int most = cached->variant_count > wanted->variant_count ? cached->variant_count : wanted->variant_count, differing = 0;
  for (int i = 0; i < most; i++) {
    int both = i < cached->variant_count && i < wanted->variant_count;
    differing += !both || strcmp(cached->variants[i].entry, wanted->variants[i].entry) != 0;
  }
  return differing;
}

static int buckets_differ(const struct plan *a, const struct plan *b) {
  return a->bucket_count != b->bucket_count ||
         memcmp(a->buckets, b->buckets, (size_t)a->bucket_count * sizeof a->buckets[0]) != 0;
}

void nearest_find(const struct catalog *catalog, const struct plan *plan, int keyed, struct nearest *nearest) {
  *nearest = (struct nearest){.state = NEAREST_NOTHING, .differing = SPEC_FIELDS + 2};
  for (int i = 0; i < catalog->plan_names.count; i++) {
    const struct catalog_plan *cached = &catalog->plans[i];
    int differing = 0;
    if (!cached->plan.variant_count) continue; /* it could not be read */
    nearest_fields(&cached->plan, plan, count_field, &differing);
    if (differing >= nearest->differing) continue;
    *nearest = (struct nearest){NEAREST_OTHER, cached, differing};
  }
  if (nearest->differing > 0) return;
  nearest->differing = keyed ? differing_variants(&nearest->plan->plan, plan) : 0;
  if (nearest->plan->missing > nearest->differing) nearest->differing = nearest->plan->missing;
  nearest->state = nearest->differing || nearest->plan->fault[0] || buckets_differ(&nearest->plan->plan, plan)
                       ? NEAREST_STALE
                       : NEAREST_READY;
}
