// -1, 0 or 1 times a bucket's scale (TernGrad, Wen et al., NIPS 2017). The probability of a nonzero
// code is magnitude / scale, so it is unbiased. The scale is the largest magnitude or, with `clip`,
// at most 2.5 times the root mean square, to which values are clipped. Codes are 0, 1, 2.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Ternary : OneScale {
  using Field = TritField;
  struct Grid {
    float scale;
    float inverse;  // 0: all codes are 1
  };
  static constexpr int32_t kFlat = 1;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& run) {
    float scale;
    if (run.clip) {
      const Measured<1> found = measure_squares<Value>(values, n);
      const float most = 2.5f * root_of_squares(found, static_cast<double>(n));
      scale = most < found.largest ? most : found.largest;
    } else {
      scale = largest_magnitude<Value>(values, n);
    }
    if (!is_finite(scale)) return {kNan, 0.0f};
    scale = scale_above(scale);
    const float inverse = 1.0f / scale;
    return {scale, is_finite(inverse) ? inverse : 0.0f};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return {grid.scale}; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return grid.inverse == 0.0f; }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& r) {
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const Floats x = values.at[i];
      const Ints one = (magnitudes(x) * grid.inverse + r.at[i] >= Floats{} + 1.0f) & 1;
      codes.at[i] = 1 + (x < Floats{} ? -one : one);
    }
    return codes;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    return __builtin_convertvector(codes - 1, Floats) * header.value;
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
