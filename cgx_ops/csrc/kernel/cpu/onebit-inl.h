// Signs, and the means of the negative values and of the others (Seide et al., Interspeech 2014). A
// code is 1 for negative values.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Onebit {
  using Field = BitField<1>;
  struct Header {
    float others;
    float negatives;
  };
  struct Wire {
    uint16_t others;
    uint16_t negatives;
  };
  static_assert(sizeof(Wire) == header_bytes(BucketFormat::kOnebit));
  using Grid = Header;
  static constexpr int32_t kFlat = 0;
  static constexpr bool kMoves = false;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const auto found =
        measure_bucket<Value, 3>(values, n, [](Floats x, Floats scaled, Floats(&term)[3]) {
          const Ints below = x < Floats{};
          term[0] = Floats(Ints(scaled) & ~below);
          term[1] = Floats(Ints(scaled) & below);
          term[2] = Floats(Ints(Floats{} + 1.0f) & below);
        });
    if (!is_finite(found.largest)) return {kNan, kNan};
    const double negatives = found.sums[2], others = static_cast<double>(n) - negatives;
    const auto mean = [&](double sum, double count) {
      return count > 0 ? nearest_scale(static_cast<float>(sum / count) * found.scale.up) : 0.0f;
    };
    return {mean(found.sums[0], others), mean(found.sums[1], negatives)};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return grid; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return !is_finite(grid.others); }
  [[gnu::always_inline]] static float fill(const Grid& /*grid*/) { return 0.0f; }
  [[gnu::always_inline]] static Wire write(const Header& header) {
    return {round_to_bfloat16(header.others), round_to_bfloat16(header.negatives)};
  }
  [[gnu::always_inline]] static Header read(const Wire& wire) {
    const Header header{widen_bfloat16(wire.others), widen_bfloat16(wire.negatives)};
    return is_finite(header.others) && is_finite(header.negatives) ? header : Header{kNan, kNan};
  }
  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& /*grid*/,
                                             const Floats16& /*r*/) {
    return map<Ints16>(values, [](Floats x) { return Ints((x < Floats{}) & 1); });
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    return codes != 0 ? Floats{} + header.negatives : Floats{} + header.others;
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
