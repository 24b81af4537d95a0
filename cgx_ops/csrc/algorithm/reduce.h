// Decode, sum in rank order, hand over: a block of values at a time, small enough to stay in the
// first-level cache, so that values are touched in memory once. What a codec cannot cut is one
// block.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "compressor/blocks.h"

namespace cgx {

// A chunk's bytes as they came from a rank.
struct Encoded {
  int source;
  std::span<const std::byte> bytes;
};
// In the place of a message: this rank's own values, as they are.
inline constexpr Encoded kOwnValues{-1, {}};

// One rank's values of a piece, or one host's sum of them: encoded bytes, or (this rank's own) raw
// values, to which their residual is added.
struct Contribution {
  Encoded message;               // of the piece alone
  const Codec* codec = nullptr;  // null: values of the plan's dtype
};

// Decodes with the error that names the sender: Error(CGX_PEER_FAILED).
void decode(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
            Dtype dtype, void* values);
void decode_add(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
                const float* base, float* sum);

// Values of a piece that are worked on at a time: about so many, in whole buckets.
int64_t block_numel(const Piece& piece, int64_t about = 4096);

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
      float* values = reduce_block(plan, piece, contributions, divide, first, numel);
      emit(values, first, numel);
    }
  }

 private:
  float* reduce_block(const Plan& plan, const Piece& piece,
                      std::span<const Contribution> contributions, bool divide, int64_t first,
                      int64_t numel);
  std::vector<float> sum_, other_, own_;
};

}  // namespace cgx
