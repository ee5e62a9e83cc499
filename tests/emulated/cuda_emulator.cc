#include "cuda_emulator.h"

#include <sanitizer/common_interface_defs.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <ucontext.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

thread_local unsigned schedule;
thread_local std::function<void(unsigned thread)> before_thread;

namespace {

constexpr size_t stack_bytes = 128 * 1024;

enum State { ready, at_block_barrier, at_warp_barrier, finished };

struct Copy {
  void *to;
  unsigned char bytes[16];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void *fake_stack;
  State state;
  Site site;
  unsigned gathers; /* warp gathers so far: two buffers take turns, since no lane can be two gathers ahead */
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
};

struct Warp {
  alignas(8) unsigned char lanes[2][32 * lane_bytes];
  unsigned waiting;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> warp_order, lane_order;
  bool greedy; /* a warp runs on as far as it can before the next one starts */
  unsigned yields;
  unsigned waiting;
  unsigned with[2];
  unsigned barriers; /* passed so far */
  unsigned char *shared;
  size_t shared_bytes;
  const std::function<void()> *kernel;
  ucontext_t scheduler;
  void *scheduler_fake_stack;
  const void *scheduler_stack;
  size_t scheduler_stack_bytes;
  unsigned current;
};

thread_local Block block;

[[noreturn]] void fail(const char *what, Site site) {
  fprintf(stderr, "emulator: %s at %s:%d (block %u, thread %u)\n", what, site.file, site.line, blockIdx.x, threadIdx.x);
  for (size_t i = 0; i < block.fibers.size(); i++) {
    const Fiber &fiber = block.fibers[i];
    static const char *const names[] = {"running", "block barrier", "warp", "finished"};
    if (i % 32 == 0 || fiber.state != block.fibers[i - 1].state || fiber.site.line != block.fibers[i - 1].site.line) {
      fprintf(stderr, "  thread %zu: %s %s:%d\n", i, names[fiber.state], fiber.site.file ? fiber.site.file : "",
              fiber.site.line);
    }
  }
  abort();
}

Fiber &self() {
  return block.fibers[block.current];
}

/* From a fiber to the scheduler; the last time with nothing to come back to. */
void leave(bool last) {
  Fiber &fiber = self();
  __sanitizer_start_switch_fiber(last ? nullptr : &fiber.fake_stack, block.scheduler_stack, block.scheduler_stack_bytes);
  swapcontext(&fiber.context, &block.scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &block.scheduler_stack, &block.scheduler_stack_bytes);
}

void enter() {
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
  if (before_thread) before_thread(threadIdx.x);
  (*block.kernel)();
  Fiber &fiber = self();
  for (const auto &group : fiber.groups) {
    if (!group.empty()) fail("a thread ended with copies under way", fiber.site);
  }
  fiber.state = finished;
  leave(true);
}

void resume(unsigned thread) {
  Fiber &fiber = block.fibers[thread];
  block.current = thread;
  threadIdx = {thread, 0, 0};
  __sanitizer_start_switch_fiber(&block.scheduler_fake_stack, fiber.stack.get(), stack_bytes);
  swapcontext(&block.scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(block.scheduler_fake_stack, nullptr, nullptr);
}

void wait_at(State state, Site site) {
  Fiber &fiber = self();
  fiber.state = state;
  fiber.site = site;
  leave(false);
}

/* Lets the threads [first, end) go on when all of them have come to one line. */
void release(unsigned first, unsigned end, State state, unsigned *waiting) {
  if (*waiting != end - first) return;
  const Site site = block.fibers[first].site;
  for (unsigned i = first; i < end; i++) {
    Fiber &fiber = block.fibers[i];
    if (fiber.site.line != site.line || strcmp(fiber.site.file, site.file))
      fail("threads wait at different barriers", fiber.site);
    if (fiber.state != state) fail("a thread is missing at a barrier", site);
    fiber.state = ready;
  }
  *waiting = 0;
}

void after_resume(unsigned thread) {
  const unsigned threads = static_cast<unsigned>(block.fibers.size());
  const State state = block.fibers[thread].state;
  if (state == at_block_barrier) {
    block.waiting++;
    if (block.waiting == threads) block.with[++block.barriers % 2] = 0;
    release(0, threads, state, &block.waiting);
  } else if (state == at_warp_barrier) {
    Warp &warp = block.warps[thread / 32];
    warp.waiting++;
    const unsigned first = thread / 32 * 32;
    release(first, first + 32, state, &warp.waiting);
  }
}

/* Resumes each lane that can go on, once. */
bool run_lanes(unsigned warp) {
  bool moved = false;
  for (unsigned lane : block.lane_order) {
    const unsigned thread = warp * 32 + lane;
    if (block.fibers[thread].state != ready) continue;
    moved = true;
    resume(thread);
    after_resume(thread);
  }
  return moved;
}

void run_block() {
  for (;;) {
    bool moved = false;
    for (unsigned warp : block.warp_order) {
      for (;;) {
        const unsigned yields = block.yields;
        if (!run_lanes(warp)) break;
        moved = true;
        if (!block.greedy || yields != block.yields) break;
      }
    }
    if (moved) continue;
    for (const Fiber &fiber : block.fibers) {
      if (fiber.state != finished) fail("threads wait for others that ended or wait elsewhere", fiber.site);
    }
    return;
  }
}

void start_fibers(unsigned threads) {
  if (threads % 32) fail("a block is not made of whole warps", EMULATED_SITE);
  block.fibers.resize(threads);
  block.warps.resize(threads / 32);
  block.waiting = 0;
  block.with[0] = block.with[1] = 0;
  for (Warp &warp : block.warps) warp.waiting = 0;
  for (Fiber &fiber : block.fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[stack_bytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.fake_stack = nullptr;
    fiber.state = ready;
    fiber.site = {};
    fiber.gathers = 0;
    fiber.groups.clear();
    fiber.open_group.clear();
  }
}

std::vector<unsigned> order_of(unsigned count, unsigned seed) {
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; i++) order[i] = seed == 1 ? count - 1 - i : i;
  if (seed < 2) return order;
  uint32_t state = seed * 2654435761u;
  for (unsigned i = count; i > 1; i--) {
    state = state * 1664525u + 1013904223u;
    std::swap(order[i - 1], order[state / 65536 % i]);
  }
  return order;
}

struct Grid {
  unsigned blocks, threads;
  size_t shared_bytes;
  const std::function<void()> &kernel;

  void run(unsigned number) const {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    blockIdx = {number, 0, 0};
    const unsigned seed = schedule < 2 ? schedule : schedule + number;
    block.warp_order = order_of(threads / 32, seed);
    block.lane_order = order_of(32, seed);
    block.greedy = schedule != 0;
    block.kernel = &kernel;
    block.shared_bytes = shared_bytes;
    block.shared = nullptr;
    if (shared_bytes) {
      block.shared = static_cast<unsigned char *>(aligned_alloc(128, (shared_bytes + 127) / 128 * 128));
      memset(block.shared, 0xff, shared_bytes);
    }
    start_fibers(threads);
    run_block();
    free(block.shared);
  }
};

}  // namespace

void launch(unsigned blocks, unsigned threads, size_t dynamic_shared_bytes, const std::function<void()> &kernel) {
  const Grid grid = {blocks, threads, dynamic_shared_bytes, kernel};
  for (unsigned number : order_of(blocks, schedule)) grid.run(number);
}

void launch_together(unsigned blocks, unsigned threads, size_t dynamic_shared_bytes, const std::function<void()> &kernel) {
  const Grid grid = {blocks, threads, dynamic_shared_bytes, kernel};
  const unsigned callers_schedule = schedule;
  const std::function<void(unsigned)> callers_before = before_thread;
  std::vector<std::thread> pthreads;
  for (unsigned number : order_of(blocks, schedule)) {
    pthreads.emplace_back([&, number] {
      schedule = callers_schedule;
      before_thread = callers_before;
      grid.run(number);
    });
  }
  for (std::thread &pthread : pthreads) pthread.join();
}

void yield() {
  sched_yield();
  block.yields++;
  wait_at(ready, self().site);
}

void block_barrier(Site site) {
  wait_at(at_block_barrier, site);
}

int block_count(Site site, bool value) {
  const unsigned turn = block.barriers % 2;
  if (value) block.with[turn]++;
  wait_at(at_block_barrier, site);
  return static_cast<int>(block.with[turn]);
}

bool block_any(Site site, bool value) {
  return block_count(site, value) != 0;
}

void warp_barrier(Site site) {
  wait_at(at_warp_barrier, site);
}

const unsigned char *warp_gather(Site site, const void *value, size_t size) {
  Fiber &fiber = self();
  unsigned char *lanes = block.warps[threadIdx.x / 32].lanes[fiber.gathers++ % 2];
  memcpy(lanes + lane() * lane_bytes, value, size);
  wait_at(at_warp_barrier, site);
  return lanes;
}

void check_mask(Site site, unsigned mask) {
  if (mask != 0xffffffffu) fail("a warp function with less than the full mask", site);
}

unsigned warp_ballot(Site site, unsigned mask, bool value) {
  check_mask(site, mask);
  const unsigned char given = value;
  const unsigned char *lanes = warp_gather(site, &given, 1);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(lanes[i * lane_bytes]) << i;
  return bits;
}

unsigned warp_match(Site site, unsigned mask, int value) {
  check_mask(site, mask);
  const unsigned char *lanes = warp_gather(site, &value, sizeof value);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(!memcmp(lanes + i * lane_bytes, &value, sizeof value)) << i;
  return bits;
}

unsigned warp_max(Site site, unsigned mask, unsigned value) {
  check_mask(site, mask);
  const unsigned char *lanes = warp_gather(site, &value, sizeof value);
  unsigned most = 0;
  for (int i = 0; i < 32; i++) {
    unsigned other;
    memcpy(&other, lanes + i * lane_bytes, sizeof other);
    if (other > most) most = other;
  }
  return most;
}

unsigned char *dynamic_shared() {
  return block.shared;
}

void load_16(uint32_t *registers, const void *from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) fail("misaligned load", self().site);
  memcpy(registers, from, 16);
}

