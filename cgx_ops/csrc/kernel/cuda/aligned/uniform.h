// The format of uniform codes (formats.h): levels between the minimum and the maximum of a bucket.
//
//   1. decode
//   2. encode
//   3. the format
#pragma once

#include <cstdint>

#include "kernel/bucket_format.h"
#include "kernel/cuda/aligned/codes.h"
#include "kernel/cuda/aligned/noise.h"
#include "kernel/cuda/aligned/records.h"
#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/aligned/values.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/uniform.h"

namespace cgx::device::cuda::aligned {

// ---- 1. decode ----

// Decodes records of any magnitude, and non-finite ones.
template <int kBits, int kChunk>
CGX_LANE void decode_any(Codes<kBits, kChunk> codes, const Header& header, std::byte* scratch,
                         Values* values) {
  using Type = Codes<kBits, kChunk>;
  const bool finite = is_finite(header.first) && is_finite(header.second);
  CGX_ROLLED
  for (int i = 0; i < kLaneValues; ++i) {
    const float level = float_of((codes.word[0] & ((1u << kBits) - 1)) | kIntegerBits);
    store(scratch + 4 * i, finite ? value_of_level(level, header) : float_of(kFloat32Nan));
    codes.word[0] >>= kBits;
    if ((i + 1) % Type::kCodesOfWord != 0) continue;
    CGX_UNROLL
    for (int w = 1; w < Type::kWords; ++w) codes.word[w - 1] = codes.word[w];
  }
  load_scratch(scratch, values);
}

// Decodes to values without other NaNs than the canonical one. A code at position `at` of the
// fraction of a float in [1, 2) is 1 + code * 2^(at - 23). Multiplied by s = step * 2^(23 - at),
// minus s, rounded once, this is fp32(code * step) in one operation, without a shift.
template <int kBits, int kChunk>
CGX_LANE void decode(const Codes<kBits, kChunk>& codes, const Header& header, std::byte* scratch,
                     Values* values) {
  using Type = Codes<kBits, kChunk>;
  constexpr int kPeriod = kBits == 8 ? 16 : 4 * kBits;  // positions below this are used
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const uint32_t one = one_in_register();
  const float largest = multiply(header.second, power_of_two(23));
  if (!is_finite(header.first) || !is_finite(largest)) {
    decode_any(codes, header, scratch, values);
    return;
  }
  CGX_UNROLL
  for (int w = 0; w < Type::kWords; ++w) {
    CGX_UNROLL
    for (int i = 0; i < Type::kCodesOfWord; ++i) {
      const int at = i * kBits % kPeriod;
      const uint32_t word = codes.word[w] >> (i * kBits - at);
      const float scale = at ? multiply(largest, power_of_two(-at)) : largest;
      const float code = float_of((word & (kMask << at)) | one);
      values->at[w * Type::kCodesOfWord + i] = add(header.first, multiply_add(code, scale, -scale));
    }
  }
}

// ---- 2. encode ----

// Places levels, given as integers in floats (floor_as_integer), next to each other.
template <int kBits, int kChunk>
CGX_LANE Codes<kBits, kChunk> pack(const Values& levels) {
  using Type = Codes<kBits, kChunk>;
  Type codes;
  CGX_UNROLL
  for (int w = 0; w < Type::kWords; ++w)
    codes.word[w] = digits<Type::kCodesOfWord>(levels.at + w * Type::kCodesOfWord, 1u << kBits);
  return codes;
}

// A lane's levels, as 2^23 + level. `noise`: of the tile, if kNoisy.
template <int kBits, bool kNoisy, int kChunk, int kLanes>
CGX_LANE Values levels_of(const Values& values, const Grid& grid, const Tiling<kLanes>& tiling,
                          int lane, const std::byte* noise) {
  Values levels;
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += kChunk) {
    float r[kChunk];
    CGX_UNROLL
    for (float& x : r) x = 0.5f;
    if constexpr (kNoisy)
      load_noise<kChunk>(
          noise, static_cast<int>(tiling.first_value(lane, kChunk)) + i * tiling.lanes(), r);
    CGX_UNROLL
    for (int j = 0; j < kChunk; ++j)
      levels.at[i + j] = level_of_value(values.at[i + j], grid, r[j], (1 << kBits) - 1);
  }
  return levels;
}

// ---- 3. the format ----

template <int kBitsOfCode>
struct Uniform {
  static constexpr BucketFormat kFormat = BucketFormat::kUniform;
  static constexpr int kBits = kBitsOfCode;
  static constexpr int kHeaderBytes = header_bytes(kFormat);
  static constexpr int kAlignment = record_alignment(kFormat);
  static constexpr bool kRoundsNoisily = true, kKeepsWriteChunks = false;
  template <bool kNoisy>
  static constexpr int kMemoryBytes = kNoisy ? kNoiseBytes : 16;

  CGX_LANE static Header load_header(const std::byte* record) {
    const auto word = load<uint64_t>(record);
    return {float_of(static_cast<uint32_t>(word)), float_of(static_cast<uint32_t>(word >> 32))};
  }
  CGX_LANE static void store_header(std::byte* record, const Header& header) {
    store(record, uint64_t{bits_of(header.second)} << 32 | bits_of(header.first));
  }

  template <typename Group, typename Records>
  CGX_LANE static void decode(Group& group, std::byte* scratch, Records& records,
                              typename Group::template Lanes<Values>& values) {
    group.for_lanes([&](int lane) {
      aligned::decode(records[lane].codes, records[lane].header, scratch + lane * kScratchBytes,
                      &values[lane]);
    });
  }

  template <bool kNoisy, bool kDecodes, int kChunk, int kLanes, typename Group>
  CGX_LANE static void encode(Group& group, std::byte* memory, const Tiling<kLanes>& tiling,
                              typename Group::template Lanes<Values>& values, const Noise& noise,
                              uint64_t first_value,
                              typename Group::template Lanes<Record<Uniform, kChunk>>& records,
                              typename Group::template Lanes<Values>& decoded) {
    typename Group::template Lanes<Extremes> keys;
    group.for_lanes([&](int lane) {
      float lowest = values[lane].at[0], highest = lowest;
      CGX_UNROLL
      for (int i = 1; i < kLaneValues; ++i) {
        lowest = smaller_or_nan(lowest, values[lane].at[i]);
        highest = larger_or_nan(highest, values[lane].at[i]);
      }
      keys[lane] = {key_of(lowest), key_of(highest)};
      if constexpr (kNoisy) make_noise(tiling, lane, noise, first_value, memory);
    });
    group.share_extremes(keys, tiling.lanes());
    if constexpr (kNoisy) group.synchronize(tiling.lanes());  // the noise is complete
    group.for_lanes([&](int lane) {
      const Grid grid = range_of(keys[lane], kBits);
      const Values levels =
          levels_of<kBits, kNoisy, kChunk>(values[lane], grid, tiling, lane, memory);
      Codes<kBits, kChunk> codes = pack<kBits, kChunk>(levels);
      CGX_UNROLL
      for (uint32_t& word : codes.word)  // levels of non-finite values are arbitrary
        word = grid.inverse == 0.0f ? 0 : word;
      records[lane] = {codes, grid.header};
      if constexpr (kDecodes) {
        CGX_UNROLL
        for (int i = 0; i < kLaneValues; ++i)
          decoded[lane].at[i] = value_of_level(levels.at[i], grid.header);
      }
    });
    if constexpr (kNoisy) group.synchronize(tiling.lanes());  // the noise has been read
  }
};

}  // namespace cgx::device::cuda::aligned
