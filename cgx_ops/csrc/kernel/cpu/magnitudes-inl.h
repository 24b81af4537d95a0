// For values chosen by their magnitude: signs, and evenly spaced levels from the smallest to the
// largest magnitude, rounded to nearest. A code has the sign in its top bit, then the level.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <int kBits>
struct Magnitudes {
  using Field = BitField<kBits>;
  static constexpr int32_t kSign = 1 << (kBits - 1);
  static constexpr int32_t kMost = kSign - 1;
  struct Header {
    float least;
    float most;
  };
  struct Wire {
    uint16_t least;
    uint16_t most;
  };
  static_assert(sizeof(Wire) == header_bytes(BucketFormat::kMagnitudes));
  struct Grid {
    float least;
    float most;
    float inverse;  // levels per unit; 0: all levels are 0
  };
  static constexpr int32_t kFlat = 0;
  static constexpr bool kMoves = false;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const float largest = largest_magnitude<Value>(values, n);
    if (!is_finite(largest)) return {kNan, kNan, 0.0f};
    float smallest = largest;
    for (int64_t i = 0; i < n; ++i) {
      const float magnitude = __builtin_fabsf(Value::widen(values[i].value));
      smallest = magnitude < smallest ? magnitude : smallest;
    }
    const float least = nearest_scale(smallest), most = nearest_scale(largest);
    const float inverse = static_cast<float>(kMost) / (most - least);
    return {least, most, is_finite(inverse) ? inverse : 0.0f};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return {grid.least, grid.most}; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return !is_finite(grid.least); }
  [[gnu::always_inline]] static float fill(const Grid& /*grid*/) { return 0.0f; }
  [[gnu::always_inline]] static Header read(const Wire& wire) {
    const float least = widen_bfloat16(wire.least), most = widen_bfloat16(wire.most);
    return is_finite(least) && is_finite(most) ? Header{least, most} : Header{kNan, kNan};
  }
  [[gnu::always_inline]] static Wire write(const Header& header) {
    return {round_to_bfloat16(header.least), round_to_bfloat16(header.most)};
  }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& /*r*/) {
    const Ints top = Ints{} + kMost;
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const Floats x = values.at[i];
      const Floats at = (magnitudes(x) - grid.least) * grid.inverse + 0.5f;
      // Magnitudes may be below the rounded minimum: level 0.
      const Ints level = __builtin_convertvector(at > Floats{} ? at : Floats{}, Ints);
      codes.at[i] = (level < top ? level : top) | ((x < Floats{}) & kSign);
    }
    return codes;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    const float step = (header.most - header.least) / static_cast<float>(kMost);
    const Floats magnitude = header.least + __builtin_convertvector(codes & kMost, Floats) * step;
    return Floats(Ints(magnitude) | (codes & kSign) << (32 - kBits));
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
