/* The flight record: a rank whose peer falls silent writes it once, and explain_hang reads it aloud. */
#include "cpu_world.h"
#include "explain_hang.h"
#include "scratch.h"

static char *explain(const char *path, moeflow_status want) {
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  const moeflow_status status = explain_hang(path, out);
  fclose(out);
  EXPECT(status == want, "%d, want %d: %s", status, want, moeflow_last_error());
  return text;
}

static void expect_said(const char *text, const char *what) {
  EXPECT(strstr(text, what), "no '%s' in:\n%s", what, text);
}

static void run_one(struct world *world, int rank, void *argument) {
  if (rank == 0) step_run_rank(world, 0, argument);
}

/* Three steps of both ranks; then rank 1 does not come. */
static void test_silent(void) {
  struct world world = {.spec = world_spec(16, 8, 6, 2), .ranks = 2, .capacity = 4, .timeout_ms = 200};
  struct step step = {.tokens = {2, 3}};
  const char *path = scratch_path("flight");
  world.flight = path;
  world_open(&world);
  step_fill(&world, &step, 4);
  for (int i = 0; i < 3; i++) world_step(&world, &step);
  EXPECT(access(path, F_OK) != 0, "nothing has happened yet");
  world_each(&world, run_one, &step);
  EXPECT(step.poll[0] == MOEFLOW_ERROR_TIMEOUT && strstr(step.poll_message[0], "rank 1"), "%d: %s", step.poll[0],
         step.poll_message[0]);
  char *text = explain(path, MOEFLOW_OK);
  expect_said(text, "rank 0 of 2 over local, 1 lane(s), capacity 4");
  expect_said(text, "lane 0: step 4 started, rows of step 3 arrived");
  expect_said(text, "a peer stayed silent until the timeout: rank 1, dispatch phase of step 4");
  expect_said(text, " rank 1: its last row 0 here is of step 3, 3 row(s)");
  expect_said(text, "  dispatch: it has not come to step 4; its last was step 3, 1 behind");
  EXPECT(strstr(text, " rank 0: its last row 0 here is of step 4, 2 row(s)"), "itself too: %s", text);
  free(text);
  EXPECT(unlink(path) == 0);
  moeflow_poll(world.rank[0].group, 0);
  EXPECT(access(path, F_OK) != 0, "it is written once");
  world_close(&world);
  step_free(&world, &step);
}

static void explain_text(const char *record, const char *want) {
  const char *path = scratch_path("record");
  scratch_write(path, record, strlen(record), 0600);
  char *text = explain(path, want ? MOEFLOW_OK : MOEFLOW_ERROR_FORMAT);
  if (want) expect_said(text, want);
  free(text);
}

#define GROUP "moeflow-flight 1\nrank 0 ranks 2 lanes 1 capacity 8 words 44 timeout_ms 1000 transport window\n"
#define LANE "lane 0 epoch 9 started 9 received 8 finished 8 poison 4 peer 1 phase 1 step 9 mine 0 theirs 0\n"
#define SOURCE(dispatch, mark) "source 1 dispatch " dispatch " return 8 8 44 mark " mark " header 8 1 1 0\n"

static void test_texts(void) {
  explain_text(GROUP LANE SOURCE("8 9 12", "0") "end\n",
               "step 9 is under way: 12 of 44 words are up, the others are at step 8");
  explain_text(GROUP LANE SOURCE("9 9 44", "0") "end\n", "dispatch: done");
  explain_text(GROUP LANE SOURCE("1073741833 1073741833 44", "4") "end\n", "it gave itself up");
  explain_text(GROUP LANE SOURCE("1073741833 1073741833 44", "4") "end\n", "it is poisoned: a peer stayed silent");
  explain_text(GROUP "lane 0 epoch 3 started 3 received 3 finished 2 poison 2 peer 1 phase 1 step 3 mine 8 theirs 16\nend\n",
               "different tokens_max (8 here, 16 there): rank 1, dispatch phase of step 3");
  explain_text("moeflow-flight 2\n", NULL);
  explain_text("", NULL);
  explain_text("moeflow-flight 1\n", NULL);
  explain_text(GROUP, NULL);
  explain_text(GROUP LANE, NULL);
  explain_text(GROUP SOURCE("8 8 44", "0") "end\n", NULL); /* of no lane */
  explain_text(GROUP LANE "source 1\nend\n", NULL);
  free(explain(scratch_path("nowhere"), MOEFLOW_ERROR_ENVIRONMENT));
}

int main(void) {
  scratch_make();
  test_silent();
  test_texts();
  scratch_remove();
  TEST_END;
}
