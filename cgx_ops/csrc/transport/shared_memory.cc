#include "transport/shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

enum FrameType : uint32_t { kControl = 1, kBulk = 2, kRelease = 3 };

struct BulkFrame {
  Slot slot;
  uint64_t segment, segment_bytes, offset, bytes, token;

  // Whether the bytes are within the segment.
  bool fits() const { return offset <= segment_bytes && bytes <= segment_bytes - offset; }
};

constexpr size_t kSmallestBlock = 4 * 1024;
constexpr size_t kLargestSharedBlock = 256 * 1024;  // larger blocks have their own segments
constexpr size_t kBlocksPerSegment = 16;
constexpr auto kAliveCheckInterval = std::chrono::milliseconds(50);

}  // namespace

LocalOffer LocalOffer::read(std::span<const std::byte> bytes) {
  return from_bytes<LocalOffer>(bytes, "an offer of shared memory");
}

size_t SharedMemoryConnector::control_bytes(int size) { return ControlSegment::bytes(size); }

Bytes SharedMemoryConnector::offer() const {
  return to_bytes(LocalOffer{this_memory(), getpid(), store_->file(), control_.id});
}

std::string SharedMemoryConnector::refusal(const std::vector<Bytes>& offers) const {
  for (size_t peer = 0; peer < offers.size(); ++peer)
    if (!near_(LocalOffer::read(offers[0]), LocalOffer::read(offers[peer])))
      return join("rank ", peer, " ", far_, " than rank 0");
  return "";
}

std::unique_ptr<Transport> SharedMemoryConnector::connect(const std::vector<Bytes>& offers,
                                                          const Reach&) {
  const LocalOffer own = LocalOffer::read(offers[rank_]);
  std::vector<std::optional<LocalOffer>> peers(offers.size());
  std::vector<uint64_t> controls(offers.size());
  for (int peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
    const LocalOffer offer = LocalOffer::read(offers[peer]);
    if (!near_(own, offer)) continue;
    controls[peer] = offer.control;
    if (peer != rank_) peers[peer] = offer;
  }
  store_->set_peers(peers);
  return std::make_unique<SharedMemoryTransport>(name_, rank_, controls, std::move(store_),
                                                 control_.memory);
}

Buffer BufferPool::take(size_t bytes) {
  const size_t capacity = std::bit_ceil(std::max(bytes, kSmallestBlock));
  auto& free = free_[capacity];
  if (free.empty()) {
    const size_t count = capacity <= kLargestSharedBlock ? kBlocksPerSegment : 1;
    const size_t stride = kHeadroom + capacity;
    const auto segment = store_->create(count * stride);
    segments_[segment.id] = segment;
    for (size_t i = count; i-- > 0;) {  // allocate from the lowest address
      const size_t offset = i * stride + kHeadroom;
      free.push_back({segment.memory.get() + offset, capacity, segment.id, offset});
    }
  }
  Buffer buffer = free.back();
  free.pop_back();
  return buffer;
}

SharedMemoryTransport::SharedMemoryTransport(const char* name, int rank,
                                             const std::vector<uint64_t>& control_ids,
                                             std::unique_ptr<SegmentStore> store,
                                             std::shared_ptr<std::byte> own_control)
    : name_(name),
      rank_(rank),
      store_(std::move(store)),
      pool_(std::make_shared<BufferPool>(store_.get())),
      own_memory_(std::move(own_control)),
      own_(reinterpret_cast<ControlSegment*>(own_memory_.get())),
      peers_(control_ids.size()) {
  using Access = SegmentStore::Access;
  const int size = static_cast<int>(control_ids.size());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    peers_[peer].lost = control_ids[peer] == 0;
    if (peers_[peer].lost) continue;
    peers_[peer].control = reinterpret_cast<ControlSegment*>(
        store_->map(peer, control_ids[peer], ControlSegment::bytes(size), Access::kWrite));
  }
}

BufferRef SharedMemoryTransport::allocate(size_t bytes) {
  // Buffers keep the pool and its memory alive: collectives, or MPI (hybrid), may hold them longer
  // than the transport exists.
  return {new Buffer(pool_->take(bytes)), [pool = pool_](Buffer* buffer) {
            pool->give_back(*buffer);
            delete buffer;
          }};
}

void SharedMemoryTransport::send_control(int destination, std::span<const std::byte> message) {
  require(message.size() <= kMaxControlBytes, CGX_INTERNAL, "control message of ", message.size(),
          " bytes");
  push(destination, kControl, message);
}

void SharedMemoryTransport::send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
                                 const std::shared_ptr<SendState>& state) {
  if (peers_[destination].lost) return;
  const uint64_t token = next_token_++;
  outstanding_.emplace(token, Outstanding{destination, buffer, state});
  state->begin(destination);
  const BulkFrame frame{slot,           buffer->segment, pool_->segment_bytes(buffer->segment),
                        buffer->offset, bytes,           token};
  push(destination, kBulk, as_bytes(frame), state);
}

void SharedMemoryTransport::release(int source, uint64_t token) {
  push(source, kRelease, as_bytes(token));
}

void SharedMemoryTransport::push(int destination, uint32_t type, std::span<const std::byte> body,
                                 const std::shared_ptr<SendState>& state) {
  auto& peer = peers_[destination];
  if (peer.lost) return;
  if (peer.backlog.empty() && peer.control->inbox[rank_].push(type, body)) {
    if (state) state->hand_over();
    peer.control->doorbell.ring();
  } else {
    peer.backlog.push_back({type, to_bytes(body), state});
  }
}

