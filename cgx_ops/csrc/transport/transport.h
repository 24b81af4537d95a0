// A transport moves bytes between the ranks of one communicator. It does not depend on dtypes or
// algorithms.
//
//   control   small messages (the engine's headers): ordered between two ranks, delivered without a
//             matching receive
//   bulk      messages on a channel: ordered within it. An engine sends them only to ranks whose
//             header it has received, so no large message waits for a receiver that is not ready.
//
// Only the thread that holds the engine's progress role may call a transport, except for wake().
// Only wait() blocks. A message, wake() or its timeout ends it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"

namespace cgx {

// Memory that peers can read after it is sent. Encoders write directly into it. It returns to the
// pool when its last owner releases it: the sender, or the transport after all peers have read it.
struct Buffer {
  std::byte* data = nullptr;  // the kHeadroom bytes before it are reserved for the transport
  size_t capacity = 0;
  uint64_t segment = 0;  // identifies the memory to peers; defined by the transport
  size_t offset = 0;
};
using BufferRef = std::shared_ptr<Buffer>;

// Identifies a bulk message: the channel of its collective, and its number among the messages to
// its destination. Detects lost, duplicated and reordered messages.
struct Slot {
  uint32_t channel;
  uint32_t sequence;  // less than kSequences; wraps around
};

// Counts the sends in flight of one collective. Transports update it. A message is released when
// the peer has read it (shared memory), or when the kernel or MPI has taken it (TCP, MPI).
class SendState {
 public:
  explicit SendState(int size) : unread_by_(size, 0) {}
  void begin(int destination) {
    ++unsent_;
    ++unreleased_;
    ++unread_by_[destination];
  }
  void hand_over() { --unsent_; }
  void release(int destination) {
    --unreleased_;
    --unread_by_[destination];
  }

  // The collective has failed here, so peers need not read its messages.
  void give_up() { given_up_ = true; }
  bool given_up() const { return given_up_; }

  int unsent() const { return unsent_; }          // not handed over to the peer, kernel or MPI
  int unreleased() const { return unreleased_; }  // limits the messages in flight of a collective
  bool unread_by(int rank) const { return unread_by_[rank] != 0; }

 private:
  int unsent_ = 0, unreleased_ = 0;
  bool given_up_ = false;
  std::vector<int> unread_by_;  // per rank
};

// A received bulk message. Its bytes are valid until the Arrival is destroyed, which releases them
// to the sender.
class Arrival {
 public:
  struct Release {
    virtual ~Release() = default;
    virtual void release(int source, uint64_t token) = 0;
  };
  Arrival(int source, Slot slot, std::span<const std::byte> bytes, Release* owner, uint64_t token)
      : source(source), slot(slot), bytes(bytes), owner_(owner), token_(token) {}
  Arrival(Arrival&& other) noexcept
      : source(other.source),
        slot(other.slot),
        bytes(other.bytes),
        owner_(std::exchange(other.owner_, nullptr)),
        token_(other.token_) {}
  Arrival& operator=(Arrival&&) = delete;
  ~Arrival() {
    if (owner_) owner_->release(source, token_);
  }

  const int source;
  const Slot slot;
  const std::span<const std::byte> bytes;

 private:
  Release* owner_;
  uint64_t token_;
};

enum class Loss {
  kLeft,    // closed its communicator after delivering all messages
  kGaveUp,  // failed, and sent the reason
  kDied,
};

// The receiver of messages: the engine.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void on_control(int source, std::span<const std::byte> message) = 0;
  virtual void on_bulk(Arrival arrival) = 0;
  // A bulk message has arrived, but this rank lacks a resource to read it.
  virtual void on_unreadable(int source, Slot slot, const Error& error) = 0;
  virtual void on_peer_lost(int rank, Loss how, const std::string& reason) = 0;
};

// Discards incoming messages while this rank leaves.
class DeafSink : public Sink {
 public:
  void on_control(int, std::span<const std::byte>) override {}
  void on_bulk(Arrival) override {}
  void on_unreadable(int, Slot, const Error&) override {}
  void on_peer_lost(int, Loss, const std::string&) override {}
};

inline constexpr size_t kMaxControlBytes = 16 * 1024;
inline constexpr uint32_t kChannels = 1u << 30;   // channels are less than this
inline constexpr uint32_t kSequences = 1u << 14;  // fits the tags of every MPI
inline constexpr size_t kHeadroom = 64;  // a cache line, so that payloads in shared memory stay
                                         // aligned

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  virtual BufferRef allocate(size_t bytes) = 0;
  virtual void send_control(int destination, std::span<const std::byte> message) = 0;
  // A buffer may be sent to several ranks, on one channel.
  virtual void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
                    const std::shared_ptr<SendState>& state) = 0;

  // Makes progress without blocking. Returns whether anything happened.
  virtual bool progress(Sink& sink) = 0;
  virtual void wait(std::chrono::microseconds at_most) = 0;
  virtual void wake() = 0;  // callable from any thread

  // Whether all messages are handed over: peers receive them without this rank's progress.
  virtual bool flushed() const = 0;
  // Also whether peers have read them, if they read this rank's memory.
  virtual bool drained() const = 0;
  // Notifies peers that this rank leaves. `graceful`: after drained().
  virtual void leave(bool graceful, const std::string& reason) = 0;

  // The number of unauthenticated connections that were rejected.
  virtual int64_t rejected_connections() const { return 0; }
};

// ---- the table -----------------------------------------------------------------------------

// The ranks to connect, the longest time to wait for them, and the deadline of collectives.
struct Reach {
  std::vector<bool> ranks;
  std::chrono::duration<double> at_most;
  std::chrono::duration<double> timeout = at_most;
};

// Sets up a transport among the ranks of a bootstrap. All ranks exchange offers, then decide from
// the same bytes, so they agree. connect() contains no collective call, so a rank on which it
// throws does not block others.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual Bytes offer() const = 0;
  // "" if these ranks can be connected, else the reason why not.
  virtual std::string refusal(const std::vector<Bytes>& offers) const = 0;
  // May throw; the ranks then agree to try the next transport. Waits for peers only if both ends of
  // a connection must take part.
  virtual std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                             const Reach& reach) = 0;
};

struct TransportEntry {
  const char* name;
  const char* description;
  const char* communicator_type;  // the COMMUNICATOR_TYPE that requires it; "" if AUTO only
  int64_t chunk_bytes;            // largest encoded size of a message of a large tensor
  bool elastic;                   // whether it connects the survivors of a lost process
  // Returns nullptr if this process cannot use the transport at all (MPI is not initialized). If it
  // throws, this rank has no offer and reports the reason.
  std::unique_ptr<Connector> (*make)(int rank, int size);
};

// In order of preference.
const std::vector<TransportEntry>& transport_table();
const TransportEntry& transport_entry(const std::string& name);

std::unique_ptr<Connector> make_thread_connector(int rank, int size);
std::unique_ptr<Connector> make_shm_connector(int rank, int size);
std::unique_ptr<Connector> make_hybrid_connector(int rank, int size);      // shm and mpi
std::unique_ptr<Connector> make_hybrid_tcp_connector(int rank, int size);  // shm and tcp
std::unique_ptr<Connector> make_mpi_connector(int rank, int size);
std::unique_ptr<Connector> make_tcp_connector(int rank, int size);

}  // namespace cgx
