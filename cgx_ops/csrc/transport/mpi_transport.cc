// The MPI transport. Every message is a non-blocking send. MpiPost receives for all communicators
// of this process. The tag of a message is its sequence; MPI preserves the order between two ranks.
//
// Messages are at most a chunk (32 KiB of payload), which Open MPI sends eagerly over TCP. Larger
// single sends use only one direction of the link at a time and take twice as long.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/hash.h"
#include "base/status.h"
#include "transport/mpi.h"
#include "transport/mpi_post.h"
#include "transport/mpi_world.h"
#include "transport/transport.h"

namespace cgx {
namespace {

constexpr int kSendWindow = 16;  // sends passed to MPI at a time, per destination
constexpr auto kFarewell = std::chrono::seconds(1);

enum Kind : uint32_t { kControl = 1, kBulk = 2, kBye = 3 };

static_assert(sizeof(MpiPrefix) <= kHeadroom);

class MpiTransport : public Transport, private Arrival::Release {
 public:
  // `ranks_in_job`: by rank.
  MpiTransport(uint64_t communicator, int rank, const std::vector<int>& ranks_in_job)
      : communicator_(communicator),
        rank_(rank),
        box_(post_.open(communicator)),
        links_(ranks_in_job.size()) {
    for (int peer = 0; peer < static_cast<int>(ranks_in_job.size()); ++peer) {
      links_[peer].rank_in_job = ranks_in_job[peer];
      rank_of_[ranks_in_job[peer]] = peer;
    }
  }

  // Leaks unfinished sends and their memory, because MPI may still use them.
  ~MpiTransport() override {
    if (!sending() && abandoned_.empty()) return;
    new std::pair(std::move(links_), std::move(abandoned_));  // NOLINT
    mpi_leave_behind();
  }

  const char* name() const override { return "mpi"; }

  BufferRef allocate(size_t bytes) override {
    const size_t whole = kHeadroom + bytes;
    auto block = post_.blocks().take(whole);
    std::byte* const data = block.get() + kHeadroom;
    return {new Buffer{data, bytes, 0, 0},
            [this_block = block.release(), whole, &blocks = post_.blocks()](Buffer* buffer) {
              blocks.give_back(BlockPool::Block(this_block), whole);
              delete buffer;
            }};
  }

  void send_control(int destination, std::span<const std::byte> message) override {
    send_unread(destination, kControl, message);
  }

  void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override {
    require(bytes <= INT_MAX - sizeof(MpiPrefix), CGX_UNSUPPORTED, "a bucket of ", bytes,
            " bytes does not fit into an MPI message: reduce bucket_size");
    state->begin(destination);
    queue(destination, {{communicator_, kBulk, slot.channel}, slot.sequence, buffer, bytes, state});
  }

  bool progress(Sink& sink) override {
    require_mpi();
    const bool sent = test_sends(sink);
    const bool received = receive(sink);
    return sent || received;
  }

  void wait(std::chrono::microseconds at_most) override {
    box_->bell.sleep(seen_, std::min(at_most, kMpiPollInterval));
    seen_ = box_->bell.count.load();
  }
  void wake() override { box_->bell.ring(); }

  bool flushed() const override {
    // Peers that have left, or have cancelled the collective, may never receive messages in flight.
    const auto over = [](const Outgoing& message) {
      return message.state && message.state->given_up();
    };
    return std::all_of(links_.begin(), links_.end(), [&](const Link& link) {
      return link.lost ||
             (link.queued.empty() && std::all_of(link.sending.begin(), link.sending.end(), over));
    });
  }
  bool drained() const override { return flushed(); }

