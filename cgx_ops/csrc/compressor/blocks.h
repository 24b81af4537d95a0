// Scratch memory for fp32 values, and iteration over blocks of whole buckets that fit the L1 cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cgx {

// Grows `block` to hold `numel` values and returns its memory. Thread-local blocks are valid within
// one call only, because steps of a collective may run on different threads.
inline float* room(std::vector<float>& block, int64_t numel) {
  if (static_cast<int64_t>(block.size()) < numel) block.resize(numel);
  return block.data();
}

// Calls work(first, count, values) for each block. `values` has room for `count` values.
template <typename Work>
void for_blocks(int64_t numel, int64_t bucket_size, const Work& work) {
  thread_local std::vector<float> memory;
  const int64_t block = std::max(bucket_size, 2048 / bucket_size * bucket_size);
  float* const values = room(memory, std::min(block, numel));
  for (int64_t first = 0; first < numel; first += block)
    work(first, std::min(block, numel - first), values);
}

}  // namespace cgx
