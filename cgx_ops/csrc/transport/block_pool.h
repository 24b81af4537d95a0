// A pool of message memory. Reuse avoids page faults in fresh memory. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace cgx {

class BlockPool {
 public:
  using Block = std::unique_ptr<std::byte[]>;
  static constexpr size_t kBlockBytes = 64 * 1024;  // holds a chunk

  Block take(size_t bytes) {
    if (bytes <= kBlockBytes) {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        Block block = std::move(free_.back());
        free_.pop_back();
        return block;
      }
      bytes = kBlockBytes;
    }
    return std::make_unique_for_overwrite<std::byte[]>(bytes);
  }
  void give_back(Block block, size_t bytes) {
    if (bytes > kBlockBytes) return;
    const std::lock_guard lock(mutex_);
    if (free_.size() < kMostFree) free_.push_back(std::move(block));
  }

 private:
  static constexpr size_t kMostFree = 64;
  std::mutex mutex_;
  std::vector<Block> free_;
};

}  // namespace cgx
