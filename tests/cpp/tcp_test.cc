// TCP between threads as ranks, over the loopback interface.
//
//   handshake   peers with the key are authenticated; others are rejected, even with replays
//   frames      complete, in order and aligned, however the stream is split; memory for long ones
//   grows as they
//               arrive
//   rendezvous  all ranks connect despite unauthenticated peers; missing ranks are named in time
//   transport   both directions, the end of connections, forked children
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "base/siphash.h"
#include "checks.h"
#include "transport/own_descriptors.h"
#include "transport/tcp_frames.h"
#include "transport/tcp_handshake.h"
#include "transport/tcp_rendezvous.h"
#include "transport/transport.h"

namespace {

using namespace cgx;
using cgx::test::contains;
using cgx::test::error_of;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using State = Handshake::State;

constexpr std::chrono::seconds kLimit(20);  // for each wait in this test

// ---- handshake -----------------------------------------------------------------------------

// Known answers of the authors of SipHash: key 00 01 .. 0f, messages 00 01 02 ...
void siphash_gives_the_known_answers() {
  const SipKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  Bytes message;
  for (int i = 0; i < 15; ++i) message.push_back(static_cast<std::byte>(i));
  const auto of_first = [&](size_t bytes) { return siphash(key, std::span(message).first(bytes)); };
  CHECK(of_first(0) == 0x726fdb47dd0e0e31, "nothing");
  CHECK(of_first(8) == 0x93f5f5799a932462, "8 bytes");
  CHECK(of_first(15) == 0xa129ca6149be45e5, "15 bytes");
}

// Runs a handshake and returns the final states of both sides.
std::pair<State, State> handshake_states(Handshake& dials, Handshake& accepts) {
  const Bytes answer = dials.take(accepts.opening());
  if (dials.state() != State::kGoing) return {dials.state(), accepts.state()};
  const Bytes confirmation = accepts.take(answer);
  if (accepts.state() == State::kProven) dials.take(confirmation);
  return {dials.state(), accepts.state()};
}

constexpr SipKey kKey{1, 2};

void peers_with_the_key_are_authenticated() {
  auto dials = Handshake::dial(kKey, 3, 1), accepts = Handshake::accept(kKey, 1, 4);
  CHECK(handshake_states(dials, accepts) == std::pair(State::kProven, State::kProven), "same key");
  CHECK(accepts.peer() == 3 && dials.peer() == 1, "the peer's rank");
}

void other_peers_are_rejected() {
  const auto refused = [](Handshake dials, Handshake accepts, const char* what) {
    CHECK(handshake_states(dials, accepts).second == State::kRefused, what);
  };
  refused(Handshake::dial({1, 3}, 3, 1), Handshake::accept(kKey, 1, 4), "a different key");
  refused(Handshake::dial(kKey, 3, 0), Handshake::accept(kKey, 1, 4),
          "a handshake for another rank");
  refused(Handshake::dial(kKey, 4, 1), Handshake::accept(kKey, 1, 4),
          "a rank outside the communicator");

  auto first = Handshake::dial(kKey, 3, 1), hears = Handshake::accept(kKey, 1, 4);
  const Bytes answer = first.take(hears.opening());
  auto again = Handshake::accept(kKey, 1, 4);
  again.take(answer);
  CHECK(again.state() == State::kRefused, "a replayed answer");

  auto dials = Handshake::dial(kKey, 3, 1);
  auto impostor = Handshake::accept({1, 3}, 1, 4);
  dials.take(impostor.opening());
  dials.take(Bytes(dials.awaits()));
  CHECK(dials.state() == State::kRefused, "an accepting side without the key");
  auto other = Handshake::dial(kKey, 3, 1);
  other.take(Bytes(other.awaits()));
  CHECK(other.state() == State::kRefused, "the greeting of another protocol");
}

// ---- frames --------------------------------------------------------------------------------

Bytes frame(FrameHeader header, const Bytes& payload) {
  Bytes bytes = to_bytes(header);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  bytes.resize(bytes.size() + frame_padding(payload.size()));
  return bytes;
}

void frames_are_reassembled() {
  std::mt19937 random(1);
  Bytes stream;
  std::vector<Bytes> payloads;
  for (int i = 0; i < 300; ++i) {
    const size_t size = i % 150 == 149 ? 5'000'000
                        : i % 50 == 49 ? 200'000
                                       : random() % (i % 5 == 0 ? 40'000 : 100);
    Bytes payload(size + i);
    for (auto& byte : payload) byte = static_cast<std::byte>(random());
    const Bytes bytes =
        frame({static_cast<uint32_t>(payload.size()), FrameHeader::kBulk, 7, 9}, payload);
    stream.insert(stream.end(), bytes.begin(), bytes.end());
    payloads.push_back(std::move(payload));
  }
  for (const size_t most : {size_t{1000}, size_t{65536}, stream.size()}) {
    BlockPool blocks;
    FrameReader reader(&blocks);
    std::vector<FrameReader::Frame> held;  // keeps all frames, to check that none is overwritten
    for (size_t at = 0; at < stream.size();) {
      const std::span<std::byte> room = reader.room();
      const size_t count = std::min({room.size(), stream.size() - at, 1 + random() % most});
      std::memcpy(room.data(), stream.data() + at, count);
      reader.filled(count);
      at += count;
      while (auto next = reader.next()) held.push_back(std::move(*next));
    }
    CHECK(held.size() == payloads.size(), join(held.size(), " frames"));
    for (size_t i = 0; i < std::min(held.size(), payloads.size()); ++i) {
      const auto& payload = held[i].payload;
      CHECK(std::equal(payload.begin(), payload.end(), payloads[i].begin(), payloads[i].end()),
            join("frame ", i));
      CHECK(reinterpret_cast<uintptr_t>(payload.data()) % 16 == 0, "aligned");
    }
  }
}

void the_memory_of_a_long_frame_grows_with_its_bytes() {
  BlockPool blocks;
  FrameReader reader(&blocks);
  const Bytes header = to_bytes(FrameHeader{kLongestPayload, FrameHeader::kBulk, 7, 9});
  std::memcpy(reader.room().data(), header.data(), header.size());
  size_t received = header.size();
  reader.filled(received);
  while (received < 20'000'000) {
    const size_t room = reader.room().size();
    CHECK(received + room <= std::max(size_t{1} << 20, 2 * received),
          join(received, " bytes of a frame reserve ", received + room));
    const size_t count = std::min<size_t>(room, 100'000);
    reader.filled(count);
    received += count;
    CHECK(!reader.next(), "a frame that is not complete");
  }
}

// After an error the connection is read without extracting frames, until it is closed.
void room_is_left_behind_frames_that_nobody_extracts() {
  BlockPool blocks;
  FrameReader reader(&blocks);
  const Bytes first = frame({1'000'000, FrameHeader::kBulk, 7, 9}, Bytes(1'000'000));
  Bytes small;  // more bytes than a small block has
  for (int i = 0; i < 10'000; ++i) {
    const Bytes next = frame({0, FrameHeader::kControl, 0, 0}, Bytes());
    small.insert(small.end(), next.begin(), next.end());
  }
  const auto receive = [&](const Bytes& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const std::span<std::byte> room = reader.room();
      CHECK(!room.empty(), "room");
      const size_t count = std::min(room.size(), bytes.size() - at);
      std::memcpy(room.data(), bytes.data() + at, count);
      reader.filled(count);
      at += count;
    }
  };
  receive(first);
  CHECK(reader.next().has_value(), "the first frame");
  for (int i = 0; i < 20; ++i) receive(small);
  int frames = 0;
  while (reader.next()) ++frames;
  CHECK(frames == 200'000, join(frames, " frames"));
}

void malformed_frames_are_rejected() {
  for (const FrameHeader header : {FrameHeader{0, 0, 0, 0}, FrameHeader{0, 4, 0, 0},
                                   FrameHeader{UINT32_MAX, FrameHeader::kBulk, 0, 0},
                                   FrameHeader{0, FrameHeader::kBulk, kChannels, 0},
                                   FrameHeader{0, FrameHeader::kBulk, 0, kSequences},
                                   FrameHeader{kMaxControlBytes + 1, FrameHeader::kControl, 0, 0},
                                   FrameHeader{8, FrameHeader::kControl, 1, 0}}) {
    BlockPool blocks;
    FrameReader reader(&blocks);
    const Bytes bytes = to_bytes(header);
    std::memcpy(reader.room().data(), bytes.data(), bytes.size());
    reader.filled(bytes.size());
    CHECK(contains(error_of([&] { reader.next(); }, CGX_PEER_FAILED), "is not a valid cgx frame"),
          join("kind ", header.kind, ", size ", header.size));
  }
}

// ---- rendezvous ----------------------------------------------------------------------------

void in_threads(int size, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(work, rank);
  for (auto& thread : threads) thread.join();
}

FileDescriptor connected_to(const SocketAddress& address) {
  std::string why;
  FileDescriptor socket = dial(address, &why);
  for (int i = 0; i < 1000 && send(socket.get(), "", 0, MSG_NOSIGNAL) < 0; ++i)
    std::this_thread::sleep_for(milliseconds(1));
  return socket;
}

// Dials like a rank with this key; returns whether the handshake succeeded.
bool is_accepted(const SocketAddress& address, const SipKey& key, int rank, int peer) {
  const FileDescriptor socket = connected_to(address);
  auto handshake = Handshake::dial(key, rank, peer);
  const auto deadline = Clock::now() + kLimit;
  Bytes received;
  while (handshake.state() == State::kGoing && Clock::now() < deadline) {
    std::byte byte;
    const ssize_t got = recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0 && errno != EAGAIN) return false;
    if (got > 0) received.push_back(byte);
    if (received.size() == handshake.awaits()) {
      const Bytes answer = handshake.take(std::exchange(received, {}));
      if (!answer.empty()) send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  }
  return handshake.state() == State::kProven;
}

struct Offers {
  std::vector<TcpRendezvous> rendezvous;
  std::vector<TcpOffer> offers;
  SipKey key{};
};
Offers make_offers(int size) {
  Offers all;
  for (int rank = 0; rank < size; ++rank) {
    all.offers.push_back(all.rendezvous.emplace_back(rank).offer());
    for (size_t i = 0; i < all.key.size(); ++i) all.key[i] ^= all.offers.back().share[i];
  }
  return all;
}

void ranks_connect_despite_unauthenticated_peers() {
  constexpr int kSize = 4;
  Offers all = make_offers(kSize);
  const SocketAddress listener = all.offers[0].addresses[0];
  // These connect before any rank, and stay connected.
  std::vector<FileDescriptor> unauthenticated;
  for (int i = 0; i < 3; ++i) unauthenticated.push_back(connected_to(listener));
  send(unauthenticated[1].get(), "G", 1, MSG_NOSIGNAL);  // the others send nothing
  const std::string garbage(200, 'x');
  unauthenticated.push_back(connected_to(listener));
  send(unauthenticated.back().get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
  connected_to(listener);  // closes immediately, like a port scan
  std::vector<TcpRendezvous::Connected> connected(kSize);
  std::vector<std::vector<bool>> wants(kSize, std::vector<bool>(kSize, true));
  wants[1][3] = wants[3][1] = false;  // so that rank 1 completes before rank 3 starts
  std::atomic<bool> foreign_accepted = true, last_may_come = false;
  in_threads(kSize, [&](int rank) {
    while (rank == 3 && !last_may_come) std::this_thread::sleep_for(milliseconds(1));
    connected[rank] = all.rendezvous[rank].connect(all.offers, {wants[rank], kLimit});
    if (rank != 1) return;
    foreign_accepted = is_accepted(listener, {all.key[0], all.key[1] ^ 1}, 3, 0);
    is_accepted(listener, all.key, 1, 0);  // rank 1 is connected already
    last_may_come = true;
  });
  CHECK(!foreign_accepted, "a peer with the key of another communicator");
  CHECK(connected[0].rejected_connections >= 7,
        join(connected[0].rejected_connections, " unauthenticated peers"));
  for (int rank = 1; rank < kSize; ++rank)
    CHECK(connected[rank].rejected_connections == 0, "unauthenticated peers of other ranks");
  for (int a = 0; a < kSize; ++a)
    for (int b = 0; b < kSize; ++b) {
      const int there = connected[a].connections[b].get();
      CHECK((there >= 0) == (a != b && wants[a][b]), join(a, " to ", b));
      if (a < b && there >= 0) send(there, &a, sizeof(a), MSG_NOSIGNAL);
    }
  for (int a = 0; a < kSize; ++a)
    for (int b = a + 1; b < kSize; ++b) {
      if (!wants[a][b]) continue;
      int received = -1;
      for (int i = 0; i < 1000 && recv(connected[b].connections[a].get(), &received,
                                       sizeof(received), MSG_DONTWAIT) < 0;
           ++i)
        std::this_thread::sleep_for(milliseconds(1));
      CHECK(received == a, join(b, " received ", received, " from ", a));
    }
}

// More connections than may wait, so that the first ones are dropped. None blocks a rank.
void many_unauthenticated_peers_block_no_rank() {
  std::vector<TcpRendezvous> rendezvous;
  for (int rank = 0; rank < 2; ++rank) rendezvous.emplace_back(rank);
  const std::vector<TcpOffer> offers{rendezvous[0].offer(), rendezvous[1].offer()};
  std::vector<TcpRendezvous::Connected> connected(2);
  std::vector<FileDescriptor> crowd;
  std::thread first([&] { connected[0] = rendezvous[0].connect(offers, {{true, true}, kLimit}); });
  for (int i = 0; i < 150; ++i) crowd.push_back(connected_to(offers[0].addresses[0]));
  connected[1] = rendezvous[1].connect(offers, {{true, true}, kLimit});
  first.join();
  CHECK(connected[0].connections[1].get() >= 0, "the ranks are not connected");
  CHECK(connected[0].rejected_connections == 150,
        join(connected[0].rejected_connections, " unauthenticated peers"));
}

// A rank gives up on a connection that does not respond, perhaps just before it is accepted.
void a_rank_that_gave_up_reconnects() {
  constexpr int kSize = 3;
  Offers all = make_offers(kSize);
  std::vector<TcpRendezvous::Connected> connected(kSize);
  std::atomic<bool> gave_up = false, others_connected = false;
  in_threads(kSize, [&](int rank) {
    if (rank == 1) gave_up = is_accepted(all.offers[0].addresses[0], all.key, 1, 0);
    while (rank == 2 && !others_connected) std::this_thread::sleep_for(milliseconds(1));
    std::vector<bool> wants(kSize, true);
    if (rank > 0) wants[3 - rank] = false;
    connected[rank] = all.rendezvous[rank].connect(all.offers, {wants, kLimit});
    if (rank == 1) others_connected = true;
  });
  CHECK(gave_up, "the first connection was not authenticated");
  const int word = 7;
  int received = 0;
  send(connected[1].connections[0].get(), &word, sizeof(word), MSG_NOSIGNAL);
  for (int i = 0; i < 1000 && received != word; ++i) {
    if (recv(connected[0].connections[1].get(), &received, sizeof(received), MSG_DONTWAIT) < 0)
      std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(received == word, join("rank 0 received ", received, " on the second connection"));
}

void missing_ranks_are_named_in_time() {
  std::vector<TcpRendezvous> rendezvous;
  std::vector<TcpOffer> offers;
  for (int rank = 0; rank < 3; ++rank) {
    rendezvous.emplace_back(rank);
    offers.push_back(rendezvous.back().offer());
  }
  const auto begin = Clock::now();
  in_threads(3, [&](int rank) {
    if (rank == 1) return;  // listens, but never connects
    const std::string error =
        error_of([&] { rendezvous[rank].connect(offers, {{true, true, true}, milliseconds(500)}); },
                 CGX_SYSTEM);
    CHECK(contains(error, rank == 0 ? "was not reached by rank 1" : "cannot reach rank 1 (127."),
          error);
    CHECK(contains(error, "CGX_SOCKET_IFNAME"), error);
  });
  CHECK(Clock::now() - begin < kLimit, "the error came too late");
}

void interfaces_are_chosen() {
  const auto with = [](const char* words) {
    setenv("CGX_SOCKET_IFNAME", words, 1);
    return own_addresses();
  };
  CHECK(with("lo")[0].text() == "127.0.0.1:0", with("lo")[0].text());
  CHECK(with("=lo").size() == with("l").size(), "a whole name or a prefix");
  const std::string error = error_of([&] { with("nothing"); }, CGX_INVALID_ARGUMENT);
  CHECK(contains(error, "CGX_SOCKET_IFNAME=\"nothing\"") && contains(error, "interfaces: ") &&
            contains(error, "lo"),
        error);
  setenv("CGX_SOCKET_IFNAME", "lo", 1);
}

// ---- transport -----------------------------------------------------------------------------

class Received : public Sink {
 public:
  void on_control(int, std::span<const std::byte> message) override {
    controls.push_back(to_bytes(message));
  }
  void on_bulk(Arrival arrival) override {
    bulk_bytes += arrival.bytes.size();
    const bool whole = !arrival.bytes.empty() && arrival.bytes.front() == arrival.bytes.back();
    in_order &= whole && arrival.slot.sequence == next++ % kSequences;
  }
  void on_unreadable(int, Slot, const Error&) override {}
  void on_peer_lost(int, Loss how, const std::string& why) override {
    losses.push_back(how);
    reason = why;
  }
  std::vector<Bytes> controls;
  std::vector<Loss> losses;
  std::string reason;
  size_t bulk_bytes = 0;
  uint32_t next = 0;
  bool in_order = true;
};

std::vector<std::unique_ptr<Transport>> two(std::chrono::duration<double> limit = kLimit) {
  std::vector<std::unique_ptr<Connector>> connectors;
  std::vector<Bytes> offers;
  for (int rank = 0; rank < 2; ++rank) {
    connectors.push_back(make_tcp_connector(rank, 2));
    offers.push_back(connectors.back()->offer());
  }
  std::vector<std::unique_ptr<Transport>> transports(2);
  in_threads(2, [&](int rank) {
    transports[rank] = connectors[rank]->connect(offers, {std::vector<bool>(2, true), limit});
  });
  return transports;
}

template <typename Until>
void progress_until(Transport& transport, Sink& sink, const Until& until) {
  const auto deadline = Clock::now() + kLimit;
  while (!until() && Clock::now() < deadline)
    if (!transport.progress(sink)) transport.wait(milliseconds(1));
  CHECK(until(), "not within the limit");
}

// Both ranks send more than the kernel buffers, so neither may wait until the other reads.
void both_directions_concurrently() {
  constexpr size_t kMessages = 700, kBytes = 100'000;
  const auto transports = two();
  in_threads(2, [&](int rank) {
    Transport& transport = *transports[rank];
    const auto state = std::make_shared<SendState>(2);
    const BufferRef buffer = transport.allocate(kBytes);
    std::memset(buffer->data, rank + 1, kBytes);
    transport.send_control(1 - rank, as_bytes(rank));
    for (size_t i = 0; i < kMessages; ++i)
      transport.send(1 - rank, {5, static_cast<uint32_t>(i)}, buffer, kBytes - i, state);
    transport.send_control(1 - rank, {});
    Received received;
    const size_t all = kMessages * kBytes - kMessages * (kMessages - 1) / 2;
    progress_until(transport, received, [&] {
      return received.bulk_bytes == all && received.controls.size() == 2 && transport.flushed();
    });
    CHECK(received.in_order, "messages are incomplete or out of order");
    CHECK(received.controls[0] == to_bytes(1 - rank), "the control message is missing");
    CHECK(state->unreleased() == 0 && state->unsent() == 0, "messages are not handed over");
    progress_until(transport, received, [&] { return transport.drained(); });
  });
}

// The peer may not read message 17 of a collective without message 16.
void messages_of_a_collective_that_ended_stop_in_sequence() {
  constexpr uint32_t kMessages = 4000;
  constexpr size_t kBytes = 4096;
  class BySlot : public Sink {
   public:
    void on_control(int, std::span<const std::byte>) override {}
    void on_bulk(Arrival arrival) override {
      uint32_t& due = next[arrival.slot.channel];
      CHECK(arrival.slot.sequence == due, join("message ", arrival.slot.sequence, " of channel ",
                                               arrival.slot.channel, ", not ", due));
      due = arrival.slot.sequence + 1;
    }
    void on_unreadable(int, Slot, const Error&) override {}
    void on_peer_lost(int, Loss, const std::string&) override {}
    std::vector<uint32_t> next{0, 0};
  };
  // Whether the first message in the queue is of one collective or the other depends on the
  // kernel's buffers.
  for (const uint32_t ended : {0u, 1u}) {
    const auto transports = two();
    const std::vector<std::shared_ptr<SendState>> states{std::make_shared<SendState>(2),
                                                         std::make_shared<SendState>(2)};
    const BufferRef buffer = transports[0]->allocate(kBytes);
    std::memset(buffer->data, 1, kBytes);
    for (uint32_t i = 0; i < kMessages; ++i)
      for (const uint32_t channel : {0u, 1u})
        transports[0]->send(1, {channel, i}, buffer, kBytes, states[channel]);
    CHECK(!transports[0]->flushed(), "the kernel has buffered everything");
    states[ended]->give_up();
    BySlot received;
    DeafSink deaf;
    progress_until(*transports[1], received, [&] {
      transports[0]->progress(deaf);
      return received.next[1 - ended] == kMessages;
    });
    CHECK(received.next[ended] < kMessages, "nothing was dropped");
    CHECK(states[ended]->unsent() == 0, "messages are left to send");
  }
}

void the_end_of_a_connection_is_reported(Loss how) {
  auto transports = two();
  const auto state = std::make_shared<SendState>(2);
  const BufferRef buffer = transports[0]->allocate(1000);
  std::memset(buffer->data, 1, 1000);
  transports[0]->send(1, {0, 0}, buffer, 1000, state);
  if (how != Loss::kDied) transports[0]->leave(how == Loss::kLeft, "the reason");
  transports[0].reset();
  Received received;
  progress_until(*transports[1], received, [&] { return !received.losses.empty(); });
  CHECK(received.bulk_bytes == 1000, "messages sent before the end are missing");
  CHECK(received.losses == std::vector{how}, "the kind of loss");
  CHECK(received.reason == (how == Loss::kDied ? "it closed its connection" : "the reason"),
        received.reason);
  transports[1]->send_control(0, {});  // the peer has left: dropped
  CHECK(transports[1]->flushed() && transports[1]->drained(), "messages are left to send");
}

// A rank may compute for longer than the connection timeout. Only a collective's deadline ends it.
void a_busy_rank_is_not_lost() {
  constexpr int kMessages = 1000;
  const auto transports = two(milliseconds(1000));
  Received sender, receiver;
  const Bytes message(8192, std::byte{1});
  for (int i = 0; i < kMessages; ++i) transports[0]->send_control(1, message);
  const auto until = Clock::now() + milliseconds(2500);
  progress_until(*transports[0], sender, [&] { return Clock::now() >= until; });
  CHECK(sender.losses.empty(), sender.reason);
  std::thread keeps_sending(
      [&] { progress_until(*transports[0], sender, [&] { return transports[0]->flushed(); }); });
  progress_until(*transports[1], receiver, [&] { return receiver.controls.size() == kMessages; });
  keeps_sending.join();
}

void a_transport_that_left_receives_nothing() {
  const auto transports = two();
  transports[1]->send_control(0, {});
  transports[0]->leave(true, "");
  Received received;
  CHECK(!transports[0]->progress(received) && received.controls.empty(), "a message was delivered");
}

// A malformed frame ends the engine. What follows it must not keep others from the last messages.
void a_rank_leaves_despite_malformed_frames() {
  auto [rendezvous, offers, key] = make_offers(2);
  const std::unique_ptr<Connector> connector = make_tcp_connector(0, 2);
  offers[0] = TcpOffer::read(connector->offer());
  std::vector<Bytes> written{to_bytes(offers[0]), to_bytes(offers[1])};
  std::unique_ptr<Transport> transport;
  FileDescriptor peer;
  in_threads(2, [&](int rank) {
    const Reach reach{{true, true}, kLimit};
    if (rank == 0)
      transport = connector->connect(written, reach);
    else
      peer = std::move(rendezvous[1].connect(offers, reach).connections[0]);
  });
  Received received;
  for (const FrameHeader malformed : {FrameHeader{0, 4, 0, 0}, FrameHeader{0, 5, 0, 0}}) {
    const Bytes garbage = to_bytes(malformed);
    CHECK(send(peer.get(), garbage.data(), garbage.size(), 0) > 0, "sent");
    std::this_thread::sleep_for(milliseconds(10));
    const auto error = error_of(
        [&] {
          for (int i = 0; i < 1000; ++i)
            if (!transport->progress(received)) transport->wait(milliseconds(1));
          fail(CGX_SYSTEM, "nothing was rejected");
        },
        malformed.kind == 4 ? CGX_PEER_FAILED : CGX_SYSTEM);
    CHECK(contains(error, malformed.kind == 4 ? "is not a valid cgx frame" : "nothing was"), error);
  }
  CHECK(send(peer.get(), "more", 4, 0) > 0, "sent");
  std::this_thread::sleep_for(milliseconds(10));
  transport->leave(false, "the reason");
  std::array<char, 64> last;
  const ssize_t got = recv(peer.get(), last.data(), last.size(), 0);
  CHECK(contains(std::string(last.data(), std::max<ssize_t>(got, 0)), "the reason"), "no farewell");
}

void wake_ends_a_wait() {
  const auto transports = two();
  const auto begin = Clock::now();
  std::thread waits([&] { transports[0]->wait(kLimit); });
  transports[0]->wake();
  waits.join();
  CHECK(Clock::now() - begin < kLimit, "the wait was not ended");
}

void a_forked_child_has_no_open_descriptors() {
  int ends[2];
  CHECK(pipe(ends) == 0, "a pipe");
  const OwnDescriptor own{FileDescriptor(ends[1])};
  const pid_t child = fork();
  if (child == 0) {
    struct stat found;
    _exit(fstat(own.fd().get(), &found) == 0 && S_ISCHR(found.st_mode) ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "the child's descriptor is not /dev/null");
  struct stat found;
  CHECK(fstat(ends[1], &found) == 0 && S_ISFIFO(found.st_mode), "the parent's descriptor changed");
  close(ends[0]);
}

}  // namespace

int main() {
  setenv("CGX_SOCKET_IFNAME", "lo", 1);
  siphash_gives_the_known_answers();
  peers_with_the_key_are_authenticated();
  other_peers_are_rejected();
  frames_are_reassembled();
  the_memory_of_a_long_frame_grows_with_its_bytes();
  room_is_left_behind_frames_that_nobody_extracts();
  malformed_frames_are_rejected();
  ranks_connect_despite_unauthenticated_peers();
  many_unauthenticated_peers_block_no_rank();
  a_rank_that_gave_up_reconnects();
  missing_ranks_are_named_in_time();
  interfaces_are_chosen();
  both_directions_concurrently();
  messages_of_a_collective_that_ended_stop_in_sequence();
  for (const Loss how : {Loss::kLeft, Loss::kGaveUp, Loss::kDied})
    the_end_of_a_connection_is_reported(how);
  a_busy_rank_is_not_lost();
  a_transport_that_left_receives_nothing();
  a_rank_leaves_despite_malformed_frames();
  wake_ends_a_wait();
  a_forked_child_has_no_open_descriptors();
  return cgx::test::report();
}
