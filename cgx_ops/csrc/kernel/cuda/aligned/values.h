// A lane's values in memory: 16 bytes at a time, each chunk at the same distance from the last.
#pragma once

#include <cstdint>

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/memory.h"

namespace cgx::device::cuda::aligned {

// Values that are read or written once need no place in the cache.
CGX_LANE Words4 load_once(const std::byte* at) {
#if defined(__CUDACC__)
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(at));
  return {{words.x, words.y, words.z, words.w}};
#else
  return load<Words4>(at);
#endif
}
CGX_LANE void store_once(std::byte* at, const Words4& words) {
#if defined(__CUDACC__)
  __stcs(reinterpret_cast<uint4*>(at),
         make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]));
#else
  store(at, words);
#endif
}

template <typename Value>
CGX_LANE void widen_word(const Words4& word, float* values) {
  CGX_UNROLL
  for (int i = 0; i < kValuesOfWord<Value>; ++i) {
    if constexpr (sizeof(typename Value::Bits) == 4)
      values[i] = Value::widen(word.at[i]);
    else
      values[i] = Value::widen(static_cast<uint16_t>(word.at[i / 2] >> (16 * (i % 2))));
  }
}
// NaNs of fp32 must be canonical.
template <typename Value>
CGX_LANE Words4 rounded_word(const float* values) {
  Words4 word{};
  CGX_UNROLL
  for (int i = 0; i < kValuesOfWord<Value>; ++i) {
    const uint32_t bits = Value::round(values[i]);
    if constexpr (sizeof(typename Value::Bits) == 4)
      word.at[i] = bits;
    else
      word.at[i / 2] |= bits << (16 * (i % 2));
  }
  return word;
}

// Loads chunks at the given distance in bytes.
template <typename Value, int kChunk>
CGX_LANE Values load_values(const std::byte* at, int distance) {
  constexpr int kCount = kValuesOfWord<Value>;
  Values values;
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += kCount)
    widen_word<Value>(load_once(at + i / kChunk * distance + 16 * (i % kChunk / kCount)),
                      values.at + i);
  return values;
}

// Stores chunks of 16 bytes.
template <typename Value>
CGX_LANE void store_values(std::byte* at, int distance, const Values& values) {
  constexpr int kCount = kValuesOfWord<Value>;
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += kCount)
    store_once(at + i / kCount * distance, rounded_word<Value>(values.at + i));
}

// A lane's shared memory for values in a rare case: registers cannot be indexed by a variable.
inline constexpr int kScratchBytes = 4 * kLaneValues;

CGX_LANE void load_scratch(const std::byte* scratch, Values* values) {
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += 4)
    widen_word<Float32>(load<Words4>(scratch + 4 * i), values->at + i);
}
CGX_LANE void store_scratch(std::byte* scratch, const Values& values) {
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += 4)
    store(scratch + 4 * i, rounded_word<Float32>(values.at + i));
}

// The values of a lane in a piece's buffer.
template <typename Value, int kChunk>
struct Column {
  static constexpr int kWidth = sizeof(typename Value::Bits);

  std::byte* first;  // of tile 0
  int distance;      // of the chunks

  CGX_LANE std::byte* at(uint32_t tile) const {
    return first + uint64_t{tile} * (kTileNumel * kWidth);
  }
  CGX_LANE Values load(uint32_t tile) const {
    return load_values<Value, kChunk>(at(tile), distance);
  }
  CGX_LANE void store(uint32_t tile, const Values& values) const {
    static_assert(kChunk == kWriteChunk<Value>);
    store_values<Value>(at(tile), distance, values);
  }
};

// The columns of all lanes.
template <typename Value, int kChunk, int kLanes, typename Group>
CGX_LANE auto columns_of(Group& group, const std::byte* values, const Tiling<kLanes>& tiling) {
  using Type = Column<Value, kChunk>;
  typename Group::template Lanes<Type> columns;
  group.for_lanes([&](int lane) {
    columns[lane] = {
        const_cast<std::byte*>(values) + tiling.first_value(lane, kChunk) * Type::kWidth,
        tiling.lanes() * kChunk * Type::kWidth};
  });
  return columns;
}

CGX_LANE void add_to(Values* sums, const Values& values) {
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; ++i) sums->at[i] = add(sums->at[i], values.at[i]);
}

// After a failure: fills this group's tiles of the results or residuals of all pieces with NaN.
template <typename Value, int kLanes, typename Group, typename Launch>
CGX_LANE void fill_with_nan(Group& group, const Launch& launch, const Work& work, uint32_t first,
                            uint32_t step, std::byte* Piece::* where) {
  for_tiles(group, launch, work, first, step, [&](const Piece& piece) {
    const Tiling<kLanes> tiling(piece);
    auto columns = columns_of<Value, kWriteChunk<Value>>(group, piece.*where, tiling);
    return [=, &group](uint32_t tile) mutable {
      if (!group.select(tiling.active(tile))) return;
      group.for_lanes([&](int lane) {
        Values values;
        CGX_UNROLL
        for (float& x : values.at) x = float_of(kFloat32Nan);
        columns[lane].store(tile, values);
      });
    };
  });
}

}  // namespace cgx::device::cuda::aligned
