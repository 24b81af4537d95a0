// The TCP transport: one connection between any two ranks, framed messages, and one epoll for all
// connections.
//
//   sending    A message is written directly from its buffer, as far as the kernel accepts it; the
//              rest waits for room. So both directions of a link are used at the same time.
//   receiving  Available bytes are read into a block, and frames are delivered in place.
//   ends       A leaving rank sends a last frame. A stream that ends without it means a dead peer.
//              A host that vanishes is detected by the kernel's keep-alive.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/status.h"
#include "transport/own_descriptors.h"
#include "transport/tcp_frames.h"
#include "transport/tcp_rendezvous.h"
#include "transport/transport.h"

namespace cgx {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kFarewell = std::chrono::seconds(1);
constexpr auto kLongestRendezvous = std::chrono::seconds(60);
constexpr size_t kFramesAtOnce = 16;         // per system call
constexpr size_t kReadAtOnce = 1024 * 1024;  // from one peer, before other peers are served
constexpr std::array<std::byte, sizeof(FrameHeader)> kPadding{};

// Shared by all communicators. Never destroyed: buffers may be released at exit.
BlockPool& blocks() {
  static auto* pool = new BlockPool;
  return *pool;
}

[[noreturn]] void fail_system(const char* call) {
  fail(CGX_SYSTEM, call, " failed: ", std::strerror(errno));
}

class TcpTransport : public Transport, private Arrival::Release {
 public:
  TcpTransport(int rank, TcpRendezvous::Connected met, std::chrono::duration<double> silence)
      : rank_(rank), rejected_(met.rejected_connections), links_(met.connections.size()) {
    if (epoll_.get() < 0) fail_system("epoll_create1");
    if (bell_.get() < 0) fail_system("eventfd");
    watch(EPOLL_CTL_ADD, bell_.get(), EPOLLIN, kBell);
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      Link& link = links_[peer];
      link.lost = met.connections[peer].get() < 0;
      if (link.lost) continue;
      prepare_connection(met.connections[peer], silence);
      link.socket = OwnDescriptor(std::move(met.connections[peer]));
      watch(EPOLL_CTL_ADD, link.socket.fd().get(), EPOLLIN, peer);
    }
  }

  const char* name() const override { return "tcp"; }
  int64_t rejected_connections() const override { return rejected_; }

  BufferRef allocate(size_t bytes) override {
    auto block = blocks().take(bytes);
    std::byte* const data = block.get();
    return {new Buffer{data, bytes, 0, 0}, [kept = block.release(), bytes](Buffer* buffer) {
              blocks().give_back(BlockPool::Block(kept), bytes);
              delete buffer;
            }};
  }

  void send_control(int destination, std::span<const std::byte> message) override {
    send_copy(destination, FrameHeader::kControl, message);
  }

  void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override {
    require(bytes <= kLongestPayload, CGX_UNSUPPORTED, "a bucket of ", bytes,
            " bytes does not fit into a TCP message: reduce bucket_size");
    state->begin(destination);
    queue(destination,
          {{static_cast<uint32_t>(bytes), FrameHeader::kBulk, slot.channel, slot.sequence},
           buffer,
           state});
  }

  bool progress(Sink& sink) override {
    if (left_) return false;
    if (events_ == 0) poll(std::chrono::milliseconds(0));
    const int count = std::exchange(events_, 0);
    for (int i = 0; i < count; ++i) {
      const uint64_t what = ready_[i].data.u64;
      if (what == kBell) {
        silence_bell();
        continue;
      }
      const int peer = static_cast<int>(what);
      if (ready_[i].events & EPOLLOUT) write(links_[peer]);
      if (ready_[i].events & ~EPOLLOUT) read(peer, sink);
    }
    return count > 0;
  }

  void wait(std::chrono::microseconds at_most) override {
    if (events_ == 0) poll(std::chrono::ceil<std::chrono::milliseconds>(at_most));
  }

  void wake() override {
    const uint64_t one = 1;
    if (!rung_.exchange(true)) (void)!::write(bell_.get(), &one, sizeof(one));
  }

  bool flushed() const override {
    // Peers that have cancelled the collective may never receive messages in flight.
    const auto over = [](const Outgoing& message) {
      return message.state && message.state->given_up();
    };
    return std::all_of(links_.begin(), links_.end(), [&](const Link& link) {
      return link.lost || std::all_of(link.queue.begin(), link.queue.end(), over);
    });
  }

  // If all hosts have acknowledged everything, closing the connections loses nothing.
  bool drained() const override {
    return flushed() && std::all_of(links_.begin(), links_.end(), [](const Link& link) {
             return link.lost || unconfirmed(link.socket.fd()) == 0;
           });
  }

