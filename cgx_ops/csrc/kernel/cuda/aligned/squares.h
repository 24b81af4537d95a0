// Sums of squares in the order of docs/reference/compressor_formats.md, for buckets of 512 values.
// Such a bucket is one block of 16 columns: value 16 * row + column. A warp has one, its lanes have
// values in chunks as in tile.h:
//
//   value k of chunk c of lane l: column (kChunk * l + k) % 16,
//                                 row (kChunk * l + k) / 16 + c * kRows
#pragma once

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/measure.h"
#include "kernel/cuda/memory.h"

namespace cgx::device::cuda::aligned {

// Shared memory has a vector for each k of each lane, with the values k of all its chunks. After
// the vectors of a lane follows an empty one, so that neighbors use different banks.
template <int kChunk>
struct Squares {
  static constexpr int kChunks = kLaneValues / kChunk;  // the elements of a vector
  static constexpr int kRows = kWarpLanes * kChunk / kSumColumns;
  static constexpr int kVectorBytes = 4 * kChunks;
  static constexpr int kLaneBytes = (kChunk + 1) * kVectorBytes;
  static constexpr int kBytes = kPairLanes * kLaneBytes;
  static constexpr int kRowBytes = kSumColumns / kChunk * kLaneBytes;  // from row to row

  struct Vector {
    float at[kChunks];
  };

  CGX_LANE static Vector load(const std::byte* from) {
    if constexpr (kChunks == 4) {
      const auto words = cuda::load<Words4>(from);
      return {float_of(words.at[0]), float_of(words.at[1]), float_of(words.at[2]),
              float_of(words.at[3])};
    } else {
      const auto words = cuda::load<uint64_t>(from);
      return {float_of(static_cast<uint32_t>(words)), float_of(static_cast<uint32_t>(words >> 32))};
    }
  }
  CGX_LANE static void store(std::byte* to, const Vector& vector) {
    if constexpr (kChunks == 4)
      cuda::store(to, Words4{{bits_of(vector.at[0]), bits_of(vector.at[1]), bits_of(vector.at[2]),
                              bits_of(vector.at[3])}});
    else
      cuda::store(to, uint64_t{bits_of(vector.at[1])} << 32 | bits_of(vector.at[0]));
  }

  // The squares of a lane's values times `by`.
  CGX_LANE static void put(int lane, const Values& values, float by, std::byte* memory) {
    Values squares;
    CGX_UNROLL
    for (int i = 0; i < kLaneValues; ++i) squares.at[i] = multiply(values.at[i], values.at[i]);
    if (by != 1.0f) {  // rare
      CGX_UNROLL
      for (int i = 0; i < kLaneValues; ++i)
        squares.at[i] = term_of(Terms::kSquares, 0, values.at[i], by);
    }
    CGX_UNROLL
    for (int k = 0; k < kChunk; ++k) {
      Vector vector;
      CGX_UNROLL
      for (int c = 0; c < kChunks; ++c) vector.at[c] = squares.at[c * kChunk + k];
      store(memory + lane * kLaneBytes + k * kVectorBytes, vector);
    }
  }

  // The sum of a column.
  CGX_LANE static float sum_of_column(int lane, const std::byte* memory) {
    const int column = lane % kSumColumns;
    const int first = lane / kWarpLanes * kWarpLanes + column / kChunk;
    const std::byte* from = memory + first * kLaneBytes + column % kChunk * kVectorBytes;
    Vector rows[kRows];
    CGX_UNROLL
    for (int row = 0; row < kRows; ++row) rows[row] = load(from + row * kRowBytes);
    float sum = 0.0f;
    CGX_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      CGX_UNROLL
      for (int row = 0; row < kRows; ++row) sum = add(sum, rows[row].at[c]);
    }
    return sum;
  }
};

inline constexpr int kMostSquaresBytes = Squares<4>::kBytes;
static_assert(Squares<8>::kBytes <= kMostSquaresBytes);

// Gives each lane the sum of the squares of its bucket, times its `by`.
template <int kChunk, typename Group>
CGX_LANE void sum_squares(Group& group, std::byte* memory,
                          typename Group::template Lanes<Values>& values,
                          typename Group::template Lanes<float>& by,
                          typename Group::template Lanes<float>& sums) {
  group.for_lanes([&](int lane) { Squares<kChunk>::put(lane, values[lane], by[lane], memory); });
  group.synchronize(kWarpLanes);
  group.for_lanes([&](int lane) { sums[lane] = Squares<kChunk>::sum_of_column(lane, memory); });
  group.synchronize(kWarpLanes);  // they have been read
  CGX_UNROLL
  for (int half = kSumColumns / 2; half > 0; half /= 2) {
    typename Group::template Lanes<float> others;
    group.for_lanes([&](int lane) {
      others[lane] =
          group.template other<kSumColumns>(sums, lane, static_cast<uint32_t>(lane ^ half));
    });
    group.for_lanes([&](int lane) { sums[lane] = add(sums[lane], others[lane]); });
  }
}

}  // namespace cgx::device::cuda::aligned
