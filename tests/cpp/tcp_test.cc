// TCP among threads as ranks, over the loopback interface.
//
//   handshake  who knows the key is let in; nobody else is, whatever he has heard before
//   frames     whole, in order and aligned, however the stream is cut
//   meeting    all ranks meet while strangers knock; who is missing is named, in time
//   transport  both directions at once, ends, and forked children that keep nothing open
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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

constexpr std::chrono::seconds kLimit(20);  // of whatever a test waits for

// ---- handshake -----------------------------------------------------------------------------

// The authors' known answers: key 00 01 .. 0f, messages 00 01 02 ...
void siphash_has_its_authors_values() {
  const SipKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  Bytes message;
  for (int i = 0; i < 15; ++i) message.push_back(static_cast<std::byte>(i));
  const auto of_first = [&](size_t bytes) { return siphash(key, std::span(message).first(bytes)); };
  CHECK(of_first(0) == 0x726fdb47dd0e0e31, "nothing");
  CHECK(of_first(8) == 0x93f5f5799a932462, "8 bytes");
  CHECK(of_first(15) == 0xa129ca6149be45e5, "15 bytes");
}

// Both sides' states at the end.
std::pair<State, State> talk(Handshake& dials, Handshake& accepts) {
  const Bytes answer = dials.take(accepts.opening());
  if (dials.state() != State::kGoing) return {dials.state(), accepts.state()};
  const Bytes confirmation = accepts.take(answer);
  if (accepts.state() == State::kProven) dials.take(confirmation);
  return {dials.state(), accepts.state()};
}

constexpr SipKey kKey{1, 2};

void those_who_know_the_key_are_proven() {
  auto dials = Handshake::dial(kKey, 3, 1), accepts = Handshake::accept(kKey, 1, 4);
  CHECK(talk(dials, accepts) == std::pair(State::kProven, State::kProven), "same key");
  CHECK(accepts.peer() == 3 && dials.peer() == 1, "who it is");
}

void nobody_else_is() {
  const auto refused = [](Handshake dials, Handshake accepts, const char* what) {
    CHECK(talk(dials, accepts).second == State::kRefused, what);
  };
  refused(Handshake::dial({1, 3}, 3, 1), Handshake::accept(kKey, 1, 4), "another key");
  refused(Handshake::dial(kKey, 3, 0), Handshake::accept(kKey, 1, 4), "meant for another rank");
  refused(Handshake::dial(kKey, 4, 1), Handshake::accept(kKey, 1, 4), "a rank that is not there");

  auto first = Handshake::dial(kKey, 3, 1), hears = Handshake::accept(kKey, 1, 4);
  const Bytes answer = first.take(hears.opening());
  auto again = Handshake::accept(kKey, 1, 4);
  again.take(answer);
  CHECK(again.state() == State::kRefused, "an answer that was heard before");

  auto dials = Handshake::dial(kKey, 3, 1);
  auto impostor = Handshake::accept({1, 3}, 1, 4);
  dials.take(impostor.opening());
  dials.take(Bytes(dials.awaits()));
  CHECK(dials.state() == State::kRefused, "who accepts does not know the key");
  auto other = Handshake::dial(kKey, 3, 1);
  other.take(Bytes(other.awaits()));
  CHECK(other.state() == State::kRefused, "another protocol's greeting");
}

// ---- frames --------------------------------------------------------------------------------

Bytes frame(FrameHeader header, const Bytes& payload) {
  Bytes bytes = to_bytes(header);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  bytes.resize(bytes.size() + frame_padding(payload.size()));
  return bytes;
}

