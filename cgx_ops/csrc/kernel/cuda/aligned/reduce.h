// The body of Reduce's aligned kernels for codes: the sum of all ranks in rank order, to records or
// values.
#pragma once

#include "kernel/cuda/aligned/records.h"

namespace cgx::device::cuda::aligned {

// Divides exactly: by the reciprocal if that is exact. Otherwise, which is rare, one by one,
// because 16 divisions would be long.
CGX_LANE void divide_all(float divisor, std::byte* scratch, Values* values) {
  if ((bits_of(divisor) & 0x007fffffu) == 0) {
    const float reciprocal = divide(1.0f, divisor);
    CGX_UNROLL
    for (float& x : values->at) x = multiply(x, reciprocal);
    return;
  }
  store_scratch(scratch, *values);
  CGX_ROLLED
  for (int i = 0; i < kLaneValues; ++i)
    store(scratch + 4 * i, divide(load<float>(scratch + 4 * i), divisor));
  load_scratch(scratch, values);
}

// A group's shared memory.
template <typename Format, bool kNoisy, bool kEncodes>
struct ReduceMemory {
  alignas(16) std::byte scratch[kPairLanes * kScratchBytes];
  alignas(16) std::byte encoding[kEncodes ? Format::template kMemoryBytes<kNoisy> : 16];
};

// kOwn: own values are added. kEncodes: to records; otherwise to values. Averages that are encoded
// need own values, because allreduce has no others.
template <typename Value, typename Format, int kLanes, bool kNoisy, bool kOwn, bool kResidual,
          bool kEncodes, typename Group>
CGX_LANE void reduce(Group& group, ReduceMemory<Format, kNoisy, kEncodes>* memory,
                     const Reduce& launch, const Work& work, uint32_t first, uint32_t step) {
  constexpr bool kWritesValues = kResidual || !kEncodes;
  constexpr int kChunk = kChunkOf<Format, Value, kOwn, kWritesValues>;
  const Place place = place_of(launch.regions, launch.fault);
  if (place.failed) {
    if constexpr (kResidual)
      fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::residual);
    if constexpr (!kEncodes)
      fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::result);
    return;
  }
  for_tiles(group, launch, work, first, step, [&](const Piece& piece) {
    const Tiling<kLanes> tiling(piece);
    // The noise of another piece, in the same memory, has been read.
    if constexpr (kNoisy) group.synchronize(kPairLanes);
    auto messages = record_columns_of<Format, kChunk>(group, piece.message + place.read, tiling);
    auto values = columns_of<Value, kChunk>(group, piece.values, tiling);
    auto result = columns_of<Value, kChunk>(group, piece.result, tiling);
    Output<Value, Format, kChunk, Group> output{
        .records = record_columns_of<Format, kChunk>(group, piece.reduced + place.write, tiling),
        .copies = &launch.copies,
        .residuals = columns_of<Value, kChunk>(group, piece.residual, tiling),
        .residual_scale = launch.residual_scale,
        .first_index = static_cast<uint64_t>(piece.first_index),
        .noise = kNoisy ? noise_of(piece, launch) : Noise{}};
    return [=, &group, &launch](uint32_t tile) mutable {
      if (!group.select(tiling.active(tile))) return;
      typename Group::template Lanes<Values> sums;
      typename Group::template Lanes<const std::byte*> record;
      typename Group::template Lanes<Record<Format, kChunk>> next;
      group.for_lanes([&](int lane) {
        CGX_UNROLL
        for (float& x : sums[lane].at) x = 0.0f;  // a decoded value is never -0
        record[lane] = messages[lane].at(tile) + (kOwn && launch.own == 0 ? launch.stride : 0);
        next[lane] = messages[lane].load(record[lane]);
      });
      int rank = 0;
      CGX_ROLLED
      do {
        typename Group::template Lanes<Values> of_rank;
        if (kOwn && rank == launch.own) {
          group.for_lanes([&](int lane) {
            of_rank[lane] = values[lane].load(tile);
            if constexpr (kResidual) add_to(&of_rank[lane], output.residuals[lane].load(tile));
          });
        } else {
          auto message = next;
          const int ahead = kOwn && rank + 1 == launch.own ? 2 : 1;
          if (rank + ahead < launch.size) {  // load while this one is decoded
            group.for_lanes([&](int lane) {
              record[lane] += ahead * launch.stride;
              next[lane] = messages[lane].load(record[lane]);
            });
          }
          Format::decode(group, memory->scratch, message, of_rank);
        }
        group.for_lanes([&](int lane) { add_to(&sums[lane], of_rank[lane]); });
      } while (++rank < launch.size);
      group.for_lanes([&](int lane) {
        Values& sum = sums[lane];
        if constexpr (kOwn || !kEncodes)
          if (launch.op == Op::kAvg)
            divide_all(launch.divisor, memory->scratch + lane * kScratchBytes, &sum);
        if constexpr (!kEncodes) {
          CGX_UNROLL
          for (float& x : sum.at) x = with_one_nan(x);
          result[lane].store(tile, sum);
        }
      });
      if constexpr (kEncodes)
        write_records<Value, Format, kChunk, kNoisy, kResidual>(group, memory->encoding, tiling,
                                                                tile, sums, output);
    };
  });
}

}  // namespace cgx::device::cuda::aligned
