// Decode, sum in rank order, hand over: a block of values at a time, small enough to stay in the
// first-level cache, so that values are touched in memory once.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "algorithm/layout.h"

namespace cgx {

// Where one rank's values of a piece, or one host's sum of them, are: encoded bytes, or (the
// owner's own) raw values.
struct Contribution {
  const std::byte* data = nullptr;
  const Compressor* compressor = nullptr;  // null: values of the plan's dtype
};

class Reducer {
 public:
  // Combines the contributions in the order given, then divides for avg if `divide`. emit(values,
  // first, numel) gets fp32 results, block after block; `first` counts from the piece's beginning.
  template <typename Emit>
  void reduce(const Plan& plan, const Piece& piece, std::span<const Contribution> contributions,
              bool divide, Emit&& emit) {
    const int64_t block = block_numel(piece);
    for (int64_t first = 0; first < piece.numel; first += block) {
      const int64_t numel = std::min(block, piece.numel - first);
      float* values = reduce_block(plan, contributions, divide, first, numel);
      emit(values, first, numel);
    }
  }

 private:
  static int64_t block_numel(const Piece& piece);
  float* reduce_block(const Plan& plan, std::span<const Contribution> contributions, bool divide,
                      int64_t first, int64_t numel);
  std::vector<float> sum_, other_;
};

}  // namespace cgx
