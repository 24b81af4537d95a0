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
  uint64_t channel, segment, segment_bytes, offset, bytes, token;
};

constexpr size_t kSmallestBlock = 4 * 1024;
constexpr size_t kLargestSharedBlock = 256 * 1024;  // larger blocks get a segment of their own
constexpr size_t kBlocksPerSegment = 16;
constexpr auto kAliveCheckInterval = std::chrono::milliseconds(50);

template <typename T>
std::span<const std::byte> as_bytes(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(T)};
}

Bytes to_bytes(std::span<const std::byte> span) { return {span.begin(), span.end()}; }

}  // namespace

LocalOffer LocalOffer::read(std::span<const std::byte> bytes) {
  LocalOffer offer;
  std::memcpy(&offer, bytes.data(), sizeof(offer));
  return offer;
}

Bytes LocalOffer::bytes() const { return to_bytes(as_bytes(*this)); }

size_t SharedMemoryConnector::control_bytes(int size) { return ControlSegment::bytes(size); }

Bytes SharedMemoryConnector::offer() const {
  return LocalOffer{this_memory(), getpid(), control_.id}.bytes();
}

std::string SharedMemoryConnector::refusal(const std::vector<Bytes>& offers) const {
  for (size_t peer = 0; peer < offers.size(); ++peer)
    if (!near_(LocalOffer::read(offers[0]), LocalOffer::read(offers[peer])))
      return join("rank ", peer, " ", far_, " than rank 0");
  return "";
}

std::unique_ptr<Transport> SharedMemoryConnector::connect(const std::vector<Bytes>& offers,
                                                          std::chrono::duration<double>) {
  std::vector<LocalOffer> peers;
  std::vector<uint64_t> controls;
  for (const auto& offer : offers) {
    peers.push_back(LocalOffer::read(offer));
    const bool reached = near_(LocalOffer::read(offers[rank_]), peers.back());
    controls.push_back(reached ? peers.back().control : 0);
  }
  store_->meet(peers);
  return std::make_unique<SharedMemoryTransport>(name_, rank_, controls, std::move(store_),
                                                 control_.data);
}

Buffer BufferPool::take(size_t bytes) {
  const size_t capacity = std::bit_ceil(std::max(bytes, kSmallestBlock));
  auto& free = free_[capacity];
  if (free.empty()) {
    const size_t count = capacity <= kLargestSharedBlock ? kBlocksPerSegment : 1;
    const auto segment = store_->create(count * capacity);
    segment_bytes_[segment.id] = segment.bytes;
    for (size_t i = count; i-- > 0;)  // the lowest address is taken first
      free.push_back({segment.data + i * capacity, capacity, segment.id, i * capacity});
  }
  Buffer buffer = free.back();
  free.pop_back();
  return buffer;
}

SharedMemoryTransport::SharedMemoryTransport(const char* name, int rank,
                                             const std::vector<uint64_t>& control_ids,
                                             std::unique_ptr<SegmentStore> store,
                                             std::byte* own_control)
    : name_(name),
      rank_(rank),
      store_(std::move(store)),
      pool_(std::make_shared<BufferPool>(store_.get())),
      own_(reinterpret_cast<ControlSegment*>(own_control)),
      peers_(control_ids.size()) {
  const int size = static_cast<int>(control_ids.size());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    peers_[peer].lost = control_ids[peer] == 0;
    if (peers_[peer].lost) continue;
    peers_[peer].control = reinterpret_cast<ControlSegment*>(
        store_->map(peer, control_ids[peer], ControlSegment::bytes(size)));
  }
}

BufferRef SharedMemoryTransport::allocate(size_t bytes) {
  // The pool outlives the buffers that collectives still hold when the transport goes.
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

void SharedMemoryTransport::send(int destination, uint32_t channel, const BufferRef& buffer,
                                 size_t bytes, const std::shared_ptr<SendState>& state) {
  if (peers_[destination].lost) return;
  const uint64_t token = next_token_++;
  outstanding_.emplace(token, Outstanding{destination, buffer, state});
  ++state->unsent;
  ++state->unreleased;
  const BulkFrame frame{channel,        buffer->segment, pool_->segment_bytes(buffer->segment),
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
    if (state) --state->unsent;
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
    if (frame.state) --frame.state->unsent;
    peer.backlog.pop_front();
    pushed = true;
  }
  if (pushed) peer.control->doorbell.ring();
  return pushed;
}

bool SharedMemoryTransport::progress(Sink& sink) {
  // Read first: whatever is rung from here on ends the next wait() at once.
  rings_seen_ = own_->doorbell.count.load(std::memory_order_seq_cst);
  bool worked = false;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || peers_[peer].lost) continue;
    worked |= flush(peer);
    // The state is read before the ring is drained: what a leaving peer sent comes first.
    const uint32_t state = peers_[peer].control->state.load(std::memory_order_acquire);
    const bool died = !peers_[peer].died.empty();
    worked |= drain(peer, sink);
    if (peers_[peer].lost || (state == ControlSegment::kHere && !died)) continue;
    forget(peer);
    if (state == ControlSegment::kHere)
      sink.on_peer_lost(peer, Loss::kDied, peers_[peer].died);
    else
      sink.on_peer_lost(peer, state == ControlSegment::kLeft ? Loss::kLeft : Loss::kGaveUp,
                        peers_[peer].control->reason);
    worked = true;
  }
  return worked;
}

bool SharedMemoryTransport::drain(int source, Sink& sink) {
  uint32_t type;
  bool worked = false;
  while (own_->inbox[source].pop(&type, &scratch_)) {
    handle(source, type, scratch_, sink);
    worked = true;
  }
  return worked;
}

void SharedMemoryTransport::handle(int source, uint32_t type, std::span<const std::byte> body,
                                   Sink& sink) {
  if (type == kControl) {
    sink.on_control(source, body);
  } else if (type == kRelease) {
    uint64_t token;
    std::memcpy(&token, body.data(), sizeof(token));
    const auto found = outstanding_.find(token);
    if (found == outstanding_.end()) return;
    --found->second.state->unreleased;
    outstanding_.erase(found);
  } else {
    BulkFrame frame;
    std::memcpy(&frame, body.data(), sizeof(frame));
    const std::byte* segment = nullptr;
    try {
      segment = store_->map(source, frame.segment, frame.segment_bytes);
    } catch (const Error& error) {  // the sender failed and took its memory with it
      peers_[source].died = error.what();
      return;
    }
    sink.on_bulk(Arrival(source, static_cast<uint32_t>(frame.channel),
                         {segment + frame.offset, frame.bytes}, this, frame.token));
  }
}

void SharedMemoryTransport::forget(int peer) {
  peers_[peer].lost = true;
  for (auto& frame : peers_[peer].backlog)
    if (frame.state) --frame.state->unsent;
  peers_[peer].backlog.clear();
  for (auto it = outstanding_.begin(); it != outstanding_.end();) {
    if (it->second.destination == peer) {
      --it->second.state->unreleased;
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
    if (peer != rank_ && !peers_[peer].lost && peers_[peer].died.empty() && !store_->alive(peer))
      peers_[peer].died = "its process ended";
}

bool SharedMemoryTransport::flushed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.backlog.empty(); });
}

void SharedMemoryTransport::leave(bool graceful, const std::string& reason) {
  std::strncpy(own_->reason, reason.c_str(), sizeof(own_->reason) - 1);
  own_->state.store(graceful ? ControlSegment::kLeft : ControlSegment::kFailed,
                    std::memory_order_release);
  for (auto& peer : peers_)
    if (peer.control && !peer.lost) peer.control->doorbell.ring();
}

}  // namespace cgx
