// Encoding, decoding and reducing one chunk of a shard, piece by piece. All algorithms share it.
//
//   encode_chunk   values -> message
//   decode_chunk   message -> values
//   ChunkReducer   messages of several ranks -> their sum, as values or as one message
//
// Encoding functions return the number of bytes to send. Decoding functions throw
// Error(CGX_PEER_FAILED), which names the sender, if a message does not belong to the chunk. The
// offsets of pieces are relative to `input`, `own` and `output`.
#pragma once

#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "algorithm/reduce.h"
#include "plan.h"

namespace cgx {

// `block`: the block of the input of a reduce_scatter or all_to_all. Each block has its own noise.
int64_t encode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Stage stage,
                     const std::byte* input, std::byte* message, int block = 0);

void decode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Stage stage,
                  const Encoded& message, std::byte* output);

// Copies this rank's block of an all_to_all to its place in the output.
void copy_own_block(const Plan& plan);

// The collective of one rank: copies input to output, adds residuals and divides for avg. Nothing
// is encoded, so new residuals are 0.
void pass_through(const Plan& plan);

class ChunkReducer {
 public:
  // The messages of one chunk, in the order of summation: first `intra` (stage kIntra), then the
  // others (stage kScatter). kOwnValues stands for this rank's uncompressed values at `own`.
  using Messages = std::span<const Encoded>;

  explicit ChunkReducer(const Plan& plan) : plan_(plan) {}

  void to_values(const Shard& shard, const Chunk& chunk, Messages messages, const std::byte* own,
                 std::byte* output, Messages intra = {});
  // kGather: encodes the sum; `output`, if not null, gets the decoded message. kScatter: encodes a
  // partial sum for the next rank; does not divide for avg.
  int64_t to_message(Stage stage, const Shard& shard, const Chunk& chunk, Messages messages,
                     const std::byte* own, std::byte* message, std::byte* output = nullptr,
                     Messages intra = {}, int block = 0);

 private:
  template <typename Emit>
  void reduce(const Shard& shard, const Chunk& chunk, Messages intra, Messages messages,
              const std::byte* own, bool divide, const Emit& emit);

  // Votes are encoded before they are added.
  Contribution own_vote(const Piece& piece, const std::byte* own);

  const Plan& plan_;
  Reducer reducer_;
  std::vector<Contribution> contributions_;
  std::vector<std::byte> vote_, result_;
};

}  // namespace cgx
