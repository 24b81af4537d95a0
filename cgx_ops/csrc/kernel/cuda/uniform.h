// Encodes buckets to levels between their minimum and maximum, in registers, and decodes them
// (docs/reference/wire_format.md, sections 2 and 3). Also the header and the grid, which all bucket
// formats share.
//
//   1. headers and grids
//   2. the range of a bucket
//   3. eight values -> eight contiguous levels
//   4. eight levels -> eight values
//   5. the format, for kernels
#pragma once

#include <cstdint>

#include "base/types.h"
#include "kernel/bucket_format.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/measure.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// ---- 1. headers and grids ----

// The minimum and the step. Other formats have one or two scales instead.
struct Header {
  float first, second;
};

CGX_LANE Header non_finite() { return {float_of(kFloat32Nan), float_of(kFloat32Nan)}; }

// No rank writes any other non-finite header.
CGX_LANE Header finite_or_nan(const Header& header) {
  return is_finite(header.first) && is_finite(header.second) ? header : non_finite();
}

struct Grid {
  Header header;
  float inverse;  // of the step, or its equivalent in other formats; 0: all values have the same
                  // code
};

CGX_LANE Grid grid_of_nan() { return {non_finite(), 0.0f}; }

// ---- 2. range ----

CGX_LANE Grid range_of(Extremes keys, int bits) {
  const float lo = value_of_key(keys.lowest), hi = value_of_key(keys.highest);
  // Not finite if a value is not: these are at the ends of the order.
  const float extent = subtract(hi, lo);
  const float step = divide(extent, static_cast<float>((1 << bits) - 1));
  const float inverse = divide(1.0f, step);  // infinite if the step is 0 or tiny
  return {is_finite(extent) ? Header{lo, step} : non_finite(), is_finite(inverse) ? inverse : 0.0f};
}

// ---- 3. encode ----

// The level of a value, as 2^23 + level (floor_as_integer). r: added before it is rounded down.
CGX_LANE float level_of_value(float x, const Grid& grid, float r, float highest) {
  const float scaled = multiply(subtract(x, grid.header.first), grid.inverse);
  return floor_as_integer(smaller(add(scaled, r), highest));
}

// Levels, given as 2^23 + level, as digits to this base, modulo 2^32.
template <int kCount>
CGX_LANE uint32_t digits(const float* levels, uint32_t base) {
  uint32_t number = 0, excess = 0;  // of all kIntegerBits
  CGX_UNROLL
  for (int i = kCount - 1; i >= 0; --i) {
    number = number * base + bits_of(levels[i]);
    excess = excess * base + kIntegerBits;
  }
  return number - excess;
}

// Shared by all units of a bucket.
class UniformEncoder {
 public:
  CGX_LANE UniformEncoder(const Grid& grid, const Coding& coding)
      : grid_(grid),
        bits_(coding.bits),
        base_(1u << bits_),
        highest_(static_cast<float>(base_ - 1)) {}

  // The field of a unit, its first level in the lowest bits. Levels beyond `count` are 0.
  CGX_LANE uint64_t encode(const Unit& values, const Unit& r, int count) const {
    float levels[kUnit];
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i)
      levels[i] = level_of_value(values.at[i], grid_, r.at[i], highest_);
    const uint32_t low = digits<4>(levels, base_), high = digits<4>(levels + 4, base_);
    const uint64_t field = uint64_t{high} << (4 * bits_) | low;
    return count == kUnit ? field : field & ((uint64_t{1} << (count * bits_)) - 1);
  }

 private:
  Grid grid_;
  int bits_;
  uint32_t base_;
  float highest_;
};

// ---- 4. decode ----

// The value of a level that is given as 2^23 + level.
CGX_LANE float value_of_level(float level, const Header& header) {
  return add(header.first, multiply(subtract(level, kInteger), header.second));
}

// Shared by all units of a record. A level in the top bits of the fraction of a float in [1, 2) is
// 1 + level / 256. Multiplied by 256 * step, minus 256 * step, rounded once, this is fp32(level *
// step) in one operation.
class UniformDecoder {
 public:
  CGX_LANE UniformDecoder(const Header& header, const Coding& coding)
      : header_(finite_or_nan(header)),
        bits_(coding.bits),
        mask_(((1u << bits_) - 1) << kPlace),
        scale_(multiply(header_.second, 256.0f)) {}

  CGX_LANE Unit decode(uint64_t field) const {
    const auto low = static_cast<uint32_t>(field);
    const auto high = static_cast<uint32_t>(field >> (4 * bits_));
    Unit values;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t word = i < 4 ? low : high;
      // From i % 4 * bits up to kPlace, by one rotate instruction.
      const uint32_t level = window(word, word, (i % 4 * bits_ + 32 - kPlace) % 32) & mask_;
      values.at[i] = float_of(level | 0x3f800000u);
    }
    if (is_finite(scale_)) {
      CGX_UNROLL
      for (float& x : values.at) x = add(header_.first, multiply_add(x, scale_, -scale_));
    } else {  // NaN, or a range that nearly overflows
      CGX_UNROLL
      for (float& x : values.at)
        x = add(header_.first, multiply(multiply(subtract(x, 1.0f), 256.0f), header_.second));
    }
    return values;
  }

 private:
  static constexpr int kPlace = 15;  // position of 8 bits at the top of 23
  Header header_;
  int bits_;
  uint32_t mask_;
  float scale_;
};

// ---- 5. the format ----

// A format has these members (this one is for kernels of uniform buckets only):
//
//   Measure(group, buffer, coding, numel)           Processes a bucket tile by tile, in those of
//                                                   kPasses for which needs(pass); then grid() is
//                                                   valid.
//   Encoder(grid, coding), Decoder(header, coding)  Convert units to fields of eight codes, and
//                                                   back.
//   kFormats                                        The pieces that its kernels process.
//   known(coding)                                   The part of the coding that is known at compile
//                                                   time.
//   in_halves(coding)                               Whether values are sent in 16 bits.
struct UniformFormat {
  static constexpr Formats kFormats = Formats::kPlain;
  using Encoder = UniformEncoder;
  using Decoder = UniformDecoder;

  template <typename Group>
  class Measure {
   public:
    static constexpr int kPasses = 1;
    CGX_LANE Measure(Group& group, std::byte* /*buffer*/, const Coding& coding, int64_t /*numel*/)
        : coding_(coding), extremes_(group) {}
    CGX_LANE bool needs(int /*pass*/) const { return true; }
    CGX_LANE void inspect(int /*pass*/, typename Group::template Lanes<Tile>& tile, int length) {
      extremes_.inspect(tile, length, [](float x) { return key_of(x); });
    }
    CGX_LANE Grid grid() { return range_of(extremes_.extremes(), coding_.bits); }

   private:
    Coding coding_;
    ExtremesOfTiles<Group> extremes_;
  };

  CGX_LANE static Coding known(const Coding& coding) { return {.bits = coding.bits}; }
  CGX_LANE static bool in_halves(const Coding& /*coding*/) { return false; }
};

}  // namespace cgx::device::cuda
