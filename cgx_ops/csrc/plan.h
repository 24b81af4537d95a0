// A plan: the validated and resolved arguments of a collective. All ranks make the same plan from
// the same arguments, so layouts, message counts and the algorithm need no negotiation.
//
//   1. Validate all arguments.
//   2. Resolve: segments too small to compress are uncompressed. The algorithms' table resolves
//      `auto`.
//   3. Agreement: the values that ranks compare before they send data, and the text of a mismatch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/topology.h"
#include "base/types.h"
#include "cgx/cgx.h"
#include "cgx/verb.h"
#include "compressor/codec.h"
#include "compressor/stage.h"
#include "config.h"

namespace cgx {

class Packing;

struct Segment {
  int64_t input_at = 0;  // bytes, from the plan's input
  int64_t output_at = 0;
  std::byte* residual = nullptr;  // error feedback, in the plan's dtype; may be null
  // From a rank's block to the next, in memory with a block per rank. Residuals have the blocks of
  // the input.
  int64_t block_bytes = 0;
  int64_t numel = 0;
  int32_t example = 0;  // of a vmap; `auto` measures only the first
  RoundingMode rounding = RoundingMode::kNearest;
  uint64_t seed = 0;
  // The address of a seed in GPU memory, or null. It is the segment's seed or, if seed_number > 0,
  // the call's, from which the segment's is derived.
  const uint64_t* seed_at = nullptr;
  int64_t seed_number = 0;
  // Uncompressed values have the tensor's dtype, except for partial sums (resolve_algorithm).
  PerStage<CodecSettings> codecs;
};

inline int64_t numel_of(const std::vector<Segment>& segments) {
  int64_t sum = 0;
  for (const Segment& segment : segments) sum += segment.numel;
  return sum;
}

// The limit on a collective's unread messages.
inline constexpr int kMostUnreleased = 64;

struct Plan {
  const Verb* verb = &kVerbs[CGX_ALLREDUCE];
  cgx_algorithm_t algorithm = CGX_SRA;
  Dtype dtype = Dtype::kFloat32;
  Op op = Op::kSum;
  int rank = 0;
  int size = 1;
  int noise_rank = 0;                        // for the noise: the call's, or `rank`
  std::vector<int> members;                  // the ranks that take part, in ascending order
  std::shared_ptr<const Topology> topology;  // null: unknown
  int64_t divisor = 1;                       // of avg
  std::vector<Segment> segments;             // of each block
  // all_to_all: the segments of the block for, or from, each rank. With splits, a block has the
  // segment of `segments`, but in the block's size.
  std::vector<std::vector<Segment>> sends, receives;
  bool has_splits = false;
  std::shared_ptr<const Packing> packing;  // of small segments (algorithm/packing.h), or null
  uint64_t packing_hash = 0;               // of the group of each segment; 0: nothing is packed
  int64_t block_numel = 0;                 // elements of a block
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  int64_t chunk_bytes = kChunkBytes;  // the limit on a message's encoded values
  int64_t unread_bytes = INT64_MAX;   // the limit on unread messages, equal on all ranks

  Rounding rounding(const Segment& segment, uint64_t seed, Stage stage) const {
    return {segment.rounding, seed, static_cast<uint32_t>(noise_rank),
            static_cast<uint32_t>(stage)};
  }
  // How many messages of this size peers may leave unread before sending stops.
  int most_unreleased(int64_t message_bytes) const {
    const int64_t fit = unread_bytes / std::max<int64_t>(1, message_bytes);
    return static_cast<int>(std::clamp<int64_t>(fit, 1, kMostUnreleased));
  }
  // Whether a single rank changes its values: it divides by a divisor other than 1.
  bool divides_alone() const { return op == Op::kAvg && divisor != 1 && verb->reduces; }
  int64_t numel() const { return numel_of(segments); }
  // The segments of each rank's block, if the blocks have equal sizes.
  std::vector<std::vector<Segment>> equal_blocks() const {
    std::vector<std::vector<Segment>> blocks(size, segments);
    for (int block = 0; block < size; ++block) {
      for (Segment& segment : blocks[block]) {
        segment.input_at += block * segment.block_bytes;
        segment.output_at += block * segment.block_bytes;
      }
    }
    return blocks;
  }
  // As in cgx_comm_info_t.
  int64_t bytes_in() const {
    if (!verb->exchanges()) return bytes(numel()) * (verb->blocks_in ? size : 1);
    int64_t sum = 0;
    for (const auto& block : sends) sum += bytes(numel_of(block));
    return sum;
  }
  int64_t bytes_plain() const {
    if (verb->exchanges()) return bytes_in() - bytes(numel_of(sends[rank]));
    const int64_t stages = int64_t{verb->scatters} + int64_t{verb->gathers};
    return stages * bytes(numel()) * (size - 1) / (verb->shards() ? size : 1);
  }
  // Converts elements to bytes.
  int64_t bytes(int64_t elements) const { return elements * size_of(dtype); }
};

// The values that must be equal on all ranks. Compared as bytes, so it has no padding.
struct Agreement {
  int32_t verb = 0, dtype = 0, op = 0, launch = 0;
  int64_t num_segments = 0, numel = 0, block_numel = 0, divisor = 0;
  AgreedConfig config = {};   // of the first segment, with the resolved algorithm
  uint64_t shared_seeds = 0;  // hash of the seeds of random indices (randk)
  uint64_t segments_hash = 0;
};

// The size of a collective's header, without its name, values and refusal text.
inline constexpr int64_t kHeaderBytes = 32 + sizeof(Agreement);

// Which buffers of a call are used. Others may be null.
struct BuffersUsed {
  bool input = true;
  bool output = true;
};

// Returns the ranks that take part in a call, in ascending order. Throws
// Error(CGX_INVALID_ARGUMENT) if its peer is not another rank.
std::vector<int> members_of(const cgx_collective_t& call, int rank, int size);
// Throws Error(CGX_INVALID_ARGUMENT or CGX_UNSUPPORTED).
Plan make_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used = {});
Agreement make_agreement(const cgx_collective_t& call, const Plan& plan);
// The bytes from one address to another, as in Segment.
inline int64_t distance(const void* from, const void* to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}
// Returns a hash of the seeds of random indices, or nullopt without randk.
std::optional<uint64_t> shared_seeds(const Plan& plan);
// Whether two agreements match. Launches of different programs may differ.
bool agreements_match(const Agreement& left, const Agreement& right);
// Describes the difference: "numel 1000 against 999, bits 4 against 8".
std::string difference(const Agreement& left, const Agreement& right);

}  // namespace cgx
