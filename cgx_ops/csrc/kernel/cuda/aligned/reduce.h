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
template <bool kNoisy>
struct ReduceMemory {
  alignas(16) std::byte scratch[kPairLanes * kScratchBytes];
  alignas(16) std::byte noise[kNoisy ? kNoiseBytes : 16];
};

// kOwn: own values are added. kEncodes: to records; otherwise to values. Averages that are encoded
// need own values, because allreduce has no others.
template <typename Value, int kBits, int kLanes, bool kNoisy, bool kOwn, bool kResidual,
          bool kEncodes, typename Group>
CGX_LANE void reduce(Group& group, ReduceMemory<kNoisy>* memory, const Reduce& launch,
                     const Work& work, uint32_t first, uint32_t step) {
  constexpr bool kWritesValues = kResidual || !kEncodes;
  constexpr int kChunk = kWritesValues ? kWriteChunk<Value> : kOwn ? kReadChunk : kLaneValues;
  const Place place = place_of(launch.regions, launch.fault);
  if (place.failed) {
    if constexpr (kResidual)
      fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::residual);
    if constexpr (!kEncodes)
      fill_with_nan<Value, kLanes>(group, launch, work, first, step, &Piece::result);
    return;
  }
  for_tiles<kLanes>(
      launch, work, first, step, [&](const Piece& piece, const Tiling<kLanes>& tiling) {
        // The noise of another piece, in the same memory, has been read.
        if constexpr (kNoisy) group.synchronize(kPairLanes);
        auto messages = record_columns_of<kBits, kChunk>(group, piece.message + place.read, tiling);
        auto values = columns_of<Value, kChunk>(group, piece.values, tiling);
        auto result = columns_of<Value, kChunk>(group, piece.result, tiling);
        Output<Value, kBits, kChunk, Group> output{
            .records = record_columns_of<kBits, kChunk>(group, piece.reduced + place.write, tiling),
            .copies = &launch.copies,
            .residuals = columns_of<Value, kChunk>(group, piece.residual, tiling),
            .residual_scale = launch.residual_scale,
            .first_index = static_cast<uint64_t>(piece.first_index),
            .noise = kNoisy ? noise_of(piece, launch) : Noise{}};
        return [=, &group, &launch](uint32_t tile) mutable {
          if (!group.select(tiling.active(tile))) return;
          typename Group::template Lanes<Values> sums;
          group.for_lanes([&](int lane) {
            std::byte* scratch = memory->scratch + lane * kScratchBytes;
            Values& sum = sums[lane];
            CGX_UNROLL
            for (float& x : sum.at) x = 0.0f;  // a decoded value is never -0
            const auto& column = messages[lane];
            const std::byte* record =
                column.at(tile) + (kOwn && launch.own == 0 ? launch.stride : 0);
            Record<kBits, kChunk> next = column.load(record);
            int rank = 0;
            CGX_ROLLED
            do {
              Values of_rank;
              if (kOwn && rank == launch.own) {
                of_rank = values[lane].load(tile);
                if constexpr (kResidual) add_to(&of_rank, output.residuals[lane].load(tile));
              } else {
                const Record<kBits, kChunk> message = next;
                const int ahead = kOwn && rank + 1 == launch.own ? 2 : 1;
                if (rank + ahead < launch.size) {  // load while this one is decoded
                  record += ahead * launch.stride;
                  next = column.load(record);
                }
                decode(message.codes, message.header, scratch, &of_rank);
              }
              add_to(&sum, of_rank);
            } while (++rank < launch.size);
            if constexpr (kOwn || !kEncodes)
              if (launch.op == Op::kAvg) divide_all(launch.divisor, scratch, &sum);
            if constexpr (!kEncodes) {
              CGX_UNROLL
              for (float& x : sum.at) x = with_one_nan(x);
              result[lane].store(tile, sum);
            }
          });
          if constexpr (kEncodes)
            write_records<Value, kBits, kChunk, kNoisy, kResidual>(group, memory->noise, tiling,
                                                                   tile, sums, output);
        };
      });
}

}  // namespace cgx::device::cuda::aligned
