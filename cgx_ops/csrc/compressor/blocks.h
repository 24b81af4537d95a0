// Memory for a block of values as fp32, and blocks of whole buckets that stay in the first-level
// cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cgx {

// A block's memory, grown to hold so many values. That of a thread is used within one call only: a
// collective's steps may run on any thread.
inline float* room(std::vector<float>& block, int64_t numel) {
  if (static_cast<int64_t>(block.size()) < numel) block.resize(numel);
  return block.data();
}

// Calls work(first, count, values) for each block; there is room for as many values.
template <typename Work>
void for_blocks(int64_t numel, int64_t bucket_size, const Work& work) {
  thread_local std::vector<float> memory;
  const int64_t block = std::max(bucket_size, 2048 / bucket_size * bucket_size);
  float* const values = room(memory, std::min(block, numel));
  for (int64_t first = 0; first < numel; first += block)
    work(first, std::min(block, numel - first), values);
}

}  // namespace cgx
