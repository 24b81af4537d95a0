// Fixed levels times a bucket's scale. The levels are those of gaussian_level(), and the scale is
// the root mean square; with 1 bit it is the mean magnitude (EF-SignSGD, Karimireddy et al., ICML
// 2019). Also signs alone, with scale 1: SignSGD with majority vote (Bernstein et al., ICML 2018).
//
// A code has the sign in its top bit, then the level of the magnitude.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <int kBits>
struct Levels {
  using Field = BitField<kBits>;
  using Wire = uint16_t;
  static constexpr int kLevels = 1 << (kBits - 1);
  struct Header {
    float scale;
    float at[8];  // the levels
  };
  // A magnitude that reaches threshold j has at least level j + 1.
  struct Grid {
    float scale;
    float thresholds[8];
  };
  static constexpr int32_t kFlat = 0;
  static constexpr bool kMoves = false;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const auto count = static_cast<double>(n);
    Measured<1> found;
    float scale;
    if constexpr (kBits == 1) {
      found = measure_bucket<Value, 1>(
          values, n,
          [](Floats /*x*/, Floats scaled, Floats(&term)[1]) { term[0] = magnitudes(scaled); });
      scale = static_cast<float>(found.sums[0] / count) * found.scale.up;
    } else {
      found = measure_squares<Value>(values, n);
      scale = root_of_squares(found, count);
    }
    if (!is_finite(found.largest)) return {kNan, {}};
    Grid grid{nearest_scale(scale), {}};
    for (int i = 0; i + 1 < kLevels; ++i)
      grid.thresholds[i] =
          0.5f * (gaussian_level(kBits, i) + gaussian_level(kBits, i + 1)) * grid.scale;
    return grid;
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) {
    Header header{grid.scale, {}};
    for (int i = 0; i < kLevels; ++i) header.at[i] = gaussian_level(kBits, i) * grid.scale;
    return header;
  }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return !(grid.scale > 0.0f); }
  [[gnu::always_inline]] static float fill(const Grid& /*grid*/) { return 0.0f; }
  [[gnu::always_inline]] static Wire write(const Header& header) {
    return Scale{header.scale}.write();
  }
  [[gnu::always_inline]] static Header read(Wire wire) {
    return header({Scale::read(wire).value, {}});
  }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& /*r*/) {
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const Floats x = values.at[i], magnitude = magnitudes(x);
      Ints level{};
      if constexpr (kLevels > 1) {
        // Counts the thresholds that the magnitude reaches, bit by bit from the highest.
        level = (magnitude >= Floats{} + grid.thresholds[kLevels / 2 - 1]) & (kLevels / 2);
#pragma GCC unroll 4
        for (int bit = kLevels / 4; bit > 0; bit /= 2)
          level |= (magnitude >= look_up8(grid.thresholds, level + (bit - 1))) & bit;
      }
      codes.at[i] = level | ((x < Floats{}) & kLevels);
    }
    return codes;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    Floats magnitude = Floats{} + header.at[0];
    if constexpr (kLevels == 2)
      magnitude = (codes & 1) != 0 ? Floats{} + header.at[1] : magnitude;
    else if constexpr (kLevels > 2)
      magnitude = look_up8(header.at, codes & (kLevels - 1));
    return Floats(Ints(magnitude) | (codes & kLevels) << (32 - kBits));
  }
};

struct Sign : Levels<1> {
  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    return {is_finite(largest_magnitude<Value>(values, n)) ? 1.0f : kNan, {}};
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
