// Framing of messages in a byte stream: {size, kind, channel, sequence}, four 32-bit words, then
// the payload, padded to 16 bytes so that payloads are aligned in the receive buffer. This file
// does not use sockets.
#pragma once

#include <climits>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "transport/block_pool.h"
#include "transport/transport.h"

namespace cgx {

struct FrameHeader {
  enum Kind : uint32_t { kControl = 1, kBulk = 2, kBye = 3 };
  uint32_t size;  // of the payload, without padding
  uint32_t kind;
  uint32_t channel, sequence;  // of bulk messages; otherwise 0
};
static_assert(sizeof(FrameHeader) == 16);

inline constexpr size_t kLongestPayload = INT_MAX;
constexpr size_t frame_padding(size_t payload) { return -payload % sizeof(FrameHeader); }

// Extracts frames from a stream. Payloads stay in the receive buffer while they are referenced.
// Only a frame that crosses the end of a block is copied to the next one.
class FrameReader {
 public:
  explicit FrameReader(BlockPool* blocks) : blocks_(blocks) {}

  // Where to receive the next bytes. Never empty.
  std::span<std::byte> room();
  void filled(size_t bytes) { end_ += bytes; }

  struct Frame {
    FrameHeader header;
    std::span<const std::byte> payload;
    std::shared_ptr<std::byte> memory;  // owns the payload
  };
  // Returns the next complete frame, if there is one. Throws Error(CGX_PEER_FAILED) if its header
  // is malformed.
  std::optional<Frame> next();

 private:
  void move_to_next_block(size_t needed);

  BlockPool* const blocks_;
  std::shared_ptr<std::byte> block_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;  // [begin, end): received, not yet extracted
};

}  // namespace cgx
