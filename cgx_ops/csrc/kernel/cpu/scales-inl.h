// What a bucket is measured by: its largest magnitude, and sums over its values in an order that no
// target changes; and scales of 16 bits.
//
//   1. headers of one scale
//   2. the largest magnitude
//   3. sums: blocks of 512 values in sixteen lanes each, folded in halves; then block by block
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernel/cpu/fields-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/cpu/vectors-inl.h"
#include "kernel/kernels.h"
#include "kernel/scales.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

constexpr float kNan = __builtin_bit_cast(float, kFloat32Nan);

// Calls visit(std::integral_constant<int, bits>{}) for bits from kFirst to kLast.
template <int kFirst, int kLast, typename Visit>
[[gnu::always_inline]] inline void with_bits(int bits, const Visit& visit) {
  if (bits == kFirst) return visit(std::integral_constant<int, kFirst>{});
  if constexpr (kFirst < kLast) with_bits<kFirst + 1, kLast>(bits, visit);
}

// ---- 1. headers ----

// A header of one scale: bf16, NaN if any value of the bucket is not finite.
struct Scale {
  float value;

  [[gnu::always_inline]] static Scale read(uint16_t wire) {
    const float value = widen_bfloat16(wire);
    return {is_finite(value) ? value : kNan};
  }
  [[gnu::always_inline]] uint16_t write() const { return round_to_bfloat16(value); }
};

// What formats of one scale share.
struct OneScale {
  using Header = Scale;
  using Wire = uint16_t;
  static constexpr bool kMoves = false;

  template <typename Grid>
  [[gnu::always_inline]] static float fill(const Grid& /*grid*/) {
    return 0.0f;
  }
  [[gnu::always_inline]] static Wire write(const Header& header) { return header.write(); }
  [[gnu::always_inline]] static Header read(Wire wire) { return Scale::read(wire); }
};

// ---- 2. magnitudes ----

// Of n > 0 values; one that is not finite if any is not. The order of the stored magnitudes is that
// of the widened ones, so the scan widens nothing.
template <typename Value>
float largest_magnitude(const Stored<typename Value::Bits>* __restrict values, int64_t n) {
  using Bits = typename Value::Bits;
  constexpr Bits kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits magnitude = values[i].value & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return Value::widen(largest);
}

[[gnu::always_inline]] inline Floats magnitudes(Floats x) { return Floats(Ints(x) & 0x7fffffff); }

// ---- 3. sums ----

template <int kSums>
struct Sums {
  double at[kSums] = {};
};

// Sums of terms(x) over n values; terms() makes kSums registers of a register, zeros of zeros.
template <typename Value, int kSums, typename Terms>
[[gnu::always_inline]] inline Sums<kSums> sums_of(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, const Terms& terms) {
  constexpr int64_t kBlock = 512;
  Sums<kSums> sums;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t end = n - start < kBlock ? n : start + kBlock;
    Floats lanes[kSums][kRegisters] = {};
    const auto add = [&](const Floats16& some) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats term[kSums];
        terms(some.at[i], term);
        for (int k = 0; k < kSums; ++k) lanes[k][i] += term[k];
      }
    };
    int64_t i = start;
    for (; i + kSixteen <= end; i += kSixteen) add(load16<Value>(values + i));
    if (i < end) add(load_last<Value>(values + i, static_cast<int>(end - i), 0.0f));
    for (int k = 0; k < kSums; ++k) {
      float lane[kSixteen];
      __builtin_memcpy(lane, lanes[k], sizeof(lane));
      for (int half = kSixteen / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
      sums.at[k] += static_cast<double>(lane[0]);
    }
  }
  return sums;
}

// Of squares, each multiplied by scale.down^2.
template <typename Value>
[[gnu::always_inline]] inline double sum_of_squares(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, const Prescale& scale) {
  const auto squares = sums_of<Value, 1>(values, n, [&](Floats x, Floats(&term)[1]) {
    const Floats scaled = x * scale.down;
    term[0] = scaled * scaled;
  });
  return squares.at[0];
}

// The square root of the sum of squares, divided by `divisor` before the root.
template <typename Value>
[[gnu::always_inline]] inline float root_of_squares(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, float largest,
    double divisor) {
  const Prescale scale = prescale_of(largest);
  const double squares = sum_of_squares<Value>(values, n, scale);
  return __builtin_sqrtf(static_cast<float>(squares / divisor)) * scale.up;
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
