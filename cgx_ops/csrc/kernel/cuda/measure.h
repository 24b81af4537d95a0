// Properties of a bucket's values: extremes, and sums in the order of
// docs/reference/compressor_formats.md. Both process one tile after another.
//
//   1. extremes
//   2. sums: blocks of 512 values in sixteen columns each, folded in halves, then block by block
#pragma once

#include <cstdint>

#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/tile.h"

namespace cgx::device::cuda {

// ---- 1. extremes ----

// Orders magnitudes: infinity above all numbers, and NaN, as a single key, above infinity.
inline constexpr int32_t kNanKey = 0x7f800001;
CGX_LANE int32_t magnitude_key(float x) {
  const auto magnitude = static_cast<int32_t>(bits_of(x) & 0x7fffffffu);
  return magnitude < kNanKey ? magnitude : kNanKey;
}

// The extremes of key(x) over all values.
template <typename Group>
class ExtremesOfTiles {
 public:
  CGX_LANE explicit ExtremesOfTiles(Group& group) : group_(group) {
    group_.each([&](int lane) { keys_[lane] = {INT32_MAX, INT32_MIN}; });
  }
  template <typename Key>
  CGX_LANE void inspect(typename Group::template Lanes<Tile>& tile, int length, const Key& key_of) {
    group_.each([&](int lane) {
      for_units<Group::kLanes>(lane, length, [&](int u, int, int) {
        CGX_UNROLL
        for (const float x : tile[lane].units[u].at) {
          const int32_t key = key_of(x);
          keys_[lane].lowest = key < keys_[lane].lowest ? key : keys_[lane].lowest;
          keys_[lane].highest = key > keys_[lane].highest ? key : keys_[lane].highest;
        }
      });
    });
  }
  CGX_LANE Extremes extremes() { return group_.extremes(keys_); }

 private:
  Group& group_;
  typename Group::template Lanes<Extremes> keys_;
};

// ---- 2. sums ----

inline constexpr int kSumBlock = 512, kSumColumns = 16, kMostSums = 3;

// The terms of a sum, of values times `by`, which keeps squares from overflowing.
enum class Terms {
  kSquares,
  kMagnitudes,
  kSides,  // nonnegative values, negative values, and the number of negative values
};
CGX_LANE float term_of(Terms terms, int k, float x, float by) {
  const float scaled = multiply(x, by);
  if (terms == Terms::kSquares) return multiply(scaled, scaled);
  if (terms == Terms::kMagnitudes) return magnitude_of(scaled);
  const bool negative = x < 0.0f;
  if (k == 2) return negative ? 1.0f : 0.0f;
  return negative == (k == 1) ? scaled : 0.0f;
}

// values[j] += values[j + kHalf], repeated with half of them, until the first is the sum.
template <int kHalf>
CGX_LANE void fold(float* values) {
  CGX_UNROLL
  for (int j = 0; j < kHalf; ++j) values[j] = add(values[j], values[j + kHalf]);
  if constexpr (kHalf > 1) fold<kHalf / 2>(values);
}

struct Sums {
  double at[kMostSums];
};

// Adds the sums of a tile.
template <typename Group>
CGX_LANE void add_sums(Group& group, std::byte* buffer, typename Group::template Lanes<Tile>& tile,
                       int length, Terms terms, float by, Sums* sums) {
  constexpr int kTile = Layout<Group>::kTile;
  constexpr int kSize = 4 * kSumColumns;  // bytes of the columns of one sum of a block
  static_assert(4 * kTile + kTile / kSumBlock * kMostSums * kSize <= Layout<Group>::kArriving);
  std::byte* const columns = buffer + 4 * kTile;
  const int kinds = terms == Terms::kSides ? kMostSums : 1;
  const int count = (length + kSumBlock - 1) / kSumBlock * kinds;
  store_tile(group, tile, length, buffer);
  group.each([&](int lane) {
    CGX_ROLLED
    for (int i = lane; i < count * kSumColumns; i += Group::kLanes) {
      const int k = i / kSumColumns % kinds;
      const int first = i / kSumColumns / kinds * kSumBlock;
      const int last = length - first < kSumBlock ? length : first + kSumBlock;
      float sum = 0.0f;
      CGX_ROLLED
      for (int at = first + i % kSumColumns; at < last; at += kSumColumns)
        sum = add(sum, term_of(terms, k, load<float>(buffer + 4 * at), by));
      store(columns + 4 * i, sum);
    }
  });
  group.each([&](int lane) {
    CGX_ROLLED
    for (int i = lane; i < count; i += Group::kLanes) {
      constexpr int kHalf = kSumColumns / 2;
      float column[kSumColumns];
      CGX_UNROLL
      for (int j = 0; j < kHalf; ++j) {
        column[j] = load<float>(columns + kSize * i + 4 * j);
        column[j + kHalf] = load<float>(columns + kSize * i + 4 * (j + kHalf));
      }
      fold<kHalf>(column);
      store(columns + kSize * i, column[0]);
    }
  });
  CGX_ROLLED
  for (int i = 0; i < count; i += kinds) {
    CGX_UNROLL
    for (int k = 0; k < kMostSums; ++k)
      if (k < kinds)
        sums->at[k] = add(sums->at[k], static_cast<double>(load<float>(columns + kSize * (i + k))));
  }
  group.each([](int) {});  // all lanes have read them
}

}  // namespace cgx::device::cuda
