// Storage, widening to fp32 and rounding of each Dtype, and the order of values as integers.
// Pointers may be unaligned.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/types.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// A value at any address, in memory of any type. (A typedef with these attributes would lose them
// in templates and with auto.)
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Stored {
  T value;
};

struct Float32 {
  using Bits = uint32_t;
  using Key = int32_t;
  [[gnu::always_inline]] static float widen(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
  }
  [[gnu::always_inline]] static uint32_t round(float x) { return __builtin_bit_cast(uint32_t, x); }
};

struct Float16 {
  using Bits = uint16_t;
  using Key = int16_t;
  static constexpr float kLargest = kLargestFloat16;
  [[gnu::always_inline]] static float widen(uint16_t bits) { return widen_float16(bits); }
  [[gnu::always_inline]] static uint16_t round(float x) { return round_to_float16(x); }
};

struct Bfloat16 {
  using Bits = uint16_t;
  using Key = int16_t;
  static constexpr float kLargest = kLargestBfloat16;
  [[gnu::always_inline]] static float widen(uint16_t bits) { return widen_bfloat16(bits); }
  [[gnu::always_inline]] static uint16_t round(float x) { return round_to_bfloat16(x); }
};

// Signed integers in the order of the values, with -0 < +0, and NaNs beyond the infinities. The
// function is its own inverse.
template <typename Key>
[[gnu::always_inline]] inline Key order_key(Key bits) {
  constexpr int kSignBit = 8 * sizeof(Key) - 1;
  constexpr Key kMagnitude = static_cast<Key>(~(Key{1} << kSignBit));
  return static_cast<Key>(bits ^ ((bits >> kSignBit) & kMagnitude));
}

// Normalizes NaN: processors differ in the payload that survives an operation and in the sign of
// Inf - Inf.
[[gnu::always_inline]] inline float with_one_nan(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return __builtin_bit_cast(float, is_nan(bits) ? kFloat32Nan : bits);
}

[[gnu::always_inline]] inline float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }

// Calls visit(Float32{}), visit(Float16{}) or visit(Bfloat16{}).
template <typename Visit>
[[gnu::always_inline]] inline void with_value_type(Dtype dtype, const Visit& visit) {
  switch (dtype) {
    case Dtype::kFloat32:
      return visit(Float32{});
    case Dtype::kFloat16:
      return visit(Float16{});
    case Dtype::kBfloat16:
      return visit(Bfloat16{});
  }
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
