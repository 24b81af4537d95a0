// Buckets of any format without blocks, as in kernel/cpu (one file per format). Here a lane
// processes eight values at a time, and the format is known only at run time. Fields in registers
// hold eight contiguous codes; trits take two bits there (trits.h packs them).
//
//   1. headers as bytes
//   2. properties of a bucket -> its grid
//   3. a value -> its code
//   4. a code -> its value
//   5. AnyFormat
#pragma once

#include <cstdint>

#include "kernel/bucket_format.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/measure.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/uniform.h"
#include "kernel/cuda/work.h"
#include "kernel/scales.h"

namespace cgx::device::cuda {

// ---- 1. headers as bytes ----

// In register fields.
CGX_LANE int code_bits(const Coding& coding) {
  return coding.format == BucketFormat::kTernary ? 2 : coding.bits;
}

CGX_LANE uint64_t word_of_header(const Header& header, const Coding& coding) {
  if (coding.format == BucketFormat::kUniform)
    return uint64_t{bits_of(header.second)} << 32 | bits_of(header.first);
  if (has_blocks(coding.format)) return bits_of(header.first);
  return uint32_t{round_to_bfloat16(header.second)} << 16 | round_to_bfloat16(header.first);
}

// Stores a header right-aligned in the room at `room`.
CGX_LANE void store_header(std::byte* room, const Header& header, const Coding& coding) {
  const auto bytes = static_cast<int>(header_bytes(coding));
  if (bytes > 0) store_field(room + kHeaderRoom - bytes, word_of_header(header, coding), bytes);
}

// Bytes beyond the header are arbitrary.
CGX_LANE Header header_of_word(uint64_t word, const Coding& coding) {
  const auto low = static_cast<uint32_t>(word);
  if (coding.format == BucketFormat::kUniform)
    return {float_of(low), float_of(static_cast<uint32_t>(word >> 32))};
  if (has_blocks(coding.format)) return {float_of(low), 0.0f};
  const bool two = header_bytes(coding) == 4;
  return {float_of(low << 16), two ? float_of(low & 0xffff0000u) : 0.0f};
}

// ---- 2. grids ----

CGX_LANE Terms terms_of(const Coding& coding) {
  if (coding.format == BucketFormat::kOnebit) return Terms::kSides;
  return coding.format == BucketFormat::kLevels && coding.bits == 1 ? Terms::kMagnitudes
                                                                    : Terms::kSquares;
}
CGX_LANE bool needs_sums(const Coding& coding) {
  if (coding.format == BucketFormat::kTernary) return coding.clip;
  return coding.format == BucketFormat::kLevels || coding.format == BucketFormat::kOnebit ||
         coding.format == BucketFormat::kQsgd;
}

// For `numel` values whose largest magnitude is finite. `sums` are of values multiplied by by.down.
CGX_LANE Grid grid_of(const Coding& coding, int64_t numel, float largest, const Sums& sums,
                      const Prescale& by) {
  const auto count = static_cast<double>(numel);
  const auto of_scale = [](float scale, float inverse) -> Grid {
    return {{scale, 0.0f}, is_finite(inverse) ? inverse : 0.0f};
  };
  const auto mean = [&](double sum, double numbers) {
    return multiply(narrowed(divide(sum, numbers)), by.up);
  };
  const auto root = [&](double divisor) {
    return multiply(square_root(narrowed(divide(sums.at[0], divisor))), by.up);
  };
  switch (coding.format) {
    case BucketFormat::kLevels: {
      const float scale = nearest_scale(coding.bits == 1 ? mean(sums.at[0], count) : root(count));
      return of_scale(scale, scale > 0.0f ? 1.0f : 0.0f);
    }
    case BucketFormat::kOnebit: {
      const double negatives = sums.at[2], others = add(count, -negatives);
      return {{others > 0 ? nearest_scale(mean(sums.at[0], others)) : 0.0f,
               negatives > 0 ? nearest_scale(mean(sums.at[1], negatives)) : 0.0f},
              1.0f};
    }
    case BucketFormat::kTernary: {
      const float most = coding.clip ? multiply(2.5f, root(count)) : largest;
      const float scale = scale_above(smaller(most, largest));
      return of_scale(scale, divide(1.0f, scale));
    }
    case BucketFormat::kQsgd: {
      const float norm = root(1.0);
      const float scale = scale_above(norm < largest ? largest : norm);
      return of_scale(scale, divide(static_cast<float>((1 << (coding.bits - 1)) - 1), scale));
    }
    default:  // kSign
      return of_scale(1.0f, 1.0f);
  }
}

// ---- 3. codes ----

// The middle between a level and the next.
CGX_LANE float middle_above(int bits, int level) {
  return multiply(0.5f, add(gaussian_level(bits, level), gaussian_level(bits, level + 1)));
}

// Counts the thresholds between levels that the magnitude reaches, bit by bit from the highest.
CGX_LANE uint32_t level_of(float magnitude, float scale, int bits) {
  int level = 0;
  CGX_ROLLED
  for (int bit = 1 << (bits - 1) >> 1; bit > 0; bit /= 2) {
    const int below = level + bit - 1;
    if (magnitude >= multiply(middle_above(bits, below), scale)) level += bit;
  }
  return static_cast<uint32_t>(level);
}

CGX_LANE uint32_t code_of(float x, const Grid& grid, const Coding& coding, float r) {
  const bool negative = x < 0.0f;
  const float magnitude = magnitude_of(x);
  const uint32_t sign = negative ? 1u << (coding.bits - 1) : 0u;
  switch (coding.format) {
    case BucketFormat::kLevels:
      return level_of(magnitude, grid.header.first, coding.bits) | sign;
    case BucketFormat::kTernary: {
      const uint32_t one = add(multiply(magnitude, grid.inverse), r) >= 1.0f ? 1 : 0;
      return negative ? 1 - one : 1 + one;
    }
    case BucketFormat::kQsgd: {
      const auto most = static_cast<float>((1 << (coding.bits - 1)) - 1);
      const float level = smaller(add(multiply(magnitude, grid.inverse), r), most);
      return static_cast<uint32_t>(truncated(level)) | sign;
    }
    default:  // kSign, kOnebit
      return sign;
  }
}

// ---- 4. values ----

// The header as decoding needs it: for kQsgd, `second` becomes a level's step; for kOnebit, -0
// becomes 0.
CGX_LANE Header decoding_header(const Header& header, const Coding& coding) {
  Header result = finite_or_nan(header);
  if (coding.format == BucketFormat::kOnebit)
    return {add(result.first, 0.0f), add(result.second, 0.0f)};
  if (coding.format == BucketFormat::kQsgd)
    result.second = divide(result.first, static_cast<float>((1 << (coding.bits - 1)) - 1));
  return result;
}

CGX_LANE float value_of_code(uint32_t code, const Header& header, const Coding& coding) {
  const uint32_t top = 1u << (coding.bits - 1);
  const auto with_sign = [&](float magnitude) {
    return float_of(bits_of(magnitude) | ((code & top) != 0 ? 0x80000000u : 0u));
  };
  const auto level = static_cast<int32_t>(code & (top - 1));
  switch (coding.format) {
    case BucketFormat::kLevels:
      return with_sign(multiply(gaussian_level(coding.bits, level), header.first));
    case BucketFormat::kOnebit:
      return code != 0 ? header.second : header.first;
    case BucketFormat::kTernary:
      return multiply(as_float(static_cast<int32_t>(code) - 1), header.first);
    case BucketFormat::kQsgd:
      return with_sign(multiply(as_float(level), header.second));
    default:  // kSign
      return with_sign(header.first);
  }
}

// ---- 5. the format ----

class AnyEncoder {
 public:
  CGX_LANE AnyEncoder(const Grid& grid, const Coding& coding) : grid_(grid), coding_(coding) {}