bool SharedMemoryTransport::flush(int destination) {
  auto& peer = peers_[destination];
  bool pushed = false;
  while (!peer.backlog.empty()) {
    Frame& frame = peer.backlog.front();
    if (!peer.control->inbox[rank_].push(frame.type, frame.body)) break;
    if (frame.state) frame.state->hand_over();
    peer.backlog.pop_front();
    pushed = true;
  }
  if (pushed) peer.control->doorbell.ring();
  return pushed;
}

bool SharedMemoryTransport::progress(Sink& sink) {
  // Read the count first: any later ring ends the next wait() immediately.
  rings_seen_ = own_->doorbell.count.load(std::memory_order_seq_cst);
  bool worked = false;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || peers_[peer].lost) continue;
    worked |= flush(peer);
    // Read the state before draining the ring, so that a leaving peer's messages are handled first.
    const uint32_t state = peers_[peer].control->state.load(std::memory_order_acquire);
    const bool died = peers_[peer].died.has_value();
    worked |= drain(peer, sink);
    if (peers_[peer].lost || (state == ControlSegment::kHere && !died)) continue;
    forget(peer);
    if (state == ControlSegment::kHere)
      sink.on_peer_lost(peer, Loss::kDied, *peers_[peer].died);
    else
      sink.on_peer_lost(peer, state == ControlSegment::kLeft ? Loss::kLeft : Loss::kGaveUp,
                        text_of(peers_[peer].control->reason));
    worked = true;
  }
  return worked;
}

bool SharedMemoryTransport::drain(int source, Sink& sink) {
  uint32_t type;
  for (bool worked = false;; worked = true) {
    const auto popped = own_->inbox[source].pop(&type, &scratch_);
    require(popped != Ring::Popped::kMalformed, CGX_PEER_FAILED, "rank ", source,
            " wrote a malformed frame to its ring");
    if (popped == Ring::Popped::kNothing) return worked;
    handle(source, type, scratch_, sink);
  }
}

void SharedMemoryTransport::handle(int source, uint32_t type, std::span<const std::byte> body,
                                   Sink& sink) {
  if (type == kControl) return sink.on_control(source, body);
  if (type == kBulk) return take_bulk(source, body, sink);
  require(type == kRelease && body.size() == sizeof(uint64_t), CGX_PEER_FAILED, "rank ", source,
          " sent a frame of type ", type, " with ", body.size(), " bytes");
  const auto token = from_bytes<uint64_t>(body, "a release of rank ", source);
  const auto found = outstanding_.find(token);
  require(found != outstanding_.end() && found->second.destination == source, CGX_PEER_FAILED,
          "rank ", source, " released message ", token, ", which it does not hold");
  found->second.state->release(source);
  outstanding_.erase(found);
}

void SharedMemoryTransport::take_bulk(int source, std::span<const std::byte> body, Sink& sink) {
  const auto frame = from_bytes<BulkFrame>(body, "a bulk frame of rank ", source);
  require(frame.fits(), CGX_PEER_FAILED, "rank ", source, " sent a message of ", frame.bytes,
          " bytes at ", frame.offset, " in a segment of ", frame.segment_bytes);
  if (peers_[source].unreadable) return;
  // Peers reuse their memory once they see that this rank has left.
  if (own_->state.load(std::memory_order_relaxed) != ControlSegment::kHere)
    return release(source, frame.token);
  const std::byte* segment = nullptr;
  try {
    segment = store_->map(source, frame.segment, frame.segment_bytes, SegmentStore::Access::kRead);
  } catch (const Error& error) {
    if (error.status() == CGX_PEER_FAILED) {
      // The peer is gone, and so is its memory. Its control messages still count: it may have
      // cancelled this collective, and others may have succeeded.
      peers_[source].unreadable = true;
      if (!peers_[source].died) peers_[source].died = error.what();
      return;
    }
    release(source, frame.token);
    return sink.on_unreadable(source, frame.slot, error);
  }
  sink.on_bulk(
      Arrival(source, frame.slot, {segment + frame.offset, frame.bytes}, this, frame.token));
}

void SharedMemoryTransport::forget(int peer) {
  peers_[peer].lost = true;
  for (auto& frame : peers_[peer].backlog)
    if (frame.state) frame.state->hand_over();
  peers_[peer].backlog.clear();
  for (auto it = outstanding_.begin(); it != outstanding_.end();) {
    if (it->second.destination == peer) {
      it->second.state->release(peer);
      it = outstanding_.erase(it);
    } else {
      ++it;
    }
  }
}

void SharedMemoryTransport::wait(std::chrono::microseconds at_most) {
  own_->doorbell.sleep(rings_seen_, at_most);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_check_ < kAliveCheckInterval) return;
  last_check_ = now;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (peer != rank_ && !peers_[peer].lost && !peers_[peer].died && !store_->alive(peer))
      peers_[peer].died = "its process ended";
}

bool SharedMemoryTransport::flushed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.backlog.empty(); });
}

bool SharedMemoryTransport::drained() const {
  return flushed() && std::all_of(outstanding_.begin(), outstanding_.end(),
                                  [](const auto& entry) { return entry.second.state->given_up(); });
}

void SharedMemoryTransport::leave(bool graceful, const std::string& reason) {
  put_text(own_->reason, reason);
  own_->state.store(graceful ? ControlSegment::kLeft : ControlSegment::kFailed,
                    std::memory_order_release);
  for (auto& peer : peers_)
    if (peer.control && !peer.lost) peer.control->doorbell.ring();
}

}  // namespace cgx
