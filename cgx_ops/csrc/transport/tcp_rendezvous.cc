#include "transport/tcp_rendezvous.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "base/status.h"
#include "transport/tcp_handshake.h"

namespace cgx {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kHandshakeTime = std::chrono::seconds(5);    // limit for the handshake of an
                                                            // established connection
constexpr auto kFirstDialTime = std::chrono::seconds(1);    // limit for the first attempt; doubled
                                                            // for each round
constexpr auto kLongestDialTime = std::chrono::seconds(8);  // upper limit for an attempt
constexpr auto kBetweenAttempts = std::chrono::milliseconds(20);
constexpr size_t kMostVisitors = 64;  // waiting connections, in addition to the ranks; the oldest
                                      // is closed

// Whether the peer has closed its end.
bool left(const FileDescriptor& socket) {
  std::byte next;
  const ssize_t there = recv(socket.get(), &next, 1, MSG_PEEK);
  return there == 0 || (there < 0 && errno != EAGAIN && errno != EINTR);
}

// A connection until it is authenticated or given up.
class Conversation {
 public:
  Conversation(FileDescriptor socket, Handshake handshake, bool connecting, Clock::time_point until)
      : socket_(std::move(socket)),
        handshake_(std::move(handshake)),
        connecting_(connecting),
        until_(until) {
    if (!connecting_) send_all(handshake_.opening());
  }

  pollfd waits() const {
    return {socket_.get(), static_cast<short>(connecting_ ? POLLOUT : POLLIN), 0};
  }
  Clock::time_point until() const { return until_; }
  bool proven() const { return handshake_.state() == Handshake::State::kProven; }
  int peer() const { return handshake_.peer(); }
  const std::string& failure() const { return failure_; }  // "" while it continues
  const FileDescriptor& socket() const { return socket_; }
  FileDescriptor take_socket() { return std::move(socket_); }

  // Continues as far as possible without blocking.
  void go_on() {
    if (connecting_) {
      if (const int error = socket_error(socket_)) return give_up(std::strerror(error));
      connecting_ = false;
      until_ = Clock::now() + kHandshakeTime;
    }
    while (handshake_.state() == Handshake::State::kGoing && failure_.empty()) {
      const size_t there = received_.size(), all = handshake_.awaits();
      received_.resize(all);
      const ssize_t got = recv(socket_.get(), received_.data() + there, all - there, 0);
      received_.resize(there + std::max<ssize_t>(got, 0));
      if (got == 0) return give_up("it closed the connection");
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got < 0) return give_up(std::strerror(errno));
      if (received_.size() < all) return;
      send_all(handshake_.take(std::exchange(received_, {})));
      if (handshake_.state() == Handshake::State::kRefused)
        give_up("the process at this address is not a rank of this communicator");
    }
  }
  void give_up(const std::string& why) { failure_ = why; }

 private:
  // A few bytes, for which a new connection always has room.
  void send_all(const Bytes& bytes) {
    if (bytes.empty()) return;
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(bytes.size())) give_up("it does not accept data");
  }

  FileDescriptor socket_;
  Handshake handshake_;
  bool connecting_;
  Clock::time_point until_;
  Bytes received_;
  std::string failure_;
};

// Tries to reach a lower rank, at each of its addresses in turn.
class Dialer {
 public:
  Dialer(const SipKey& key, int rank, int peer, const TcpOffer& offer)
      : key_(key), rank_(rank), peer_(peer) {
    for (const SocketAddress& address : offer.addresses)
      if (address.family != SocketAddress::kNone) addresses_.push_back(address);
    failures_.resize(addresses_.size());
  }
  int peer() const { return peer_; }
  std::optional<Conversation>& attempt() { return attempt_; }
  Clock::time_point next_step() const { return attempt_ ? attempt_->until() : next_attempt_; }