  // See UniformEncoder.
  CGX_LANE uint64_t encode(const Unit& values, const Unit& r, int count) const {
    if (coding_.format == BucketFormat::kUniform)
      return UniformEncoder(grid_, coding_).encode(values, r, count);
    const int bits = code_bits(coding_);
    uint64_t field = 0;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i)
      field |= uint64_t{code_of(values.at[i], grid_, coding_, r.at[i])} << (i * bits);
    return count == kUnit ? field : field & ((uint64_t{1} << (count * bits)) - 1);
  }

 private:
  Grid grid_;
  Coding coding_;
};

class AnyDecoder {
 public:
  CGX_LANE AnyDecoder(const Header& header, const Coding& coding)
      : header_(decoding_header(header, coding)), coding_(coding) {}

  CGX_LANE Unit decode(uint64_t field) const {
    if (coding_.format == BucketFormat::kUniform)
      return UniformDecoder(header_, coding_).decode(field);
    const int bits = code_bits(coding_);
    Unit values;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const auto code = static_cast<uint32_t>(field >> (i * bits)) & ((1u << bits) - 1);
      values.at[i] = value_of_code(code, header_, coding_);
    }
    return values;
  }

 private:
  Header header_;
  Coding coding_;
};

struct AnyFormat {
  static constexpr Formats kFormats = Formats::kAny;
  using Encoder = AnyEncoder;
  using Decoder = AnyDecoder;

  template <typename Group>
  class Measure {
   public:
    static constexpr int kPasses = 2;
    CGX_LANE Measure(Group& group, std::byte* buffer, const Coding& coding, int64_t numel)
        : group_(group), buffer_(buffer), coding_(coding), numel_(numel), extremes_(group) {}

    CGX_LANE bool needs(int pass) {
      if (pass == 0) return true;
      found_ = extremes_.extremes();
      return !is_uniform() && is_finite(largest()) && needs_sums(coding_);
    }
    CGX_LANE void inspect(int pass, typename Group::template Lanes<Tile>& tile, int length) {
      if (pass == 0) {
        const bool uniform = is_uniform();
        extremes_.inspect(tile, length,
                          [&](float x) { return uniform ? key_of(x) : magnitude_key(x); });
      } else {
        add_sums(group_, buffer_, tile, length, terms_of(coding_), prescale_of(largest()).down,
                 &sums_);
      }
    }
    CGX_LANE Grid grid() const {
      if (is_uniform()) return range_of(found_, coding_.bits);
      if (!is_finite(largest())) return grid_of_nan();
      return grid_of(coding_, numel_, largest(), sums_, prescale_of(largest()));
    }

   private:
    CGX_LANE bool is_uniform() const { return coding_.format == BucketFormat::kUniform; }
    CGX_LANE float largest() const { return float_of(static_cast<uint32_t>(found_.highest)); }

    Group& group_;
    std::byte* buffer_;
    Coding coding_;
    int64_t numel_;
    ExtremesOfTiles<Group> extremes_;
    Extremes found_{};
    Sums sums_{};
  };

  CGX_LANE static Coding known(const Coding& coding) { return coding; }
  CGX_LANE static bool in_halves(const Coding& coding) { return is_half(coding); }
};

}  // namespace cgx::device::cuda
