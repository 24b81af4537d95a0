// Hierarchical all_gather, for several hosts with several ranks each. A value crosses to each other
// host once, however many ranks it has.
//
//   1. Encode my block once. Send the bytes to all ranks of my host, and to one delegate on each
//      other host (host_blocks.h).
//   2. A delegate forwards the bytes, unchanged, to all other ranks of its host. So all ranks get
//      the same bits.
//
// No deadlock: own and forwarded messages within a host are decoded when they arrive. A delegate
// forwards in a fixed order. Let m be the lowest chunk that any delegate waits for. Its owner's
// messages of earlier chunks will be read, so it can send chunk m. A delegate that may not forward
// has unread forwarded messages, since most_forwarded_ exceeds its own ones.
#include <algorithm>
#include <cstring>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/host_blocks.h"
#include "algorithm/layout.h"
#include "base/thread_pool.h"

namespace cgx {
namespace {

constexpr int kOwn = 0, kForwarded = 1;  // parts

class HierarchicalGather : public Algorithm {
 public:
  explicit HierarchicalGather(Plan plan)
      : plan_(std::move(plan)),
        topology_(*plan_.topology),
        layout_(plan_),
        host_(topology_.host_of(plan_.rank)),
        chunks_(layout_.shard(plan_.rank).chunks.size()),
        forwards_(delegated_to(topology_, plan_.rank)),
        own_arrived_(plan_.size, 0),
        forwarded_(plan_.size) {
    const auto& near = topology_.ranks_of(host_);
    for (int step = 1; step < topology_.hosts(); ++step)
      receivers_.push_back(handler_of(topology_, (host_ + step) % topology_.hosts(), plan_.rank));
    for (size_t step = 1; step < near.size(); ++step) {
      const int rank = near[(topology_.local_rank(plan_.rank) + step) % near.size()];
      receivers_.push_back(rank);
      neighbours_.push_back(rank);
      forwarded_[rank].blocks = delegated_to(topology_, rank);
      forwarded_[rank].arrived = {forwarded_[rank].blocks.size(), chunks_};
    }
    to_forward_ = {forwards_.size(), chunks_};
    arrivals_.resize(forwards_.size());
    const auto receivers = static_cast<int>(receivers_.size());
    most_own_ = std::max(plan_.most_unreleased(layout_.longest_message()), receivers);
    most_forwarded_ = most_own_ + threads_.size() * receivers;
  }

  Step step(Port& port) override {
    if (decode_next()) return Step::kWorked;
    const size_t ready = forwardable();
    if (ready > 0 && port.unreleased() < most_forwarded_) {
      forward_next(port, ready);
      return Step::kWorked;
    }
    if (encoded_ < chunks_ && port.unreleased() < most_own_) {
      encode_next(port);
      return Step::kWorked;
    }
    return ready > 0 || encoded_ < chunks_ ? Step::kBlocked : Step::kIdle;
  }

  bool finished() const override {
    if (encoded_ < chunks_ || !to_forward_.done() || !gathered_.empty()) return false;
    for (int rank = 0; rank < plan_.size; ++rank)
      if (waits_for(rank)) return false;
    return true;
  }
  bool waits_for(int rank) const override {
    return (sends_own(rank) && own_arrived_[rank] < chunks_) || !forwarded_[rank].arrived.done();
  }
  const char* phase() const override { return "hierarchical all-gather"; }

 private:
  // The blocks that a rank of my host forwards to me.
  struct Forwarded {
    std::vector<int> blocks;
    ChunkStream arrived;
  };

  std::optional<Length> due(int source, int part) const override {
    if (part == kForwarded) {
      const ChunkStream& arrived = forwarded_[source].arrived;
      if (arrived.done()) return {};
      return chunk_of(source, arrived.chunk()).length[Stage::kGather];
    }
    if (!sends_own(source) || own_arrived_[source] == chunks_) return {};
    return chunk_of(source, own_arrived_[source]).length[Stage::kGather];
  }
  void take(int part, Arrival arrival) override {
    const int source = arrival.source;
    if (part == kForwarded) {
      auto& [blocks, arrived] = forwarded_[source];
      const int block = blocks[arrived.block()];
      gathered_.push_back({std::move(arrival), block, &chunk_of(block, arrived.chunk())});
      ++arrived.position;
      return;
    }
    const size_t chunk = own_arrived_[source]++;
    if (topology_.host_of(source) == host_) {
      gathered_.push_back({std::move(arrival), source, &chunk_of(source, chunk)});
    } else {
      const auto place = std::find(forwards_.begin(), forwards_.end(), source) - forwards_.begin();
      arrivals_[place].push_back(std::move(arrival));
    }
  }

  // Whether a rank sends me its own block.
  bool sends_own(int rank) const {
    return rank != plan_.rank &&
           (topology_.host_of(rank) == host_ || handler_of(topology_, host_, rank) == plan_.rank);
  }
  const Chunk& chunk_of(int block, size_t chunk) const {
    return layout_.shard(block).chunks[chunk];
  }
  void decode(int block, const Chunk& chunk, const Encoded& message) const {
    decode_chunk(plan_, layout_.shard(block), chunk, Stage::kGather, message, plan_.output);
  }