  // Starts an attempt if none is in progress, and gives up one that takes too long.
  void step(Clock::time_point now) {
    if (attempt_ && now >= attempt_->until()) attempt_->give_up("it does not respond");
    if (attempt_ && !attempt_->failure().empty()) {
      failures_[at_] = attempt_->failure();
      attempt_.reset();
      turn(now);
    }
    if (attempt_ || now < next_attempt_ || addresses_.empty()) return;
    FileDescriptor socket = dial(addresses_[at_], &failures_[at_]);
    if (socket.get() < 0) return turn(now);
    attempt_.emplace(std::move(socket), Handshake::dial(key_, rank_, peer_), /*connecting=*/true,
                     now + dial_time_);
  }

  std::string describe() const {
    std::string text = join("rank ", peer_);
    for (size_t i = 0; i < addresses_.size(); ++i)
      text += join(i ? ", " : " (", addresses_[i].text(), ": ",
                   failures_[i].empty() ? "not tried" : failures_[i]);
    return text + ")";
  }

 private:
  void turn(Clock::time_point now) {
    at_ = (at_ + 1) % addresses_.size();
    if (at_ == 0) dial_time_ = std::min<Clock::duration>(2 * dial_time_, kLongestDialTime);
    next_attempt_ = now + kBetweenAttempts;
  }

  const SipKey key_;
  const int rank_, peer_;
  std::vector<SocketAddress> addresses_;
  std::vector<std::string> failures_;  // the last failure per address
  size_t at_ = 0;
  Clock::duration dial_time_ = kFirstDialTime;
  Clock::time_point next_attempt_{};
  std::optional<Conversation> attempt_;
};

