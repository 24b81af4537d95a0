// The MPI transport: every message is a non-blocking send on a communicator of its own, taken in by
// matched probes. Tag 0 is control, the other tags are channels; MPI keeps a tag's messages in
// order.
//
// Messages are at most a chunk (32 KiB of payload), which Open MPI sends eagerly over TCP: large
// single sends use one direction of the link at a time and take twice as long.
#include <mpi.h>
// After mpi.h, whose macros it needs.
#include <mpi-ext.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "base/status.h"
#include "transport/doorbell.h"
#include "transport/mpi.h"
#include "transport/mpi_world.h"
#include "transport/transport.h"

namespace cgx {
namespace {

constexpr int kSendWindow = 16;  // sends handed to MPI per destination

// Memory for messages, kept for reuse: fresh memory is paid for page by page.
class BlockPool {
 public:
  using Block = std::unique_ptr<std::byte[]>;

  Block take(size_t bytes) {
    if (bytes > kBlockBytes) return std::make_unique_for_overwrite<std::byte[]>(bytes);
    if (free_.empty()) return std::make_unique_for_overwrite<std::byte[]>(kBlockBytes);
    Block block = std::move(free_.back());
    free_.pop_back();
    return block;
  }
  void give_back(Block block, size_t bytes) {
    if (bytes <= kBlockBytes && free_.size() < kMostFree) free_.push_back(std::move(block));
  }

 private:
  static constexpr size_t kBlockBytes = 64 * 1024;  // holds a chunk
  static constexpr size_t kMostFree = 64;
  std::vector<Block> free_;
};

class MpiTransport : public Transport, private Arrival::Release {
 public:
  MpiTransport(MPI_Comm comm, int rank, int size)
      : comm_(comm), rank_(rank), links_(size), lost_(size, false) {
    void* upper = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &upper, &found);
    require(found && *static_cast<int*>(upper) >= static_cast<int>(kChannels), CGX_SYSTEM,
            "this MPI has too few tags: ", found ? *static_cast<int*>(upper) : 0);
  }

  // comm_ is left to MPI_Finalize: freeing is collective, and a rank leaves alone. So are requests
  // that never completed, and the memory MPI may still use for them.
  ~MpiTransport() override {
    if (drained() && receiving_.empty() && abandoned_.empty()) return;
    new std::tuple(std::move(links_), std::move(receiving_), std::move(abandoned_));
  }

  const char* name() const override { return "mpi"; }

  BufferRef allocate(size_t bytes) override {
    // The pool outlives the buffers that collectives still hold when the transport goes.
    return {new Buffer{pool_->take(bytes).release(), bytes, 0, 0}, [pool = pool_](Buffer* buffer) {
              pool->give_back(BlockPool::Block(buffer->data), buffer->capacity);
              delete buffer;
            }};
  }

  void send_control(int destination, std::span<const std::byte> message) override {
    auto buffer = allocate(message.size());
    std::memcpy(buffer->data, message.data(), message.size());
    queue(destination, {0, buffer, message.size(), nullptr});
  }

  void send(int destination, uint32_t channel, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override {
    require(bytes <= INT_MAX, CGX_UNSUPPORTED, "a bucket of ", bytes,
            " bytes does not fit into an MPI message: choose a smaller bucket_size");
    ++state->unsent;
    ++state->unreleased;
    queue(destination, {static_cast<int>(1 + channel), buffer, bytes, state});
  }

  bool progress(Sink& sink) override {
    require(
        !mpi_finalized(), CGX_SYSTEM,
        "MPI was finalized while cgx used it: call cgx_finalize, or close communicators, before");
    const bool sent = test_sends(sink);
    const bool received = receive(sink);
    return sent || received;
  }

  void wait(std::chrono::microseconds at_most) override {
    bell_.sleep(seen_, std::min(at_most, kMpiPollInterval));
    seen_ = bell_.count.load();
  }
  void wake() override { bell_.ring(); }

  bool flushed() const override {
    for (const auto& link : links_)
      if (!link.queued.empty() || !link.sending.empty()) return false;
    return true;
  }
  bool drained() const override { return flushed(); }

  void leave(bool graceful, const std::string& reason) override {
    if (mpi_finalized()) return;
    // A rank that leaves says so on the control channel, behind its last header.
    for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
      if (peer == rank_ || lost_[peer]) continue;
      Bytes bye(2 + reason.size());
      bye[0] = kBye;
      bye[1] = std::byte{graceful};
      std::memcpy(bye.data() + 2, reason.data(), reason.size());
      send_control(peer, bye);
    }
    struct Deaf : Sink {
      void on_control(int, std::span<const std::byte>) override {}
      void on_bulk(Arrival) override {}
      void on_peer_lost(int, Loss, const std::string&) override {}
    } deaf;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!drained() && std::chrono::steady_clock::now() < deadline) test_sends(deaf);
  }

