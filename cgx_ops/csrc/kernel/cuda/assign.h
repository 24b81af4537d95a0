// Assigns the pieces of a launch to kernels, and cuts pieces of which one kernel can process only a
// part. For the host.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernel/cuda/aligned/pieces.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// A kernel for one type of launch and one dtype.
struct Kernel {
  std::optional<aligned::Variant> aligned;  // of aligned/; nullopt: a general kernel:
  Formats formats = Formats::kPlain;
  Takers takers = Takers::kWarps;
  bool operator==(const Kernel&) const = default;
};

inline Kernel general_kernel(const Piece& piece) {
  return {.aligned = {}, .formats = formats_of(piece), .takers = takers_of(piece)};
}

// The part of a piece from element `first` on, which begins a bucket.
inline Piece after(const Piece& piece, int64_t first, int width) {
  const auto offset = [&](const Coding& coding) {
    if (is_exact(coding)) return first * width;
    return bucket_at(first / piece.bucket_size, piece.bucket_size, coding, width);
  };
  Piece rest = piece;
  rest.values = moved(piece.values, first * width);
  rest.result = moved(piece.result, first * width);
  rest.residual = moved(piece.residual, first * width);
  rest.message = moved(piece.message, offset(piece.coding));
  rest.reduced = moved(piece.reduced, offset(piece.reduced_coding));
  rest.numel -= first;
  rest.first_index += first;
  return rest;
}

// Calls run(launch, kernel) for each kernel that has work, with its pieces.
template <typename Launch, typename Run>
void for_kernels(const Launch& launch, const Run& run) {
  struct Assigned {
    Kernel kernel;
    Piece piece;
  };
  std::vector<Assigned> assigned;
  assigned.reserve(2 * static_cast<size_t>(launch.pieces.count));
  const int width = static_cast<int>(size_of(launch.dtype));
  for (int i = 0; i < launch.pieces.count; ++i) {
    Piece piece = launch.pieces.at[i];
    cut_if_exact(&piece, std::is_same_v<Launch, Reduce>);
    const auto variant = aligned::variant_of(launch, piece);
    const int64_t first = variant ? aligned::numel_of(piece, width) : 0;
    if (first > 0) {
      assigned.push_back({{.aligned = variant}, piece});
      assigned.back().piece.numel = first;
      piece = after(piece, first, width);
    }
    if (piece.numel > 0) assigned.push_back({general_kernel(piece), piece});
  }
  Launch part = launch;
  for (const Assigned& first : assigned) {
    part.pieces.count = 0;
    for (Assigned& one : assigned) {
      if (!(one.kernel == first.kernel) || one.piece.numel == 0) continue;
      part.pieces.at[part.pieces.count++] = one.piece;
      one.piece.numel = 0;  // once
    }
    if (part.pieces.count > 0) run(part, first.kernel);
  }
}

}  // namespace cgx::device::cuda
