/* What the emulated tests share: guarded buffers, a random source, bf16 by its definition, and the rows' layout spelled out
 * anew (nothing here calls templates/, except for the structs and constants of abi.h). */
#ifndef MOEFLOW_EMULATED_H
#define MOEFLOW_EMULATED_H

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "abi.h"
#include "test.h"

constexpr unsigned schedules[] = {0, 1, 12345}; /* in order, in reverse, shuffled */
constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/* `count` values between poisoned guard zones, all bytes 0xff at first: NaN as a float, -1 as an id. */
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count), bytes_((count * sizeof(T) + 255) / 256 * 256) {
    memory_ = static_cast<unsigned char *>(aligned_alloc(256, bytes_ + 2 * guard));
    memset(memory_, 0xff, bytes_ + 2 * guard);
    __asan_poison_memory_region(memory_, guard);
    __asan_poison_memory_region(memory_ + guard + count * sizeof(T), bytes_ - count * sizeof(T) + guard);
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() {
    __asan_unpoison_memory_region(memory_, bytes_ + 2 * guard);
    free(memory_);
  }
  T *data() {
    return reinterpret_cast<T *>(memory_ + guard);
  }
  T &operator[](size_t i) {
    return data()[i];
  }
  size_t size() const {
    return count_;
  }
  void fill(int byte) {
    memset(memory_ + guard, byte, count_ * sizeof(T));
  }

 private:
  static constexpr size_t guard = 1024;
  size_t count_;
  size_t bytes_;
  unsigned char *memory_;
};

class Random { /* SplitMix64, public domain */
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int count) {
    return static_cast<int>(next() % static_cast<uint64_t>(count));
  }
  double unit() {
    return static_cast<double>(next() >> 11) * 0x1p-53;
  }
  float normal() {
    return static_cast<float>(std::sqrt(-2 * std::log(1 - unit())) * std::cos(6.283185307179586 * unit()));
  }

 private:
  uint64_t state_;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float from_bf16(uint16_t bits) {
  return float_of(static_cast<uint32_t>(bits) << 16);
}
/* The nearer of the two bf16 neighbours; the one with an even last bit at equal distance. */
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t towards_zero = static_cast<uint16_t>(bits >> 16);
  if (std::isnan(value)) return towards_zero | 0x40;
  if (std::isinf(value)) return towards_zero;
  const uint16_t away = static_cast<uint16_t>(towards_zero + 1); /* perhaps infinity, which stands for 2^128 here */
  const double below = std::fabs(static_cast<double>(from_bf16(towards_zero)));
  const double above = std::isinf(from_bf16(away)) ? 0x1p128 : std::fabs(static_cast<double>(from_bf16(away)));
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude - below < above - magnitude) return towards_zero;
  if (magnitude - below > above - magnitude) return away;
  return towards_zero % 2 ? away : towards_zero;
}

/* The layout of a row, from the description in abi.h. */
struct Layout {
  int hidden;
  int top_k;
  static int64_t padded(int64_t bytes) {
    return (bytes + 127) & ~int64_t{127};
  }
  int64_t hidden_at() const {
    return padded(16 + top_k * 8);
  }
  int64_t bytes() const {
    return hidden_at() + padded(hidden * int64_t{2});
  }
  int64_t return_bytes(bool fp32) const {
    return padded(hidden * int64_t{fp32 ? 4 : 2});
  }
};

struct Header {
  uint32_t epoch, rows_sent, tokens_max, flags;
};

/* A received row, written field by field. */
class RowWriter {
 public:
  RowWriter(uint8_t *row, const Layout &layout) : row_(row), layout_(layout) {}
  void header(const Header &header) {
    memcpy(row_, &header, sizeof header);
  }
  void id(int k, int32_t place) {
    memcpy(row_ + 16 + 4 * k, &place, 4);
  }
  void weight(int k, float weight) {
    memcpy(row_ + 16 + 4 * layout_.top_k + 4 * k, &weight, 4);
  }
  void hidden(int column, uint16_t bits) {
    memcpy(row_ + layout_.hidden_at() + 2 * column, &bits, 2);
  }

 private:
  uint8_t *row_;
  Layout layout_;
};

inline moeflow_lane lane_at(uint32_t epoch) {
  moeflow_lane lane = {};
  lane.epoch = epoch;
  return lane;
}

#define EXPECT_EQUAL(got, want)                                                                 \
  do {                                                                                          \
    auto got_ = (got);                                                                          \
    decltype(got_) want_ = (want);                                                              \
    EXPECT(got_ == want_, "%g, not %g", static_cast<double>(got_), static_cast<double>(want_)); \
  } while (0)
#endif
