// The failures of a rank's wire, and a fault word that devices can copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "device/wire.h"

namespace cgx::device {

// Thread-safe.
class Failures {
 public:
  // `word`: pinned memory.
  explicit Failures(Memory word) : word_(std::move(word)) {}

  // 0, or 1 after the first failure.
  const uint32_t* word() const { return reinterpret_cast<const uint32_t*>(word_.get()); }
  void add(cgx_status_t status, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = Failure{status, text};
    std::atomic_ref(*reinterpret_cast<uint32_t*>(word_.get())).store(1, std::memory_order_release);
  }
  std::optional<Failure> first() const {
    const std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  const Memory word_;
  mutable std::mutex mutex_;
  std::optional<Failure> first_;
};

}  // namespace cgx::device
