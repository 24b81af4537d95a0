// What is done with one chunk of a shard, piece by piece: the same in every algorithm, whoever
// carries the messages.
//
//   encode_chunk   values -> message
//   decode_chunk   message -> values
//   ChunkReducer   messages of several ranks -> their sum, as values or as one message
//
// What encodes returns the bytes of the message, which are those to send. What decodes throws
// Error(CGX_PEER_FAILED), which names the sender, if a message is none of this chunk.
//
// `input`, `own` and `output` point to where the offsets of the shard's pieces count from.
#pragma once

#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "algorithm/reduce.h"
#include "plan.h"

namespace cgx {

// block: of a reduce_scatter's input; each has noise of its own.
int64_t encode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Way way,
                     const std::byte* input, std::byte* message, int block = 0);

// Of reduced values.
void decode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, const Encoded& message,
                  std::byte* output);

// One rank alone: the identity, but that a residual is added and avg divides. Nothing is encoded,
// so nothing is lost.
void pass_through(const Plan& plan);

class ChunkReducer {
 public:
  // Messages of one chunk, in the order in which they are summed: first those of `intra`, if any,
  // which are kIntra, then the others, which are kScatter. kOwnValues stands for this rank's own
  // values, which are at `own`.
  using Messages = std::span<const Encoded>;

  explicit ChunkReducer(const Plan& plan) : plan_(plan) {}

  void to_values(const Shard& shard, const Chunk& chunk, Messages messages, const std::byte* own,
                 std::byte* output);
  // kGather: the sum; `output`, if not null, gets what the message decodes to. kScatter: a partial
  // sum, for the next rank to add to; avg is not divided.
  int64_t to_message(Way way, const Shard& shard, const Chunk& chunk, Messages messages,
                     const std::byte* own, std::byte* message, std::byte* output = nullptr,
                     Messages intra = {});

 private:
  template <typename Emit>
  void reduce(const Shard& shard, const Chunk& chunk, Messages intra, Messages messages,
              const std::byte* own, bool divide, const Emit& emit);

  // A vote is encoded to be added.
  Contribution own_vote(const Piece& piece, const std::byte* own);

  const Plan& plan_;
  Reducer reducer_;
  std::vector<Contribution> contributions_;
  std::vector<std::byte> vote_, result_;
};

}  // namespace cgx
