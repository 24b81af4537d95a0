// The format of levels (formats.h): a sign, and one of 2^(bits - 1) fixed magnitudes times a scale.
// Buckets have 512 values, so that each is a warp.
#pragma once

#include <cstdint>

#include "kernel/bucket_format.h"
#include "kernel/cuda/aligned/codes.h"
#include "kernel/cuda/aligned/records.h"
#include "kernel/cuda/aligned/squares.h"
#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/aligned/values.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/formats.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/noise.h"
#include "kernel/scales.h"

namespace cgx::device::cuda::aligned {

// The number of thresholds that a magnitude reaches, times `unit`. They are in ascending order;
// kCount + 1 is a power of two.
template <int kCount>
CGX_LANE uint32_t count_reached(float magnitude, const float* thresholds, uint32_t unit) {
  constexpr int kMiddle = kCount / 2;
  const bool reached = magnitude >= thresholds[kMiddle];
  const uint32_t count = reached ? (kMiddle + 1) * unit : 0;
  if constexpr (kCount == 1) {
    return count;
  } else {
    float rest[kMiddle];
    CGX_UNROLL
    for (int i = 0; i < kMiddle; ++i)
      rest[i] = reached ? thresholds[kMiddle + 1 + i] : thresholds[i];
    return count | count_reached<kMiddle>(magnitude, rest, unit);
  }
}

template <int kBitsOfCode>
struct Levels {
  static constexpr BucketFormat kFormat = BucketFormat::kLevels;
  static constexpr int kBits = kBitsOfCode;
  static constexpr int kHeaderBytes = header_bytes(kFormat);
  static constexpr int kAlignment = record_alignment(kFormat);
  static constexpr bool kRoundsNoisily = false, kKeepsWriteChunks = true;
  template <bool kNoisy>
  static constexpr int kMemoryBytes = kMostSquaresBytes;

  CGX_LANE static Header load_header(const std::byte* record) {
    return {widen_bfloat16(load<uint16_t>(record)), 0.0f};
  }
  CGX_LANE static void store_header(std::byte* record, const Header& header) {
    store(record, static_cast<uint16_t>(bits_of(header.first) >> 16));  // is a bf16
  }

  // Looks values up in a table that is distributed over 16 lanes: lane i has the value of code i,
  // modulo the number of codes. So bits of a word beyond a code do not matter.
  template <typename Group, typename Records>
  CGX_LANE static void decode(Group& group, std::byte* /*scratch*/, Records& records,
                              typename Group::template Lanes<Values>& values) {
    typename Group::template Lanes<float> table;
    group.for_lanes([&](int lane) {
      table[lane] = with_one_nan(value_of_code(static_cast<uint32_t>(lane) % (1u << kBits),
                                               finite_or_nan(records[lane].header), coding()));
    });
    group.for_lanes([&](int lane) {
      using Type = decltype(records[lane].codes);
      CGX_UNROLL
      for (int w = 0; w < Type::kWords; ++w) {
        CGX_UNROLL
        for (int i = 0; i < Type::kCodesOfWord; ++i)
          values[lane].at[w * Type::kCodesOfWord + i] = group.template other<kEntries>(
              table, lane, records[lane].codes.word[w] >> (i * kBits));
      }
    });
  }

  template <bool kNoisy, bool kDecodes, int kChunk, int kLanes, typename Group>
  CGX_LANE static void encode(Group& group, std::byte* memory, const Tiling<kLanes>& /*tiling*/,
                              typename Group::template Lanes<Values>& values,
                              const Noise& /*noise*/, uint64_t /*first_value*/,
                              typename Group::template Lanes<Record<Levels, kChunk>>& records,
                              typename Group::template Lanes<Values>& decoded) {
    static_assert(kLanes == kWarpLanes);
    typename Group::template Lanes<Extremes> keys;
    typename Group::template Lanes<float> down, sums;
    group.for_lanes([&](int lane) {
      float largest = 0.0f;
      CGX_UNROLL
      for (const float x : values[lane].at) largest = larger_or_nan(largest, magnitude_of(x));
      keys[lane].lowest = keys[lane].highest = static_cast<int32_t>(bits_of(largest));
    });
    group.share_extremes(keys, kLanes);
    group.for_lanes([&](int lane) { down[lane] = prescale_of(largest_of(keys[lane])).down; });
    sum_squares<kChunk>(group, memory, values, down, sums);
    group.for_lanes([&](int lane) {
      const Grid grid = grid_of(largest_of(keys[lane]), sums[lane]);
      records[lane] = {codes_of<kChunk>(values[lane], grid), grid.header};
    });
    if constexpr (kDecodes) decode(group, nullptr, records, decoded);
  }

 private:
  CGX_LANE static Coding coding() { return {.format = kFormat, .bits = kBits}; }

  static constexpr int kEntries = 16;
  static constexpr int kThresholds = (1 << (kBits - 1)) - 1;
  static_assert(kEntries >= 1 << kBits);

  CGX_LANE static float largest_of(const Extremes& keys) {
    return float_of(static_cast<uint32_t>(keys.highest));
  }
  CGX_LANE static Grid grid_of(float largest, float sum) {
    if (!is_finite(largest)) return grid_of_nan();
    return cuda::grid_of(coding(), kWarpLanes * kLaneValues, largest, Sums{sum},
                         prescale_of(largest));
  }

  template <int kChunk>
  CGX_LANE static Codes<kBits, kChunk> codes_of(const Values& values, const Grid& grid) {
    using Type = Codes<kBits, kChunk>;
    float thresholds[kThresholds];
    CGX_UNROLL
    for (int i = 0; i < kThresholds; ++i)
      thresholds[i] = multiply(middle_above(kBits, i), grid.header.first);
    Type codes;
    CGX_UNROLL
    for (int w = 0; w < Type::kWords; ++w) {
      uint32_t word = 0;
      CGX_UNROLL
      for (int i = 0; i < Type::kCodesOfWord; ++i) {
        const float x = values.at[w * Type::kCodesOfWord + i];
        const uint32_t unit = 1u << (i * kBits);
        word |= count_reached<kThresholds>(magnitude_of(x), thresholds, unit);
        word |= x < 0.0f ? unit << (kBits - 1) : 0;
      }
      codes.word[w] = grid.inverse == 0.0f ? 0 : word;
    }
    return codes;
  }
};

}  // namespace cgx::device::cuda::aligned
