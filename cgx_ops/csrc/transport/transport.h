// A transport moves bytes between the ranks of one communicator. It knows no dtype and no
// algorithm.
//
//   control   small messages, ordered between two ranks, delivered unasked: the engine's headers
//   bulk      messages on a channel, ordered within it; an engine sends them only to a rank whose
//             header it has, so nothing large waits for a receiver that is not ready
//
// One thread at a time (the holder of the engine's progress role) calls everything but wake().
// Nothing here blocks but wait(), which a message, wake() or its timeout ends.
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

// Memory that peers can read once it has been sent; encoders write straight into it. Its last owner
// (the sender, or the transport until every peer has read it) gives it back to the pool.
struct Buffer {
  std::byte* data = nullptr;  // kHeadroom bytes before it are the transport's
  size_t capacity = 0;
  uint64_t segment = 0;  // where peers find it: the transport's own terms
  size_t offset = 0;
};
using BufferRef = std::shared_ptr<Buffer>;

// Where bulk messages of one collective belong: a channel, and the number that a message has among
// those to its destination, so that a lost, doubled or displaced one is noticed.
struct Slot {
  uint32_t channel;
  uint32_t sequence;  // below kSequences: they begin anew after that
};

// The sends of one collective that are still under way. Transports tell it: a message is released
// when the peer has read it in shared memory, and when the kernel or MPI has taken it over TCP and
// MPI.
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

  // The collective has failed here: nobody needs to read what it sent.
  void give_up() { given_up_ = true; }
  bool given_up() const { return given_up_; }

  int unsent() const { return unsent_; }          // the sender must still drive progress
  int unreleased() const { return unreleased_; }  // bounds what a collective keeps in flight
  bool unread_by(int rank) const { return unread_by_[rank] != 0; }

 private:
  int unsent_ = 0, unreleased_ = 0;
  bool given_up_ = false;
  std::vector<int> unread_by_;  // by rank
};

// A bulk message. The bytes stay valid until the Arrival is destroyed, which tells the sender so.
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
  kLeft,    // closed its communicator, after everything it sent was handed over
  kGaveUp,  // failed, and says why
  kDied,
};

// Who receives: the engine.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void on_control(int source, std::span<const std::byte> message) = 0;
  virtual void on_bulk(Arrival arrival) = 0;
  // A bulk message is here, but this rank cannot take it in: it is short of something.
  virtual void on_unreadable(int source, Slot slot, const Error& error) = 0;
  virtual void on_peer_lost(int rank, Loss how, const std::string& reason) = 0;
};

// Of who leaves: what still comes is taken in, and dropped.
class DeafSink : public Sink {
 public:
  void on_control(int, std::span<const std::byte>) override {}
  void on_bulk(Arrival) override {}
  void on_unreadable(int, Slot, const Error&) override {}
  void on_peer_lost(int, Loss, const std::string&) override {}
};

inline constexpr size_t kMaxControlBytes = 16 * 1024;
inline constexpr uint32_t kChannels = 1u << 30;   // channel numbers are below
inline constexpr uint32_t kSequences = 1u << 14;  // what every MPI's tags can tell
inline constexpr size_t kHeadroom = 64;  // a cache line: in shared memory payloads stay aligned

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  virtual BufferRef allocate(size_t bytes) = 0;
  virtual void send_control(int destination, std::span<const std::byte> message) = 0;
  // A buffer may go to several ranks, on one channel.
  virtual void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
                    const std::shared_ptr<SendState>& state) = 0;

  // Moves what can be moved without waiting; returns whether anything did.
  virtual bool progress(Sink& sink) = 0;
  virtual void wait(std::chrono::microseconds at_most) = 0;
  virtual void wake() = 0;  // from any thread

  // Everything sent has been handed over: peers get it without this rank's progress.
  virtual bool flushed() const = 0;
  // It has also been read, where peers read this rank's memory.
  virtual bool drained() const = 0;
  // Tells peers that this rank leaves. graceful: after drained().
  virtual void leave(bool graceful, const std::string& reason) = 0;

  // Connections of others than the ranks that were refused.
  virtual int64_t strangers() const { return 0; }
};

// ---- the table -----------------------------------------------------------------------------

// Whom this rank talks to by a transport, and for how long it waits for anything of theirs.
struct Reach {
  std::vector<bool> ranks;
  std::chrono::duration<double> at_most;
};

// Brings up one transport among the ranks of a bootstrap: everybody's offers are exchanged, then
// all ranks decide alike from the same bytes. connect() makes no collective call of its own, so a
// rank on which it throws keeps nobody waiting.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual Bytes offer() const = 0;
  // "" if these ranks can be connected, else why not.
  virtual std::string refusal(const std::vector<Bytes>& offers) const = 0;
  // May throw; the ranks then agree to try the next transport. Waits for nobody, but where a
  // connection takes both of its ends.
  virtual std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                             const Reach& reach) = 0;
};

struct TransportEntry {
  const char* name;
  const char* description;
  const char* communicator_type;  // the COMMUNICATOR_TYPE that insists on it; "" if AUTO only
  int64_t chunk_bytes;            // of encoded values, at most, in a message of a large tensor
  // nullptr when this process cannot serve the transport at all (MPI is not up). May throw: this
  // rank then has no offer, and says why.
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
