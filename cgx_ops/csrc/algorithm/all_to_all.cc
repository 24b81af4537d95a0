// All-to-all: every rank encodes a block for each other rank and sends it. The receiver decodes it.
// The block for this rank itself is copied.
//
// A call with a peer has two members, and exchanges blocks between them only.
//
// Blocks may have any sizes. Headers contain the sizes of the blocks that a rank sends and expects,
// so every rank compares those of all ranks before values are sent.
//
// Steps: 1. Received messages are decoded before more are sent, and none depends on another, so a
// rank that blocks does so only until its peers have read its messages.
#include <algorithm>
#include <cstring>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/block_sizes.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"
#include "algorithm/one_shot.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace cgx {
namespace {

// Two sizes per rank fit the payload of a header.
constexpr int kMostRanks = kEagerBytes / (2 * sizeof(int64_t));

class AllToAll : public Algorithm {
 public:
  explicit AllToAll(Plan plan)
      : plan_(std::move(plan)),
        layout_(plan_),
        most_unreleased_(plan_.most_unreleased(layout_.longest_message())),
        sizes_(plan_.members.size()),
        arrived_(plan_.size, 0) {
    require(sizes_.size() <= kMostRanks, CGX_UNSUPPORTED, "all_to_all over ", sizes_.size(),
            " ranks is not supported; accepted: at most ", kMostRanks);
    sizes_of(plan_.rank) = BlockSizes::of(plan_);
    for (int peer = 0; peer < plan_.size; ++peer)
      undecoded_ += layout_.received(peer).chunks.size();
    order_messages();
  }

  Bytes eager() override { return sizes_of(plan_.rank).to_bytes(); }

  std::string disagreement() const override { return difference(plan_.members, sizes_); }

  Step step(Port& port) override {
    if (decode_next()) return Step::kWorked;
    const bool unsent = next_ < outgoing_.size();
    if (unsent && port.unreleased() < most_unreleased_) {
      encode_next(port);
      return Step::kWorked;
    }
    if (!copied_) {
      copy_own_block(plan_);
      copied_ = true;
      return Step::kWorked;
    }
    return unsent ? Step::kBlocked : Step::kIdle;
  }

  bool finished() const override { return copied_ && next_ == outgoing_.size() && undecoded_ == 0; }
  bool waits_for(int rank) const override {
    return arrived_[rank] < layout_.received(rank).chunks.size();
  }
  const char* phase() const override { return "all-to-all"; }

 private:
  std::optional<Length> due(int source, int part) const override {
    if (part != 0 || !waits_for(source)) return {};
    return layout_.received(source).chunks[arrived_[source]].length[Stage::kScatter];
  }
  void take(int, Arrival arrival) override {
    const Chunk& chunk = layout_.received(arrival.source).chunks[arrived_[arrival.source]++];
    incoming_.push_back({std::move(arrival), &chunk});
  }
  bool awaits_eager(int, size_t bytes) const override {
    return bytes == BlockSizes::bytes(sizes_.size());
  }
  void take_eager(int source, Bytes payload) override {
    sizes_of(source) = BlockSizes::from_bytes(payload, sizes_.size());
  }

  BlockSizes& sizes_of(int rank) {
    const auto& members = plan_.members;
    return sizes_[std::lower_bound(members.begin(), members.end(), rank) - members.begin()];
  }

  // Chunk by chunk, so that no receiver waits for all of another's. Each rank begins with the next
  // one, so that not all send to the same.
  void order_messages() {
    for (size_t i = 0, longest = 1; i < longest; ++i) {
      for (int step = 1; step < plan_.size; ++step) {
        const int peer = (plan_.rank + step) % plan_.size;
        const auto& chunks = layout_.shard(peer).chunks;
        longest = std::max(longest, chunks.size());
        if (i < chunks.size()) outgoing_.push_back({peer, &chunks[i]});
      }
    }
  }

  // One message per thread.
  void encode_next(Port& port) {
    const size_t count = std::min<size_t>(threads_.size(), outgoing_.size() - next_);
    const std::span now = std::span(outgoing_).subspan(next_, count);
    for (Outgoing& each : now)
      each.buffer = port.allocate(each.chunk->length[Stage::kScatter].most);
    threads_.for_each(static_cast<int>(count), [&](int i) {
      auto& [peer, chunk, buffer, bytes] = now[i];
      bytes = encode_chunk(plan_, layout_.shard(peer), *chunk, Stage::kScatter, plan_.input,
                           buffer->data, peer);
    });
    for (auto& [peer, chunk, buffer, bytes] : now) {
      port.send(peer, 0, buffer, bytes);
      buffer = nullptr;
    }
    next_ += count;
  }

  // One message per thread.
  bool decode_next() {
    const size_t ready = std::min<size_t>(threads_.size(), incoming_.size());
    threads_.for_each(static_cast<int>(ready), [&](int i) {
      const auto& [arrival, chunk] = incoming_[i];
      decode_chunk(plan_, layout_.received(arrival.source), *chunk, Stage::kScatter,
                   {arrival.source, arrival.bytes}, plan_.output);
    });
    for (size_t i = 0; i < ready; ++i) incoming_.pop_front();
    undecoded_ -= ready;
    return ready > 0;
  }

  struct Outgoing {
    int peer;
    const Chunk* chunk;
    BufferRef buffer = nullptr;
    int64_t bytes = 0;
  };
  struct Incoming {
    Arrival arrival;
    const Chunk* chunk;
  };

  ThreadPool& threads_ = ThreadPool::instance();
  const Plan plan_;
  const Layout layout_;
  const int most_unreleased_;
  std::vector<BlockSizes> sizes_;   // per member
  std::vector<Outgoing> outgoing_;  // all messages of this rank, in their order
  size_t next_ = 0;                 // of them
  std::vector<size_t> arrived_;     // messages, per source
  std::deque<Incoming> incoming_;   // messages to be decoded
  size_t undecoded_ = 0;            // messages, including those that have not arrived
  bool copied_ = false;
};

}  // namespace

const AlgorithmEntry kAllToAll = {
    CGX_SRA,
    "all_to_all",
    "every rank sends each other rank a block: 1 step, quantized once",
    /*passes_sums_on=*/false,
    [](const Plan& plan) { return plan.size; },
    [](const Plan& plan, const Layout& layout) {
      int64_t sum = 0;
      for (int peer = 0; peer < plan.size; ++peer) sum += layout.shard(peer).bytes(Stage::kScatter);
      return sum;
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<AllToAll>(std::move(plan));
    },
};

}  // namespace cgx