class Rendezvous {
 public:
  Rendezvous(int rank, const std::vector<FileDescriptor>& listeners,
             const std::vector<TcpOffer>& offers, const Reach& reach)
      : rank_(rank),
        listeners_(listeners),
        reach_(reach),
        connections_(offers.size()),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(reach.at_most)) {
    for (const TcpOffer& offer : offers)
      for (size_t i = 0; i < key_.size(); ++i) key_[i] ^= offer.share[i];
    for (int peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
      if (!wanted(peer)) continue;
      ++missing_;
      if (peer < rank) dialers_.emplace_back(key_, rank, peer, offers[peer]);
    }
  }

  TcpRendezvous::Connected run() {
    while (missing_ > 0) {
      // Handle pending events before anything times out: this process may have been suspended.
      const auto now = Clock::now();
      go_on();
      if (missing_ == 0) break;
      if (now >= deadline_) fail(CGX_SYSTEM, describe());
      step(now);
      wait();
    }
    return {std::move(connections_), rejected_ + static_cast<int64_t>(visitors_.size())};
  }

 private:
  bool wanted(int peer) const { return peer != rank_ && reach_.ranks[peer]; }
  bool met(int peer) const { return connections_[peer].get() >= 0; }

  void step(Clock::time_point now) {
    for (Dialer& dialer : dialers_)
      if (!met(dialer.peer())) dialer.step(now);
    visitors_.remove_if([&](const Conversation& visitor) {
      const bool over = !visitor.failure().empty() || now >= visitor.until();
      rejected_ += over;
      return over;
    });
  }

  // Waits for a socket event or the next deadline.
  void wait() {
    auto until = deadline_;
    std::vector<pollfd> sockets;
    for (const FileDescriptor& listener : listeners_)
      sockets.push_back({listener.get(), POLLIN, 0});
    for (const Conversation& visitor : visitors_) {
      until = std::min(until, visitor.until());
      sockets.push_back(visitor.waits());
    }
    for (Dialer& dialer : dialers_) {
      if (met(dialer.peer())) continue;
      until = std::min(until, dialer.next_step());
      if (dialer.attempt()) sockets.push_back(dialer.attempt()->waits());
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    poll(sockets.data(), sockets.size(), static_cast<int>(std::clamp<int64_t>(left, 0, 1000)));
  }

  void go_on() {
    for (const FileDescriptor& listener : listeners_) take_visitors(listener);
    for (Conversation& visitor : visitors_) {
      visitor.go_on();
      if (!visitor.proven()) continue;
      // Only higher ranks dial this one. A rank whose attempt timed out dials again.
      const int peer = visitor.peer();
      const bool expected = peer > rank_ && wanted(peer);
      if (expected && !left(visitor.socket()) && (!met(peer) || left(connections_[peer])))
        keep(visitor);
      else
        visitor.give_up("it has left, is connected already, or is not expected");
    }
    visitors_.remove_if(
        [](const Conversation& visitor) { return visitor.waits().fd < 0; });  // accepted
    for (Dialer& dialer : dialers_) {
      auto& attempt = dialer.attempt();
      if (!attempt || met(dialer.peer())) continue;
      const pollfd now = ready(attempt->waits());
      if (now.revents == 0) continue;
      attempt->go_on();
      if (attempt->proven()) keep(*attempt);
    }
  }

  // Polls first: a connection in progress has no error to query.
  static pollfd ready(pollfd socket) {
    poll(&socket, 1, 0);
    return socket;
  }

  void take_visitors(const FileDescriptor& listener) {
    for (;;) {
      FileDescriptor socket = accept_at(listener);
      if (socket.get() < 0) return;
      if (visitors_.size() >= kMostVisitors + connections_.size()) {
        visitors_.pop_front();
        ++rejected_;
      }
      visitors_.emplace_back(std::move(socket),
                             Handshake::accept(key_, rank_, static_cast<int>(connections_.size())),
                             /*connecting=*/false, Clock::now() + kHandshakeTime);
    }
  }

  void keep(Conversation& conversation) {
    const int peer = conversation.peer();
    if (!met(peer)) --missing_;
    connections_[peer] = conversation.take_socket();
  }

  std::string describe() const {
    std::string unreached, absent;
    for (const Dialer& dialer : dialers_)
      if (!met(dialer.peer()))
        unreached += join(unreached.empty() ? "cannot reach " : ", ", dialer.describe());
    for (int peer = rank_ + 1; peer < static_cast<int>(connections_.size()); ++peer)
      if (wanted(peer) && !met(peer))
        absent += join(absent.empty() ? "was not reached by rank " : ", ", peer);
    return join(unreached, unreached.empty() || absent.empty() ? "" : "; ", absent, " within ",
                reach_.at_most.count(),
                " s: select the interface with CGX_SOCKET_IFNAME, and let firewalls allow "
                "connections between the ranks' ports");
  }

  const int rank_;
  const std::vector<FileDescriptor>& listeners_;
  const Reach& reach_;
  SipKey key_{};
  std::vector<FileDescriptor> connections_;  // by rank
  const Clock::time_point deadline_;
  int missing_ = 0;
  int64_t rejected_ = 0;
  std::list<Dialer> dialers_;
  std::list<Conversation> visitors_;  // oldest first
};

}  // namespace

TcpOffer TcpOffer::read(std::span<const std::byte> bytes) {
  return from_bytes<TcpOffer>(bytes, "an offer of TCP");
}

TcpRendezvous::TcpRendezvous(int rank) : rank_(rank) {
  offer_.share = random_nonce();
  const std::vector<SocketAddress> addresses = own_addresses();
  for (size_t i = 0; i < std::min(addresses.size(), offer_.addresses.size()); ++i) {
    offer_.addresses[i] = addresses[i];
    listeners_.push_back(listen_at(&offer_.addresses[i]));
  }
}

TcpRendezvous::Connected TcpRendezvous::connect(const std::vector<TcpOffer>& offers,
                                                const Reach& reach) {
  Connected met = Rendezvous(rank_, listeners_, offers, reach).run();
  listeners_.clear();
  return met;
}

}  // namespace cgx
