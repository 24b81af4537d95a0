// Which rank of a host handles which blocks in a hierarchical reduce_scatter or all_gather. Index
// arithmetic only.
//
// On its own host, a block is handled by its owner. On every other host it is handled by the
// owner's delegate: the rank with the owner's number on its host, modulo the ranks of that host. So
// hosts may have any numbers of ranks.
#pragma once

#include <vector>

#include "base/topology.h"

namespace cgx {

inline int handler_of(const Topology& topology, int host, int block) {
  if (topology.host_of(block) == host) return block;
  const auto& ranks = topology.ranks_of(host);
  return ranks[topology.local_rank(block) % ranks.size()];
}

// The other ranks' blocks that a rank handles, in circular order of ranks, beginning after it.
inline std::vector<int> delegated_to(const Topology& topology, int rank) {
  std::vector<int> blocks;
  for (int step = 1; step < topology.size(); ++step) {
    const int block = (rank + step) % topology.size();
    if (handler_of(topology, topology.host_of(rank), block) == rank) blocks.push_back(block);
  }
  return blocks;
}

// A stream of messages that contains chunk 0 of each of `blocks` blocks, then chunk 1, and so on.
struct ChunkStream {
  size_t blocks = 0;
  size_t chunks = 0;    // of each block
  size_t position = 0;  // of the next message

  bool done() const { return position == blocks * chunks; }
  size_t left() const { return blocks * chunks - position; }
  // The place among the blocks, and the chunk, of the message that is `ahead` of the next one.
  size_t block(size_t ahead = 0) const { return (position + ahead) % blocks; }
  size_t chunk(size_t ahead = 0) const { return (position + ahead) / blocks; }
  // How many earlier messages of the same block are still ahead, too.
  size_t before(size_t ahead) const { return ahead / blocks; }
};

}  // namespace cgx
