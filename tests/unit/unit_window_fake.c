/* The window transport on a fake GPU whose memory is files: which calls are made, what becomes of failures. */
#include <dirent.h>
#include <signal.h>

#include "deadline.h"
#include "fakes/fake_ranks.h"

static char chosen[RANKS][1024];

static void keep_choice(void *user, moeflow_log_level level, const char *message) {
  (void)user, (void)level;
  int rank;
  if (sscanf(message, "rank %d: window memory", &rank) == 1 && strstr(message, "window memory"))
    snprintf(chosen[rank], sizeof chosen[rank], "%s", message);
}

static void start(int lanes, int timeout_ms) {
  set_up(MOEFLOW_TRANSPORT_WINDOW, "fake_nccl");
  for (int r = 0; r < RANKS; r++) {
    ranks[r].config.lanes = lanes;
    ranks[r].config.timeout_ms = timeout_ms;
    ranks[r].context->log = keep_choice;
    chosen[r][0] = 0;
  }
}

static int calls_of(const char *name) {
  int count = 0;
  for (int i = 0; i < cuda->call_count; i++) count += !strcmp(cuda->calls[i].name, name);
  return count;
}

static int open_files(void) {
  DIR *folder = opendir("/proc/self/fd");
  int count = 0;
  while (folder && readdir(folder)) count++;
  if (folder) closedir(folder);
  return count;
}

/* A store through what a kernel would take arrives in the peer's window. */
static void expect_reach(int from, int to, int lane) {
  const struct group_lane *mine = &ranks[from].group->lanes[lane], *peer = &ranks[to].group->lanes[lane];
  const int64_t out = from * group_block_bytes(ranks[to].group, MOEFLOW_PHASE_DISPATCH);
  const int64_t home = from * group_block_bytes(ranks[to].group, MOEFLOW_PHASE_RETURN);
  const uint8_t seen = (uint8_t)(16 * from + to + 1 + 64 * lane);
  mine->dispatch_targets[to][5] = seen;
  mine->return_targets[to][7] = seen;
  mine->peer_flags[to][from] = seen;
  EXPECT(peer->received[out + 5] == seen && peer->returned[home + 7] == seen && peer->flags[from] == seen,
         "rank %d does not reach rank %d, lane %d", from, to, lane);
}

static void expect_zeros(const struct group_lane *lane) {
  size_t set = 0;
  for (size_t i = 0; i < lane->window_bytes; i++) set += ((const uint8_t *)lane->window)[i] != 0;
  EXPECT(set == 0, "%zu bytes of a new window are set", set);
}

static void expect_works(const char *source, int lanes) {
  expect_all(MOEFLOW_OK, "");
  for (int r = 0; r < RANKS; r++) EXPECT(strstr(chosen[r], source), "rank %d: '%s', want %s", r, chosen[r], source);
  for (int r = 0; r < RANKS && ranks[r].group; r++) {
    for (int i = 0; i < lanes; i++) expect_zeros(&ranks[r].group->lanes[i]);
  }
  for (int pair = 0; pair < RANKS * RANKS && ranks[0].group && ranks[1].group; pair++) {
    for (int i = 0; i < lanes; i++) expect_reach(pair / RANKS, pair % RANKS, i);
  }
}

/* The probe and each lane: created and exported by each rank, imported by the other, all of it given back. */
static void test_vmm(void) {
  const int lanes = 2, files = open_files();
  start(lanes, 2000);
  each(create_group);
  expect_works("window memory vmm, the first choice", lanes);
  const int own = RANKS * (lanes + 1);
  EXPECT(calls_of("cuMemCreate") == own && calls_of("cuMemExportToShareableHandle") == own, "%d", calls_of("cuMemCreate"));
  EXPECT(calls_of("cuMemImportFromShareableHandle") == own * (RANKS - 1));
  EXPECT(calls_of("cuMemMap") == own * RANKS && calls_of("cuMemSetAccess") == own * RANKS);
  EXPECT(calls_of("cuIpcGetMemHandle") == 0);
  tear_down();
  EXPECT(calls_of("cuMemUnmap") == own * RANKS && calls_of("cuMemAddressFree") == own * RANKS &&
         calls_of("cuMemRelease") == own * RANKS);
  EXPECT(open_files() <= files + 2, "%d files are left open", open_files() - files); /* the fakes' libraries */
}

static void test_fallback(void) {
  static const char *const calls[] = {"cuMemGetAllocationGranularity",
                                      "cuMemCreate",
                                      "cuMemAddressReserve",
                                      "cuMemMap",
                                      "cuMemSetAccess",
                                      "cuMemExportToShareableHandle",
                                      "cuMemImportFromShareableHandle"};
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    static moeflow_unique_id id;
    if (i == 0) start(1, 2000);
    EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_WINDOW, &id));
    for (int r = 0; r < RANKS; r++) ranks[r].config.unique_id = &id;
    snprintf(cuda->fail_share, sizeof cuda->fail_share, "%s", calls[i]);
    cuda->call_count = 0;
    const int live = cuda->live;
    each(create_group);
    expect_works("window memory cuda_ipc", 1);
    EXPECT(strstr(chosen[0], calls[i]), "no %s in: %s", calls[i], chosen[0]);
    each(destroy);
    expect_all(MOEFLOW_OK, "");
    EXPECT(cuda->live == live, "%s: %d pieces are left", calls[i], cuda->live - live);
  }
  tear_down();
}

