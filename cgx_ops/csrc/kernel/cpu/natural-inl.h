// Signs and powers of two (natural compression, Horvath et al., MSML 2022), rounded at random
// between the two next to the value, so unbiased. The header is the power of two, P, that the
// bucket's largest magnitude has; a code has the sign above, then k: P * 2^(k - 126), or 0 for 0.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Natural : OneScale {
  using Field = BitField<8>;
  struct Grid {
    float power;            // P; NaN, or 0 where all codes are 0
    int32_t below;          // exponent field of a code 0: that of P minus 126
    int32_t most;           // codes; beyond it values would overflow
    float lowest, inverse;  // the least power that is sent, and 1 over it
  };
  static constexpr int32_t kFlat = 0;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const float largest = largest_magnitude<Value>(values, n);
    if (!is_finite(largest)) return {kNan, 0, 0, 0.0f, 0.0f};
    const auto exponent = static_cast<int32_t>(__builtin_bit_cast(uint32_t, largest) >> 23);
    if (exponent == 0) return {0.0f, 0, 0, 0.0f, 0.0f};
    const int32_t below = exponent - 126;
    const int32_t lowest = below + 1 > 1 ? below + 1 : 1;
    return {power(exponent), below, exponent == 254 ? 126 : 127, power(lowest),
            power(254 - lowest)};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return {grid.power}; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return !(grid.power > 0.0f); }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& r) {
    const Ints top = Ints{} + grid.most;
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const Floats x = values.at[i], magnitude = magnitudes(x);
      // The fraction plus r carries into the exponent with a probability of the fraction.
      const Ints noise = __builtin_convertvector(r.at[i] * 8388608.0f, Ints);
      const Ints level = ((Ints(magnitude) + noise) >> 23) - grid.below;
      // Below the least power: that, with a probability of magnitude / power, or 0.
      const Ints least = Ints(magnitude * grid.inverse + r.at[i] >= Floats{} + 1.0f) &
                         ((Ints(Floats{} + grid.lowest) >> 23) - grid.below);
      const Ints k = magnitude < Floats{} + grid.lowest ? least : level;
      codes.at[i] = (k < top ? k : top) | ((x < Floats{}) & 128);
    }
    return codes;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    const Ints k = codes & 127;
    // In two factors, each of which is a normal number.
    const Ints high = k >> 1;
    const auto first = Floats((high + (127 - 63)) << 23);
    const auto second = Floats((k - high + (127 - 63)) << 23);
    const Floats magnitude =
        k != 0 ? header.value * first * second : Floats{} + 0.0f * header.value;
    return Floats(Ints(magnitude) | (codes & 128) << 24);
  }

 private:
  [[gnu::always_inline]] static float power(int32_t exponent) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(exponent) << 23);
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
