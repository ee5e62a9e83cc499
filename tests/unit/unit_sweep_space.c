/* The arms of a sweep: every point has a shortlist, and what a sweep has no room for is counted. */
#include "sweep_space.h"

#include "test.h"

static struct plan_draft draft;

static struct sweep_space space_of(const struct spec *spec) {
  EXPECT(plan_build(spec, "sm_90a", NULL, &draft) == MOEFLOW_OK, "%s", moeflow_last_error());
  return (struct sweep_space){.spec = spec, .draft = &draft, .arch = arch_find("sm_90a"), .ep = 2, .multiprocessors = 132};
}

static struct spec spec_of(void) {
  return (struct spec){.name = "model",
                       .hidden = 4096,
                       .intermediate = 2048,
                       .experts = 64,
                       .top_k = 8,
                       .dtype = SPEC_BF16,
                       .reduce = SPEC_REDUCE_OWNER};
}

static void shortlists(void) {
  const struct spec spec = spec_of();
  const struct sweep_space space = space_of(&spec);
  struct sweep_arms arms;
  struct sweep_point points[2] = {{.tokens = 4, .rows = 8}, {.tokens = 48, .rows = 96}};
  EXPECT(sweep_space_arms(&space, &arms, points, 2) == MOEFLOW_OK, "%s", moeflow_last_error());
  EXPECT(points[0].rows == 8 && points[1].rows == 96, "rows are the caller's: %d, %d", points[0].rows, points[1].rows);
  EXPECT(arms.arms[SWEEP_PORTABLE].kernel == KERNEL_GATE_UP && !arms.left_out, "%d left out", arms.left_out);
  for (int i = 0; i < 2; i++)
    EXPECT(points[i].order_count >= SWEEP_SHORTLIST_MIN && points[i].order_count <= SWEEP_SHORTLIST_MAX + 1, "%d",
           points[i].order_count);
  sweep_space_free(&arms, points, 2);
}

/* gate_up + down add in another order than the default, which `batch_invariant` would not let win. */
static void one_order(void) {
  struct spec spec = spec_of();
  spec.batch_invariant = 1;
  const struct sweep_space space = space_of(&spec);
  struct sweep_arms arms;
  struct sweep_point point = {.tokens = 4, .rows = 8};
  EXPECT(sweep_space_arms(&space, &arms, &point, 1) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < point.order_count; i++) EXPECT(point.order[i] != SWEEP_PORTABLE, "place %d", i);
  sweep_space_free(&arms, &point, 1);
}

/* The estimate of very many rows takes no time, and passes on smoothly from that of fewer. */
static void many_rows(void) {
  const struct spec spec = spec_of();
  const struct sweep_space space = space_of(&spec);
  const struct experts_shape shape = {64, 128, 128, 5, 1, 1};
  double last = 0;
  for (int tokens = 1; tokens <= 1 << 20; tokens *= 2) {
    const double us = sweep_estimate(&space, KERNEL_EXPERTS, &shape, tokens / 2 + 1);
    EXPECT(us >= last && (last == 0 || us < 2.6 * last), "%d tokens: %g us after %g", tokens, us, last);
    last = us;
  }
}

/* With shared memory for every ring there are more legal shapes than arms. */
static void too_many(void) {
  const struct spec spec = spec_of();
  struct sweep_space space = space_of(&spec);
  struct sweep_arms arms;
  struct sweep_point point = {.tokens = 4, .rows = 8};
  int legal, all, default_too = 0;
  draft.shared_max = 16 << 20;
  space.exhaustive = space.packed = 1;
  sweep_space_count(&space, &legal, &all);
  EXPECT(legal > SWEEP_ARMS_MAX, "%d", legal);
  EXPECT(sweep_space_arms(&space, &arms, &point, 1) == MOEFLOW_OK, "%s", moeflow_last_error());
  for (int i = 0; i < point.order_count; i++) default_too |= point.order[i] == point.standard;
  EXPECT(!default_too && arms.count == SWEEP_ARMS_MAX, "%d arms", arms.count);
  EXPECT(arms.left_out == legal + 1 - SWEEP_ARMS_MAX, "%d of %d legal shapes and the portable form are left out",
         arms.left_out, legal);
  sweep_space_free(&arms, &point, 1);
}

int main(void) {
  shortlists();
  one_order();
  many_rows();
  too_many();
  TEST_END;
}
