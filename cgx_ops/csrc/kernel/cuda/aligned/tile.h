// A tile: 1,024 values of a piece, 16 for each of 64 lanes. It holds one bucket of 1,024 values, or
// several shorter ones, each with its share of the lanes. The values and codes of a lane are in
// chunks, and neighbors have neighboring chunks, so that a warp accesses consecutive addresses:
//
//   value v of lane l in a bucket with L lanes: ((v / kChunk) * L + l) * kChunk + v % kChunk
#pragma once

#include <cstdint>

#include "base/noise_position.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda::aligned {

inline constexpr int kLaneValues = 16;  // what a lane processes in an iteration
inline constexpr int kTileNumel = kPairLanes * kLaneValues;
inline constexpr int64_t kLeastBucket = kNoiseBlock;
inline constexpr int64_t kMostNumel = int64_t{1}
                                      << 36;  // pieces are shorter: their lanes have 32 bits

// Values in 16 bytes.
template <typename Value>
inline constexpr int kValuesOfWord = 16 / static_cast<int>(sizeof(typename Value::Bits));

// The alignment of a format's records in bytes: a full one of levels has an odd number of 2-byte
// words.
CGX_HD constexpr int record_alignment(BucketFormat format) {
  return format == BucketFormat::kLevels ? 2 : 8;
}

// A chunk of values that are only read, and of values that are written: there a store of 16 bytes
// must follow that of the neighbor.
inline constexpr int kReadChunk = 8;
template <typename Value>
inline constexpr int kWriteChunk = kValuesOfWord<Value>;
// The chunks of a kernel that reads or writes values.
template <typename Format, typename Value, bool kReads, bool kWrites>
inline constexpr int kChunkOf = kWrites || Format::kKeepsWriteChunks ? kWriteChunk<Value>
                                : kReads                             ? kReadChunk
                                                                     : kLaneValues;

// A lane's values.
struct Values {
  float at[kLaneValues];
};

// The tiles of a piece. kLanes: lanes of a bucket, 8, 16, 32 or 64, if that is known at compile
// time; otherwise 0.
template <int kLanes>
class Tiling {
 public:
  CGX_LANE explicit Tiling(const Piece& piece)
      : log_(log_of(piece.bucket_size / kLaneValues)),
        lanes_(static_cast<uint32_t>(static_cast<uint64_t>(piece.numel) / kLaneValues)) {}

  CGX_LANE int lanes() const { return 1 << log(); }
  // The number of lanes with values, from the tile on.
  CGX_LANE uint32_t active(uint32_t tile) const { return lanes_ - tile * kPairLanes; }

  CGX_LANE int bucket(int lane) const { return lane >> log(); }
  CGX_LANE int in_bucket(int lane) const { return lane & (lanes() - 1); }
  // The offset of a lane's first chunk in a tile, in values. The next ones follow at a distance of
  // lanes() chunks.
  CGX_LANE uint32_t first_value(int lane, int chunk) const {
    return static_cast<uint32_t>((bucket(lane) * kLaneValues << log()) + in_bucket(lane) * chunk);
  }
  // In bytes.
  template <typename Format>
  CGX_LANE uint32_t record_bytes() const {
    return static_cast<uint32_t>(Format::kHeaderBytes + (kLaneValues / 8 * Format::kBits << log()));
  }
  template <typename Format>
  CGX_LANE uint32_t tile_record_bytes() const {
    return static_cast<uint32_t>((Format::kHeaderBytes * kPairLanes >> log()) +
                                 kLaneValues / 8 * Format::kBits * kPairLanes);
  }

 private:
  CGX_LANE static constexpr int log_of(int64_t lanes) {
    return 3 + (lanes > 8) + (lanes > 16) + (lanes > 32);
  }
  CGX_LANE int log() const { return kLanes ? log_of(kLanes) : log_; }

  int log_;         // of the lanes of a bucket
  uint32_t lanes_;  // of all tiles
};

// Runs a group's tiles: every `step`-th one from `first` on. prepare(piece), for all lanes, returns
// run(tile), which gets the tile's number in the piece.
template <typename Group, typename Launch, typename Prepare>
CGX_LANE void for_tiles(Group& group, const Launch& launch, const Work& work, uint32_t first,
                        uint32_t step, const Prepare& prepare) {
  uint32_t at = first;
  CGX_ROLLED
  for (int i = 0; i < launch.pieces.count; ++i) {
    const auto begin = static_cast<uint32_t>(work.before[i]);
    const auto end =
        static_cast<uint32_t>(i + 1 < launch.pieces.count ? work.before[i + 1] : work.items);
    if (at >= end) continue;
    group.select(kPairLanes);
    auto run = prepare(launch.pieces.at[i]);
    CGX_ROLLED
    for (; at < end; at += step) run(at - begin);
  }
}

}  // namespace cgx::device::cuda::aligned
