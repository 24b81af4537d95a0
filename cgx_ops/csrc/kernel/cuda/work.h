// How the work of a launch is dealt out: pieces are cut into buckets, buckets go to groups, by two
// kinds of kernels. Index arithmetic only, for the kernels and for who launches them.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernel/cuda/launches.h"

namespace cgx::device::cuda {

inline constexpr int kHeaderRoom = 8;  // bytes, for a record's header

inline constexpr int kUnit = 8;       // values that a lane takes at a time: `bits` bytes of field
inline constexpr int kLaneUnits = 2;  // units of a tile that a lane holds in registers

// Values that a group holds in registers. Buckets up to this long are read once, longer ones twice.
constexpr int tile_numel(int lanes) { return lanes * kLaneUnits * kUnit; }

inline constexpr int kWarpLanes = 32, kBlockLanes = 512;  // groups of one kind, and of the other
// The longest bucket for a warp: two tiles, read again while the cache still holds them.
inline constexpr int64_t kMostOfWarp = 1024;

CGX_HD int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

CGX_HD bool is_exact(const Coding& coding) { return coding.bits == kExactBits; }
CGX_HD bool is_half(const Coding& coding) { return coding.bits == kHalfBits; }
CGX_HD bool is_vote(const Coding& coding) {
  return !is_exact(coding) && coding.format == BucketFormat::kSign;
}
// Whether kernels that know uniform buckets and exact values alone serve it.
CGX_HD bool is_plain(const Coding& coding) {
  return is_exact(coding) ||
         (!is_half(coding) && coding.format == BucketFormat::kUniform && coding.rotation_log == 0);
}

CGX_HD int64_t header_bytes(const Coding& coding) { return header_bytes(coding.format); }
CGX_HD int64_t field_bytes(int64_t numel, const Coding& coding) {
  return field_bytes(coding.format, numel, coding.bits);
}

// Bytes of a bucket of `numel` values in a message: a record, or the values themselves.
CGX_HD int64_t bucket_bytes(int64_t numel, const Coding& coding, int width) {
  if (is_exact(coding)) return numel * width;
  if (is_half(coding)) return numel * 2;
  return header_bytes(coding) + field_bytes(numel, coding);
}

// Where a bucket begins: all before it are whole. (They may be longer than any message.)
CGX_HD int64_t bucket_at(int64_t number, int64_t bucket_size, const Coding& coding, int width) {
  return number == 0 ? 0 : number * bucket_bytes(bucket_size, coding, width);
}

CGX_HD int64_t buckets_of(const Piece& piece) {
  return piece.numel <= 0 ? 0 : (piece.numel - 1) / piece.bucket_size + 1;
}

// Values that need no grid are cut as suits a warp.
inline void cut_exact_pieces(Pieces* pieces, bool reduces) {
  for (int i = 0; i < pieces->count; ++i) {
    Piece& piece = pieces->at[i];
    const auto has_grid = [](const Coding& coding) {
      return !is_exact(coding) && !is_half(coding);
    };
    const bool reduced = reduces && (piece.reduced || is_vote(piece.reduced_coding));
    if (has_grid(piece.coding) || (reduced && has_grid(piece.reduced_coding))) continue;
    piece.bucket_size = kMostOfWarp;
  }
}

// Who takes a bucket: a warp, or a block if it is long.
enum class Takers { kWarps, kBlocks };
constexpr int lanes_of(Takers takers) {
  return takers == Takers::kWarps ? kWarpLanes : kBlockLanes;
}

inline Takers takers_of(const Piece& piece) {
  // What is rotated must be in registers as a whole.
  const bool rotated = piece.coding.rotation_log != 0 || piece.reduced_coding.rotation_log != 0;
  const int64_t most = rotated ? tile_numel(kWarpLanes) : kMostOfWarp;
  return at_most(piece.bucket_size, piece.numel) <= most ? Takers::kWarps : Takers::kBlocks;
}
static_assert(tile_numel(kBlockLanes) == kMostRotatedOnDevices);

// Whose kernels: those of uniform buckets and exact values, or those of any.
enum class Formats { kPlain, kAny };

inline Formats formats_of(const Piece& piece) {
  return is_plain(piece.coding) && is_plain(piece.reduced_coding) ? Formats::kPlain : Formats::kAny;
}

// The pieces of a launch that are for one kind of group and of kernel.
struct Work {
  int64_t buckets = 0;
  int32_t pieces = 0;
  int32_t piece[kMostPieces] = {};   // its place in the launch
  int64_t before[kMostPieces] = {};  // buckets of the pieces before it
};

inline Work work_for(Formats formats, Takers takers, const Pieces& pieces) {
  Work work;
  for (int i = 0; i < pieces.count; ++i) {
    const int64_t buckets = buckets_of(pieces.at[i]);
    if (buckets == 0 || formats_of(pieces.at[i]) != formats || takers_of(pieces.at[i]) != takers)
      continue;
    work.piece[work.pieces] = i;
    work.before[work.pieces++] = work.buckets;
    work.buckets += buckets;
  }
  return work;
}

// Groups that share `buckets`: no more than keep the GPU busy, they take several in turn.
inline int groups_for(Takers takers, int64_t buckets, int processors) {
  return static_cast<int>(
      at_most(buckets, int64_t{processors} * (takers == Takers::kWarps ? 64 : 4)));
}

struct Bucket {
  int32_t piece;   // in the launch
  int64_t number;  // in the piece
};

// `from` is where the last search ended: a group's buckets come in order.
CGX_HD Bucket find_bucket(const Work& work, int64_t bucket, int32_t* from) {
  int32_t at = *from;
  while (at + 1 < work.pieces && work.before[at + 1] <= bucket) ++at;
  *from = at;
  return {work.piece[at], bucket - work.before[at]};
}

}  // namespace cgx::device::cuda
