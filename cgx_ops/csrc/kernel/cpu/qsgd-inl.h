// Signs, and levels of a bucket's 2-norm (QSGD, Alistarh et al., NIPS 2017), stochastically
// rounded, unbiased. A code has the sign in its top bit, then the level.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <int kBits>
struct Qsgd : OneScale {
  using Field = BitField<kBits>;
  static constexpr int32_t kSign = 1 << (kBits - 1);
  static constexpr int32_t kMost = kSign - 1;  // the level of the norm
  struct Grid {
    float norm;
    float inverse;  // levels per unit; 0: all codes are 0
  };
  static constexpr int32_t kFlat = 0;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const Measured<1> found = measure_squares<Value>(values, n);
    if (!is_finite(found.largest)) return {kNan, 0.0f};
    const float root = root_of_squares(found, 1.0);
    const float norm = scale_above(root < found.largest ? found.largest : root);
    const float inverse = static_cast<float>(kMost) / norm;
    return {norm, is_finite(inverse) ? inverse : 0.0f};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return {grid.norm}; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return grid.inverse == 0.0f; }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& r) {
    const Ints top = Ints{} + kMost;
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const Floats x = values.at[i];
      const Ints level = __builtin_convertvector(magnitudes(x) * grid.inverse + r.at[i], Ints);
      codes.at[i] = (level < top ? level : top) | ((x < Floats{}) & kSign);
    }
    return codes;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    const float step = header.value / static_cast<float>(kMost);
    const Floats magnitude = __builtin_convertvector(codes & kMost, Floats) * step;
    return Floats(Ints(magnitude) | (codes & kSign) << (32 - kBits));
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
