// Blocks of whole buckets that stay in the first-level cache, and room for one as fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cgx {

// Calls work(first, count, room) for each; room has as many values. Used within one call only: a
// collective's steps may run on any thread.
template <typename Work>
void for_blocks(int64_t numel, int64_t bucket_size, const Work& work) {
  thread_local std::vector<float> room;
  const int64_t block = std::max(bucket_size, 2048 / bucket_size * bucket_size);
  if (static_cast<int64_t>(room.size()) < std::min(block, numel))
    room.resize(std::min(block, numel));
  for (int64_t first = 0; first < numel; first += block)
    work(first, std::min(block, numel - first), room.data());
}

}  // namespace cgx