/* The bytes arrive when the thread waits for them; until then the destination holds 0xff, which is NaN as bf16. All 16
 * source bytes are touched even when none is used: their address must be legal. */
void copy_async(void *to, const void *from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("misaligned copy", self().site);
  if (bytes != 0 && bytes != 16) fail("a copy of neither 0 nor 16 bytes", self().site);
  Copy copy = {to, {}};
  memcpy(copy.bytes, from, 16);
  memset(copy.bytes + bytes, 0, 16 - static_cast<size_t>(bytes));
  memset(to, 0xff, 16);
  self().open_group.push_back(copy);
}

void copy_commit() {
  Fiber &fiber = self();
  fiber.groups.push_back(std::move(fiber.open_group));
  fiber.open_group.clear();
}

void copy_wait(int pending) {
  std::vector<std::vector<Copy>> &groups = self().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const Copy &copy : groups.front()) memcpy(copy.to, copy.bytes, 16);
    groups.erase(groups.begin());
  }
}

/* PTX, "Warp-level matrix load": lane 8i + j gives row j of matrix i; lane l receives columns 2 * (l % 4), + 1 of row l / 4.
 */
void load_matrix(uint32_t *registers, int count, const void *row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("misaligned matrix row", self().site);
  const unsigned char *lanes = warp_gather(EMULATED_SITE, &row, sizeof row);
  for (int i = 0; i < count; i++) {
    const unsigned char *from;
    memcpy(&from, lanes + (i * 8 + lane() / 4) * lane_bytes, sizeof from);
    memcpy(registers + i, from + lane() % 4 * 4, 4);
  }
}

namespace {

struct Fragments {
  uint32_t a[4];
  uint32_t b[2];
};

float half_of(uint32_t pair, int high) {
  return __uint_as_float((high ? pair >> 16 : pair & 0xffffu) << 16);
}

}  // namespace

/* PTX, "Matrix fragments for mma.m16n8k16": element (row, k) of a is in lane row % 8 * 4 + k % 8 / 2, register row / 8 + k /
 * 8 * 2; element (k, column) of b in lane column * 4 + k % 8 / 2, register k / 8; a lane's sums are rows lane / 4 and + 8,
 * columns lane % 4 * 2 and + 1. */
void mma_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const unsigned char *lanes = warp_gather(EMULATED_SITE, &mine, sizeof mine);
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8;
    const int column = lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      Fragments left, right;
      memcpy(&left, lanes + (row % 8 * 4 + k % 8 / 2) * lane_bytes, sizeof left);
      memcpy(&right, lanes + (column * 4 + k % 8 / 2) * lane_bytes, sizeof right);
      sum[i] += half_of(left.a[row / 8 + k / 8 * 2], k % 2) * half_of(right.b[k / 8], k % 2);
    }
  }
}

uint64_t global_timer() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace emulator
