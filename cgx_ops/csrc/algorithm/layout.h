// How the values of a plan are cut for travelling: shards, one for each owner; chunks, one for each
// message; pieces, the part of one segment inside one chunk. Cuts fall between grains (buckets), so
// each piece encodes independently, and every rank computes the same layout.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "compressor/compressor.h"
#include "plan.h"

namespace cgx {

// What travels: a rank's own values within its host (hierarchical), what is summed on its way to
// the owner, reduced values on their way back.
enum class Way { kIntra, kScatter, kGather };

struct Piece {
  int64_t input_at;   // bytes, in the input (allreduce) or in a rank's block of it
  int64_t output_at;  // bytes, in the output or in a rank's block of it
  std::byte* error;   // where to write what compression lost; null: nowhere
  int64_t numel;
  int64_t first_index;  // of its first element, in its segment
  uint64_t seed;
  const Compressor* intra;
  const Compressor* scatter;
  const Compressor* gather;
  int64_t intra_at;  // bytes, in the chunk's message
  int64_t scatter_at;
  int64_t gather_at;
  const Segment* segment;  // of the plan that the layout is of
};

struct Chunk {
  size_t first_piece;
  size_t last_piece;  // one past
  int64_t intra_bytes;
  int64_t scatter_bytes;
  int64_t gather_bytes;
};

struct Shard {
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;

  std::span<const Piece> pieces_of(const Chunk& chunk) const {
    return std::span(pieces).subspan(chunk.first_piece, chunk.last_piece - chunk.first_piece);
  }
};

class Layout {
 public:
  explicit Layout(const Plan& plan);  // which outlives it

  // What rank `owner` owns. one_shot has one shard, of everything; in reduce_scatter and all_gather
  // every rank's shard is a block, and `block_offset` tells where in the larger buffer.
  // hierarchical numbers shards by Topology::shard_of.
  const Shard& shard(int owner) const { return shards_.size() == 1 ? shards_[0] : shards_[owner]; }
  int64_t block_offset(int owner) const { return block_stride_ * owner; }
  int64_t longest_message() const;  // bytes; a grain may be longer than a chunk should be

 private:
  void append(Shard* shard, const Segment& segment, int64_t first, int64_t last);
  const Compressor* compressor(const CompressorSettings& settings);

  std::vector<std::pair<CompressorSettings, std::unique_ptr<Compressor>>> compressors_;
  std::vector<Shard> shards_;
  int64_t chunk_bytes_ = 0, value_bytes_ = 0, block_stride_ = 0;
  bool has_intra_ = false;  // messages within a host
};

// Plan::chunk_bytes where the transport carries up to `most`: longer chunks only where a shard has
// many, for threads to share and for steps to overlap.
int64_t fitting_chunk_bytes(const Plan& plan, int64_t most);

// Payload bytes that this rank sends under a plan whose algorithm is picked.
int64_t payload_bytes(const Plan& plan);

}  // namespace cgx
