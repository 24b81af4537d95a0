// Several hosts, some with several ranks: shared memory within a host, MPI or TCP between hosts.
//
// Both halves use the communicator's ranks and handle their own peers. Encoders always write to
// shared memory; the other half sends from there.
#include <algorithm>

#include "base/status.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace cgx {
namespace {

// No single event ends a wait for both halves. So a waiter sleeps on shared memory and polls the
// other half at this interval.
constexpr auto kPollInterval = std::chrono::microseconds(100);

class HybridTransport : public Transport {
 public:
  HybridTransport(const char* name, std::unique_ptr<Transport> near, std::unique_ptr<Transport> far,
                  std::vector<bool> is_near)
      : name_(name), near_(std::move(near)), far_(std::move(far)), is_near_(std::move(is_near)) {}

  const char* name() const override { return name_; }
  int64_t rejected_connections() const override { return far_->rejected_connections(); }

  BufferRef allocate(size_t bytes) override { return near_->allocate(bytes); }
  void send_control(int destination, std::span<const std::byte> message) override {
    to(destination).send_control(destination, message);
  }
  void send(int destination, Slot slot, const BufferRef& buffer, size_t bytes,
            const std::shared_ptr<SendState>& state) override {
    to(destination).send(destination, slot, buffer, bytes, state);
  }

  bool progress(Sink& sink) override {
    FarSink far_sink(sink, is_near_);
    const bool near_worked = near_->progress(sink);
    return far_->progress(far_sink) || near_worked;
  }
  void wait(std::chrono::microseconds at_most) override {
    near_->wait(std::min(at_most, kPollInterval));
  }
  void wake() override { near_->wake(); }

  bool flushed() const override { return near_->flushed() && far_->flushed(); }
  bool drained() const override { return near_->drained() && far_->drained(); }
  void leave(bool graceful, const std::string& reason) override {
    near_->leave(graceful, reason);
    far_->leave(graceful, reason);
  }

 private:
  // Ignores MPI's report of a lost near rank: it may arrive before messages that this rank left in
  // shared memory, which reports the loss itself.
  class FarSink : public Sink {
   public:
    FarSink(Sink& sink, const std::vector<bool>& is_near) : sink_(sink), is_near_(is_near) {}
    void on_control(int source, std::span<const std::byte> message) override {
      sink_.on_control(source, message);
    }
    void on_bulk(Arrival arrival) override { sink_.on_bulk(std::move(arrival)); }
    void on_unreadable(int source, Slot slot, const Error& error) override {
      sink_.on_unreadable(source, slot, error);
    }
    void on_peer_lost(int rank, Loss how, const std::string& reason) override {
      if (!is_near_[rank]) sink_.on_peer_lost(rank, how, reason);
    }

   private:
    Sink& sink_;
    const std::vector<bool>& is_near_;
  };

  Transport& to(int destination) { return is_near_[destination] ? *near_ : *far_; }

  const char* const name_;
  std::unique_ptr<Transport> near_, far_;
  const std::vector<bool> is_near_;  // by rank
};

class HybridConnector : public Connector {
 public:
  HybridConnector(const char* name, int rank, std::unique_ptr<Connector> near,
                  std::unique_ptr<Connector> far)
      : name_(name), rank_(rank), near_(std::move(near)), far_(std::move(far)) {}

  // shm's offer, whose length is equal on all ranks, then the other half's.
  Bytes offer() const override {
    Bytes both = near_->offer();
    const Bytes far = far_->offer();
    both.insert(both.end(), far.begin(), far.end());
    return both;
  }

  std::string refusal(const std::vector<Bytes>& offers) const override {
    std::vector<Host> memories;
    for (const Bytes& offer : near_parts(offers))
      memories.push_back(LocalOffer::read(offer).memory);
    std::sort(memories.begin(), memories.end());
    if (memories.front() == memories.back()) return "all ranks share memory";
    if (std::adjacent_find(memories.begin(), memories.end()) == memories.end())
      return "no two ranks share memory";
    return far_->refusal(far_parts(offers));
  }

  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                     const Reach& reach) override {
    const std::vector<Bytes> near = near_parts(offers);
    const Host own = LocalOffer::read(near[rank_]).memory;
    std::vector<bool> is_near;
    for (const Bytes& offer : near) is_near.push_back(LocalOffer::read(offer).memory == own);
    Reach others = reach;
    for (size_t peer = 0; peer < offers.size(); ++peer)
      if (is_near[peer]) others.ranks[peer] = false;
    auto connected = near_->connect(near, {is_near, reach.at_most, reach.timeout});
    return std::make_unique<HybridTransport>(
        name_, std::move(connected), far_->connect(far_parts(offers), others), std::move(is_near));
  }

 private:
  // Each half validates the length of its part.
  static size_t near_bytes(const Bytes& offer) {
    return std::min(offer.size(), sizeof(LocalOffer));
  }
  static std::vector<Bytes> near_parts(const std::vector<Bytes>& offers) {
    std::vector<Bytes> parts;
    for (const Bytes& offer : offers)
      parts.emplace_back(offer.begin(), offer.begin() + near_bytes(offer));
    return parts;
  }
  static std::vector<Bytes> far_parts(const std::vector<Bytes>& offers) {
    std::vector<Bytes> parts;
    for (const Bytes& offer : offers)
      parts.emplace_back(offer.begin() + near_bytes(offer), offer.end());
    return parts;
  }

  const char* const name_;
  const int rank_;
  std::unique_ptr<Connector> near_, far_;
};

}  // namespace

std::unique_ptr<Connector> make_hybrid_connector(int rank, int size) {
  auto far = make_mpi_connector(rank, size);
  if (!far) return nullptr;
  return std::make_unique<HybridConnector>("hybrid", rank, make_shm_connector(rank, size),
                                           std::move(far));
}

std::unique_ptr<Connector> make_hybrid_tcp_connector(int rank, int size) {
  return std::make_unique<HybridConnector>("hybrid_tcp", rank, make_shm_connector(rank, size),
                                           make_tcp_connector(rank, size));
}

}  // namespace cgx
