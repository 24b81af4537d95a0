// The steps of a collective as kernel launches: encode, reduce and decode. The caller exchanges the
// messages in between. One call handles one chunk of every shard. The steps follow sra or one_shot
// on CPUs (algorithm/), with bit-identical messages and results.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "device/queue.h"
#include "plan.h"

namespace cgx::device {

// A round: the index of its chunk, and how its launches run (launches.h).
struct Round {
  int64_t number;
  Queue& queue;
  Regions regions = {};
  const uint32_t* fault = nullptr;
};

// The messages of all ranks: rank 0's is at `from`, the others follow at distances of `stride`.
struct Received {
  const std::byte* from;
  int64_t stride;
};

class Steps {
 public:
  // The arguments must outlive the steps. The algorithm must be sra or one_shot. Throws
  // Error(CGX_UNSUPPORTED) if GPUs do not support a codec.
  Steps(const Plan& plan, const Layout& layout);

  // Encodes values to be summed, for each owner or (one_shot) for all; or my block, for all; or the
  // block for each other rank.
  // to[owner] is the address of a message; a message for all is written to each distinct address.
  void encode(const Round& round, std::span<std::byte* const> to) const;
  // Reduces my shard or (one_shot) everything, in rank order. My own values are raw unless I sent
  // them, too: then my message is not read. Writes the sum as a message to `to`, or as values if
  // `to` is empty.
  void reduce(const Round& round, const Received& messages, std::span<std::byte* const> to) const;
  // Decodes all shards, including mine, so that all ranks have the same bits. In an all_to_all:
  // the block from each other rank.
  void decode(const Round& round, const Received& messages) const;

  // The chunk of a shard in a round; null after the end of the shard.
  static const Chunk* chunk(const Shard& shard, int64_t round);

 private:
  bool one_shot() const { return plan_.algorithm == CGX_ONE_SHOT; }
  bool scatters() const { return plan_.verb->scatters; }
  bool gathers() const { return plan_.verb->gathers; }

  const Plan& plan_;
  const Layout& layout_;
  RoundingMode rounding_ = RoundingMode::kNearest;  // of all segments
};

// Copies this rank's block to itself, in an all_to_all.
void copy_own_block(const Plan& plan, Queue& queue);

// The collective of one rank: copies, adds residuals and divides for avg. Nothing is encoded, so
// new residuals are 0.
void pass_through(const Plan& plan, Queue& queue);

}  // namespace cgx::device