  // Step 1, one chunk per thread.
  void encode_next(Port& port) {
    const size_t count = std::min<size_t>(threads_.size(), chunks_ - encoded_);
    messages_.clear();
    for (size_t i = 0; i < count; ++i)
      messages_.push_back(
          {port.allocate(chunk_of(plan_.rank, encoded_ + i).length[Stage::kGather].most)});
    threads_.for_each(static_cast<int>(count), [&](int i) {
      auto& [buffer, bytes] = messages_[i];
      const Chunk& chunk = chunk_of(plan_.rank, encoded_ + i);
      bytes = static_cast<size_t>(encode_chunk(plan_, layout_.shard(plan_.rank), chunk,
                                               Stage::kGather, plan_.input, buffer->data));
      decode(plan_.rank, chunk, {plan_.rank, {buffer->data, bytes}});
    });
    encoded_ += count;
    send(port, kOwn, receivers_);
  }

  // The number of messages that can be forwarded now, at most one per thread.
  size_t forwardable() const {
    const size_t most = std::min<size_t>(threads_.size(), to_forward_.left());
    for (size_t i = 0; i < most; ++i)
      if (arrivals_[to_forward_.block(i)].size() <= to_forward_.before(i)) return i;
    return most;
  }

  // Step 2, one message per thread.
  void forward_next(Port& port, size_t count) {
    const auto arrival_of = [&](size_t i) -> const Arrival& {
      return arrivals_[to_forward_.block(i)][to_forward_.before(i)];
    };
    messages_.clear();
    for (size_t i = 0; i < count && !neighbours_.empty(); ++i) {
      const size_t bytes = arrival_of(i).bytes.size();
      messages_.push_back({port.allocate(bytes), bytes});
    }
    threads_.for_each(static_cast<int>(count), [&](int i) {
      const Arrival& arrival = arrival_of(i);
      decode(arrival.source, chunk_of(arrival.source, to_forward_.chunk(i)),
             {arrival.source, arrival.bytes});
      if (!neighbours_.empty())
        std::memcpy(messages_[i].buffer->data, arrival.bytes.data(), arrival.bytes.size());
    });
    for (size_t i = 0; i < count; ++i) arrivals_[to_forward_.block(i)].pop_front();
    to_forward_.position += count;
    send(port, kForwarded, neighbours_);
  }

  void send(Port& port, int part, const std::vector<int>& receivers) {
    for (const auto& [buffer, bytes] : messages_)
      for (const int rank : receivers) port.send(rank, part, buffer, bytes);
    messages_.clear();
  }

  // Messages from ranks of my host, one per thread.
  bool decode_next() {
    const size_t ready = std::min<size_t>(threads_.size(), gathered_.size());
    threads_.for_each(static_cast<int>(ready), [&](int i) {
      const auto& [arrival, block, chunk] = gathered_[i];
      decode(block, *chunk, {arrival.source, arrival.bytes});
    });
    for (size_t i = 0; i < ready; ++i) gathered_.pop_front();
    return ready > 0;
  }

  struct Gathered {
    Arrival arrival;
    int block;
    const Chunk* chunk;
  };
  struct Message {
    BufferRef buffer;
    size_t bytes = 0;
  };

  ThreadPool& threads_ = ThreadPool::instance();
  const Plan plan_;
  const Topology& topology_;
  const Layout layout_;
  const int host_;
  const size_t chunks_;                        // of each block
  const std::vector<int> forwards_;            // blocks that I forward within my host
  std::vector<int> receivers_;                 // of my block: delegates, then my host's ranks
  std::vector<int> neighbours_;                // the other ranks of my host
  int most_own_ = 0, most_forwarded_ = 0;      // unread messages at which sending them stops
  size_t encoded_ = 0;                         // chunks of my block
  std::vector<size_t> own_arrived_;            // chunks of the senders' own blocks, by rank
  std::vector<Forwarded> forwarded_;           // by rank; empty for those of other hosts
  ChunkStream to_forward_;                     // of forwards_
  std::vector<std::deque<Arrival>> arrivals_;  // to be decoded and forwarded; as forwards_
  std::deque<Gathered> gathered_;              // to be decoded
  std::vector<Message> messages_;              // of one step
};

}  // namespace

const AlgorithmEntry kHierarchicalGather = {
    CGX_HIERARCHICAL,
    "hierarchical",
    "hosts, then ranks of a host: 2 steps, a value is sent once to each host, quantized once",
    /*passes_sums_on=*/false,
    [](const Plan&) { return 1; },
    [](const Plan& plan, const Layout& layout) {
      const Topology& topology = *plan.topology;
      const auto& near = topology.ranks_of(topology.host_of(plan.rank));
      const int64_t neighbours = static_cast<int64_t>(near.size()) - 1;
      const auto forwarded = static_cast<int64_t>(delegated_to(topology, plan.rank).size());
      return (topology.hosts() - 1 + (forwarded + 1) * neighbours) *
             layout.shard(plan.rank).bytes(Stage::kGather);
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<HierarchicalGather>(std::move(plan));
    },
};

}  // namespace cgx
