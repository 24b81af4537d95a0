// The order of hierarchical's messages of one lane between two ranks of a host.
#pragma once

#include <algorithm>
#include <vector>

#include "algorithm/layout.h"
#include "base/topology.h"

namespace cgx {

// Chunk by chunk. Within a chunk, the shards of the following hosts first, and the host's own last.
class LaneWalk {
 public:
  LaneWalk(const Layout& layout, const Topology& topology, int host, int lane) : host_(host) {
    for (int owner = 0; owner < topology.hosts(); ++owner) {
      shards_.push_back(&layout.shard(topology.shard_of(owner, lane)));
      messages_ += shards_.back()->chunks.size();
      longest_ = std::max(longest_, shards_.back()->chunks.size());
    }
    skip_missing();
  }
  size_t messages() const { return messages_; }
  bool done() const { return chunk_ == longest_; }
  int owner() const { return (host_ + step_) % hosts(); }  // the host that owns the next shard
  const Shard& shard() const { return *shards_[owner()]; }
  const Chunk& chunk() const { return shard().chunks[chunk_]; }
  size_t chunk_index() const { return chunk_; }
  void advance() {
    next();
    skip_missing();
  }

 private:
  int hosts() const { return static_cast<int>(shards_.size()); }
  void next() {
    if (++step_ <= hosts()) return;
    step_ = 1;
    ++chunk_;
  }
  void skip_missing() {
    while (!done() && chunk_ >= shard().chunks.size()) next();
  }
  const int host_;
  std::vector<const Shard*> shards_;  // by owner
  size_t messages_ = 0, longest_ = 0, chunk_ = 0;
  int step_ = 1;
};

}  // namespace cgx
