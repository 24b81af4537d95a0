// Buckets of block formats (kernel/mx.h, kernel/nvfp4.h): a block is 16 or 32 values, two or four
// units of neighboring lanes. A tile has whole blocks, except at the end of a bucket.
//
//   1. a unit in a field
//   2. eight values -> their codes
//   3. eight codes -> their values
//   4. the scales of a tile
//   5. the format
#pragma once

#include <cstdint>

#include "kernel/bucket_format.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/measure.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/uniform.h"
#include "kernel/cuda/work.h"
#include "kernel/elements.h"
#include "kernel/mx.h"
#include "kernel/nvfp4.h"

namespace cgx::device::cuda {

// ---- 1. fields ----

// Offsets in a field that begins with a whole block.
struct UnitInField {
  int scale;  // the byte of the unit's block
  int codes;  // `bits` bytes
};
CGX_LANE UnitInField unit_in_field(int first, const Coding& coding) {
  const int block = block_numel(coding.format);
  const int scale = first / block * (1 + block * coding.bits / 8);
  return {scale, scale + 1 + first % block / kUnit * coding.bits};
}

// Stores a unit's codes and, if it is the first of its block, the scale.
CGX_LANE void store_in_block(std::byte* field, int first, uint64_t codes, uint32_t scale,
                             const Coding& coding) {
  const UnitInField at = unit_in_field(first, coding);
  if (first % block_numel(coding.format) == 0) store(field + at.scale, static_cast<uint8_t>(scale));
  CGX_ROLLED
  for (int i = 0; i < coding.bits; ++i)
    store(field + at.codes + i, static_cast<uint8_t>(codes >> (8 * i)));
}

// ---- 2. encode ----

class BlocksEncoder {
 public:
  CGX_LANE BlocksEncoder(const Grid& grid, const Coding& coding)
      : header_{grid.header.first, grid.header.second},
        format_(coding.format),
        element_(element_of(coding.format)) {}

  CGX_LANE BlockScale scale_of_block(float largest) const {
    return format_ == BucketFormat::kNvfp4 ? nvfp4::scale_of_block(header_, largest)
                                           : mx::scale_of_block(largest, element_);
  }

  // The codes of a unit, the first in the lowest bits. Codes beyond `count` are 0. r: noise, if
  // `noisy`.
  CGX_LANE uint64_t encode(const Unit& values, const Unit& r, int count, const BlockScale& scale,
                           bool noisy) const {
    if (!is_finite(scale.value)) return 0;
    uint64_t field = 0;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const float x = values.at[i];
      const float magnitude = multiply(magnitude_of(x), scale.inverse);
      const uint32_t code =
          noisy ? drawn_code(magnitude, r.at[i], element_) : nearest_code(magnitude, element_);
      const uint32_t sign = bits_of(x) >> 31 << (element_.bits - 1);
      field |= uint64_t{code | sign} << (i * element_.bits);
    }
    return count == kUnit ? field : field & ((uint64_t{1} << (count * element_.bits)) - 1);
  }

 private:
  nvfp4::Header header_;
  BucketFormat format_;
  Element element_;
};

// ---- 3. decode ----

class BlocksDecoder {
 public:
  CGX_LANE BlocksDecoder(const Header& header, const Coding& coding)
      : header_(nvfp4::header_of_scale(header.first)),
        format_(coding.format),
        element_(element_of(coding.format)) {}

  CGX_LANE float scale_of_byte(uint32_t byte) const {
    return format_ == BucketFormat::kNvfp4 ? nvfp4::scale_of_byte(header_, byte)
                                           : mx::scale_of_byte(byte);
  }

  CGX_LANE Unit decode(uint64_t field, float scale) const {
    const uint32_t mask = element_.magnitude_mask();
    Unit values;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const auto code = static_cast<uint32_t>(field >> (i * element_.bits));
      const float magnitude = multiply(magnitude_of_code(code & mask, element_), scale);
      const uint32_t sign = code >> (element_.bits - 1) << 31;
      values.at[i] = float_of(bits_of(magnitude) | sign);
    }
    return values;
  }

 private:
  nvfp4::Header header_;
  BucketFormat format_;
  Element element_;
};

// ---- 4. scales ----

// The scales of the blocks to which a lane's units belong.
struct ScalesOfUnits {
  BlockScale at[kLaneUnits];
};

// `scratch`: shared memory of 4 bytes per unit.
template <typename Group>
CGX_LANE void find_scales(Group& group, std::byte* scratch, const BlocksEncoder& encoder,
                          const Coding& coding, int length,
                          typename Group::template Lanes<Tile>& tile,
                          typename Group::template Lanes<ScalesOfUnits>& scales) {
  group.each([&](int lane) {
    for_units<Group::kLanes>(lane, length, [&](int u, int at, int) {
      int32_t largest = 0;
      CGX_UNROLL
      for (const float x : tile[lane].units[u].at) {
        const int32_t key = magnitude_key(x);
        largest = key > largest ? key : largest;
      }
      store(scratch + at / kUnit * 4, static_cast<uint32_t>(largest));
    });
  });
  const int units_of_block = block_numel(coding.format) / kUnit;
  group.each([&](int lane) {
    for_units<Group::kLanes>(lane, length, [&](int u, int at, int) {
      const int first = at / kUnit / units_of_block * units_of_block;
      const int units = (length + kUnit - 1) / kUnit;
      uint32_t largest = 0;
      CGX_ROLLED
      for (int i = first; i < first + units_of_block && i < units; ++i) {
        const auto one = load<uint32_t>(scratch + 4 * i);
        largest = one > largest ? one : largest;
      }
      scales[lane].at[u] = encoder.scale_of_block(float_of(largest));
    });
  });
}

// ---- 5. the format ----

// See UniformFormat. Encoder and Decoder also take the scale of a unit's block.
struct BlocksFormat {
  static constexpr Formats kFormats = Formats::kBlocks;
  using Encoder = BlocksEncoder;
  using Decoder = BlocksDecoder;

  template <typename Group>
  class Measure {
   public:
    static constexpr int kPasses = 1;
    CGX_LANE Measure(Group& group, std::byte* /*buffer*/, const Coding& coding, int64_t /*numel*/)
        : format_(coding.format), extremes_(group) {}
    CGX_LANE bool needs(int /*pass*/) const { return true; }
    CGX_LANE void inspect(int /*pass*/, typename Group::template Lanes<Tile>& tile, int length) {
      if (format_ == BucketFormat::kNvfp4)
        extremes_.inspect(tile, length, [](float x) { return magnitude_key(x); });
    }
    CGX_LANE Grid grid() {
      if (format_ != BucketFormat::kNvfp4) return {{0.0f, 0.0f}, 1.0f};
      const auto largest = float_of(static_cast<uint32_t>(extremes_.extremes().highest));
      const auto [scale, inverse] = nvfp4::header_of_bucket(largest);
      return {{scale, inverse}, 1.0f};
    }

   private:
    BucketFormat format_;
    ExtremesOfTiles<Group> extremes_;
  };

  CGX_LANE static Coding known(const Coding& coding) { return coding; }
  CGX_LANE static bool in_halves(const Coding& /*coding*/) { return false; }
};

}  // namespace cgx::device::cuda
