// A transport that wraps another one and injects one fault: it drops, truncates, lengthens,
// changes, duplicates, reorders or delays one message, or delivers it as a message of another rank.
//
// Faults are injected on arrival. Every message is delivered in heap memory of exactly its length,
// so that AddressSanitizer detects reads past its end.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cgx {

enum class FaultKind {
  kNone,
  kDrop,
  kTruncate,
  kGrow,
  kFlip,  // one bit
  kDuplicate,
  kReorder,  // after the next message of the same rank
  kDelay,    // together with later messages of the same rank
  kForeign,  // delivered as a message of the next rank
};
inline constexpr std::array kFaultNames{"none",      "drop",    "truncate", "grow",   "flip",
                                        "duplicate", "reorder", "delay",    "foreign"};

enum class Traffic { kControl, kBulk };
inline constexpr std::array kTrafficNames{"control", "bulk"};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  Traffic traffic = Traffic::kControl;
  int nth = 0;  // index among all messages of this traffic, from all ranks
  unsigned seed = 0;
  // Set by the transport: the sender of the message, -1 until it arrives.
  int sender = -1;
};

class FaultyTransport : public Transport, private Sink, private Arrival::Release {
 public:
  // Read `fault` only after the communicator is closed.
  FaultyTransport(std::unique_ptr<Transport> inner, int rank, int size,
                  std::shared_ptr<Fault> fault)
      : inner_(std::move(inner)),
        rank_(rank),
        fault_(std::move(fault)),
        random_(fault_->seed),
        links_(size) {}

  const char* name() const override { return inner_->name(); }
  BufferRef allocate(size_t bytes) override { return inner_->allocate(bytes); }
  void send_control(int destination, std::span<const std::byte> message) override {
    inner_->send_control(destination, message);
  }
  void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override {
    inner_->send(destination, slot, buffer, bytes, state);
  }
  bool progress(Sink& sink) override {
    const bool worked = inner_->progress(*this);
    return forward(sink) || worked;
  }
  void wait(std::chrono::microseconds at_most) override {
    inner_->wait(std::min<std::chrono::microseconds>(at_most, std::chrono::milliseconds(1)));
  }
  void wake() override { inner_->wake(); }
  bool flushed() const override { return inner_->flushed(); }
  bool drained() const override { return inner_->drained(); }
  void leave(bool graceful, const std::string& reason) override { inner_->leave(graceful, reason); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kHoldUp = std::chrono::milliseconds(5);

  // A control message, a bulk message or an event, which is passed on unchanged.
  struct Message {
    int source;
    std::optional<Arrival> arrival;  // of a bulk message: holds the sender's memory
    Bytes bytes;
    std::function<void(Sink&)> event;
  };
  struct Link {
    std::deque<Message> queue;
    Clock::time_point stopped_until{};
    std::optional<Message> displaced;
    Clock::time_point displaced_until{};
  };

  // Callbacks of the inner transport.
  void on_control(int source, std::span<const std::byte> message) override {
    take(Traffic::kControl, {source, {}, exactly(message), {}});
  }
  void on_bulk(Arrival arrival) override {
    const int source = arrival.source;
    Bytes bytes = exactly(arrival.bytes);
    take(Traffic::kBulk, {source, std::move(arrival), std::move(bytes), {}});
  }
  void on_unreadable(int source, Slot slot, const Error& error) override {
    links_[source].queue.push_back(
        {source, {}, {}, [=](Sink& sink) { sink.on_unreadable(source, slot, error); }});
  }
  void on_peer_lost(int rank, Loss how, const std::string& reason) override {
    put_back(links_[rank]);
    links_[rank].queue.push_back(
        {rank, {}, {}, [=](Sink& sink) { sink.on_peer_lost(rank, how, reason); }});
  }

  void take(Traffic traffic, Message message) {
    Link& link = links_[message.source];
    const bool hit =
        traffic == fault_->traffic && fault_->kind != FaultKind::kNone && seen_++ == fault_->nth;
    if (hit) {
      fault_->sender = message.source;
      spoil(link, std::move(message));
    } else {
      link.queue.push_back(std::move(message));
      if (link.displaced && traffic == fault_->traffic) put_back(link);
    }
  }

  void spoil(Link& link, Message message) {
    Bytes& bytes = message.bytes;
    switch (fault_->kind) {
      case FaultKind::kDrop:
        return;
      case FaultKind::kTruncate:
        bytes = exactly(std::span(bytes).first(random_() % bytes.size()));
        break;
      case FaultKind::kGrow:
        for (auto extra = 1 + random_() % 100; extra > 0; --extra)
          bytes.push_back(static_cast<std::byte>(random_()));
        bytes = exactly(bytes);
        break;
      case FaultKind::kFlip:
        bytes[random_() % bytes.size()] ^= static_cast<std::byte>(1u << random_() % 8);
        break;
      case FaultKind::kDuplicate:
        link.queue.push_back({message.source, again(message.arrival), exactly(bytes), {}});
        break;
      case FaultKind::kReorder:
        link.displaced.emplace(std::move(message));
        link.displaced_until = Clock::now() + 4 * kHoldUp;
        return;
      case FaultKind::kDelay:
        link.stopped_until = Clock::now() + kHoldUp;
        break;
      case FaultKind::kForeign:
        do message.source = (message.source + 1) % static_cast<int>(links_.size());
        while (message.source == rank_);
        break;
      case FaultKind::kNone:
        break;
    }
    link.queue.push_back(std::move(message));
  }

  // Delivers a displaced message after those that have arrived.
  static void put_back(Link& link) {
    if (!link.displaced) return;
    link.queue.push_back(std::move(*link.displaced));
    link.displaced.reset();
  }

  bool forward(Sink& sink) {
    bool worked = false;
    for (Link& link : links_) {
      const auto now = Clock::now();
      if (link.displaced && now >= link.displaced_until) put_back(link);
      if (now < link.stopped_until) continue;
      while (!link.queue.empty()) {
        Message message = std::move(link.queue.front());
        link.queue.pop_front();
        deliver(std::move(message), sink);
        worked = true;
      }
    }
    return worked;
  }

  void deliver(Message message, Sink& sink) {
    if (message.event) return message.event(sink);
    if (!message.arrival) return sink.on_control(message.source, message.bytes);
    const uint64_t token = next_token_++;
    const Message& held = held_.emplace(token, std::move(message)).first->second;
    sink.on_bulk(Arrival(held.source, held.arrival->slot, held.bytes, this, token));
  }

  void release(int /*source*/, uint64_t token) override { held_.erase(token); }

  // The duplicate of a message, which is not released to the sender.
  static std::optional<Arrival> again(const std::optional<Arrival>& arrival) {
    if (!arrival) return {};
    return Arrival(arrival->source, arrival->slot, arrival->bytes, nullptr, 0);
  }
  static Bytes exactly(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

  const std::unique_ptr<Transport> inner_;  // destroyed after the arrivals below
  const int rank_;
  const std::shared_ptr<Fault> fault_;
  std::mt19937 random_;
  int seen_ = 0;             // messages of the fault's traffic so far
  std::vector<Link> links_;  // by source
  std::unordered_map<uint64_t, Message> held_;
  uint64_t next_token_ = 0;
};

}  // namespace cgx
