// Encodes a tile's values to records.
//
//   1. noise
//   2. records
#pragma once

#include <cstdint>

#include "kernel/cuda/addresses.h"
#include "kernel/cuda/aligned/codes.h"
#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/aligned/values.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/noise.h"
#include "kernel/cuda/uniform.h"

namespace cgx::device::cuda::aligned {

// ---- 1. noise ----

// A tile's noise in shared memory: word j of counter i at (j * kNoiseRow + i). Neighboring values
// have neighboring counters, and the same half of the same word.
inline constexpr int kTileCounters = kTileNumel / kNoiseBlock * kNoiseCounters;
inline constexpr int kNoiseRow = kTileCounters + 4;  // words; rows begin in different banks
inline constexpr int kNoiseBytes = 4 * kNoiseRow * 4;

// A lane's part: two counters of its bucket.
template <int kLanes>
CGX_LANE void make_noise(const Tiling<kLanes>& tiling, int lane, const Noise& noise,
                         uint64_t first_value, std::byte* buffer) {
  const uint64_t first = first_value / kNoiseBlock * kNoiseCounters;
  constexpr int kEach = kTileCounters / kPairLanes;
  CGX_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int number = (tiling.bucket(lane) * kEach + i) * tiling.lanes() + tiling.in_bucket(lane);
    const NoiseWords words = noise_words(noise, first + static_cast<uint64_t>(number));
    CGX_UNROLL
    for (int j = 0; j < 4; ++j) store(buffer + 4 * (j * kNoiseRow + number), words.at[j]);
  }
}

// For kChunk values from value `at` of the tile on.
template <int kChunk>
CGX_LANE void load_noise(const std::byte* buffer, int at, float* noise) {
  const int half = at % kNoiseBlock / kNoiseCounters;
  const int number = at / kNoiseBlock * kNoiseCounters + at % kNoiseCounters;
  const std::byte* from = buffer + 4 * (half / 2 * kNoiseRow + number);
  const int shift = 16 * (half % 2);
  CGX_UNROLL
  for (int i = 0; i < kChunk; i += 4) {
    const auto words = load<Words4>(from + 4 * i);
    CGX_UNROLL
    for (int j = 0; j < 4; ++j) noise[i + j] = uniform_noise(words.at[j] >> shift);
  }
}

// ---- 2. records ----

template <int kBits, int kChunk>
struct Record {
  Codes<kBits, kChunk> codes;  // of a lane
  Header header;
};

// A lane's records in a piece's message.
template <int kBits, int kChunk>
struct RecordColumn {
  std::byte* first;  // of tile 0
  int field;         // offset of the codes
  int distance;      // of the chunks
  uint32_t tile_bytes;

  CGX_LANE std::byte* at(uint32_t tile) const { return first + uint64_t{tile} * tile_bytes; }
  CGX_LANE Record<kBits, kChunk> load(const std::byte* record) const {
    return {load_codes<kBits, kChunk>(record + field, distance), load_header(record)};
  }
};

template <int kBits, int kChunk, int kLanes, typename Group>
CGX_LANE auto record_columns_of(Group& group, std::byte* message, const Tiling<kLanes>& tiling) {
  constexpr int kChunkBytes = Codes<kBits, kChunk>::kChunkBytes;
  typename Group::template Lanes<RecordColumn<kBits, kChunk>> columns;
  group.for_lanes([&](int lane) {
    columns[lane] = {
        message + static_cast<uint32_t>(tiling.bucket(lane)) * tiling.record_bytes(kBits),
        kHeaderBytes + tiling.in_bucket(lane) * kChunkBytes, tiling.lanes() * kChunkBytes,
        tiling.tile_record_bytes(kBits)};
  });
  return columns;
}

// Where a piece's records and its quantization errors are written, and how.
template <typename Value, int kBits, int kChunk, typename Group>
struct Output {
  typename Group::template Lanes<RecordColumn<kBits, kChunk>> records;
  const Copies* copies;
  typename Group::template Lanes<Column<Value, kChunk>> residuals;
  float residual_scale;
  uint64_t first_index;  // of the piece
  Noise noise;
};

// Writes the records of a tile, and if kResidual the errors in the dtype of `Value`.
template <typename Value, int kBits, int kChunk, bool kNoisy, bool kResidual, int kLanes,
          typename Group>
CGX_LANE void write_records(Group& group, std::byte* noise, const Tiling<kLanes>& tiling,
                            uint32_t tile, typename Group::template Lanes<Values>& values,
                            Output<Value, kBits, kChunk, Group>& output) {
  typename Group::template Lanes<Extremes> keys;
  group.for_lanes([&](int lane) {
    float lowest = values[lane].at[0], highest = lowest;
    CGX_UNROLL
    for (int i = 1; i < kLaneValues; ++i) {
      lowest = smaller_or_nan(lowest, values[lane].at[i]);
      highest = larger_or_nan(highest, values[lane].at[i]);
    }
    keys[lane] = {key_of(lowest), key_of(highest)};
    if constexpr (kNoisy)
      make_noise(tiling, lane, output.noise, output.first_index + uint64_t{tile} * kTileNumel,
                 noise);
  });
  group.share_extremes(keys, tiling.lanes());
  if constexpr (kNoisy) group.synchronize(tiling.lanes());  // the noise is complete
  group.for_lanes([&](int lane) {
    const Grid grid = range_of(keys[lane], kBits);
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
        levels.at[i + j] = level_of_value(values[lane].at[i + j], grid, r[j], (1 << kBits) - 1);
    }
    Codes<kBits, kChunk> codes = pack<kBits, kChunk>(levels);
    CGX_UNROLL
    for (uint32_t& word : codes.word)  // levels of non-finite values are arbitrary
      word = grid.inverse == 0.0f ? 0 : word;
    const RecordColumn<kBits, kChunk>& column = output.records[lane];
    visit_copies(output.copies, column.at(tile), [&](std::byte* record) {
      if (tiling.in_bucket(lane) == 0) store_header(record, grid.header);
      store_codes(record + column.field, column.distance, codes);
    });
    if constexpr (kResidual) {
      Values errors;
      CGX_UNROLL
      for (int i = 0; i < kLaneValues; ++i) {
        const float decoded = value_of_level(levels.at[i], grid.header);
        const float error = subtract(values[lane].at[i], decoded);
        errors.at[i] = kept_in_residual<Value>(multiply(error, output.residual_scale));
      }
      output.residuals[lane].store(tile, errors);
    }
  });
  if constexpr (kNoisy) group.synchronize(tiling.lanes());  // the noise has been read
}

}  // namespace cgx::device::cuda::aligned
