// How the values of a plan are cut for travelling: shards, one for each owner; chunks, one for each
// message; pieces, the part of one segment inside one chunk. Cuts fall between grains (buckets), so
// each piece encodes independently, and every rank computes the same layout. What a codec cannot
// cut is a piece, and a chunk, of its own.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "compressor/codec.h"
#include "plan.h"

namespace cgx {

// Bytes that a message may have. What was cut has a length that is known beforehand.
struct Length {
  int64_t least;
  int64_t most;
  bool fits(int64_t bytes) const { return least <= bytes && bytes <= most; }
};

struct Piece {
  // The codec of one way, and where its bytes begin in the chunk's message.
  struct Coded {
    const Codec* codec;
    int64_t at;
  };

  int64_t input_at;     // bytes, in the input (allreduce) or in a rank's block of it
  int64_t output_at;    // bytes, in the output or in a rank's block of it
  std::byte* residual;  // of these values (feedback.h); null: none
  int64_t numel;
  int64_t first_index;  // of its first element, in its segment
  uint64_t seed;
  ByWay<Coded> coded;
  const Segment* segment;  // of the plan that the layout is of
};

struct Chunk {
  size_t first_piece;
  size_t last_piece;  // one past
  ByWay<Length> length;
  bool sliced;  // else it is one piece, whose length is known when it is encoded
};

struct Shard {
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;

  std::span<const Piece> pieces_of(const Chunk& chunk) const {
    return std::span(pieces).subspan(chunk.first_piece, chunk.last_piece - chunk.first_piece);
  }
  // Of all its messages of one way together, at most.
  int64_t bytes(Way way) const;
};

class Layout {
 public:
  explicit Layout(const Plan& plan);  // which outlives it

  // What rank `owner` owns. one_shot has one shard, of everything; in reduce_scatter and all_gather
  // every rank's shard is a block (one Shard serves them all where there are no residuals), and
  // `block_offset` tells where in the larger buffer. hierarchical numbers shards by
  // Topology::shard_of.
  const Shard& shard(int owner) const { return shards_.size() == 1 ? shards_[0] : shards_[owner]; }
  int64_t block_offset(int owner) const { return block_stride_ * owner; }
  int64_t longest_message() const;  // bytes; a grain may be longer than a chunk should be

 private:
  void append(Shard* shard, const Segment& segment, int64_t first, int64_t last);
  const Codec* codec(const CodecSettings& settings);

  std::vector<std::pair<CodecSettings, std::unique_ptr<Codec>>> codecs_;
  std::vector<Shard> shards_;
  int64_t chunk_bytes_ = 0, value_bytes_ = 0, block_stride_ = 0;
  bool has_intra_ = false;  // messages within a host
};

// Plan::chunk_bytes where the transport carries up to `most`: longer chunks only where a shard has
// many, for threads to share and for steps to overlap.
int64_t fitting_chunk_bytes(const Plan& plan, int64_t most);

}  // namespace cgx