  void leave(bool graceful, const std::string& reason) override {
    if (mpi_finalized()) return;
    Bytes bye = to_bytes(static_cast<uint8_t>(graceful));
    bye.insert(bye.end(), reinterpret_cast<const std::byte*>(reason.data()),
               reinterpret_cast<const std::byte*>(reason.data() + reason.size()));
    for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer)
      if (peer != rank_ && !links_[peer].lost) send_unread(peer, kBye, bye);
    DeafSink deaf;
    const auto deadline = std::chrono::steady_clock::now() + kFarewell;
    while (!drained() && std::chrono::steady_clock::now() < deadline) test_sends(deaf);
  }

 private:
  struct Outgoing {
    MpiPrefix prefix;
    uint32_t sequence;
    BufferRef buffer;
    size_t bytes;
    std::shared_ptr<SendState> state;  // of a bulk message
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Link {
    int rank_in_job = 0;
    bool lost = false;
    std::deque<Outgoing> queued;
    std::list<Outgoing> sending;
  };

  bool sending() const {
    return std::any_of(links_.begin(), links_.end(),
                       [](const Link& link) { return !link.sending.empty(); });
  }

  void send_unread(int destination, Kind kind, std::span<const std::byte> message) {
    auto buffer = allocate(message.size());
    std::memcpy(buffer->data, message.data(), message.size());
    queue(destination, {{communicator_, kind, 0}, 0, buffer, message.size(), nullptr});
  }

  void queue(int destination, Outgoing message) {
    links_[destination].queued.push_back(std::move(message));
    start_sends(destination);
  }

  void start_sends(int destination) {
    Link& link = links_[destination];
    while (!link.queued.empty() && link.sending.size() < kSendWindow) {
      link.sending.push_back(std::move(link.queued.front()));
      link.queued.pop_front();
      Outgoing& message = link.sending.back();
      if (link.lost || mpi_finalized()) {
        settle(destination, message);
        link.sending.pop_back();
        continue;
      }
      // The prefix is equal for all destinations, and the buffer may be in flight already.
      std::byte* const begin = message.buffer->data - sizeof(MpiPrefix);
      if (std::memcmp(begin, &message.prefix, sizeof(MpiPrefix)) != 0)
        std::memcpy(begin, &message.prefix, sizeof(MpiPrefix));
      const int code = MPI_Isend(begin, static_cast<int>(sizeof(MpiPrefix) + message.bytes),
                                 MPI_BYTE, link.rank_in_job, static_cast<int>(message.sequence),
                                 mpi_job().messages, &message.request);
      if (code != MPI_SUCCESS) {
        settle(destination, message);
        link.sending.pop_back();
        errors_.emplace_back(destination, mpi_text(code));
        return;
      }
    }
  }

  static void settle(int destination, const Outgoing& message) {
    if (!message.state) return;
    message.state->hand_over();
    message.state->release(destination);
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
        settle(peer, *it);
        it = sending.erase(it);
        worked = true;
      }
      start_sends(peer);
    }
    for (auto& [peer, text] : std::exchange(errors_, {})) lose(peer, Loss::kDied, text, sink);
    return worked;
  }

  bool receive(Sink& sink) {
    post_.progress();
    std::deque<MpiMessage> messages;
    std::vector<int> dead;
    {
      const std::lock_guard lock(box_->mutex);
      messages.swap(box_->messages);
      dead.swap(box_->dead);
    }
    for (MpiMessage& message : messages) deliver(std::move(message), sink);
    for (const int rank_in_job : dead)
      if (const auto found = rank_of_.find(rank_in_job); found != rank_of_.end())
        lose(found->second, Loss::kDied, "its process ended", sink);
    return !messages.empty() || !dead.empty();
  }

