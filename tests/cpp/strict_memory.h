// Buffers for tests of kernels: values of any dtype at any address, and memory of which every byte
// is checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "base/half.h"
#include "float_data.h"
#include "kernel/kernels.h"

namespace cgx::test {

using Memory = std::vector<std::byte>;
inline constexpr std::byte kFill{0xa5};

inline std::mt19937 random_bits(20240607);
inline int64_t pick(int64_t end) {
  return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(end));
}
template <typename T>
T one_of(std::initializer_list<T> list) {
  return list.begin()[pick(static_cast<int64_t>(list.size()))];
}

// All addresses and sizes below are multiples of these; 1: they are arbitrary.
struct Alignment {
  int64_t values = 1, messages = 1;
};
inline Alignment alignment;

// The bytes after a message.
inline int64_t padding() { return pick(48) / alignment.messages * alignment.messages; }

// Values of a dtype at an offset from an aligned address. The buffer ends with the last value.
struct Values {
  Memory memory;
  int64_t skipped = 0;
  std::byte* data() { return memory.data() + skipped; }
};

inline Values make_values(Dtype dtype, int64_t numel, Data kind) {
  static std::normal_distribution<float> normal;
  const int64_t width = size_of(dtype);
  Values values;
  values.skipped = one_of<int64_t>({0, 0, 0, 1, 2, 4, 8, 11}) / alignment.values * alignment.values;
  values.memory.resize(static_cast<size_t>(values.skipped + numel * width));
  for (int64_t i = 0; i < numel; ++i) {
    const float x = value_of(kind, random_bits, normal);
    const auto any = static_cast<uint16_t>(random_bits());
    const uint16_t half = kind == Data::kAnyBits     ? any
                          : dtype == Dtype::kFloat16 ? round_to_float16(x)
                                                     : round_to_bfloat16(x);
    const void* from = width == 4 ? static_cast<const void*>(&x) : &half;
    std::memcpy(values.data() + i * width, from, static_cast<size_t>(width));
  }
  return values;
}

inline float* floats_of(Memory& memory) { return reinterpret_cast<float*>(memory.data()); }

// Values in fp32, plus their residual, which may be null.
inline Memory as_floats(Dtype dtype, const std::byte* values, int64_t numel,
                        const std::byte* residual = nullptr) {
  Memory floats(static_cast<size_t>(4 * numel));
  kernels().convert(dtype, values, Dtype::kFloat32, floats.data(), numel);
  if (residual) kernels().add(dtype, residual, floats_of(floats), floats_of(floats), numel);
  return floats;
}

// The output memory of a launch, in several ranges. Afterwards all bytes must be as expected,
// including those between the ranges.
struct Space {
  int64_t unit = alignment.values;
  Memory actual = {}, expected = {};

  // Adds a range of `bytes` bytes and returns its offset.
  int64_t add(int64_t bytes) {
    const int64_t gap = one_of<int64_t>({16, 16, 17, 22, 24, 31}) / unit * unit;
    const int64_t at = static_cast<int64_t>(actual.size()) + gap;
    const int64_t end = at + bytes + 16;
    actual.resize(static_cast<size_t>((end + unit - 1) / unit * unit), kFill);
    return at;
  }
  // Adds a range that contains `bytes`.
  int64_t add(const Memory& bytes) {
    const int64_t at = add(static_cast<int64_t>(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), actual.begin() + at);
    return at;
  }
  void repeat(int times) {
    const size_t once = actual.size();
    actual.resize(once * static_cast<size_t>(times), kFill);
  }
  void expect(int64_t at, const Memory& bytes) {
    if (expected.empty()) expected.assign(actual.size(), kFill);
    if (!bytes.empty()) std::memcpy(expected.data() + at, bytes.data(), bytes.size());
  }
  // Returns null for a negative offset.
  std::byte* place(int64_t at) { return at < 0 ? nullptr : actual.data() + at; }
  bool as_expected() {
    if (expected.empty()) expected.assign(actual.size(), kFill);
    return actual == expected;
  }
};

}  // namespace cgx::test