/* One rank's driver alone fails: all go on to the next kind of memory. */
static void test_fallback_of_one(void) {
  start(1, 2000);
  cuda->fail_allocation = 1; /* the first allocation of all is a probe's */
  each(create_group);
  expect_works("window memory cuda_ipc, since others fail: vmm: ", 1);
  EXPECT(strstr(chosen[0], "CUDA_ERROR_OUT_OF_MEMORY") && strstr(chosen[1], "CUDA_ERROR_OUT_OF_MEMORY"));
  tear_down();
}

static void test_none(void) {
  start(1, 2000);
  snprintf(cuda->fail_share, sizeof cuda->fail_share, "cuIpcGetMemHandle");
  cuda->share_wrong = 1;
  each(create_group);
  for (int r = 0; r < RANKS; r++) {
    EXPECT(strstr(ranks[r].message, "vmm: ") && strstr(ranks[r].message, "is not there (memory vmm)"), "%s",
           ranks[r].message);
    EXPECT(strstr(ranks[r].message, "cuda_ipc: ") && strstr(ranks[r].message, "cuIpcGetMemHandle"), "%s", ranks[r].message);
    EXPECT(ranks[r].status == MOEFLOW_ERROR_CUDA, "%s", moeflow_status_name(ranks[r].status));
    ranks[r].status = MOEFLOW_OK;
    ranks[r].message[0] = 0;
  }
  tear_down();
}

static void test_missing(void) {
  start(1, 300);
  ranks[1].config.ranks = 0;
  const int64_t begin = deadline_now_ms();
  each(create_group);
  EXPECT(deadline_now_ms() - begin < 3000, "bounded");
  EXPECT(ranks[0].status == MOEFLOW_ERROR_TIMEOUT && strstr(ranks[0].message, "rank 1 of 2 did not join"), "%s",
         ranks[0].message);
  ranks[0].status = MOEFLOW_OK;
  ranks[0].message[0] = 0;
  tear_down();
}

/* Abort raises the flags at the peer, both phases and the mark, whatever its own kernels do. */
static void test_abort(void) {
  start(1, 2000);
  each(create_group);
  each(make_layer);
  expect_all(MOEFLOW_OK, "");
  const struct moeflow_group *group = ranks[1].group;
  const struct group_lane *lane = &group->lanes[0];
  ranks[0].group->lanes[0].state->epoch = 41;
  EXPECT_OK(moeflow_abort(ranks[0].group));
  for (int r = 0; r < RANKS; r++) {
    for (int word = 0; word < group->flag_words; word++) {
      const uint32_t want = r ? 0 : 41 + MOEFLOW_FLAG_POISONED;
      EXPECT(lane->flags[moeflow_flag_at(MOEFLOW_PHASE_DISPATCH, r, RANKS, group->flag_words) + word] == want &&
                 lane->flags[moeflow_flag_at(MOEFLOW_PHASE_RETURN, r, RANKS, group->flag_words) + word] == want,
             "source %d, word %d", r, word);
    }
  }
  EXPECT(lane->flags[moeflow_mark_at(0, RANKS, group->flag_words)] == MOEFLOW_POISON_ABORT);
  EXPECT(lane->flags[moeflow_mark_at(1, RANKS, group->flag_words)] == 0 && read_lane(group, 0).poison == 0);
  EXPECT_STATUS(moeflow_poll(ranks[0].group, 0), MOEFLOW_ERROR_PEER, "aborted");
  tear_down();
}

/* Memory stays until the other rank has left as well, or the timeout has passed. */
static void *destroy_late(void *argument) {
  struct rank *rank = argument;
  const struct timespec nap = {0, 200000000};
  if (rank->config.rank == 1) nanosleep(&nap, NULL);
  if (rank->config.rank == 1) EXPECT(calls_of("cuMemRelease") == RANKS * RANKS + 1, "only what rank 0 had opened");
  return destroy(rank);
}

static void test_leave(void) {
  start(1, 3000);
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  int64_t begin = deadline_now_ms();
  each(destroy_late);
  EXPECT(deadline_now_ms() - begin < 2000, "no timeout");
  tear_down();
}

static void test_leave_alone(void) {
  start(1, 300);
  each(create_group);
  expect_all(MOEFLOW_OK, "");
  int64_t begin = deadline_now_ms();
  destroy(&ranks[0]);
  EXPECT(deadline_now_ms() - begin >= 250 && deadline_now_ms() - begin < 3000, "bounded");
  tear_down();
}

