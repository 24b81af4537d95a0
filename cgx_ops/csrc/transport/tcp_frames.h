// Messages on a stream of bytes: each is a frame of {size, kind, channel, sequence}, four words of
// 32 bits, and its payload, filled up to 16 bytes so that payloads stay aligned where they were
// received. Nothing here touches a socket.
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
  uint32_t size;  // of the payload, without what fills it up
  uint32_t kind;
  uint32_t channel, sequence;  // of bulk; else 0
};
static_assert(sizeof(FrameHeader) == 16);

inline constexpr size_t kLongestPayload = INT_MAX;
constexpr size_t frame_padding(size_t payload) { return -payload % sizeof(FrameHeader); }

// Takes frames out of a stream. Payloads stay where they were received until their last owner lets
// go; only a frame that crosses the end of a block is moved to the next one.
class FrameReader {
 public:
  explicit FrameReader(BlockPool* blocks) : blocks_(blocks) {}

  // Where the next bytes of the stream go. Never empty.
  std::span<std::byte> room();
  void filled(size_t bytes) { end_ += bytes; }

  struct Frame {
    FrameHeader header;
    std::span<const std::byte> payload;
    std::shared_ptr<std::byte> memory;  // that it lies in
  };
  // The next whole frame, if it is there. Throws Error(CGX_PEER_FAILED) if none can begin so.
  std::optional<Frame> next();

 private:
  void move_to_next_block(size_t needed);

  BlockPool* const blocks_;
  std::shared_ptr<std::byte> block_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;  // what was received and not taken: [begin, end)
};

}  // namespace cgx
