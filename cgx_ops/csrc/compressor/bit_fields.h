// Numbers of few bits, packed from the lowest bit of the first byte on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cgx {

class BitPacker {
 public:
  explicit BitPacker(std::byte* to) : to_(to) {}
  void put(uint32_t value, int bits) {  // at most 32; higher bits of the value are 0
    word_ |= uint64_t{value} << filled_;
    for (filled_ += bits; filled_ >= 8; filled_ -= 8, word_ >>= 8)
      *to_++ = static_cast<std::byte>(word_);
  }
  // Writes the last byte, and returns the end.
  std::byte* finish() {
    if (filled_ > 0) *to_++ = static_cast<std::byte>(word_);
    word_ = 0, filled_ = 0;
    return to_;
  }

 private:
  std::byte* to_;
  uint64_t word_ = 0;
  int filled_ = 0;
};

// Callers check that there are enough bytes.
class BitUnpacker {
 public:
  explicit BitUnpacker(std::span<const std::byte> from) : from_(from) {}
  uint32_t take(int bits) {
    while (filled_ < bits) {
      word_ |= uint64_t{static_cast<uint8_t>(from_[at_++])} << filled_;
      filled_ += 8;
    }
    const auto value = static_cast<uint32_t>(word_ & ((uint64_t{1} << bits) - 1));
    word_ >>= bits;
    filled_ -= bits;
    return value;
  }
  // Whether all bytes were read, and unused bits are 0.
  bool ended() const { return at_ == from_.size() && word_ == 0; }

 private:
  std::span<const std::byte> from_;
  size_t at_ = 0;
  uint64_t word_ = 0;
  int filled_ = 0;
};

}  // namespace cgx
