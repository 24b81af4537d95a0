// What a group does with one bucket of an Encode, a Reduce or a Decode: the bodies of the kernels.
//
//   1. where the bucket lies
//   2. run_bucket(): its source (sources.h) into its target (targets.h)
#pragma once

#include <cstdint>

#include "base/seeds.h"
#include "kernel/cuda/codec.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/sources.h"
#include "kernel/cuda/targets.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// ---- 1. places ----

// Where this exchange's messages lie, and whether there is one.
struct Place {
  int64_t read, write;  // bytes from the addresses in the launch
  bool failed;
};
CGX_LANE Place place_of(const Regions& regions, const uint32_t* fault) {
  const uint64_t done = regions.done ? *regions.done : 0;
  const int64_t bytes = regions.done ? regions.bytes : 0;
  return {done % 2 ? bytes : 0, done % 2 ? 0 : bytes, fault && *fault != 0};
}

// A bucket's place in its piece.
struct Extent {
  int64_t start;  // elements
  int64_t numel;
};
CGX_LANE Extent extent_of(const Piece& piece, int64_t number) {
  const int64_t start = number * piece.bucket_size;
  return {start, at_most(piece.bucket_size, piece.numel - start)};
}

template <typename Launch>
CGX_LANE Noise noise_of(const Piece& piece, const Launch& launch) {
  const uint64_t seed =
      piece.seed_at ? segment_seed(*piece.seed_at, piece.seed_number) : piece.seed;
  return {block_seed(seed, piece.block), launch.rank, launch.phase};
}

CGX_LANE std::byte* moved(std::byte* from, int64_t bytes) { return from ? from + bytes : nullptr; }

// ---- 2. bodies ----

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Encode& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* values = piece.values + start * kWidth;
  std::byte* record =
      piece.message + place.write + bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth);
  std::byte* residual = moved(piece.residual, start * kWidth);
  // Exact values are cut as suits a warp (cut_exact_pieces): a block gets none.
  const bool exact = Group::kLanes == kWarpLanes && piece.bits == kExactBits;
  if (!residual && place.failed) return;
  if (!residual && exact) {
    move_exact<Value>(group, buffer, values, numel, false,
                      [&](const auto& visit) { for_copies(launch.copies, record, visit); });
    return;
  }
  // A failed rank's peers may be reading.
  const Target target{.record = place.failed ? nullptr : record,
                      .copies = &launch.copies,
                      .bits = piece.bits,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .residual = residual,
                      .residual_scale = 1.0f,
                      .failed = place.failed};
  const OwnValues<Value, Group> own{group, buffer, values, residual, place.failed};
  if (place.failed || exact) {
    write_exact<Value>(group, buffer, target, numel, own);
  } else {
    write_record<Value>(group, buffer, target, numel, own);
  }
}

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Reduce& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  std::byte* residual = moved(piece.residual, start * kWidth);
  const Sums<Value, Group> sums{
      .group = group,
      .buffer = buffer,
      .own_values = piece.values + start * kWidth,
      .own_residual = residual,
      .message = piece.message + place.read +
                 bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth),
      .stride = launch.stride,
      .size = launch.size,
      .own = launch.own,
      .bits = piece.bits,
      .op = launch.op,
      .divisor = launch.divisor,
      .failed = place.failed};
  const int64_t at = bucket_at(bucket.number, piece.bucket_size, piece.reduced_bits, kWidth);
  // A failed rank's peers may be reading.
  const Target target{.record = place.failed ? nullptr : moved(piece.reduced, place.write + at),
                      .copies = &launch.copies,
                      .bits = piece.reduced_bits,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .result = moved(piece.result, start * kWidth),
                      .residual = residual,
                      .residual_scale = launch.residual_scale,
                      .failed = place.failed};
  if (target.record && piece.reduced_bits != kExactBits) {
    write_record<Value>(group, buffer, target, numel, sums);
  } else {
    write_exact<Value>(group, buffer, target, numel, sums);
  }
}

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Decode& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* record =
      piece.message + place.read + bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth);
  std::byte* result = piece.result + start * kWidth;
  if (piece.bits == kExactBits) {
    move_exact<Value>(group, buffer, record, numel, place.failed,
                      [&](const auto& visit) { visit(result); });
    return;
  }
  const Sums<Value, Group> one{.group = group,
                               .buffer = buffer,
                               .own_values = nullptr,
                               .own_residual = nullptr,
                               .message = record,
                               .stride = 0,
                               .size = 1,
                               .own = -1,
                               .bits = piece.bits,
                               .op = Op::kSum,
                               .divisor = 1.0f,
                               .failed = place.failed};
  const Target target{.result = result, .failed = place.failed};
  write_exact<Value>(group, buffer, target, numel, one);
}

}  // namespace cgx::device::cuda