  void leave(bool graceful, const std::string& reason) override {
    if (left_) return;
    Bytes bye = to_bytes(static_cast<uint8_t>(graceful));
    const auto text = std::as_bytes(std::span(reason));
    bye.insert(bye.end(), text.begin(), text.end());
    for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer)
      send_copy(peer, FrameHeader::kBye, bye);
    // Read and discard incoming data: closing a connection with unread bytes would reset it, and
    // lose data in flight to the peer.
    DeafSink deaf;
    const auto deadline = Clock::now() + kFarewell;
    while (!drained() && Clock::now() < deadline)
      if (!progress(deaf)) poll(std::chrono::milliseconds(1));
    left_ = true;
    for (Link& link : links_) settle_queue(link);
  }

 private:
  static constexpr uint64_t kBell = UINT64_MAX;  // the bell's event; other events have the peer's
                                                 // rank

  struct Outgoing {
    FrameHeader header;
    BufferRef buffer;
    std::shared_ptr<SendState> state;  // of a bulk message
    size_t bytes() const { return sizeof(header) + header.size + frame_padding(header.size); }
  };
  struct Link {
    OwnDescriptor socket;
    FrameReader reader{&blocks()};
    std::deque<Outgoing> queue;
    size_t written = 0;  // bytes of the first message in the queue
    bool awaits_room = false;
    bool broken = false;   // cannot be written; the end has not been read yet
    bool garbled = false;  // sent something malformed: the rest is read and discarded
    bool lost = false;     // or never connected
  };

  // ---- events
  // ------------------------------------------------------------------------------------

  void watch(int operation, int fd, uint32_t events, uint64_t what) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = what;
    if (epoll_ctl(epoll_.get(), operation, fd, &event) != 0) fail_system("epoll_ctl");
  }
  void watch_room(Link& link, bool awaits) {
    if (std::exchange(link.awaits_room, awaits) == awaits) return;
    watch(EPOLL_CTL_MOD, link.socket.fd().get(), EPOLLIN | (awaits ? uint32_t{EPOLLOUT} : 0),
          static_cast<uint64_t>(&link - links_.data()));
  }
  void poll(std::chrono::milliseconds at_most) {
    events_ = std::max(0, epoll_wait(epoll_.get(), ready_.data(), ready_.size(),
                                     static_cast<int>(at_most.count())));
  }
  void silence_bell() {
    uint64_t rings;
    (void)!::read(bell_.get(), &rings, sizeof(rings));
    rung_ = false;
  }

  // ---- sending
  // -----------------------------------------------------------------------------------

  void send_copy(int destination, FrameHeader::Kind kind, std::span<const std::byte> message) {
    if (destination == rank_ || links_[destination].lost) return;
    const BufferRef buffer = allocate(message.size());
    if (!message.empty()) std::memcpy(buffer->data, message.data(), message.size());
    queue(destination, {{static_cast<uint32_t>(message.size()), kind, 0, 0}, buffer, nullptr});
  }

  void queue(int destination, Outgoing message) {
    Link& link = links_[destination];
    if (link.lost || link.broken || left_) return settle(destination, message);
    link.queue.push_back(std::move(message));
    if (!link.awaits_room) write(link);
  }

  static void settle(int destination, const Outgoing& message) {
    if (!message.state) return;
    message.state->hand_over();
    message.state->release(destination);
  }
  void settle_queue(Link& link) {
    for (const Outgoing& message : link.queue) settle(rank_of(link), message);
    link.queue.clear();
    link.written = 0;
  }
  int rank_of(const Link& link) const { return static_cast<int>(&link - links_.data()); }

  // Writes as much as the kernel accepts.
  void write(Link& link) {
    while (drop_given_up(link)) {
      const ssize_t sent = write_some(link);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno == EAGAIN) return watch_room(link, true);
      if (sent < 0) {  // read() reports the reason, after the peer's earlier messages
        link.broken = true;
        settle_queue(link);
        break;
      }
      advance(link, static_cast<size_t>(sent));
    }
    watch_room(link, false);
  }

  // Drops the messages of failed collectives once the first of them is not partly written. All
  // messages of a collective are dropped together, because the peer would miss those between.
  // Returns false if nothing is left.
  bool drop_given_up(Link& link) {
    while (!link.queue.empty() && link.written == 0) {
      const std::shared_ptr<SendState> state = link.queue.front().state;
      if (!state || !state->given_up()) break;
      for (const Outgoing& message : link.queue)
        if (message.state == state) settle(rank_of(link), message);
      std::erase_if(link.queue, [&](const Outgoing& each) { return each.state == state; });
    }
    return !link.queue.empty();
  }

  static ssize_t write_some(Link& link) {
    std::array<iovec, 3 * kFramesAtOnce> parts;
    size_t count = 0, skip = link.written;
    const auto add = [&](const void* at, size_t bytes) {
      const size_t skipped = std::min(skip, bytes);
      skip -= skipped;
      if (bytes > skipped)
        parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(at)) + skipped,
                          bytes - skipped};
    };
    for (size_t i = 0; i < std::min(link.queue.size(), kFramesAtOnce); ++i) {
      const Outgoing& message = link.queue[i];
      add(&message.header, sizeof(message.header));
      add(message.buffer->data, message.header.size);
      add(kPadding.data(), frame_padding(message.header.size));
    }
    msghdr all{};
    all.msg_iov = parts.data();
    all.msg_iovlen = count;
    return sendmsg(link.socket.fd().get(), &all, MSG_NOSIGNAL);
  }

  void advance(Link& link, size_t sent) {
    link.written += sent;
    while (!link.queue.empty() && link.written >= link.queue.front().bytes()) {
      link.written -= link.queue.front().bytes();
      settle(rank_of(link), link.queue.front());
      link.queue.pop_front();
    }
  }

  // ---- receiving
  // ---------------------------------------------------------------------------------

  void read(int peer, Sink& sink) {
    Link& link = links_[peer];
    for (size_t taken = 0; taken < kReadAtOnce && !link.lost;) {
      const std::span<std::byte> room = link.garbled ? std::span(garbage_) : link.reader.room();
      const ssize_t got = recv(link.socket.fd().get(), room.data(), room.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return lose(peer, Loss::kDied, end_of(got, errno), sink);
      if (!link.garbled) link.reader.filled(static_cast<size_t>(got));
      while (auto frame = next_frame(peer)) deliver(peer, std::move(*frame), sink);
      if (static_cast<size_t>(got) < room.size()) return;  // no more is available
      taken += static_cast<size_t>(got);
    }
  }

  std::optional<FrameReader::Frame> next_frame(int peer) {
    Link& link = links_[peer];
    if (link.lost || link.garbled) return std::nullopt;
    try {
      auto frame = link.reader.next();
      require(!frame || frame->header.kind != FrameHeader::kBye || !frame->payload.empty(),
              CGX_PEER_FAILED, "a last message without content");
      return frame;
    } catch (const Error& error) {
      link.garbled = true;
      fail(error.status(), "rank ", peer, " sent ", error.what());
    }
  }

  static std::string end_of(ssize_t got, int error) {
    if (got == 0) return "it closed its connection";
    if (error == ETIMEDOUT) return "its host does not respond";
    return join("its connection ended: ", std::strerror(error));
  }

  void deliver(int peer, FrameReader::Frame frame, Sink& sink) {
    const auto& header = frame.header;
    if (header.kind == FrameHeader::kBulk) {
      const uint64_t token = next_token_++;
      held_.emplace(token, std::move(frame.memory));
      sink.on_bulk(Arrival(peer, {header.channel, header.sequence}, frame.payload, this, token));
    } else if (header.kind == FrameHeader::kControl) {
      sink.on_control(peer, frame.payload);
    } else {
      const std::string reason(reinterpret_cast<const char*>(frame.payload.data()) + 1,
                               frame.payload.size() - 1);
      lose(peer, frame.payload[0] == std::byte{1} ? Loss::kLeft : Loss::kGaveUp, reason, sink);
    }
  }

  void release(int, uint64_t token) override { held_.erase(token); }

  void lose(int peer, Loss how, const std::string& reason, Sink& sink) {
    Link& link = links_[peer];
    link.lost = true;
    settle_queue(link);
    link.socket = OwnDescriptor();
    sink.on_peer_lost(peer, how, reason);
  }

  const int rank_;
  const int64_t rejected_;
  const FileDescriptor epoll_{epoll_create1(EPOLL_CLOEXEC)};
  const FileDescriptor bell_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> rung_{false};
  std::vector<Link> links_;  // by rank
  std::array<epoll_event, 64> ready_;
  int events_ = 0;                       // ready and not handled yet
  std::array<std::byte, 4096> garbage_;  // read from garbled connections
  std::unordered_map<uint64_t, std::shared_ptr<std::byte>> held_;
  uint64_t next_token_ = 0;
  bool left_ = false;
};

class TcpConnector : public Connector {
 public:
  explicit TcpConnector(int rank) : rank_(rank), rendezvous_(rank) {}

  Bytes offer() const override { return to_bytes(rendezvous_.offer()); }

  std::string refusal(const std::vector<Bytes>& offers) const override {
    for (const Bytes& offer : offers) TcpOffer::read(offer);  // throws if it is invalid
    return "";
  }

  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                     const Reach& reach) override {
    std::vector<TcpOffer> all;
    for (const Bytes& offer : offers) all.push_back(TcpOffer::read(offer));
    // Half of the time is left for the ranks to exchange their results: some fail early.
    const auto at_most =
        std::min<std::chrono::duration<double>>(reach.at_most / 2, kLongestRendezvous);
    // Detects a vanished host before the collectives' own deadline.
    return std::make_unique<TcpTransport>(rank_, rendezvous_.connect(all, {reach.ranks, at_most}),
                                          reach.timeout / 2);
  }

 private:
  const int rank_;
  TcpRendezvous rendezvous_;
};

}  // namespace

std::unique_ptr<Connector> make_tcp_connector(int rank, int) {
  return std::make_unique<TcpConnector>(rank);
}

}  // namespace cgx