 private:
  // Marks the last control message of a rank; the engine's kinds are small numbers.
  static constexpr std::byte kBye{0xff};

  struct Outgoing {
    int tag;
    BufferRef buffer;
    size_t bytes;
    std::shared_ptr<SendState> state;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Link {
    std::deque<Outgoing> queued;
    std::list<Outgoing> sending;
  };
  struct Incoming {
    int source;
    int tag;
    BlockPool::Block block;
    size_t size;
    MPI_Request request;

    std::span<const std::byte> bytes() const { return {block.get(), size}; }
  };

  void queue(int destination, Outgoing message) {
    links_[destination].queued.push_back(std::move(message));
    start_sends(destination);
  }

  void start_sends(int destination) {
    auto& link = links_[destination];
    while (!link.queued.empty() && link.sending.size() < kSendWindow) {
      link.sending.push_back(std::move(link.queued.front()));
      link.queued.pop_front();
      auto& message = link.sending.back();
      if (lost_[destination] || mpi_finalized()) {
        settle(message);
        link.sending.pop_back();
        continue;
      }
      const int code = MPI_Isend(message.buffer->data, static_cast<int>(message.bytes), MPI_BYTE,
                                 destination, message.tag, comm_, &message.request);
      if (code != MPI_SUCCESS) {
        settle(message);
        link.sending.pop_back();
        errors_.emplace_back(destination, mpi_text(code));
        return;
      }
    }
  }

  static void settle(const Outgoing& message) {
    if (!message.state) return;
    --message.state->unsent;
    --message.state->unreleased;
  }

  bool test_sends(Sink& sink) {
    bool worked = false;
    for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
      auto& sending = links_[peer].sending;
      for (auto it = sending.begin(); it != sending.end();) {
        int done = 0;
        const int code = MPI_Test(&it->request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) errors_.emplace_back(peer, mpi_text(code));
        if (!done && code == MPI_SUCCESS) {
          ++it;
          continue;
        }
        settle(*it);
        it = sending.erase(it);
        worked = true;
      }
      start_sends(peer);
    }
    for (auto& [peer, text] : std::exchange(errors_, {})) lose(peer, Loss::kDied, text, sink);
    return worked;
  }

