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
  int bit;           // of the first code in its byte
  int distance;      // of the chunks
  uint32_t tile_bytes;

  CGX_LANE std::byte* at(uint32_t tile) const { return first + uint64_t{tile} * tile_bytes; }
  CGX_LANE Record<Format, kChunk> load(const std::byte* record) const {
    return {load_codes<Format::kAlignment, Format::kBits, kChunk>(record + field, distance, bit),
            Format::load_header(record)};
  }
  CGX_LANE void store(std::byte* record, const Type& codes) const {
    store_codes<Format::kAlignment>(record + field, distance, codes);
  }
  // Stores what this lane has of a pair's chunks, see codes_to_store().
  CGX_LANE void store(std::byte* record, const Codes<Format::kBits, 2 * kChunk>& codes) const {
    std::byte* const of_pair = record + field - (bit != 0);
    store_codes<Format::kAlignment>(of_pair + (bit != 0) * Type::kChunks / 2 * distance, distance,
                                    codes);
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
                     Format::kHeaderBytes + first_bit / 8, first_bit % 8,
                     tiling.lanes() * kChunkBits / 8, tiling.template tile_record_bytes<Format>()};
  });
  return columns;
}

// The codes that each lane stores: its own if its chunks are whole bytes. If not, those of two
// neighbors are, together: the first one stores both parts of half of the chunks, the second one
// those of the others.
template <typename Format, int kChunk, typename Group>
CGX_LANE auto codes_to_store(Group& group,
                             typename Group::template Lanes<Record<Format, kChunk>>& records) {
  using Own = Codes<Format::kBits, kChunk>;
  if constexpr (Own::kHasWholeBytes) {
    typename Group::template Lanes<Own> codes;
    group.for_lanes([&](int lane) { codes[lane] = records[lane].codes; });
    return codes;
  } else {
    static_assert(Own::kWordsOfChunk == 1);
    constexpr int kHalf = Own::kChunks / 2;
    typename Group::template Lanes<Codes<Format::kBits, 2 * kChunk>> codes;
    CGX_UNROLL
    for (int c = 0; c < kHalf; ++c) {
      typename Group::template Lanes<uint32_t> sent;
      group.for_lanes([&](int lane) {
        const uint32_t* own = records[lane].codes.word;
        sent[lane] = lane % 2 ? own[c] : own[c + kHalf];
      });
      group.for_lanes([&](int lane) {
        const uint32_t* own = records[lane].codes.word;
        const auto received = group.template other<2>(sent, lane, static_cast<uint32_t>(lane ^ 1));
        const uint32_t low = lane % 2 ? received : own[c];
        const uint32_t high = lane % 2 ? own[c + kHalf] : received;
        codes[lane].word[c] = high << Own::kChunkBits | low;
      });
    }
    return codes;
  }
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
  auto codes = codes_to_store<Format, kChunk>(group, records);
  group.for_lanes([&](int lane) {
    const RecordColumn<Format, kChunk>& column = output.records[lane];
    visit_copies(output.copies, column.at(tile), [&](std::byte* record) {
      if (tiling.in_bucket(lane) == 0) Format::store_header(record, records[lane].header);
      column.store(record, codes[lane]);
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
