// The protocol of ranks that can read each other's memory, whether they are threads or processes.
//
// Every rank has a control segment: its doorbell, its state and one inbox ring for each peer. Bulk
// bytes stay where the sender encoded them; a small frame tells the receiver where, the receiver
// decodes in place and answers with a release frame. So values cross without a copy, and buffers,
// released quickly, are reused while they are still in the cache.
//
// Where segments come from is the only difference between threads and processes: SegmentStore.
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

// The memory file that holds a rank's segments: where it is, and what tells it from any other file
// that may be found there later.
struct MemoryFile {
  int64_t descriptor = -1;  // of the process that made it
  uint64_t device = 0, inode = 0;
};

// What a rank tells its peers before it connects.
struct LocalOffer {
  Host memory;
  int64_t pid;
  MemoryFile file;
  uint64_t control;  // the id of its control segment; never 0

  static LocalOffer read(std::span<const std::byte> bytes);
};

class SegmentStore {
 public:
  struct Segment {
    std::shared_ptr<std::byte> memory;  // there for as long as anybody keeps it
    size_t bytes = 0;
    uint64_t id = 0;
  };
  enum class Access { kRead, kWrite };
  virtual ~SegmentStore() = default;
  // Zeroed memory that peers can map by its id, while the store is there. Throws
  // Error(CGX_SYSTEM).
  virtual Segment create(size_t bytes) = 0;
  // A peer's segment in this process. Throws Error: CGX_PEER_FAILED if it is not there, or is
  // something else; CGX_SYSTEM if this process is short of something.
  virtual std::byte* map(int owner, uint64_t id, size_t bytes, Access access) = 0;
  // The file that the segments are in, if any.
  virtual MemoryFile file() const { return {}; }
  // Before anything of the peers is mapped. By rank; nothing for those that are not near.
  virtual void meet(const std::vector<std::optional<LocalOffer>>& /*peers*/) {}
  // False once the peer's process has ended.
  virtual bool alive(int peer) = 0;
};

class SharedMemoryConnector : public Connector {
 public:
  using Near = bool (*)(const LocalOffer&, const LocalOffer&);
  // `near`: whether two ranks can share memory; `far`: what is said of one that cannot.
  SharedMemoryConnector(const char* name, int rank, int size, std::unique_ptr<SegmentStore> store,
                        Near near, const char* far)
      : name_(name), rank_(rank), store_(std::move(store)), near_(near), far_(far) {
    control_ = store_->create(control_bytes(size));
  }
  Bytes offer() const override;
  std::string refusal(const std::vector<Bytes>& offers) const override;
  // Leaves out whoever is not near.
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

// Blocks of power-of-two sizes, each behind its headroom, cut from segments; memory is taken when
// used and kept for reuse.
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

// The first thing in a rank's control segment; `size` inbox rings follow.
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
  // control_ids[r] is rank r's control segment; 0: out of reach, nothing is sent there.
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
    std::deque<Frame> backlog;  // frames that found the ring full
    bool lost = false;
    std::optional<std::string> died;  // set by wait(): the process is gone, and how that was seen
    bool unreadable = false;          // its memory is gone: no more bulk messages are taken in
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