  bool receive(Sink& sink) {
    bool worked = false;
    for (;;) {
      int found = 0;
      MPI_Message message;
      MPI_Status status;
      const int code = MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &found, &message, &status);
      if (code != MPI_SUCCESS) {
        if (!report_failed(sink)) check_mpi(code, "MPI_Improbe");
        return true;
      }
      if (!found) break;
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      auto& incoming =
          receiving_.emplace_back(Incoming{status.MPI_SOURCE, status.MPI_TAG, pool_->take(bytes),
                                           static_cast<size_t>(bytes), MPI_REQUEST_NULL});
      check_mpi(MPI_Imrecv(incoming.block.get(), bytes, MPI_BYTE, &message, &incoming.request),
                "MPI_Imrecv");
    }
    // In order of arrival: a message is delivered only when those before it have been.
    while (!receiving_.empty()) {
      int done = 0;
      const int code = MPI_Test(&receiving_.front().request, &done, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) {
        lose(receiving_.front().source, Loss::kDied, mpi_text(code), sink);
        receiving_.pop_front();
        continue;
      }
      if (!done) break;
      Incoming incoming = std::move(receiving_.front());
      receiving_.pop_front();
      deliver(std::move(incoming), sink);
      worked = true;
    }
    return worked;
  }

  void deliver(Incoming incoming, Sink& sink) {
    const int source = incoming.source;
    if (lost_[source]) return;
    const auto bytes = incoming.bytes();
    if (incoming.tag != 0) {
      const auto channel = static_cast<uint32_t>(incoming.tag - 1);
      const uint64_t token = next_token_++;
      held_.emplace(token, std::move(incoming));
      sink.on_bulk(Arrival(source, channel, bytes, this, token));
      return;
    }
    if (bytes[0] == kBye) {
      const std::string reason(reinterpret_cast<const char*>(bytes.data()) + 2, bytes.size() - 2);
      lose(source, bytes[1] == std::byte{1} ? Loss::kLeft : Loss::kGaveUp, reason, sink);
    } else {
      sink.on_control(source, bytes);
    }
    pool_->give_back(std::move(incoming.block), incoming.size);
  }

  void release(int, uint64_t token) override {
    const auto held = held_.find(token);
    pool_->give_back(std::move(held->second.block), held->second.size);
    held_.erase(held);
  }

  // Asks a fault-tolerant MPI (mpirun --with-ft ulfm) who died. False if nobody did.
  bool report_failed(Sink& sink) {
    bool any = false;
#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
    MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
    if (MPIX_Comm_failure_ack(comm_) != MPI_SUCCESS ||
        MPIX_Comm_failure_get_acked(comm_, &failed) != MPI_SUCCESS)
      return false;
    MPI_Comm_group(comm_, &all);
    int count = 0;
    MPI_Group_size(failed, &count);
    for (int i = 0; i < count; ++i) {
      int peer = MPI_UNDEFINED;
      MPI_Group_translate_ranks(failed, 1, &i, all, &peer);
      if (peer != MPI_UNDEFINED) lose(peer, Loss::kDied, "its process ended", sink);
      any = true;
    }
    MPI_Group_free(&failed);
    MPI_Group_free(&all);
#endif
    return any;
  }

  void lose(int peer, Loss how, const std::string& reason, Sink& sink) {
    if (lost_[peer]) return;
    lost_[peer] = true;
    for (auto& message : links_[peer].queued) settle(message);
    links_[peer].queued.clear();
    if (how != Loss::kLeft) {
      for (auto& message : links_[peer].sending) {
        settle(message);
        abandoned_.push_back(message.buffer);  // MPI may still read it
      }
      links_[peer].sending.clear();
    }
    sink.on_peer_lost(peer, how, reason);
  }

  const std::shared_ptr<BlockPool> pool_ = std::make_shared<BlockPool>();
  MPI_Comm comm_;
  const int rank_;
  std::vector<Link> links_;
  std::vector<bool> lost_;
  std::deque<Incoming> receiving_;
  std::unordered_map<uint64_t, Incoming> held_;
  uint64_t next_token_ = 0;
  std::vector<std::pair<int, std::string>> errors_;
  std::vector<BufferRef> abandoned_;
  Doorbell bell_;
  uint32_t seen_ = 0;
};

struct Offer {
  uint64_t job;
  int64_t world_rank;
  uint64_t serial;  // of the communicator, on this rank
};

std::atomic<uint64_t> next_serial{0};

class MpiConnector : public Connector {
 public:
  explicit MpiConnector(int rank) : rank_(rank) {}

  Bytes offer() const override {
    int world_rank = 0;
    MPI_Comm_rank(mpi_job().world, &world_rank);
    const Offer mine{mpi_job().number, world_rank, serial_};
    Bytes bytes(sizeof(mine));
    std::memcpy(bytes.data(), &mine, sizeof(mine));
    return bytes;
  }

  std::string refusal(const std::vector<Bytes>& offers) const override {
    for (size_t peer = 0; peer < offers.size(); ++peer)
      if (read(offers[peer]).job != read(offers[0]).job)
        return join("rank ", peer, " belongs to another MPI job than rank 0");
    return "";
  }

  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                     std::chrono::duration<double>) override {
    std::vector<int> ranks;
    for (const auto& offer : offers) ranks.push_back(static_cast<int>(read(offer).world_rank));
    MPI_Group all, members;
    MPI_Comm_group(mpi_job().world, &all);
    MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members);
    // Threads may be making groups side by side, of the same ranks too: serials tell them apart.
    uint32_t tag = 0;
    for (const auto& offer : offers)
      tag = tag * 1000003u +
            static_cast<uint32_t>(read(offer).world_rank * 7919 + read(offer).serial);
    MPI_Comm comm;
    const int code =
        MPI_Comm_create_group(mpi_job().world, members, static_cast<int>(tag % 32749), &comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    check_mpi(code, "MPI_Comm_create_group");
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    return std::make_unique<MpiTransport>(comm, rank_, static_cast<int>(ranks.size()));
  }

 private:
  static Offer read(const Bytes& bytes) {
    Offer offer;
    std::memcpy(&offer, bytes.data(), sizeof(offer));
    return offer;
  }
  int rank_;
  const uint64_t serial_ = next_serial++;
};

}  // namespace

std::unique_ptr<Connector> make_mpi_connector(int rank, int) {
  if (!mpi_job().ready || mpi_finalized()) return nullptr;
  return std::make_unique<MpiConnector>(rank);
}

}  // namespace cgx
