// Tensors at odd addresses, between guard bytes that must not change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "base/half.h"
#include "base/types.h"
#include "float_data.h"

namespace cgx::test {

inline std::vector<float> make_data(Data kind, int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel));
  for (float& x : values) x = value_of(kind, random, normal);
  return values;
}

inline constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};

inline float widened(Dtype dtype, const std::byte* stored) {
  if (dtype == Dtype::kFloat32) {
    float value;
    std::memcpy(&value, stored, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, stored, sizeof(bits));
  return dtype == Dtype::kFloat16 ? widen_float16(bits) : widen_bfloat16(bits);
}

inline void store(Dtype dtype, float value, std::byte* stored) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(stored, &value, sizeof(value));
    return;
  }
  const uint16_t bits =
      dtype == Dtype::kFloat16 ? round_to_float16(value) : round_to_bfloat16(value);
  std::memcpy(stored, &bits, sizeof(bits));
}

// Begins one byte after an aligned address, and ends with guard bytes that must not change.
class Unaligned {
 public:
  explicit Unaligned(int64_t bytes) : bytes_(static_cast<size_t>(bytes) + 1 + kGuard, kFill) {}
  std::byte* data() { return bytes_.data() + 1; }
  const std::byte* data() const { return bytes_.data() + 1; }
  bool guard_intact() const {
    return bytes_[0] == kFill &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), [](std::byte b) { return b == kFill; });
  }
  bool operator==(const Unaligned&) const = default;
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  static constexpr int kGuard = 64;
  static constexpr std::byte kFill{0xa5};
  std::vector<std::byte> bytes_;
};

inline Unaligned stored(Dtype dtype, const std::vector<float>& values) {
  const auto width = size_of(dtype);
  Unaligned out(static_cast<int64_t>(values.size()) * width);
  for (size_t i = 0; i < values.size(); ++i) {
    store(dtype, values[i], out.data() + width * static_cast<int64_t>(i));
  }
  return out;
}

}  // namespace cgx::test
