// The bodies of aligned kernels for exact values: copies, and sums in rank order, in words of 16
// bytes. Here a piece is whole words, and a tile may end with any of them.
#pragma once

#include "kernel/cuda/addresses.h"
#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/aligned/values.h"

namespace cgx::device::cuda::aligned {

// Calls visit(piece, at) for each word of every `step`-th tile from `first` on, which begins `at`
// bytes after the begin of its piece.
template <typename Value, typename Group, typename Launch, typename Visit>
CGX_LANE void for_words(Group& group, const Launch& launch, const Work& work, uint32_t first,
                        uint32_t step, const Visit& visit) {
  constexpr int kWidth = sizeof(typename Value::Bits), kTileBytes = kTileNumel * kWidth;
  for_tiles(group, launch, work, first, step, [&](const Piece& piece) {
    return [&](uint32_t tile) {
      const int64_t start = int64_t{tile} * kTileBytes;
      const auto bytes = static_cast<int>(at_most(kTileBytes, piece.numel * kWidth - start));
      group.for_lanes([&](int lane) {
        CGX_UNROLL
        for (int at = 16 * lane, end = at + kTileBytes; at < end; at += 16 * kPairLanes)
          if (at < bytes) visit(piece, start + at);
      });
    };
  });
}

template <typename Value>
CGX_LANE Words4 word_of_nan() {
  float values[kValuesOfWord<Value>];
  CGX_UNROLL
  for (float& x : values) x = float_of(kFloat32Nan);
  return rounded_word<Value>(values);
}

// Values -> messages. Values that are only moved keep their bits.
template <typename Value, typename Group>
CGX_LANE void exact(Group& group, const Encode& launch, const Work& work, uint32_t first,
                    uint32_t step) {
  const Place place = place_of(launch.regions, launch.fault);
  if (place.failed) return;
  for_words<Value>(group, launch, work, first, step, [&](const Piece& piece, int64_t at) {
    const Words4 word = load_once(piece.values + at);
    visit_copies(&launch.copies, piece.message + place.write + at,
                 [&](std::byte* to) { store(to, word); });
  });
}

// A message -> values.
template <typename Value, typename Group>
CGX_LANE void exact(Group& group, const Decode& launch, const Work& work, uint32_t first,
                    uint32_t step) {
  const Place place = place_of(launch.regions, launch.fault);
  for_words<Value>(group, launch, work, first, step, [&](const Piece& piece, int64_t at) {
    store_once(piece.result + at,
               place.failed ? word_of_nan<Value>() : load<Words4>(piece.message + place.read + at));
  });
}

// Messages and own values -> a message, or values.
template <typename Value, typename Group>
CGX_LANE void exact(Group& group, const Reduce& launch, const Work& work, uint32_t first,
                    uint32_t step) {
  constexpr int kCount = kValuesOfWord<Value>;
  const Place place = place_of(launch.regions, launch.fault);
  const bool averages = launch.op == Op::kAvg;
  const bool moves = launch.size == 1 && !averages;  // values of a single rank
  for_words<Value>(group, launch, work, first, step, [&](const Piece& piece, int64_t at) {
    Words4 word = word_of_nan<Value>();
    if (!place.failed) {
      float sums[kCount] = {};
      CGX_ROLLED
      for (int rank = 0; rank < launch.size; ++rank) {
        const std::byte* from = rank == launch.own
                                    ? piece.values + at
                                    : piece.message + place.read + rank * launch.stride + at;
        float values[kCount];
        widen_word<Value>(load<Words4>(from), values);
        CGX_UNROLL
        for (int i = 0; i < kCount; ++i) sums[i] = rank == 0 ? values[i] : add(sums[i], values[i]);
      }
      CGX_UNROLL
      for (float& x : sums) {
        if (averages) x = divide(x, launch.divisor);
        if (!moves) x = with_one_nan(x);
      }
      word = rounded_word<Value>(sums);
    }
    if (piece.result) store_once(piece.result + at, word);
    if (piece.reduced && !place.failed)
      visit_copies(&launch.copies, piece.reduced + place.write + at,
                   [&](std::byte* to) { store(to, word); });
  });
}

}  // namespace cgx::device::cuda::aligned