/* Each allocation fails once, at one rank: both fail or none does, and nothing is left behind. */
static void test_oom(void) {
  static moeflow_unique_id id;
  start(2, 2000);
  const int live = cuda->live, files = open_files();
  int failed = 0, done = 0;
  for (int n = 1; n < 100 && !done; n++) {
    EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_WINDOW, &id));
    for (int r = 0; r < RANKS; r++) ranks[r].config.unique_id = &id;
    cuda->call_count = 0;
    cuda->fail_allocation = n;
    each(create_group);
    done = cuda->fail_allocation > 0;
    EXPECT((ranks[0].status == MOEFLOW_OK) == (ranks[1].status == MOEFLOW_OK), "allocation %d: %s / %s", n, ranks[0].message,
           ranks[1].message);
    if (done) break;
    failed += ranks[0].status != MOEFLOW_OK;
    ranks[0].status = ranks[1].status = MOEFLOW_OK;
    each(destroy);
    expect_all(MOEFLOW_OK, "");
    EXPECT(cuda->live == live && open_files() == files, "allocation %d: %d pieces, %d files are left", n, cuda->live - live,
           open_files() - files);
  }
  cuda->fail_allocation = 0;
  EXPECT(done && failed == RANKS * (1 + 2 * 2), "%d failures: records, windows and arenas", failed);
  tear_down();
}

/* ---- Processes ---- */

static volatile uint8_t *mine_at(int rank) {
  return ranks[rank].group->lanes[0].received;
}

/* Rank 1 sees what rank 0 stores, and is killed; rank 0 leaves at once, not after its timeout. */
static void live(int rank, const moeflow_unique_id *id) {
  const struct timespec nap = {0, 1000000};
  start(1, 30000);
  ranks[rank].config.unique_id = id;
  create_group(&ranks[rank]);
  EXPECT(ranks[rank].status == MOEFLOW_OK, "rank %d: %s", rank, ranks[rank].message);
  if (rank == 1) {
    for (int i = 0; i < 5000 && *mine_at(1) != 0x77; i++) nanosleep(&nap, NULL);
    EXPECT(*mine_at(1) == 0x77, "nothing arrives");
    scratch_remove();
    fflush(NULL);
    if (!test_failures) raise(SIGKILL);
    _exit(1);
  }
  *ranks[0].group->lanes[0].dispatch_targets[1] = 0x77;
  const int64_t begin = deadline_now_ms();
  tear_down();
  EXPECT(deadline_now_ms() - begin < 10000, "%lld ms to leave a dead rank", (long long)(deadline_now_ms() - begin));
}

static void test_processes(void) {
  moeflow_unique_id id;
  int result = 0;
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_WINDOW, &id));
  fflush(NULL);
  const pid_t child = fork(); /* before anybody touches the fake GPU */
  if (child == 0) {
    scratch_make();
    live(1, &id);
  }
  live(0, &id);
  waitpid(child, &result, 0);
  EXPECT(WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL, "rank 1 ends with %d", result);
}

/* ---- Ids ---- */

static void test_ids(void) {
  static moeflow_unique_id id;
  start(1, 2000);
  for (int r = 0; r < RANKS; r++) ranks[r].config.transport = MOEFLOW_TRANSPORT_AUTO;
  each(create_group); /* its id was made for window */
  expect_works("window memory vmm", 1);
  each(destroy);
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_NCCL, &id));
  for (int r = 0; r < RANKS; r++) ranks[r].config.transport = MOEFLOW_TRANSPORT_WINDOW, ranks[r].config.unique_id = &id;
  each(create_group);
  expect_works("window memory vmm", 1);
  each(destroy);
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_LOCAL, &id));
  each(create_group);
  expect_all(MOEFLOW_ERROR_ARGUMENT, "made for the local transport");
  EXPECT_OK(moeflow_get_unique_id(MOEFLOW_TRANSPORT_WINDOW, &id));
  for (int r = 0; r < RANKS; r++) ranks[r].config.transport = MOEFLOW_TRANSPORT_NCCL;
  each(create_group);
  expect_all(MOEFLOW_ERROR_ARGUMENT, "made for the window transport; the nccl transport needs NCCL's");
  for (int r = 0; r < RANKS; r++) ranks[r].config.transport = MOEFLOW_TRANSPORT_WINDOW, ranks[r].config.unique_id = NULL;
  each(create_group);
  expect_all(MOEFLOW_ERROR_ARGUMENT, "2 ranks need a unique_id");
  tear_down();
}

int main(void) {
  in_child("vmm", test_vmm);
  in_child("fallback", test_fallback);
  in_child("fallback of one", test_fallback_of_one);
  in_child("none", test_none);
  in_child("missing", test_missing);
  in_child("abort", test_abort);
  in_child("leave", test_leave);
  in_child("leave alone", test_leave_alone);
  in_child("oom", test_oom);
  in_child("processes", test_processes);
  in_child("ids", test_ids);
  TEST_END;
}
