// Scatter-reduce-allgather. Every rank owns a shard.
//
//   1. Scatter: encode my values of each peer's shard and send them to its owner.
//   2. Reduce: when all peers' messages of a chunk of my shard have arrived, sum them in rank order
//      with my own raw values. Encode the sum once and send it to all ranks.
//   3. Gather: decode the owners' bytes. The owner decodes its own, too, so that all ranks get the
//      same bits.
//
// reduce_scatter is 1 and the sum of 2. all_gather is 3 for every rank's own block. Steps: 2. Each
// rank sends 2(n-1)/n of the encoded size.
#include <algorithm>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"
#include "base/thread_pool.h"

namespace cgx {
namespace {

constexpr int kScatter = 0, kGather = 1;  // parts

class Sra : public Algorithm {
 public:
  explicit Sra(Plan plan)
      : plan_(std::move(plan)),
        layout_(plan_),
        scatters_(plan_.verb->scatters),
        gathers_(plan_.verb->gathers),
        most_unreleased_(
            std::max(plan_.most_unreleased(layout_.longest_message()), plan_.size - 1)),
        contributions_(plan_.size),
        gather_arrived_(plan_.size, 0),
        decoded_(plan_.size, 0),
        reducers_(threads_.size(), ChunkReducer(plan_)) {
    encode_peer_ = next_peer(plan_.rank);
    for (int owner = 0; owner < plan_.size; ++owner)
      longest_ = std::max(longest_, layout_.shard(owner).chunks.size());
  }

  Step step(Port& port) override {
    if (scatters_ && reduce_next(port)) return Step::kWorked;
    if (decode_next()) return Step::kWorked;
    if (!scatters_ && reduced_ < own_chunks().size()) {
      if (port.unreleased() >= most_unreleased_) return Step::kBlocked;
      encode_own_block(port);
      return Step::kWorked;
    }
    if (scatters_ && encoded_ < longest_) {
      // Every rank sends its chunks in the same order, and at least one to every peer before it
      // blocks. So the oldest chunk can always be reduced and read.
      if (port.unreleased() >= most_unreleased_) return Step::kBlocked;
      encode_next(port);
      return Step::kWorked;
    }
    return Step::kIdle;
  }

  bool finished() const override {
    if (scatters_ && encoded_ < longest_) return false;
    if (reduced_ < own_chunks().size()) return false;
    for (int peer = 0; peer < plan_.size; ++peer)
      if (lacks(decoded_, peer)) return false;
    return true;
  }

  bool waits_for(int rank) const override {
    if (rank == plan_.rank) return false;
    return lacks(gather_arrived_, rank) ||
           (scatters_ && reduced_ < own_chunks().size() &&
            reduced_ + contributions_[rank].size() < own_chunks().size());
  }

  const char* phase() const override {
    return scatters_ && reduced_ < own_chunks().size() ? "scatter-reduce" : "all-gather";
  }

 private:
  std::optional<Length> due(int source, int part) const override {
    if (part == kScatter) {
      const size_t next = reduced_ + contributions_[source].size();
      if (!scatters_ || next >= own_chunks().size()) return {};
      return own_chunks()[next].length[Stage::kScatter];
    }
    if (!lacks(gather_arrived_, source)) return {};
    return layout_.shard(source).chunks[gather_arrived_[source]].length[Stage::kGather];
  }
  void take(int part, Arrival arrival) override {
    if (part == kScatter) {
      contributions_[arrival.source].push_back(std::move(arrival));
    } else {
      ++gather_arrived_[arrival.source];
      gathered_.push_back(std::move(arrival));
    }
  }

  const std::vector<Chunk>& own_chunks() const { return layout_.shard(plan_.rank).chunks; }
  int next_peer(int peer) const { return (peer + 1) % plan_.size; }
  // Whether `counts` is below the number of chunks of a peer's shard.
  bool lacks(const std::vector<size_t>& counts, int peer) const {
    return gathers_ && peer != plan_.rank && counts[peer] < layout_.shard(peer).chunks.size();
  }

  // Phase 1, one message per thread, beginning with chunk `encoded_` for `encode_peer_`. Chunks are
  // the outer loop, so that no owner waits for all of another's.
  void encode_next(Port& port) {
    outgoing_.clear();
    while (static_cast<int>(outgoing_.size()) < threads_.size() && encoded_ < longest_) {
      const auto& chunks = layout_.shard(encode_peer_).chunks;
      if (encoded_ < chunks.size()) {
        const Chunk& chunk = chunks[encoded_];
        outgoing_.push_back(
            {encode_peer_, &chunk, port.allocate(chunk.length[Stage::kScatter].most)});
      }
      encode_peer_ = next_peer(encode_peer_);
      if (encode_peer_ != plan_.rank) continue;
      encode_peer_ = next_peer(encode_peer_);
      ++encoded_;
    }
    threads_.for_each(static_cast<int>(outgoing_.size()), [&](int i) {
      auto& [peer, chunk, buffer, bytes] = outgoing_[i];
      bytes = encode_chunk(plan_, layout_.shard(peer), *chunk, Stage::kScatter, plan_.input,
                           buffer->data, gathers_ ? 0 : peer);
    });
    for (const auto& [peer, chunk, buffer, bytes] : outgoing_)
      port.send(peer, kScatter, buffer, bytes);
    outgoing_.clear();
  }

