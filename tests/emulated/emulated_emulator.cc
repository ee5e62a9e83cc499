/* The emulator itself: its words do what CUDA's do, and broken kernels are caught. */
#include <sys/wait.h>
#include <unistd.h>

#include "emulated.h"
#include "ptx.cuh"

namespace {

/* 1 when running the kernel ends the process with a signal or an error, 0 when it runs through. */
bool caught(unsigned threads, unsigned schedule, const std::function<void()> &kernel) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (!freopen("/dev/null", "w", stderr)) _exit(0);
    emulator::schedule = schedule;
    emulator::launch(2, threads, 1024, kernel);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

void words() {
  for (unsigned schedule : schedules) {
    emulator::schedule = schedule;
    Buffer<int> out(2 * 64 * 6);
    emulator::launch(2, 64, 0, [&] {
      const int thread = static_cast<int>(threadIdx.x);
      int *mine = out.data() + (blockIdx.x * 64 + threadIdx.x) * 6;
      mine[0] = __shfl_sync(0xffffffffu, thread, 5);
      mine[1] = __shfl_xor_sync(0xffffffffu, thread, 3);
      mine[2] = __shfl_up_sync(0xffffffffu, thread, 4);
      mine[3] = static_cast<int>(__ballot_sync(0xffffffffu, thread % 3 == 0));
      mine[4] = static_cast<int>(__match_any_sync(0xffffffffu, thread % 4));
      mine[5] = __syncthreads_or(blockIdx.x == 1 && thread == 63);
    });
    for (int i = 0; i < 128; i++) {
      const int thread = i % 64;
      const int *got = out.data() + i * 6;
      EXPECT_EQUAL(got[0], thread / 32 * 32 + 5);
      EXPECT_EQUAL(got[1], thread ^ 3);
      EXPECT_EQUAL(got[2], thread % 32 < 4 ? thread : thread - 4);
      unsigned thirds = 0;
      unsigned same = 0;
      for (int j = 0; j < 32; j++) {
        thirds |= static_cast<unsigned>((thread / 32 * 32 + j) % 3 == 0) << j;
        same |= static_cast<unsigned>(j % 4 == thread % 4) << j;
      }
      EXPECT_EQUAL(static_cast<unsigned>(got[3]), thirds);
      EXPECT_EQUAL(static_cast<unsigned>(got[4]), same);
      EXPECT_EQUAL(got[5], i >= 64);
    }
  }
}

void broken_kernels() {
  EXPECT(caught(64, 0,
                [] {
                  if (threadIdx.x < 32) __syncthreads();
                }),
         "half a block at a barrier");
  EXPECT(caught(64, 0,
                [] {
                  if (threadIdx.x % 2) {
                    __syncthreads();
                  } else {
                    __syncthreads();
                  }
                }),
         "two barriers");
  EXPECT(caught(32, 0,
                [] {
                  if (threadIdx.x != 7) __syncwarp();
                }),
         "a lane is missing");
  EXPECT(caught(32, 0, [] { __shfl_sync(0xffffu, 1, 0); }), "half a mask");
  EXPECT(caught(48, 0, [] {}), "half a warp");
  EXPECT(caught(32, 0,
                [] {
                  Buffer<uint4> from(1);
                  moeflow::copy_async_16(moeflow::to_shared(moeflow::dynamic_shared()),
                                         reinterpret_cast<char *>(from.data()) + 8, 16);
                }),
         "a misaligned copy");
  EXPECT(caught(32, 0, [] { *(volatile unsigned char *)(moeflow::dynamic_shared() + 1024) = 1; }), "beyond shared memory");
  EXPECT(!caught(64, 0,
                 [] {
                   __syncthreads();
                   __syncwarp();
                 }),
         "a good kernel");
}

/* A missing barrier: the result depends on the schedule. */
void schedules_differ() {
  int seen[2] = {-1, -1};
  for (unsigned schedule : {0u, 1u}) {
    emulator::schedule = schedule;
    emulator::launch(1, 64, 64 * 4, [&] {
      int *shared = reinterpret_cast<int *>(moeflow::dynamic_shared());
      shared[threadIdx.x] = static_cast<int>(threadIdx.x);
      if (threadIdx.x == 40) seen[schedule] = shared[0];
    });
  }
  EXPECT(seen[0] != seen[1], "%d %d", seen[0], seen[1]);
}

/* Copies arrive with the wait, not before, and oldest first. */
void copies() {
  Buffer<uint16_t> from(16);
  for (int i = 0; i < 16; i++) from[i] = static_cast<uint16_t>(i + 1);
  emulator::schedule = 0;
  Buffer<int> out(6);
  emulator::launch(1, 32, 64, [&] {
    if (threadIdx.x) return;
    uint16_t *shared = reinterpret_cast<uint16_t *>(moeflow::dynamic_shared());
    moeflow::copy_async_16(moeflow::to_shared(shared), from.data(), 16);
    moeflow::copy_commit();
    moeflow::copy_async_16(moeflow::to_shared(shared + 8), from.data() + 8, 0);
    moeflow::copy_commit();
    out[0] = shared[3];
    moeflow::copy_wait<1>();
    out[1] = shared[3];
    out[2] = shared[11];
    moeflow::copy_wait<0>();
    out[3] = shared[11];
  });
  EXPECT_EQUAL(out[0], 0xffff);
  EXPECT_EQUAL(out[1], 4);
  EXPECT_EQUAL(out[2], 0xffff);
  EXPECT_EQUAL(out[3], 0);
}

/* ldmatrix and mma together multiply two plain matrices. */
void matrices() {
  Buffer<uint16_t> a(16 * 16), b(8 * 16); /* [row][k], [column][k] */
  Buffer<float> sum(16 * 8);
  Random random(3);
  for (size_t i = 0; i < a.size(); i++) a[i] = to_bf16(static_cast<float>(random.below(17) - 8));
  for (size_t i = 0; i < b.size(); i++) b[i] = to_bf16(static_cast<float>(random.below(17) - 8));
  emulator::launch(1, 32, 0, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    uint32_t left[4], right[2];
    moeflow::load_matrix_4(left, moeflow::to_shared(a.data() + lane % 16 * 16 + lane / 16 * 8));
    moeflow::load_matrix_2(right, moeflow::to_shared(b.data() + lane % 8 * 16 + lane / 8 % 2 * 8));
    float mine[4] = {1, 1, 1, 1};
    moeflow::mma_bf16(mine, left, right[0], right[1]);
    for (int i = 0; i < 4; i++) sum[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = mine[i];
  });
  for (int row = 0; row < 16; row++) {
    for (int column = 0; column < 8; column++) {
      float want = 1;
      for (int k = 0; k < 16; k++) want += from_bf16(a[row * 16 + k]) * from_bf16(b[column * 16 + k]);
      EXPECT_EQUAL(sum[row * 8 + column], want);
    }
  }
}

}  // namespace

int main() {
  words();
  broken_kernels();
  schedules_differ();
  copies();
  matrices();
  TEST_END;
}
