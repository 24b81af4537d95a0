// A ring buffer of frames between one writer and one reader, in shared memory.
//
// A frame is {uint32 size, uint32 type, body, padding to 8}. Positions increase monotonically;
// bytes wrap around. The reader validates all lengths.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace cgx {

struct Ring {
  enum class Popped { kFrame, kNothing, kMalformed };
  static constexpr size_t kCapacity = 64 * 1024;  // a power of two; at least two control messages

  alignas(64) std::atomic<uint64_t> written{0};
  alignas(64) std::atomic<uint64_t> read{0};
  alignas(64) std::byte bytes[kCapacity];

  // Returns false if there is no room.
  bool push(uint32_t type, std::span<const std::byte> body) {
    const uint64_t size = body.size();
    const uint64_t at = written.load(std::memory_order_relaxed);
    const uint64_t total = 8 + round_up(size);
    if (at + total - read.load(std::memory_order_acquire) > kCapacity) return false;
    const uint32_t prefix[2] = {static_cast<uint32_t>(size), type};
    copy_in(at, prefix, sizeof(prefix));
    copy_in(at + 8, body.data(), size);
    written.store(at + total, std::memory_order_release);
    return true;
  }

  Popped pop(uint32_t* type, std::vector<std::byte>* body) {
    const uint64_t at = read.load(std::memory_order_relaxed);
    const uint64_t there = written.load(std::memory_order_acquire) - at;
    if (there == 0) return Popped::kNothing;
    if (there < 8 || there > kCapacity) return Popped::kMalformed;
    uint32_t prefix[2];
    copy_out(at, prefix, sizeof(prefix));
    const uint64_t total = 8 + round_up(prefix[0]);
    if (total > there) return Popped::kMalformed;
    *type = prefix[1];
    body->resize(prefix[0]);
    copy_out(at + 8, body->data(), body->size());
    read.store(at + total, std::memory_order_release);
    return Popped::kFrame;
  }

 private:
  static uint64_t round_up(uint64_t size) { return (size + 7) & ~uint64_t{7}; }

  void copy_in(uint64_t at, const void* from, size_t size) {
    const size_t begin = at % kCapacity, first = std::min(size, kCapacity - begin);
    if (first) std::memcpy(bytes + begin, from, first);
    if (size > first) std::memcpy(bytes, static_cast<const std::byte*>(from) + first, size - first);
  }
  void copy_out(uint64_t at, void* to, size_t size) const {
    const size_t begin = at % kCapacity, first = std::min(size, kCapacity - begin);
    if (first) std::memcpy(to, bytes + begin, first);
    if (size > first) std::memcpy(static_cast<std::byte*>(to) + first, bytes, size - first);
  }
};

}  // namespace cgx
