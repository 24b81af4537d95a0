// The body of Encode's aligned kernels for codes.
#pragma once

#include "kernel/cuda/aligned/records.h"

namespace cgx::device::cuda::aligned {

// A group's part: every `step`-th tile from `first` on. `memory`: see kMemoryBytes.
template <typename Value, typename Format, int kLanes, bool kNoisy, bool kResidual, typename Group>
CGX_LANE void encode(Group& group, std::byte* memory, const Encode& launch, const Work& work,
                     uint32_t first, uint32_t step) {
  constexpr int kChunk = kChunkOf<Format, Value, /*kReads=*/true, kResidual>;
  const Place place = place_of(launch.regions, launch.fault);
  if (place.failed) {
    if constexpr (kResidual)
      fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::residual);
    return;
  }
  for_tiles(group, launch, work, first, step, [&](const Piece& piece) {
    const Tiling<kLanes> tiling(piece);
    // The noise of another piece, in the same memory, has been read.
    if constexpr (kNoisy) group.synchronize(kPairLanes);
    auto input = columns_of<Value, kChunk>(group, piece.values, tiling);
    Output<Value, Format, kChunk, Group> output{
        .records = record_columns_of<Format, kChunk>(group, piece.message + place.write, tiling),
        .copies = &launch.copies,
        .residuals = columns_of<Value, kChunk>(group, piece.residual, tiling),
        .residual_scale = 1.0f,
        .first_index = static_cast<uint64_t>(piece.first_index),
        .noise = kNoisy ? noise_of(piece, launch) : Noise{}};
    return [=, &group](uint32_t tile) mutable {
      if (!group.select(tiling.active(tile))) return;
      typename Group::template Lanes<Values> values;
      group.for_lanes([&](int lane) {
        values[lane] = input[lane].load(tile);
        if constexpr (kResidual) add_to(&values[lane], output.residuals[lane].load(tile));
      });
      write_records<Value, Format, kChunk, kNoisy, kResidual>(group, memory, tiling, tile, values,
                                                              output);
    };
  });
}

}  // namespace cgx::device::cuda::aligned