  // Phase 2 for my shard, one chunk per thread, for all chunks that have arrived.
  bool reduce_next(Port& port) {
    size_t ready = std::min<size_t>(threads_.size(), own_chunks().size() - reduced_);
    for (int peer = 0; peer < plan_.size; ++peer)
      if (peer != plan_.rank) ready = std::min(ready, contributions_[peer].size());
    if (ready == 0) return false;
    const Shard& shard = layout_.shard(plan_.rank);
    outgoing_.clear();
    for (size_t i = 0; i < ready; ++i) {
      const Chunk& chunk = own_chunks()[reduced_ + i];
      outgoing_.push_back({plan_.rank, &chunk,
                           gathers_ ? port.allocate(chunk.length[Stage::kGather].most) : nullptr});
    }
    threads_.for_each(static_cast<int>(ready), [&](int i) {
      auto& [rank, chunk, buffer, bytes] = outgoing_[i];
      std::vector<Encoded> arrived(plan_.size, kOwnValues);
      for (int peer = 0; peer < plan_.size; ++peer)
        if (peer != rank) arrived[peer] = {peer, contributions_[peer][i].bytes};
      if (gathers_)
        bytes = reducers_[i].to_message(Stage::kGather, shard, *chunk, arrived, plan_.input,
                                        buffer->data, plan_.output);
      else
        reducers_[i].to_values(shard, *chunk, arrived, plan_.input, plan_.output);
    });
    reduced_ += ready;
    for (auto& queue : contributions_)
      for (size_t i = 0; i < ready && !queue.empty(); ++i) queue.pop_front();
    for (const auto& [rank, chunk, buffer, bytes] : outgoing_)
      if (gathers_) send_to_all(port, buffer, bytes);
    outgoing_.clear();
    return true;
  }

  // all_gather: encodes one chunk of my own block.
  void encode_own_block(Port& port) {
    const Shard& shard = layout_.shard(plan_.rank);
    const Chunk& chunk = shard.chunks[reduced_++];
    const BufferRef buffer = port.allocate(chunk.length[Stage::kGather].most);
    const auto bytes = static_cast<size_t>(
        encode_chunk(plan_, shard, chunk, Stage::kGather, plan_.input, buffer->data));
    decode_chunk(plan_, shard, chunk, Stage::kGather, {plan_.rank, {buffer->data, bytes}},
                 plan_.output);
    send_to_all(port, buffer, bytes);
  }

  void send_to_all(Port& port, const BufferRef& buffer, size_t bytes) {
    for (int peer = next_peer(plan_.rank); peer != plan_.rank; peer = next_peer(peer))
      port.send(peer, kGather, buffer, bytes);
  }

  // Phase 3, one message per thread.
  bool decode_next() {
    const size_t ready = std::min<size_t>(threads_.size(), gathered_.size());
    if (ready == 0) return false;
    std::vector<const Chunk*> chunks;
    for (size_t i = 0; i < ready; ++i) {
      const int owner = gathered_[i].source;
      chunks.push_back(&layout_.shard(owner).chunks[decoded_[owner]++]);
    }
    threads_.for_each(static_cast<int>(ready), [&](int i) {
      const Arrival& arrival = gathered_[i];
      decode_chunk(plan_, layout_.shard(arrival.source), *chunks[i], Stage::kGather,
                   {arrival.source, arrival.bytes}, plan_.output);
    });
    for (size_t i = 0; i < ready; ++i) gathered_.pop_front();
    return true;
  }

  // A chunk to be sent.
  struct Outgoing {
    int peer;
    const Chunk* chunk;
    BufferRef buffer;
    int64_t bytes = 0;
  };

  ThreadPool& threads_ = ThreadPool::instance();
  const Plan plan_;
  const Layout layout_;
  const bool scatters_, gathers_;
  const int most_unreleased_;
  size_t longest_ = 0;  // chunks of the longest shard
  size_t encoded_ = 0;  // current chunk of phase 1
  int encode_peer_;
  std::vector<std::deque<Arrival>> contributions_;  // for my shard, by source
  size_t reduced_ = 0;                              // chunks of my shard that are reduced
  std::deque<Arrival> gathered_;
  std::vector<size_t> gather_arrived_,
      decoded_;                         // chunks of each owner's shard that are decoded
  std::vector<Outgoing> outgoing_;      // of one step
  std::vector<ChunkReducer> reducers_;  // one per thread
};

}  // namespace

const AlgorithmEntry kSra = {
    CGX_SRA,
    "sra",
    "scatter-reduce-allgather: 2 steps, 2(n-1)/n x size sent, quantized twice",
    /*passes_sums_on=*/false,
    [](const Plan& plan) { return plan.verb->shards() ? plan.size : 1; },
    [](const Plan& plan, const Layout& layout) {
      int64_t sum = 0;
      for (int owner = 0; owner < plan.size && plan.verb->scatters; ++owner)
        if (owner != plan.rank) sum += layout.shard(owner).bytes(Stage::kScatter);
      if (!plan.verb->gathers) return sum;
      return sum + (plan.size - 1) * layout.shard(plan.rank).bytes(Stage::kGather);
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> { return std::make_unique<Sra>(std::move(plan)); },
};

}  // namespace cgx
