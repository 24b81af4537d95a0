#include "transport/tcp_frames.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

constexpr size_t kBlock = BlockPool::kBlockBytes;
constexpr size_t kLeastRoom = 4096;   // less is not worth a system call
constexpr size_t kTrusted = 1 << 20;  // reserved for a frame when only its header has arrived

void check(const FrameHeader& header) {
  const bool bulk = header.kind == FrameHeader::kBulk;
  const size_t longest = bulk ? kLongestPayload : kMaxControlBytes;
  require(header.kind >= FrameHeader::kControl && header.kind <= FrameHeader::kBye &&
              header.size <= longest &&
              (bulk ? header.channel < kChannels && header.sequence < kSequences
                    : header.channel == 0 && header.sequence == 0),
          CGX_PEER_FAILED, "a frame of kind ", header.kind, ", channel ", header.channel,
          ", sequence ", header.sequence, " with ", header.size,
          " bytes, which is not a valid cgx frame");
}

}  // namespace

std::span<std::byte> FrameReader::room() {
  const size_t there = end_ - begin_;
  size_t whole = sizeof(FrameHeader), wanted = kLeastRoom;
  if (there >= sizeof(FrameHeader)) {  // the rest of a frame, however short
    FrameHeader header;
    std::memcpy(&header, block_.get() + begin_, sizeof(header));
    whole += header.size + frame_padding(header.size);
    // After an error, complete frames stay here while the connection is read on.
    if (there < whole) wanted = std::min(wanted, whole - there);
  }
  if (there == 0 && block_.use_count() == 1) begin_ = end_ = 0;
  if (begin_ + std::min(whole, kTrusted) > capacity_ || end_ + wanted > capacity_)
    move_to_next_block(std::min(whole, std::max(kTrusted, 2 * there)));
  return {block_.get() + end_, capacity_ - end_};
}

// The size of a long frame is not trusted: its memory doubles as bytes arrive.
void FrameReader::move_to_next_block(size_t needed) {
  const size_t there = end_ - begin_;
  const size_t capacity = std::max({kBlock, needed, there + kLeastRoom});
  std::shared_ptr<std::byte> next(blocks_->take(capacity).release(),
                                  [capacity, blocks = blocks_](std::byte* block) {
                                    blocks->give_back(BlockPool::Block(block), capacity);
                                  });
  if (there > 0) std::memcpy(next.get(), block_.get() + begin_, there);
  block_ = std::move(next);
  capacity_ = capacity;
  begin_ = 0;
  end_ = there;
}

std::optional<FrameReader::Frame> FrameReader::next() {
  const size_t there = end_ - begin_;
  if (there < sizeof(FrameHeader)) return std::nullopt;
  Frame frame;
  std::memcpy(&frame.header, block_.get() + begin_, sizeof(FrameHeader));
  check(frame.header);
  const size_t whole = sizeof(FrameHeader) + frame.header.size + frame_padding(frame.header.size);
  if (there < whole) return std::nullopt;
  frame.payload = {block_.get() + begin_ + sizeof(FrameHeader), frame.header.size};
  frame.memory = block_;
  begin_ += whole;
  return frame;
}

}  // namespace cgx
