// The bodies of the general kernels: run_bucket() is the work of a group for one bucket of an
// Encode, a Reduce or a Decode, from its source (sources.h) to its target (targets.h).
#pragma once

#include <cstdint>

#include "kernel/cuda/addresses.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/sources.h"
#include "kernel/cuda/sparse.h"
#include "kernel/cuda/targets.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

template <typename Value, typename Format, typename Group, typename Source>
CGX_LANE void write_bucket(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                           const Source& source, const Draw& indices) {
  if constexpr (Format::kFormats == Formats::kSparse)
    write_sparse<Value>(group, buffer, target, numel, source, indices);
  else
    write_record<Value, Format>(group, buffer, target, numel, source);
}

template <typename Value, typename Format, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Encode& launch, const Place& place,
                         const Item& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const Coding coding = Format::known(piece.coding);
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* values = piece.values + start * kWidth;
  std::byte* record =
      piece.message + place.write + bucket_at(bucket.number, piece.bucket_size, coding, kWidth);
  std::byte* residual = moved(piece.residual, start * kWidth);
  // Values without a grid are always cut for warps (cut_if_exact), so blocks never get them.
  const bool half = Group::kLanes == kWarpLanes && Format::in_halves(coding);
  const bool exact = Group::kLanes == kWarpLanes && is_exact(coding);
  if (!residual && place.failed) return;
  if (!residual && (exact || (half && kWidth == 2))) {
    move_exact<Value>(group, buffer, values, numel, false,
                      [&](const auto& visit) { for_copies(&launch.copies, record, visit); });
    return;
  }
  // Do not write after a failure: peers may still be reading.
  const Target target{.record = place.failed ? nullptr : record,
                      .copies = &launch.copies,
                      .coding = coding,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .residual = residual,
                      .residual_scale = 1.0f,
                      .failed = place.failed};
  const OwnValues<Value, Group> own{group, buffer, values, residual, place.failed};
  if (place.failed || exact || half) {
    write_values<Value>(group, buffer, target, numel, own, half);
  } else {
    write_bucket<Value, Format>(group, buffer, target, numel, own, draw_of(piece, start));
  }
}

// The magnitude of the votes of a rank's own values.
template <typename Value, typename Group>
CGX_LANE float vote_of(Group& group, std::byte* buffer, const std::byte* values, int64_t numel) {
  typename Group::template Lanes<Tile> tile;
  const OwnValues<Value, Group> own{group, buffer, values, nullptr, false};
  ExtremesOfTiles<Group> keys(group);
  for (int64_t start = 0; start < numel; start += Layout<Group>::kTile) {
    const auto length = static_cast<int>(at_most(Layout<Group>::kTile, numel - start));
    own(tile, start, length);
    keys.inspect(tile, length, [](float x) { return magnitude_key(x); });
  }
  const bool finite = is_finite(float_of(static_cast<uint32_t>(keys.extremes().highest)));
  return finite ? 1.0f : float_of(kFloat32Nan);
}

template <typename Value, typename Format, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Reduce& launch, const Place& place,
                         const Item& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const Coding coding = Format::known(piece.coding), to = Format::known(piece.reduced_coding);
  const auto [start, numel] = extent_of(piece, bucket.number);
  std::byte* residual = moved(piece.residual, start * kWidth);
  const std::byte* own_values = piece.values + start * kWidth;
  const bool votes = is_vote(coding) && launch.own >= 0 && !place.failed;
  const SumOfRanks<Value, Format, Group> sums{
      .group = group,
      .buffer = buffer,
      .own_values = own_values,
      .own_residual = residual,
      .message =
          piece.message + place.read + bucket_at(bucket.number, piece.bucket_size, coding, kWidth),
      .stride = launch.stride,
      .bucket_numel = numel,
      .size = launch.size,
      .own = launch.own,
      .coding = coding,
      .indices = draw_of(piece, start),
      .own_vote = votes ? vote_of<Value>(group, buffer, own_values, numel) : 1.0f,
      .op = launch.op,
      .divisor = launch.divisor,
      .failed = place.failed};
  const int64_t at = bucket_at(bucket.number, piece.bucket_size, to, kWidth);
  // Do not write after a failure: peers may still be reading.
  const Target target{.record = place.failed ? nullptr : moved(piece.reduced, place.write + at),
                      .copies = &launch.copies,
                      .coding = to,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .result = moved(piece.result, start * kWidth),
                      .residual = residual,
                      .residual_scale = launch.residual_scale,
                      .failed = place.failed};
  const bool encodes = target.record || (is_vote(to) && !place.failed);
  const bool half = encodes && Format::in_halves(to);
  if (!encodes || is_exact(to) || half) {
    write_values<Value>(group, buffer, target, numel, sums, half);
  } else {
    write_bucket<Value, Format>(group, buffer, target, numel, sums, draw_of(piece, start));
  }
}

template <typename Value, typename Format, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Decode& launch, const Place& place,
                         const Item& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const Coding coding = Format::known(piece.coding);
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* record =
      piece.message + place.read + bucket_at(bucket.number, piece.bucket_size, coding, kWidth);
  std::byte* result = piece.result + start * kWidth;
  if (is_exact(coding) || (Format::in_halves(coding) && kWidth == 2)) {
    move_exact<Value>(group, buffer, record, numel, place.failed,
                      [&](const auto& visit) { visit(result); });
    return;
  }
  const SumOfRanks<Value, Format, Group> one{.group = group,
                                             .buffer = buffer,
                                             .own_values = nullptr,
                                             .own_residual = nullptr,
                                             .message = record,
                                             .stride = 0,
                                             .bucket_numel = numel,
                                             .size = 1,
                                             .own = -1,
                                             .coding = coding,
                                             .indices = draw_of(piece, start),
                                             .own_vote = 1.0f,
                                             .op = Op::kSum,
                                             .divisor = 1.0f,
                                             .failed = place.failed};
  const Target target{.result = result, .failed = place.failed};
  write_values<Value>(group, buffer, target, numel, one, /*in_halves=*/false);
}

}  // namespace cgx::device::cuda
