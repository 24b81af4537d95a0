// A plan: one call of cgx.h, checked and resolved. Every rank makes the same plan from the same
// arguments, so layouts, message counts and the algorithm need no negotiation.
//
//   1. check every argument
//   2. resolve: segments too small to compress travel exact (what `auto` means is the algorithms'
//      own table)
//   3. agreement: what ranks compare before any value moves, and how a difference is told
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
#include "compressor/ways.h"
#include "config.h"

namespace cgx {

struct Segment {
  int64_t input_at = 0;  // bytes, from the plan's input
  int64_t output_at = 0;
  std::byte* residual = nullptr;  // what compression lost of the values, of the plan's dtype
  int64_t numel = 0;
  bool repeats = false;  // `auto` does not count it
  RoundingMode rounding = RoundingMode::kNearest;
  uint64_t seed = 0;
  // If not null, a seed is here, on the device: the segment's, or the call's, from which that of
  // number `seed_number` follows.
  const uint64_t* seed_at = nullptr;
  int64_t seed_number = 0;
  // Exact values are of the tensor's dtype, but for partial sums (resolve_algorithm).
  ByWay<CodecSettings> codecs;
};

// Messages of a collective that peers may leave unread.
inline constexpr int kMostUnreleased = 64;

struct Plan {
  const Verb* verb = &kVerbs[CGX_ALLREDUCE];
  cgx_algorithm_t algorithm = CGX_SRA;
  Dtype dtype = Dtype::kFloat32;
  Op op = Op::kSum;
  int rank = 0;
  int size = 1;
  int noise_rank = 0;  // in the noise's counter: the call's if it says one, else `rank`
  std::shared_ptr<const Topology> topology;  // null: not known
  int64_t divisor = 1;                       // of avg
  std::vector<Segment> segments;
  int64_t block_numel = 0;  // elements of a block
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  int64_t chunk_bytes = kChunkBytes;  // of encoded values, at most, in a message
  int64_t unread_bytes = INT64_MAX;   // of messages, at most; equal on all ranks

  Rounding rounding(const Segment& segment, uint64_t seed, Way way) const {
    return {segment.rounding, seed, static_cast<uint32_t>(noise_rank), static_cast<uint32_t>(way)};
  }
  // Of messages of so many bytes: how many peers may leave unread before no more are sent.
  int most_unreleased(int64_t message_bytes) const {
    const int64_t fit = unread_bytes / std::max<int64_t>(1, message_bytes);
    return static_cast<int>(std::clamp<int64_t>(fit, 1, kMostUnreleased));
  }
  // Whether one rank alone changes its values: the sum is its own, but divided.
  bool divides_alone() const { return op == Op::kAvg && divisor != 1 && verb->reduces; }
  int64_t numel() const {
    int64_t sum = 0;
    for (const Segment& segment : segments) sum += segment.numel;
    return sum;
  }
  // As in cgx_comm_info_t.
  int64_t bytes_in() const { return bytes(numel()) * (verb->blocks_in ? size : 1); }
  int64_t bytes_plain() const {
    const int64_t stages = int64_t{verb->scatters} + int64_t{verb->gathers};
    return (size - 1) * (stages * bytes(numel()) / (verb->shards() ? size : 1));
  }
  // Bytes from the start of a buffer to an element.
  int64_t bytes(int64_t elements) const { return elements * size_of(dtype); }
};

// What must be equal on all ranks. Compared as bytes, so it has no padding.
struct Agreement {
  int32_t verb = 0, dtype = 0, op = 0, launch = 0;
  int64_t num_segments = 0, numel = 0, block_numel = 0, divisor = 0;
  AgreedConfig config = {};   // of the first segment, with the algorithm of the plan
  uint64_t shared_seeds = 0;  // of places that all ranks draw: their hash
  uint64_t segments_hash = 0;
};

// Of a collective's header, without name, values and a refusal's text.
inline constexpr int64_t kHeaderBytes = 32 + sizeof(Agreement);

// Which of a call's buffers will be used; one that will not may be null.
struct BuffersUsed {
  bool input = true;
  bool output = true;
};

// Throws Error(CGX_INVALID_ARGUMENT or CGX_UNSUPPORTED).
Plan make_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used = {});
Agreement make_agreement(const cgx_collective_t& call, const Plan& plan);
// A hash of the seeds of places that all ranks draw; none where no places are drawn.
std::optional<uint64_t> shared_seeds(const Plan& plan);
// Whether all is equal, but for launches of different programs.
bool alike(const Agreement& left, const Agreement& right);
// "numel 1000 against 999, bits 4 against 8".
std::string difference(const Agreement& left, const Agreement& right);

}  // namespace cgx
