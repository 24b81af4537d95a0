// Min-max quantization: evenly spaced levels from a bucket's minimum to its maximum.
#pragma once

#include "kernel/cpu/scales-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Extent {
  float lo;
  float extent;  // max - min; both are NaN if a value or the difference is not finite
};

// For n > 0 values. Stored values are ordered as the widened ones, so the scan does not widen.
template <typename Value>
[[gnu::always_inline]] inline Extent extent_of(
    const Stored<typename Value::Bits>* __restrict values, int64_t n) {
  using Key = typename Value::Key;
  Key lowest = order_key(static_cast<Key>(values[0].value));
  Key highest = lowest;
  for (int64_t i = 0; i < n; ++i) {
    const Key key = order_key(static_cast<Key>(values[i].value));
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  const float lo = Value::widen(static_cast<std::make_unsigned_t<Key>>(order_key(lowest)));
  const float hi = Value::widen(static_cast<std::make_unsigned_t<Key>>(order_key(highest)));
  const float extent = hi - lo;
  // NaN and infinity are at the ends of the order.
  if (!is_finite(lo) || !is_finite(hi) || !is_finite(extent)) return {kNan, kNan};
  return {lo, extent};
}

template <int kBits>
struct Uniform {
  using Field = BitField<kBits>;
  struct Header {
    float min;
    float step;
  };
  using Wire = Header;
  static_assert(sizeof(Wire) == header_bytes(BucketFormat::kUniform));
  struct Grid {
    float lo;
    float step;
    float inverse;  // 0: all codes are 0
  };
  static constexpr int32_t kFlat = 0;
  static constexpr bool kMoves = true;

  template <typename Value>
  static Grid scan(const Stored<typename Value::Bits>* __restrict values, int64_t n,
                   const BucketRun& /*run*/) {
    const Extent found = extent_of<Value>(values, n);
    if (!is_finite(found.extent)) return {kNan, kNan, 0.0f};
    const float step = found.extent / static_cast<float>((1 << kBits) - 1);
    const float inverse = 1.0f / step;
    return {found.lo, step, step == 0.0f || !is_finite(inverse) ? 0.0f : inverse};
  }

  [[gnu::always_inline]] static Header header(const Grid& grid) { return {grid.lo, grid.step}; }
  [[gnu::always_inline]] static bool flat(const Grid& grid) { return grid.inverse == 0.0f; }
  [[gnu::always_inline]] static float fill(const Grid& grid) { return grid.lo; }

  // Returns false if the moved grid is not finite.
  [[gnu::always_inline]] static bool move(const Grid& grid, float r, Header* header) {
    header->min = grid.lo + (0.5f - r) * grid.step;
    if (is_finite(header->min)) return true;
    *header = {kNan, kNan};
    return false;
  }

  [[gnu::always_inline]] static Wire write(const Header& header) { return header; }
  [[gnu::always_inline]] static Header read(const Wire& wire) {
    // No rank writes any other non-finite header. Which of two NaNs is kept would depend on the
    // compiler.
    return is_finite(wire.min) && is_finite(wire.step) ? wire : Header{kNan, kNan};
  }

  [[gnu::always_inline]] static Ints16 codes(const Floats16& values, const Grid& grid,
                                             const Floats16& r) {
    const Ints top = Ints{} + ((1 << kBits) - 1);
    Ints16 levels;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      // Not negative, and hardly above the highest level: truncation is floor and cannot overflow.
      const Ints level =
          __builtin_convertvector((values.at[i] - grid.lo) * grid.inverse + r.at[i], Ints);
      levels.at[i] = level < top ? level : top;
    }
    return levels;
  }
  [[gnu::always_inline]] static Floats values(const Header& header, Ints codes) {
    return header.min + __builtin_convertvector(codes, Floats) * header.step;
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