  void deliver(MpiMessage message, Sink& sink) {
    const auto found = rank_of_.find(message.sender);
    require(found != rank_of_.end(), CGX_PEER_FAILED, "rank ", message.sender,
            " of the MPI job, which is not a rank of this communicator, sent it a message");
    const int source = found->second;
    if (links_[source].lost) return;
    const MpiPrefix prefix = message.prefix();
    const auto payload = message.payload();
    if (prefix.kind == kBulk) {
      const Slot slot{prefix.channel, message.sequence};
      const uint64_t token = next_token_++;
      held_.emplace(token, std::move(message));
      sink.on_bulk(Arrival(source, slot, payload, this, token));
      return;
    }
    if (prefix.kind == kControl) {
      sink.on_control(source, payload);
    } else {
      require(prefix.kind == kBye && !payload.empty(), CGX_PEER_FAILED, "rank ", source,
              " sent a message of kind ", prefix.kind, " with ", payload.size(), " bytes");
      const std::string reason(reinterpret_cast<const char*>(payload.data()) + 1,
                               payload.size() - 1);
      lose(source, payload[0] == std::byte{1} ? Loss::kLeft : Loss::kGaveUp, reason, sink);
    }
    post_.blocks().give_back(std::move(message.block), message.size);
  }

  void release(int, uint64_t token) override {
    const auto held = held_.find(token);
    post_.blocks().give_back(std::move(held->second.block), held->second.size);
    held_.erase(held);
  }

  void lose(int peer, Loss how, const std::string& reason, Sink& sink) {
    Link& link = links_[peer];
    if (link.lost) return;
    link.lost = true;
    for (auto& message : link.queued) settle(peer, message);
    link.queued.clear();
    if (how != Loss::kLeft) {
      for (auto& message : link.sending) {
        settle(peer, message);
        abandoned_.push_back(message.buffer);  // MPI may still read it
      }
      link.sending.clear();
    }
    sink.on_peer_lost(peer, how, reason);
  }

  MpiPost& post_ = MpiPost::instance();
  const uint64_t communicator_;
  const int rank_;
  const std::shared_ptr<MpiBox> box_;
  std::vector<Link> links_;               // by rank
  std::unordered_map<int, int> rank_of_;  // by rank in the job
  std::unordered_map<uint64_t, MpiMessage> held_;
  uint64_t next_token_ = 0;
  std::vector<std::pair<int, std::string>> errors_;
  std::vector<BufferRef> abandoned_;
  uint32_t seen_ = 0;
};

struct Offer {
  uint64_t job;
  int64_t rank_in_job;
  uint64_t serial;  // number of the communicator on this rank

  static Offer read(const Bytes& bytes) { return from_bytes<Offer>(bytes, "an offer of MPI"); }
};

std::atomic<uint64_t> next_serial{0};

class MpiConnector : public Connector {
 public:
  explicit MpiConnector(int rank) : rank_(rank) {}

  Bytes offer() const override {
    int rank_in_job = 0;
    MPI_Comm_rank(mpi_job().world, &rank_in_job);
    return to_bytes(Offer{mpi_job().number, rank_in_job, serial_});
  }

  std::string refusal(const std::vector<Bytes>& offers) const override {
    std::set<int64_t> ranks_in_job;
    for (size_t peer = 0; peer < offers.size(); ++peer) {
      const Offer offer = Offer::read(offers[peer]);
      if (offer.job != Offer::read(offers[0]).job)
        return join("rank ", peer, " belongs to a different MPI job than rank 0");
      if (!ranks_in_job.insert(offer.rank_in_job).second)
        return join("rank ", peer, " is in the same process as another rank");
    }
    return "";
  }

  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers, const Reach&) override {
    std::vector<int> ranks_in_job;
    uint64_t communicator = fnv1a({});  // a hash of all ranks' offers, which are unique
    for (const Bytes& offer : offers) {
      ranks_in_job.push_back(static_cast<int>(Offer::read(offer).rank_in_job));
      communicator = fnv1a(offer, communicator);
    }
    return std::make_unique<MpiTransport>(communicator, rank_, ranks_in_job);
  }

 private:
  const int rank_;
  const uint64_t serial_ = next_serial++;
};

}  // namespace

std::unique_ptr<Connector> make_connector_of_job(int rank) {
  if (!mpi_job().ready || mpi_finalized()) return nullptr;
  return std::make_unique<MpiConnector>(rank);
}

}  // namespace cgx
