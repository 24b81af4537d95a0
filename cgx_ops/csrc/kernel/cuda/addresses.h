// Addresses and seeds of a launch that all kernels need: the region of the current exchange, and
// the noise and the random indices of a piece.
#pragma once

#include <cstdint>

#include "base/seeds.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/noise.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// The region of the current exchange's messages, and whether the collective has failed.
struct Place {
  int64_t read, write;  // offsets in bytes from the addresses in the launch
  bool failed;
};
CGX_LANE Place place_of(const Regions& regions, const uint32_t* fault) {
  const uint64_t done = regions.done ? *regions.done : 0;
  const int64_t bytes = regions.done ? regions.bytes : 0;
  return {done % 2 ? bytes : 0, done % 2 ? 0 : bytes, fault && *fault != 0};
}

// Calls visit(address) for each address that receives a message.
template <typename Visit>
CGX_LANE void visit_copies(const Copies* copies, std::byte* first, const Visit& visit) {
  int64_t distance = 0;
  CGX_ROLLED
  for (int next = 0;; ++next) {  // visit() is inlined once
    visit(first + distance);
    if (next == copies->count) break;
    distance = copies->distance[next];
  }
}
// The same; null: none.
template <typename Visit>
CGX_LANE void for_copies(const Copies* copies, std::byte* first, const Visit& visit) {
  if (first) visit_copies(copies, first, visit);
}

// The position of a bucket in its piece.
struct Extent {
  int64_t start;  // in elements
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

// For a bucket that begins at element `start` of its piece. Does not depend on the block, because
// all ranks draw the same indices.
CGX_LANE Draw draw_of(const Piece& piece, int64_t start) {
  return {piece.seed, static_cast<uint64_t>(piece.first_index + start)};
}

}  // namespace cgx::device::cuda
