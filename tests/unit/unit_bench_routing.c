/* The routings that moeflow-bench draws: counts, distributions and the rank played. */
#include <math.h>

#include "routing.h"
#include "test.h"

static const struct spec model = {.name = "model", .hidden = 64, .intermediate = 64, .experts = 32, .top_k = 4};

static struct routing_shape shape_of(int tokens, double skew) {
  return (struct routing_shape){.spec = &model, .ep = 2, .tokens = tokens, .skew = skew, .seed = 3};
}

static void draw(const struct routing_shape *shape, int layer, struct routing *routing) {
  EXPECT(routing_draw(shape, layer, routing) == MOEFLOW_OK, "%s", moeflow_last_error());
}

/* What is counted is what the ids say, and weights are fit for use. */
static void check_counts(const struct routing *routing, int local) {
  int active = 0;
  int64_t entries = 0;
  char seen[64] = {0};
  for (int row = 0; row < routing->rows; row++) {
    double sum = 0;
    int mine = 0;
    for (int k = 0; k < model.top_k; k++) {
      const int32_t id = routing->ids[row * model.top_k + k];
      const float weight = routing->weights[row * model.top_k + k];
      EXPECT(id >= -1 && id < local, "row %d choice %d is expert %d", row, k, id);
      EXPECT(weight > 0, "row %d choice %d weighs %g", row, k, (double)weight);
      for (int other = 0; other < k; other++)
        EXPECT(id < 0 || routing->ids[row * model.top_k + other] != id, "row %d picks expert %d twice", row, id);
      sum += weight;
      if (id < 0) continue;
      mine++;
      active += !seen[id];
      seen[id] = 1;
    }
    EXPECT(fabs(sum - 1) < 1e-5, "the weights of row %d add up to %g", row, sum);
    EXPECT(mine == routing->row_entries[row], "row %d has %d entries, not %d", row, mine, routing->row_entries[row]);
    entries += mine;
  }
  EXPECT(active == routing->active && entries == routing->entries, "%d active and %lld entries, not %d and %lld", active,
         (long long)entries, routing->active, (long long)routing->entries);
}

static void test_counts(void) {
  static const double skews[] = {0, 0.7, 3, ROUTING_SAME};
  for (int s = 0; s < 4; s++) {
    for (int layer = 0; layer < 4; layer++) {
      const struct routing_shape shape = shape_of(5, skews[s]);
      struct routing routing;
      draw(&shape, layer, &routing);
      EXPECT(routing.rows == 10, "%d rows", routing.rows);
      check_counts(&routing, 16);
      routing_free(&routing);
    }
  }
}

static void test_repeats(void) {
  struct routing_shape shape = shape_of(8, 0.7);
  struct routing first, second, other, seeded;
  draw(&shape, 2, &first);
  draw(&shape, 2, &second);
  draw(&shape, 3, &other);
  shape.seed = 4;
  draw(&shape, 2, &seeded);
  const size_t bytes = 16 * 4 * sizeof *first.ids;
  EXPECT(!memcmp(first.ids, second.ids, bytes) && !memcmp(first.weights, second.weights, bytes), "not repeatable");
  EXPECT(memcmp(first.ids, other.ids, bytes), "two layers are the same");
  EXPECT(memcmp(first.ids, seeded.ids, bytes), "two seeds give the same");
  routing_free(&first);
  routing_free(&second);
  routing_free(&other);
  routing_free(&seeded);
}

/* T = 1: of 8 picks at least 4 lie on the busier rank, and more only by chance; the mean of the larger half is known. */
static void test_busiest(void) {
  const struct routing_shape shape = shape_of(1, 0), alone = {.spec = &model, .ep = 1, .tokens = 1, .seed = 3};
  struct routing routing;
  double active = 0;
  for (int layer = 0; layer < 400; layer++) {
    draw(&shape, layer, &routing);
    EXPECT(routing.entries >= 3, "layer %d: %lld entries on the busiest rank", layer, (long long)routing.entries);
    active += routing.active / 400.0;
    routing_free(&routing);
  }
  EXPECT(active > 4.3 && active < 5.3, "%g experts are active on average", active);
  draw(&alone, 0, &routing);
  EXPECT(routing.active == 4 && routing.entries == 4, "one rank has them all: %d", routing.active);
  routing_free(&routing);
}

/* Share of the most popular expert, over many rows of one layer. */
static double top_share(double skew) {
  const struct routing_shape shape = {.spec = &model, .ep = 1, .tokens = 2000, .skew = skew, .seed = 5};
  struct routing routing;
  int count[32] = {0}, most = 0;
  draw(&shape, 0, &routing);
  for (int i = 0; i < routing.rows * model.top_k; i++) count[routing.ids[i]]++;
  for (int e = 0; e < 32; e++)
    if (count[e] > most) most = count[e];
  routing_free(&routing);
  return most / 2000.0; /* at most 1: a row picks an expert once */
}

static void test_skew(void) {
  const double uniform = top_share(0), mild = top_share(0.7), strong = top_share(3);
  EXPECT(uniform < 0.16, "uniform: an expert is in %g of the rows instead of 0.125", uniform);
  EXPECT(mild > 0.25 && mild < strong, "sigma 0.7: %g", mild);
  EXPECT(strong > 0.9, "sigma 3: %g", strong);
}

static void test_same(void) {
  const struct routing_shape shape = shape_of(6, ROUTING_SAME);
  struct routing routing;
  int differing = 0;
  int32_t before[4] = {-1};
  for (int layer = 0; layer < 8; layer++) {
    draw(&shape, layer, &routing);
    EXPECT(routing.active == 4 && routing.entries == 48, "%d active, %lld entries", routing.active,
           (long long)routing.entries);
    for (int row = 1; row < routing.rows; row++)
      EXPECT(!memcmp(routing.ids, routing.ids + row * 4, 4 * sizeof *routing.ids), "row %d picks others", row);
    differing += memcmp(before, routing.ids, sizeof before) != 0;
    memcpy(before, routing.ids, sizeof before);
    routing_free(&routing);
  }
  EXPECT(differing > 4, "the layers pick the same experts");
}

static void test_refusals(void) {
  struct routing_shape shape = shape_of(1, 0);
  struct routing routing;
  shape.ep = 3;
  EXPECT(routing_draw(&shape, 0, &routing) == MOEFLOW_ERROR_ARGUMENT && strstr(moeflow_last_error(), "32 experts"), "%s",
         moeflow_last_error());
  shape.ep = 16;
  shape.skew = ROUTING_SAME;
  EXPECT(routing_draw(&shape, 0, &routing) == MOEFLOW_ERROR_ARGUMENT && strstr(moeflow_last_error(), "each has 2"), "%s",
         moeflow_last_error());
}

int main(void) {
  test_counts();
  test_repeats();
  test_busiest();
  test_skew();
  test_same();
  test_refusals();
  TEST_END;
}
