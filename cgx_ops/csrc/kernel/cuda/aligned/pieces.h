// Which pieces the kernels of this folder process. They are the common cases, and fast. All
// addresses are aligned. For the host.
//
//   uniform codes  2, 4 or 8 bits, rounded to nearest or stochastically, in whole buckets of 128 to
//                  1,024 values (a power of two)
//   levels         2, 3 or 4 bits, in whole buckets of 512 values
//   exact values
//
// Everything else takes the general kernels (buckets.h), which give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda::aligned {

// A kernel of this folder. There is one for each combination that variant_of() returns.
struct Variant {
  BucketFormat format = BucketFormat::kUniform;
  uint8_t bits = kExactBits;  // of codes, or kExactBits
  bool default_size = false;  // whether buckets have 512 values
  bool own = false;           // Reduce: whether own values are added
  bool residual = false;      // Encode, Reduce
  bool encodes = false;       // Reduce: whether the sum is encoded to a message
  bool operator==(const Variant&) const = default;
};

// The lanes of such a bucket are a warp.
inline constexpr int64_t kDefaultSize = 512;
static_assert(kDefaultSize == kWarpLanes * kLaneValues);

// Alignments in bytes. A lane moves 16 bytes of values, and up to 8 bytes of codes, at a time.
inline constexpr uintptr_t kValueAlignment = 16;
inline uintptr_t message_alignment(const Coding& coding) {
  if (is_exact(coding)) return kValueAlignment;
  return static_cast<uintptr_t>(record_alignment(coding.format));
}

// Whether these addresses, or distances between addresses, are multiples of `to`. Null is one.
template <typename... Addresses>
bool are_aligned(uintptr_t to, Addresses... at) {
  const auto bits = [](auto one) {
    if constexpr (std::is_pointer_v<decltype(one)>)
      return reinterpret_cast<uintptr_t>(one);
    else
      return static_cast<uintptr_t>(one);
  };
  return (bits(at) | ...) % to == 0;
}
inline bool are_copies_aligned(uintptr_t to, const Copies& copies) {
  return std::all_of(copies.distance, copies.distance + copies.count,
                     [to](int64_t distance) { return are_aligned(to, distance); });
}

inline bool has_variants(const Piece& piece) {
  const Coding& coding = piece.coding;
  if (is_exact(coding)) return true;
  const int64_t size = piece.bucket_size;
  if (coding == Coding{.format = BucketFormat::kLevels, .bits = coding.bits})
    return 2 <= coding.bits && coding.bits <= 4 && size == kDefaultSize;
  const bool has_bits = coding.bits == 2 || coding.bits == 4 || coding.bits == 8;
  return is_plain(coding) && has_bits && kLeastBucket <= size && size <= kTileNumel &&
         (size & (size - 1)) == 0;
}

// The part of a variant that does not depend on the type of launch.
inline Variant variant_of(const Piece& piece) {
  if (is_exact(piece.coding)) return {};
  return {.format = piece.coding.format,
          .bits = piece.coding.bits,
          .default_size = piece.bucket_size == kDefaultSize};
}

// The kernel for the whole buckets of a piece; nullopt: a general one.
inline std::optional<Variant> variant_of(const Encode& launch, const Piece& piece) {
  if (!has_variants(piece)) return {};
  const bool exact = is_exact(piece.coding);
  if (exact ? piece.residual != nullptr : launch.rounding == RoundingMode::kShift) return {};
  const uintptr_t to = message_alignment(piece.coding);
  if (!are_aligned(kValueAlignment, piece.values, piece.residual) ||
      !are_aligned(to, piece.message, launch.regions.bytes) ||
      !are_copies_aligned(to, launch.copies))
    return {};
  Variant variant = variant_of(piece);
  variant.residual = piece.residual != nullptr;
  return variant;
}

inline std::optional<Variant> variant_of(const Reduce& launch, const Piece& piece) {
  if (!has_variants(piece)) return {};
  const bool exact = is_exact(piece.coding), own = launch.own >= 0;
  const bool encodes = piece.reduced != nullptr;
  if (launch.op != Op::kSum && (launch.op != Op::kAvg || (encodes && !own))) return {};
  if (is_vote(piece.reduced_coding)) return {};
  if (encodes == (piece.result != nullptr)) return {};  // exactly one
  if (encodes && piece.reduced_coding != piece.coding) return {};
  if (piece.residual && (exact || !own || !encodes)) return {};
  if (!exact && launch.size == 1 && own) return {};  // no message
  if (!exact && encodes && launch.rounding == RoundingMode::kShift) return {};
  const uintptr_t to = message_alignment(piece.coding);
  if (!are_aligned(kValueAlignment, piece.values, piece.residual, piece.result) ||
      !are_aligned(to, piece.message, piece.reduced, launch.stride, launch.regions.bytes) ||
      !are_copies_aligned(to, launch.copies))
    return {};
  Variant variant = variant_of(piece);
  if (exact) return variant;  // one kernel for all
  variant.own = own;
  variant.residual = piece.residual != nullptr;
  variant.encodes = encodes;
  return variant;
}

inline std::optional<Variant> variant_of(const Decode& launch, const Piece& piece) {
  if (!has_variants(piece)) return {};
  const uintptr_t to = message_alignment(piece.coding);
  if (!are_aligned(kValueAlignment, piece.result) ||
      !are_aligned(to, piece.message, launch.regions.bytes))
    return {};
  return variant_of(piece);
}

// The values of a piece that its aligned kernel processes: whole buckets, or whole words of 16
// bytes. 0: none.
inline int64_t numel_of(const Piece& piece, int width) {
  const int64_t grain = is_exact(piece.coding) ? 16 / width : piece.bucket_size;
  const int64_t numel = piece.numel / grain * grain;
  // A second launch, for the rest, must be worthwhile.
  constexpr int64_t kLeast = 1 << 16;
  const bool cuts = numel != piece.numel;
  return numel >= kMostNumel || (cuts && numel < kLeast) ? 0 : numel;
}

inline int64_t tiles_of(const Piece& piece) { return (piece.numel + kTileNumel - 1) / kTileNumel; }

// The number of blocks for so many tiles: enough to keep the GPU busy, and at most four tiles for
// each, because the GPU distributes blocks better than a fixed assignment of tiles.
inline int blocks_for(int64_t tiles, int processors) {
  const int64_t least = at_most(tiles, int64_t{processors} * 32);
  return static_cast<int>(at_most(std::max(least, (tiles + 3) / 4), INT32_MAX));
}

}  // namespace cgx::device::cuda::aligned
