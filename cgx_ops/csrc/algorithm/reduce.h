// Decodes messages and sums them in rank order. Works on blocks that fit the L1 cache, so that
// values pass through memory once. If a codec has no fixed length, the whole piece is one block.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "compressor/blocks.h"

namespace cgx {

// The bytes of a message, or of a part of it, from a rank.
struct Encoded {
  int source;
  std::span<const std::byte> bytes;
};
// Stands for this rank's own uncompressed values, instead of a message.
inline constexpr Encoded kOwnValues{-1, {}};

// A rank's values of a piece, or a host's sum of them: encoded bytes, or this rank's raw values, to
// which their residual is added.
struct Contribution {
  Encoded message;               // this piece only
  const Codec* codec = nullptr;  // null: raw values of the plan's dtype
};

// Decode a message. Errors become Error(CGX_PEER_FAILED), which names the sender.
void decode(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
            Dtype dtype, void* values);
void decode_add(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
                const float* base, float* sum);

// Elements per block: about `about`, in whole buckets.
int64_t block_numel(const Piece& piece, int64_t about = 4096);

class Reducer {
 public:
  // Sums the contributions in the given order, then divides for avg if `divide`. Calls emit(values,
  // first, numel) with fp32 results for each block; `first` is relative to the piece.
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
