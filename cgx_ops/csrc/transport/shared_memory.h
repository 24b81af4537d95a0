// The protocol of ranks that share memory, either threads or processes.
//
// Every rank has a control segment: its doorbell, its state, and an inbox ring per peer. Bulk data
// stays where the sender encoded it. A small frame tells the receiver the address; the receiver
// decodes in place and answers with a release frame. So values are not copied, and buffers are
// reused while they are in the cache.
//
// Threads and processes differ only in how they create segments: SegmentStore.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/doorbell.h"
#include "transport/host.h"
#include "transport/ring.h"
#include "transport/transport.h"

namespace cgx {

// Identifies the memory file of a rank's segments, even if the descriptor is later reused for
// another file.
struct MemoryFile {
  int64_t descriptor = -1;  // in the process that created it
  uint64_t device = 0, inode = 0;
};

// Sent to the peers before connecting.
struct LocalOffer {
  Host memory;
  int64_t pid;
  MemoryFile file;
  uint64_t control;  // id of its control segment, never 0

  static LocalOffer read(std::span<const std::byte> bytes);
};

class SegmentStore {
 public:
  struct Segment {
    std::shared_ptr<std::byte> memory;  // exists while anyone holds it
    size_t bytes = 0;
    uint64_t id = 0;
  };
  enum class Access { kRead, kWrite };
  virtual ~SegmentStore() = default;
  // Creates zeroed memory that peers can map by id while the store exists. Throws
  // Error(CGX_SYSTEM).
  virtual Segment create(size_t bytes) = 0;
  // Maps a peer's segment. Throws Error: CGX_PEER_FAILED if it does not exist or is not valid,
  // CGX_SYSTEM if this process lacks a resource.
  virtual std::byte* map(int owner, uint64_t id, size_t bytes, Access access) = 0;
  // The file of the segments, if there is one.
  virtual MemoryFile file() const { return {}; }
  // Sets the peers, by rank; nullopt for ranks that do not share memory. Call it before map().
  virtual void set_peers(const std::vector<std::optional<LocalOffer>>& /*peers*/) {}
  // False if the peer's process has ended.
  virtual bool alive(int peer) = 0;
};

class SharedMemoryConnector : public Connector {
 public:
  using Near = bool (*)(const LocalOffer&, const LocalOffer&);
  // `near`: whether two ranks can share memory. `far`: the error text for a rank that cannot.
  SharedMemoryConnector(const char* name, int rank, int size, std::unique_ptr<SegmentStore> store,
                        Near near, const char* far)
      : name_(name), rank_(rank), store_(std::move(store)), near_(near), far_(far) {
    control_ = store_->create(control_bytes(size));
  }
  Bytes offer() const override;
  std::string refusal(const std::vector<Bytes>& offers) const override;
  // Connects only ranks that share memory.
  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers, const Reach& reach) override;

 private:
  static size_t control_bytes(int size);
  const char* name_;
  int rank_;
  std::unique_ptr<SegmentStore> store_;
  Near near_;
  const char* far_;
  SegmentStore::Segment control_;
};

// Allocates blocks of power-of-two sizes, each with headroom in front, from segments. Memory is
// kept for reuse.
class BufferPool {
 public:
  explicit BufferPool(SegmentStore* store) : store_(store) {}
  Buffer take(size_t bytes);
  void give_back(const Buffer& buffer) { free_[buffer.capacity].push_back(buffer); }
  size_t segment_bytes(uint64_t segment) const { return segments_.at(segment).bytes; }

 private:
  SegmentStore* store_;
  std::unordered_map<size_t, std::vector<Buffer>> free_;          // by capacity
  std::unordered_map<uint64_t, SegmentStore::Segment> segments_;  // by id
};

// The head of a rank's control segment. An inbox ring per rank follows.
struct ControlSegment {
  enum State : uint32_t { kHere = 0, kLeft = 1, kFailed = 2 };
  Doorbell doorbell;
  std::atomic<uint32_t> state{kHere};
  char reason[1020];
  Ring inbox[];

  static size_t bytes(int size) { return sizeof(ControlSegment) + size * sizeof(Ring); }
};

class SharedMemoryTransport : public Transport, private Arrival::Release {
 public:
  // control_ids[r] is rank r's control segment, or 0 if it is not reachable.
  SharedMemoryTransport(const char* name, int rank, const std::vector<uint64_t>& control_ids,
                        std::unique_ptr<SegmentStore> store,
                        std::shared_ptr<std::byte> own_control);

  const char* name() const override { return name_; }
  BufferRef allocate(size_t bytes) override;
  void send_control(int destination, std::span<const std::byte> message) override;
  void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override;
  bool progress(Sink& sink) override;
  void wait(std::chrono::microseconds at_most) override;
  void wake() override { own_->doorbell.ring(); }
  bool flushed() const override;
  bool drained() const override;
  void leave(bool graceful, const std::string& reason) override;

 private:
  struct Frame {
    uint32_t type;
    Bytes body;
    std::shared_ptr<SendState> state;  // of a bulk frame
  };
  struct Outstanding {
    int destination;
    BufferRef buffer;
    std::shared_ptr<SendState> state;
  };
  struct Peer {
    ControlSegment* control = nullptr;
    std::deque<Frame> backlog;  // frames waiting for room in the ring
    bool lost = false;
    std::optional<std::string> died;  // set by wait(): how the end of the process was detected
    bool unreadable = false;          // its memory is gone: no more bulk messages are read
  };

  void release(int source, uint64_t token) override;
  void push(int destination, uint32_t type, std::span<const std::byte> body,
            const std::shared_ptr<SendState>& state = nullptr);
  bool flush(int destination);
  bool drain(int source, Sink& sink);
  void handle(int source, uint32_t type, std::span<const std::byte> body, Sink& sink);
  void take_bulk(int source, std::span<const std::byte> body, Sink& sink);
  void forget(int peer);

  const char* name_;
  const int rank_;
  std::unique_ptr<SegmentStore> store_;
  std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<std::byte> own_memory_;
  ControlSegment* const own_;
  std::vector<Peer> peers_;
  std::unordered_map<uint64_t, Outstanding> outstanding_;
  uint64_t next_token_ = 0;
  uint32_t rings_seen_ = 0;
  Bytes scratch_;
  std::chrono::steady_clock::time_point last_check_{};
};

}  // namespace cgx
