// A tile's records in a message.
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

template <typename Format, int kChunk>
struct Record {
  Codes<Format::kBits, kChunk> codes;  // of a lane
  Header header;
};

// A lane's records in a piece's message.
template <typename Format, int kChunk>
struct RecordColumn {
  using Type = Codes<Format::kBits, kChunk>;

  std::byte* first;  // of tile 0
  int field;         // offset of the codes
  int distance;      // of the chunks
  uint32_t tile_bytes;

  CGX_LANE std::byte* at(uint32_t tile) const { return first + uint64_t{tile} * tile_bytes; }
  CGX_LANE Record<Format, kChunk> load(const std::byte* record) const {
    return {load_codes<Format::kBits, kChunk>(record + field, distance),
            Format::load_header(record)};
  }
  CGX_LANE void store(std::byte* record, const Type& codes) const {
    store_codes(record + field, distance, codes);
  }
};

template <typename Format, int kChunk, int kLanes, typename Group>
CGX_LANE auto record_columns_of(Group& group, std::byte* message, const Tiling<kLanes>& tiling) {
  constexpr int kChunkBits = Codes<Format::kBits, kChunk>::kChunkBits;
  typename Group::template Lanes<RecordColumn<Format, kChunk>> columns;
  group.for_lanes([&](int lane) {
    const int first_bit = tiling.in_bucket(lane) * kChunkBits;
    columns[lane] = {message + static_cast<uint32_t>(tiling.bucket(lane)) *
                                   tiling.template record_bytes<Format>(),
                     Format::kHeaderBytes + first_bit / 8, tiling.lanes() * kChunkBits / 8,
                     tiling.template tile_record_bytes<Format>()};
  });
  return columns;
}

// Where a piece's records and its quantization errors are written, and how.
template <typename Value, typename Format, int kChunk, typename Group>
struct Output {
  typename Group::template Lanes<RecordColumn<Format, kChunk>> records;
  const Copies* copies;
  typename Group::template Lanes<Column<Value, kChunk>> residuals;
  float residual_scale;
  uint64_t first_index;  // of the piece
  Noise noise;
};

// Encodes a tile, and writes its records, and if kResidual the errors in the dtype of `Value`.
template <typename Value, typename Format, int kChunk, bool kNoisy, bool kResidual, int kLanes,
          typename Group>
CGX_LANE void write_records(Group& group, std::byte* memory, const Tiling<kLanes>& tiling,
                            uint32_t tile, typename Group::template Lanes<Values>& values,
                            Output<Value, Format, kChunk, Group>& output) {
  typename Group::template Lanes<Record<Format, kChunk>> records;
  typename Group::template Lanes<Values> decoded;  // if kResidual
  Format::template encode<kNoisy, kResidual, kChunk>(
      group, memory, tiling, values, output.noise, output.first_index + uint64_t{tile} * kTileNumel,
      records, decoded);
  group.for_lanes([&](int lane) {
    const RecordColumn<Format, kChunk>& column = output.records[lane];
    visit_copies(output.copies, column.at(tile), [&](std::byte* record) {
      if (tiling.in_bucket(lane) == 0) Format::store_header(record, records[lane].header);
      column.store(record, records[lane].codes);
    });
    if constexpr (kResidual) {
      Values errors;
      CGX_UNROLL
      for (int i = 0; i < kLaneValues; ++i) {
        const float error = subtract(values[lane].at[i], decoded[lane].at[i]);
        errors.at[i] = kept_in_residual<Value>(multiply(error, output.residual_scale));
      }
      output.residuals[lane].store(tile, errors);
    }
  });
}

}  // namespace cgx::device::cuda::aligned
