// The body of Decode's aligned kernels for codes.
#pragma once

#include "kernel/cuda/aligned/records.h"

namespace cgx::device::cuda::aligned {

// `scratch`: kScratchBytes for each lane.
template <typename Value, typename Format, int kLanes, typename Group>
CGX_LANE void decode(Group& group, std::byte* scratch, const Decode& launch, const Work& work,
                     uint32_t first, uint32_t step) {
  constexpr int kChunk = kWriteChunk<Value>;
  const Place place = place_of(launch.regions, launch.fault);
  if (place.failed) {
    fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::result);
    return;
  }
  for_tiles(group, launch, work, first, step, [&](const Piece& piece) {
    const Tiling<kLanes> tiling(piece);
    auto records = record_columns_of<Format, kChunk>(group, piece.message + place.read, tiling);
    auto result = columns_of<Value, kChunk>(group, piece.result, tiling);
    return [=, &group](uint32_t tile) mutable {
      if (!group.select(tiling.active(tile))) return;
      typename Group::template Lanes<Record<Format, kChunk>> loaded;
      typename Group::template Lanes<Values> values;
      group.for_lanes([&](int lane) { loaded[lane] = records[lane].load(records[lane].at(tile)); });
      Format::decode(group, scratch, loaded, values);
      group.for_lanes([&](int lane) { result[lane].store(tile, values[lane]); });
    };
  });
}

}  // namespace cgx::device::cuda::aligned