void frames_come_whole_however_they_are_cut() {
  std::mt19937 random(1);
  Bytes stream;
  std::vector<Bytes> payloads;
  for (int i = 0; i < 300; ++i) {
    Bytes payload(i % 50 == 49 ? 200'000 + i : random() % (i % 5 == 0 ? 40'000 : 100));
    for (auto& byte : payload) byte = static_cast<std::byte>(random());
    const Bytes bytes =
        frame({static_cast<uint32_t>(payload.size()), FrameHeader::kBulk, 7, 9}, payload);
    stream.insert(stream.end(), bytes.begin(), bytes.end());
    payloads.push_back(std::move(payload));
  }
  for (const size_t most : {size_t{1000}, size_t{65536}, stream.size()}) {
    BlockPool blocks;
    FrameReader reader(&blocks);
    std::vector<FrameReader::Frame> held;  // all of them: nothing may be written over
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

void frames_that_cannot_be_are_refused() {
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

// ---- meeting -------------------------------------------------------------------------------

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

// Does what a rank does that dials, with that key; returns whether it was let in.
bool let_in(const SocketAddress& address, const SipKey& key, int rank, int peer) {
  const FileDescriptor socket = connected_to(address);
  auto handshake = Handshake::dial(key, rank, peer);
  const auto deadline = Clock::now() + kLimit;
  Bytes heard;
  while (handshake.state() == State::kGoing && Clock::now() < deadline) {
    std::byte byte;
    const ssize_t got = recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0 && errno != EAGAIN) return false;
    if (got > 0) heard.push_back(byte);
    if (heard.size() == handshake.awaits()) {
      const Bytes answer = handshake.take(std::exchange(heard, {}));
      if (!answer.empty()) send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  }
  return handshake.state() == State::kProven;
}

struct Parties {
  std::vector<TcpRendezvous> rendezvous;
  std::vector<TcpOffer> offers;
  SipKey key{};
};
Parties parties(int size) {
  Parties all;
  for (int rank = 0; rank < size; ++rank) {
    all.offers.push_back(all.rendezvous.emplace_back(rank).offer());
    for (size_t i = 0; i < all.key.size(); ++i) all.key[i] ^= all.offers.back().share[i];
  }
  return all;
}

void ranks_meet_while_strangers_knock() {
  constexpr int kSize = 4;
  Parties all = parties(kSize);
  const SocketAddress door = all.offers[0].addresses[0];
  // They knock before any rank does, and stay.
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(connected_to(door));  // silent
  send(strangers[1].get(), "G", 1, MSG_NOSIGNAL);                       // and slow
  const std::string garbage(200, 'x');
  strangers.push_back(connected_to(door));
  send(strangers.back().get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
  connected_to(door);  // a scan of ports
  std::vector<TcpRendezvous::Connected> met(kSize);
  std::vector<std::vector<bool>> wants(kSize, std::vector<bool>(kSize, true));
  wants[1][3] = wants[3][1] = false;  // so that rank 1 is done before rank 3 comes
  std::atomic<bool> foreign_let_in = true, last_may_come = false;
  in_threads(kSize, [&](int rank) {
    while (rank == 3 && !last_may_come) std::this_thread::sleep_for(milliseconds(1));
    met[rank] = all.rendezvous[rank].connect(all.offers, {wants[rank], kLimit});
    if (rank != 1) return;
    foreign_let_in = let_in(door, {all.key[0], all.key[1] ^ 1}, 3, 0);
    let_in(door, all.key, 1, 0);  // it is there already
    last_may_come = true;
  });
  CHECK(!foreign_let_in, "who knows another communicator's key");
  CHECK(met[0].strangers >= 7, join(met[0].strangers, " strangers"));
  for (int rank = 1; rank < kSize; ++rank) CHECK(met[rank].strangers == 0, "others have none");
  for (int a = 0; a < kSize; ++a)
    for (int b = 0; b < kSize; ++b) {
      const int there = met[a].connections[b].get();
      CHECK((there >= 0) == (a != b && wants[a][b]), join(a, " to ", b));
      if (a < b && there >= 0) send(there, &a, sizeof(a), MSG_NOSIGNAL);
    }
  for (int a = 0; a < kSize; ++a)
    for (int b = a + 1; b < kSize; ++b) {
      if (!wants[a][b]) continue;
      int heard = -1;
      for (int i = 0;
           i < 1000 && recv(met[b].connections[a].get(), &heard, sizeof(heard), MSG_DONTWAIT) < 0;
           ++i)
        std::this_thread::sleep_for(milliseconds(1));
      CHECK(heard == a, join(b, " hears ", heard, " from ", a));
    }
}

// So many that the first ones must leave: none of them keeps a rank out.
void a_crowd_keeps_nobody_out() {
  std::vector<TcpRendezvous> rendezvous;
  for (int rank = 0; rank < 2; ++rank) rendezvous.emplace_back(rank);
  const std::vector<TcpOffer> offers{rendezvous[0].offer(), rendezvous[1].offer()};
  std::vector<TcpRendezvous::Connected> met(2);
  std::vector<FileDescriptor> crowd;
  std::thread first([&] { met[0] = rendezvous[0].connect(offers, {{true, true}, kLimit}); });
  for (int i = 0; i < 150; ++i) crowd.push_back(connected_to(offers[0].addresses[0]));
  met[1] = rendezvous[1].connect(offers, {{true, true}, kLimit});
  first.join();
  CHECK(met[0].connections[1].get() >= 0, "they met");
  CHECK(met[0].strangers == 150, join(met[0].strangers, " strangers"));
}

// A rank gives up when nothing answers for a while, which may be just before the answer comes.
void who_gave_up_comes_again() {
  constexpr int kSize = 3;
  Parties all = parties(kSize);
  std::vector<TcpRendezvous::Connected> met(kSize);
  std::atomic<bool> gave_up = false, others_met = false;
  in_threads(kSize, [&](int rank) {
    if (rank == 1) gave_up = let_in(all.offers[0].addresses[0], all.key, 1, 0);  // and closes
    while (rank == 2 && !others_met) std::this_thread::sleep_for(milliseconds(1));
    std::vector<bool> wants(kSize, true);
    if (rank > 0) wants[3 - rank] = false;
    met[rank] = all.rendezvous[rank].connect(all.offers, {wants, kLimit});
    if (rank == 1) others_met = true;
  });
  CHECK(gave_up, "the first connection was proven");
  const int word = 7;
  int heard = 0;
  send(met[1].connections[0].get(), &word, sizeof(word), MSG_NOSIGNAL);
  for (int i = 0; i < 1000 && heard != word; ++i) {
    if (recv(met[0].connections[1].get(), &heard, sizeof(heard), MSG_DONTWAIT) < 0)
      std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(heard == word, join("rank 0 hears ", heard, " by the second one"));
}

void who_is_missing_is_named_in_time() {
  std::vector<TcpRendezvous> rendezvous;
  std::vector<TcpOffer> offers;
  for (int rank = 0; rank < 3; ++rank) {
    rendezvous.emplace_back(rank);
    offers.push_back(rendezvous.back().offer());
  }
  const auto begin = Clock::now();
  in_threads(3, [&](int rank) {
    if (rank == 1) return;  // it listens, and says nothing
    const std::string error =
        error_of([&] { rendezvous[rank].connect(offers, {{true, true, true}, milliseconds(500)}); },
                 CGX_SYSTEM);
    CHECK(contains(error, rank == 0 ? "was not reached by rank 1" : "cannot reach rank 1 (127."),
          error);
    CHECK(contains(error, "CGX_SOCKET_IFNAME"), error);
  });
  CHECK(Clock::now() - begin < kLimit, "in time");
}

void interfaces_are_chosen() {
  const auto with = [](const char* words) {
    setenv("CGX_SOCKET_IFNAME", words, 1);
    return own_addresses();
  };
  CHECK(with("lo")[0].text() == "127.0.0.1:0", with("lo")[0].text());
  CHECK(with("=lo").size() == with("l").size(), "a whole name, or its beginning");
  const std::string error = error_of([&] { with("nothing"); }, CGX_INVALID_ARGUMENT);
  CHECK(contains(error, "CGX_SOCKET_IFNAME=\"nothing\"") && contains(error, "interfaces: ") &&
            contains(error, "lo"),
        error);
  setenv("CGX_SOCKET_IFNAME", "lo", 1);
}

// ---- transport -----------------------------------------------------------------------------

class Heard : public Sink {
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
  CHECK(until(), "in time");
}

// More than the kernel holds, from both at once: nobody waits for the other to read.
void both_directions_at_once() {
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
    Heard heard;
    const size_t all = kMessages * kBytes - kMessages * (kMessages - 1) / 2;
    progress_until(transport, heard, [&] {
      return heard.bulk_bytes == all && heard.controls.size() == 2 && transport.flushed();
    });
    CHECK(heard.in_order, "in order, and whole");
    CHECK(heard.controls[0] == to_bytes(1 - rank), "control goes with them");
    CHECK(state->unreleased() == 0 && state->unsent() == 0, "all is handed over");
    progress_until(transport, heard, [&] { return transport.drained(); });
  });
}

void an_end_is_told(Loss how) {
  auto transports = two();
  const auto state = std::make_shared<SendState>(2);
  const BufferRef buffer = transports[0]->allocate(1000);
  std::memset(buffer->data, 1, 1000);
  transports[0]->send(1, {0, 0}, buffer, 1000, state);
  if (how != Loss::kDied) transports[0]->leave(how == Loss::kLeft, "the reason");
  transports[0].reset();
  Heard heard;
  progress_until(*transports[1], heard, [&] { return !heard.losses.empty(); });
  CHECK(heard.bulk_bytes == 1000, "what was sent before arrives");
  CHECK(heard.losses == std::vector{how}, "how it ended");
  CHECK(heard.reason == (how == Loss::kDied ? "it closed its connection" : "the reason"),
        heard.reason);
  transports[1]->send_control(0, {});  // to nobody: it is dropped
  CHECK(transports[1]->flushed() && transports[1]->drained(), "nothing is left to be sent");
}

// Longer than the ranks wait for a collective, which is what its deadline is for.
void one_that_computes_is_not_lost() {
  constexpr int kMessages = 1000;
  const auto transports = two(milliseconds(1000));
  Heard sender, receiver;
  const Bytes message(8192, std::byte{1});
  for (int i = 0; i < kMessages; ++i) transports[0]->send_control(1, message);
  const auto until = Clock::now() + milliseconds(2500);
  progress_until(*transports[0], sender, [&] { return Clock::now() >= until; });
  CHECK(sender.losses.empty(), sender.reason);
  std::thread goes_on(
      [&] { progress_until(*transports[0], sender, [&] { return transports[0]->flushed(); }); });
  progress_until(*transports[1], receiver, [&] { return receiver.controls.size() == kMessages; });
  goes_on.join();
}

void one_that_has_left_takes_nothing() {
  const auto transports = two();
  transports[1]->send_control(0, {});
  transports[0]->leave(true, "");
  Heard heard;
  CHECK(!transports[0]->progress(heard) && heard.controls.empty(), "nothing more is handed on");
}

void who_waits_is_woken() {
  const auto transports = two();
  const auto begin = Clock::now();
  std::thread waits([&] { transports[0]->wait(kLimit); });
  transports[0]->wake();
  waits.join();
  CHECK(Clock::now() - begin < kLimit, "before the time is over");
}

void a_forked_child_keeps_nothing_open() {
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
  CHECK(status == 0, "it has /dev/null there");
  struct stat found;
  CHECK(fstat(ends[1], &found) == 0 && S_ISFIFO(found.st_mode), "the parent keeps it");
  close(ends[0]);
}

}  // namespace

int main() {
  setenv("CGX_SOCKET_IFNAME", "lo", 1);
  siphash_has_its_authors_values();
  those_who_know_the_key_are_proven();
  nobody_else_is();
  frames_come_whole_however_they_are_cut();
  frames_that_cannot_be_are_refused();
  ranks_meet_while_strangers_knock();
  a_crowd_keeps_nobody_out();
  who_gave_up_comes_again();
  who_is_missing_is_named_in_time();
  interfaces_are_chosen();
  both_directions_at_once();
  for (const Loss how : {Loss::kLeft, Loss::kGaveUp, Loss::kDied}) an_end_is_told(how);
  one_that_computes_is_not_lost();
  one_that_has_left_takes_nothing();
  who_waits_is_woken();
  a_forked_child_keeps_nothing_open();
  return cgx::test::report();
}
