/* fill equals templates/random.h element by element, and writes nothing else. */
#include "emulated.h"
#include "fill.cuh"

namespace {

struct Model {};
struct Variant {
  static constexpr int threads = 256;
};

void run(int first_expert, int experts, int64_t rows, int64_t columns, int matrix, int shift) {
  const uint64_t seed = 0x123456789abcdefu;
  Buffer<uint16_t> out(static_cast<size_t>(experts * rows * columns));
  const moeflow_fill_params params = {out.data(), seed, rows, columns, first_expert, experts, matrix, shift};
  emulator::launch(7, 256, 0, [&] { moeflow::fill<Model, Variant>(params); });
  size_t at = 0;
  size_t wrong = 0;
  for (int e = 0; e < experts; e++) {
    for (int64_t row = 0; row < rows; row++) {
      const uint32_t key = moeflow_random_row(seed, static_cast<uint32_t>(first_expert + e), static_cast<uint32_t>(matrix),
                                              static_cast<uint32_t>(row));
      for (int64_t column = 0; column < columns; column++, at++) {
        wrong += out[at] != moeflow_random_bf16(moeflow_random_bits(key, static_cast<uint32_t>(column)), shift);
      }
    }
  }
  EXPECT(wrong == 0, "%zu of %zu elements, %d experts of %lld x %lld", wrong, at, experts, static_cast<long long>(rows),
         static_cast<long long>(columns));
}

}  // namespace

int main() {
  run(0, 1, 1, 8, MOEFLOW_RANDOM_HIDDEN, 0);
  run(140, 3, 5, 136, MOEFLOW_RANDOM_GATE_UP, 6);
  run(7, 2, 9, 2880, MOEFLOW_RANDOM_DOWN, 5);
  run(0, 2, 3, 33, MOEFLOW_RANDOM_LOGITS, 1);
  TEST_END;
}
