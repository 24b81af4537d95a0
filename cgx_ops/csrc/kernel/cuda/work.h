// How the work of a launch is distributed: pieces are cut into buckets, and buckets are assigned to
// groups, for three kinds of kernels. Index arithmetic only, for kernels and for the code that
// launches them.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernel/cuda/launches.h"

namespace cgx::device::cuda {

inline constexpr int kHeaderRoom = 8;  // bytes, for a record's header

inline constexpr int kUnit = 8;       // values that a lane processes at a time: `bits` bytes of
                                      // field
inline constexpr int kLaneUnits = 2;  // units of a tile that a lane holds in registers

// Values that a group holds in registers. Longer buckets are read once per pass.
constexpr int tile_numel(int lanes) { return lanes * kLaneUnits * kUnit; }

inline constexpr int kWarpLanes = 32, kPairLanes = 64, kBlockLanes = 512;  // the sizes of groups
// The longest bucket for a warp: two tiles, which are read again while they are in the cache.
inline constexpr int64_t kMostOfWarp = 1024;

CGX_HD int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Null stays null.
template <typename Byte>
CGX_HD Byte* moved(Byte* from, int64_t bytes) {
  return from ? from + bytes : nullptr;
}

CGX_HD bool is_sparse(const Coding& coding) { return coding.density != 0; }
CGX_HD bool is_exact(const Coding& coding) {
  return coding.bits == kExactBits && !is_sparse(coding);
}
CGX_HD bool is_half(const Coding& coding) { return coding.bits == kHalfBits && !is_sparse(coding); }
CGX_HD bool is_vote(const Coding& coding) {
  return !is_exact(coding) && coding.format == BucketFormat::kSign;
}
// Whether the kernels for uniform buckets and uncompressed values support it.
CGX_HD bool is_plain(const Coding& coding) {
  return is_exact(coding) || (!is_half(coding) && !is_sparse(coding) &&
                              coding.format == BucketFormat::kUniform && coding.rotation_log == 0);
}

CGX_HD int64_t header_bytes(const Coding& coding) { return header_bytes(coding.format); }
CGX_HD int64_t field_bytes(int64_t numel, const Coding& coding) {
  return field_bytes(coding.format, numel, coding.bits);
}

// A sparse bucket: the indices in the Elias-Fano code (compressor/indices.cc) unless they are
// random, then the values.
struct SparseRecord {
  int numel, count;  // values of the bucket and of the record
  int low_bits;      // per index, in low_bytes; the other bits are in high_bytes
  int low_bytes, high_bytes;
  int width;  // bytes of a value

  CGX_HD SparseRecord(int64_t bucket_numel, const Coding& coding, int dtype_width)
      : numel(static_cast<int>(bucket_numel)),
        count(static_cast<int>(chosen_of(bucket_numel, coding.density))),
        low_bits(0),
        low_bytes(0),
        high_bytes(0),
        width(coding.bits == kHalfBits ? 2 : dtype_width) {
    if (coding.drawn) return;
    while (numel / count >> (low_bits + 1) > 0) ++low_bits;
    low_bytes = (count * low_bits + 7) / 8;
    high_bytes = (((numel - 1) >> low_bits) + count + 7) / 8;
  }
  CGX_HD int values_at() const { return low_bytes + high_bytes; }
  CGX_HD int bytes() const { return values_at() + count * width; }
};

// The parameters of a bucket's random indices.
struct Draw {
  uint64_t seed;
  uint64_t first_index;  // of the bucket's first value in its segment
};

// Bytes of a bucket of `numel` values in a message: a record, or the values themselves.
CGX_HD int64_t bucket_bytes(int64_t numel, const Coding& coding, int width) {
  if (is_sparse(coding)) return SparseRecord(numel, coding, width).bytes();
  if (is_exact(coding)) return numel * width;
  if (is_half(coding)) return numel * 2;
  return header_bytes(coding) + field_bytes(numel, coding);
}

// The offset of a bucket; all earlier buckets are full. (A bucket may be longer than any message.)
CGX_HD int64_t bucket_at(int64_t number, int64_t bucket_size, const Coding& coding, int width) {
  return number == 0 ? 0 : number * bucket_bytes(bucket_size, coding, width);
}

CGX_HD int64_t buckets_of(const Piece& piece) {
  return piece.numel <= 0 ? 0 : (piece.numel - 1) / piece.bucket_size + 1;
}

// Cuts values without a grid for warps.
inline void cut_if_exact(Piece* piece, bool reduces) {
  const auto has_grid = [](const Coding& coding) { return !is_exact(coding) && !is_half(coding); };
  const bool reduced = reduces && (piece->reduced || is_vote(piece->reduced_coding));
  if (has_grid(piece->coding) || (reduced && has_grid(piece->reduced_coding))) return;
  piece->bucket_size = kMostOfWarp;
}

// The kind of group for a bucket: a warp, or a block if it is long.
enum class Takers { kWarps, kBlocks };
constexpr int lanes_of(Takers takers) {
  return takers == Takers::kWarps ? kWarpLanes : kBlockLanes;
}

inline Takers takers_of(const Piece& piece) {
  const auto is_whole = [](const Coding& coding) {
    return coding.rotation_log != 0 || is_sparse(coding);
  };
  const bool whole = is_whole(piece.coding) || is_whole(piece.reduced_coding);
  const int64_t most = whole ? tile_numel(kWarpLanes) : kMostOfWarp;
  return at_most(piece.bucket_size, piece.numel) <= most ? Takers::kWarps : Takers::kBlocks;
}
static_assert(tile_numel(kBlockLanes) == kMostWholeOnDevices);

// The general kernels: for uniform buckets and uncompressed values, for any format without blocks,
// for sparse buckets, for block formats.
enum class Formats { kPlain, kAny, kSparse, kBlocks };

inline Formats formats_of(const Piece& piece) {
  if (is_sparse(piece.coding) || is_sparse(piece.reduced_coding)) return Formats::kSparse;
  if (has_blocks(piece.coding.format) || has_blocks(piece.reduced_coding.format))
    return Formats::kBlocks;
  return is_plain(piece.coding) && is_plain(piece.reduced_coding) ? Formats::kPlain : Formats::kAny;
}

// The items of a launch, which groups process in turn: buckets, or tiles (aligned/tile.h).
struct Work {
  int64_t items = 0;
  int64_t before[kMostPieces] = {};  // number of items in earlier pieces
};

// Counts the items of each piece.
template <typename Count>
Work work_of(const Pieces& pieces, const Count& count) {
  Work work;
  for (int i = 0; i < pieces.count; ++i) {
    work.before[i] = work.items;
    work.items += count(pieces.at[i]);
  }
  return work;
}

// The number of groups for `buckets`: as many as keep the GPU busy; each processes several in turn.
inline int groups_for(Takers takers, int64_t buckets, int processors) {
  return static_cast<int>(
      at_most(buckets, int64_t{processors} * (takers == Takers::kWarps ? 64 : 4)));
}

struct Item {
  int32_t piece;   // index in the launch
  int64_t number;  // index in the piece
};

// `from` is the piece of the previous search: a group's items come in order.
CGX_HD Item find_item(const Pieces& pieces, const Work& work, int64_t item, int32_t* from) {
  int32_t at = *from;
  while (at + 1 < pieces.count && work.before[at + 1] <= item) ++at;
  *from = at;
  return {at, item - work.before[at]};
}

}  // namespace cgx::device::cuda
