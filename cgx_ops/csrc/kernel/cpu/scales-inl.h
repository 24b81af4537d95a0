// Properties of a bucket: its largest magnitude, and sums of its values in an order that all
// targets share. Also 16-bit scales.
//
//   1. headers with one scale
//   2. the largest magnitude
//   3. sums: blocks of 512 values in sixteen lanes each, folded in halves, then block by block
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

// A header with one scale: bf16, or NaN if any value of the bucket is not finite.
struct Scale {
  float value;

  [[gnu::always_inline]] static Scale read(uint16_t wire) {
    const float value = widen_bfloat16(wire);
    return {is_finite(value) ? value : kNan};
  }
  [[gnu::always_inline]] uint16_t write() const { return round_to_bfloat16(value); }
};

// Common members of formats with one scale.
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

// For n > 0 values. Non-finite if any value is. Stored magnitudes are ordered as the widened ones,
// so the scan does not widen.
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

// A bucket's largest magnitude, and sums over its values multiplied by scale.down.
template <int kSums>
struct Measured {
  float largest;
  Prescale scale;
  double sums[kSums];
};

// Sums the registers that terms(x, scaled) returns for each register; zeros must give zeros.
// Returns the largest stored magnitude, as bits.
template <typename Value, int kSums, typename Terms>
[[gnu::always_inline]] inline int32_t add_up(const Stored<typename Value::Bits>* __restrict values,
                                             int64_t n, float down, const Terms& terms,
                                             double (&sums)[kSums]) {
  constexpr int64_t kBlock = 512;
  Ints16 largest{};
  for (double& sum : sums) sum = 0.0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t end = n - start < kBlock ? n : start + kBlock;
    Floats lanes[kSums][kRegisters] = {};
    const auto add = [&](const Floats16& some) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        const auto magnitude = Ints(magnitudes(some.at[i]));
        largest.at[i] = magnitude > largest.at[i] ? magnitude : largest.at[i];
        Floats term[kSums];
        terms(some.at[i], some.at[i] * down, term);
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
      sums[k] += static_cast<double>(lane[0]);
    }
  }
  int32_t lane[kSixteen], most = 0;
  store_registers(largest, lane);
  for (const int32_t magnitude : lane) most = magnitude > most ? magnitude : most;
  return most;
}

// For n > 0 values. A single pass unless values need scaling, which is rare. The sums are
// meaningless if the largest magnitude is not finite.
template <typename Value, int kSums, typename Terms>
[[gnu::always_inline]] inline Measured<kSums> measure_bucket(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, const Terms& terms) {
  Measured<kSums> found;
  found.largest = __builtin_bit_cast(float, add_up<Value>(values, n, 1.0f, terms, found.sums));
  found.scale = prescale_of(found.largest);
  if (found.scale.down != 1.0f && is_finite(found.largest))
    add_up<Value>(values, n, found.scale.down, terms, found.sums);
  return found;
}

template <typename Value>
[[gnu::always_inline]] inline Measured<1> measure_squares(
    const Stored<typename Value::Bits>* __restrict values, int64_t n) {
  return measure_bucket<Value, 1>(
      values, n, [](Floats /*x*/, Floats scaled, Floats(&term)[1]) { term[0] = scaled * scaled; });
}

// The square root of (the sum of squares / divisor).
[[gnu::always_inline]] inline float root_of_squares(const Measured<1>& squares, double divisor) {
  return __builtin_sqrtf(static_cast<float>(squares.sums[0] / divisor)) * squares.scale.up;
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
