// Divides a plan's values into shards (one per owner), chunks (one per message) and pieces (the
// part of a segment in a chunk). Shards are cut at multiples of Codec::cut(), and pieces at
// multiples of grain() from the shard's first value on, so each piece can be encoded independently.
// If a codec has no fixed length, each piece has at most a grain and is a chunk. Every rank
// computes the same layout.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "compressor/codec.h"
#include "plan.h"

namespace cgx {

// The possible length of a message, in bytes.
struct Length {
  int64_t least;
  int64_t most;
  bool fits(int64_t bytes) const { return least <= bytes && bytes <= most; }
};

struct Piece {
  // The codec of a stage, and the offset of the piece in the chunk's message.
  struct Coded {
    const Codec* codec;
    int64_t at;
  };

  int64_t input_at;     // bytes, from the plan's input
  int64_t output_at;    // bytes, from the plan's output
  std::byte* residual;  // of these values (feedback.h); null: none
  int64_t numel;
  int64_t first_index;  // index of the first element in its segment
  uint64_t seed;
  PerStage<Coded> coded;
  const Segment* segment;  // in the plan
};

struct Chunk {
  size_t first_piece;
  size_t last_piece;  // exclusive
  PerStage<Length> length;
  bool fixed_length;  // otherwise it is one piece, whose length is known after encoding
};

struct Shard {
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;

  std::span<const Piece> pieces_of(const Chunk& chunk) const {
    return std::span(pieces).subspan(chunk.first_piece, chunk.last_piece - chunk.first_piece);
  }
  // The largest total size of the messages of a stage.
  int64_t bytes(Stage stage) const;
};

class Layout {
 public:
  explicit Layout(const Plan& plan);  // the plan must outlive the layout

  // The shard of rank `owner`. one_shot has a single shard with everything. In reduce_scatter and
  // all_gather a shard is a block. hierarchical numbers shards by Topology::shard_of.
  const Shard& shard(int owner) const { return shards_.size() == 1 ? shards_[0] : shards_[owner]; }
  // The block from a rank, in an all_to_all. shard() is the block for a rank. This rank's own block
  // has no pieces.
  const Shard& received(int source) const { return received_[source]; }
  int64_t longest_message() const;  // bytes; may exceed the chunk size, since a grain may be longer

 private:
  void append_block(Shard* shard, const std::vector<Segment>& block);
  void append(Shard* shard, const Segment& segment, int64_t first, int64_t last);
  const Codec* codec(const CodecSettings& settings);

  std::vector<std::pair<CodecSettings, std::unique_ptr<Codec>>> codecs_;
  std::vector<Shard> shards_, received_;
  int64_t chunk_bytes_ = 0, value_bytes_ = 0;
  bool has_intra_ = false;  // whether there are messages within a host
};

// Returns the chunk size for a plan, up to the transport's limit `most`. Chunks are longer only if
// a shard has many: threads need chunks to share, and steps to overlap.
int64_t fitting_chunk_bytes(const Plan& plan, int64_t most);

}  // namespace cgx
