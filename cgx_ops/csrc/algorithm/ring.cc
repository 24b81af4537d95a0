// Ring allreduce: every rank talks to its right-hand neighbour only.
//
//   1. start: encode my values of the shard that begins at me
//   2. reduce: to each message from the left add my own values; encode and pass on, or, when the
//      shard has reached its owner (me), encode the sum for everyone
//   3. gather: decode the owners' bytes and pass them on unchanged
//
// Messages are passed on in the order of arrival, mine first, so the n-th message from the left has
// a known meaning. A rank starts all of one shard before it reads anything, so a limit on what is
// in flight would stop a ring whose ranks all wait for their neighbours to read. Steps: 2(n-1).
// Values are quantized once per hop: for exact values, or few ranks.
#include <cstring>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"
#include "algorithm/schedule.h"

namespace cgx {
namespace {

constexpr int kReduce = 0, kGather = 1;  // parts

// Walks the messages of one part from the left: chunk after chunk of the shards of hop 1, 2, ...
// size - 1. Hop h brings shard rank - shift - h.
class Walk {
 public:
  Walk(const Layout& layout, int rank, int size, int shift)
      : layout_(layout), rank_(rank), size_(size), shift_(shift) {
    skip_empty();
  }
  bool done() const { return hop_ >= size_; }
  int shard() const { return ring_shard(rank_, hop_ + shift_, size_); }
  const Chunk& chunk() const { return layout_.shard(shard()).chunks[chunk_]; }
  bool last_hop() const { return hop_ == size_ - 1; }
  void advance() {
    ++chunk_;
    skip_empty();
  }

 private:
  void skip_empty() {
    while (!done() && chunk_ == layout_.shard(shard()).chunks.size()) {
      ++hop_;
      chunk_ = 0;
    }
  }
  const Layout& layout_;
  const int rank_, size_, shift_;
  int hop_ = 1;
  size_t chunk_ = 0;
};

class RingAllreduce : public Algorithm {
 public:
  explicit RingAllreduce(Plan plan)
      : plan_(std::move(plan)),
        layout_(plan_),
        left_(ring_left(plan_.rank, plan_.size)),
        right_(ring_right(plan_.rank, plan_.size)),
        reduce_(layout_, plan_.rank, plan_.size, 1),
        gather_(layout_, plan_.rank, plan_.size, 0),
        due_{reduce_, gather_},
        reducer_(plan_) {}

  Step step(Port& port) override {
    if (started_ < starting_shard().chunks.size()) {
      start_next(port);
    } else if (!reduce_.done()) {
      if (arrived_[kReduce].empty()) return Step::kIdle;
      reduce_next(port);
    } else {
      if (gather_.done() || arrived_[kGather].empty()) return Step::kIdle;
      gather_next(port);
    }
    return Step::kWorked;
  }

  bool finished() const override {
    return started_ == starting_shard().chunks.size() && reduce_.done() && gather_.done();
  }
  bool waits_for(int rank) const override {
    return rank == left_ && !(due_[kReduce].done() && due_[kGather].done());
  }
  const char* phase() const override { return reduce_.done() ? "ring gather" : "ring reduce"; }

 private:
  std::optional<Length> due(int source, int part) const override {
    if (source != left_ || due_[part].done()) return {};
    return due_[part].chunk().length[part == kReduce ? Way::kScatter : Way::kGather];
  }
  void take(int part, Arrival arrival) override {
    due_[part].advance();
    arrived_[part].push_back(std::move(arrival));
  }

  const Shard& starting_shard() const { return layout_.shard(left_); }

  void start_next(Port& port) {
    const Shard& shard = starting_shard();
    const Chunk& chunk = shard.chunks[started_++];
    const BufferRef buffer = port.allocate(chunk.length[Way::kScatter].most);
    port.send(right_, kReduce, buffer,
              encode_chunk(plan_, shard, chunk, Way::kScatter, plan_.input, buffer->data));
  }

  void reduce_next(Port& port) {
    const Arrival arrival = std::move(arrived_[kReduce].front());
    arrived_[kReduce].pop_front();
    const bool mine = reduce_.last_hop();
    const Shard& shard = layout_.shard(reduce_.shard());
    const Chunk& chunk = reduce_.chunk();
    const BufferRef buffer = port.allocate(chunk.length[mine ? Way::kGather : Way::kScatter].most);
    const Encoded messages[] = {{left_, arrival.bytes}, kOwnValues};
    const int64_t bytes =
        mine ? reducer_.to_gather_message(shard, chunk, messages, plan_.input, buffer->data,
                                          plan_.output)
             : reducer_.to_scatter_message(shard, chunk, messages, plan_.input, buffer->data);
    reduce_.advance();
    port.send(right_, mine ? kGather : kReduce, buffer, bytes);
  }

  void gather_next(Port& port) {
    const Arrival arrival = std::move(arrived_[kGather].front());
    arrived_[kGather].pop_front();
    if (!gather_.last_hop()) {  // the right-hand neighbour does not own it
      const BufferRef buffer = port.allocate(arrival.bytes.size());
      std::memcpy(buffer->data, arrival.bytes.data(), arrival.bytes.size());
      port.send(right_, kGather, buffer, arrival.bytes.size());
    }
    const Shard& shard = layout_.shard(gather_.shard());
    decode_chunk(plan_, shard, gather_.chunk(), {left_, arrival.bytes}, plan_.output);
    gather_.advance();
  }

  const Plan plan_;
  const Layout layout_;
  const int left_, right_;
  size_t started_ = 0;
  Walk reduce_, gather_;  // what is done next
  Walk due_[2];           // by part: what comes next
  std::deque<Arrival> arrived_[2];
  ChunkReducer reducer_;
};

}  // namespace

const AlgorithmEntry kRing = {
    CGX_RING,
    "ring",
    "2(n-1) steps to the right-hand neighbour, 2(n-1)/n x size sent, quantized n times: for exact "
    "values",
    /*passes_sums_on=*/true,
    /*sliced=*/true,
    [](const Plan& plan) { return plan.size; },
    [](const Plan& plan, const Layout& layout) {
      int64_t sum = 0;  // every shard but one passes through, each way
      for (int owner = 0; owner < plan.size; ++owner) {
        if (owner != plan.rank) sum += layout.shard(owner).bytes(Way::kScatter);
        if (owner != ring_right(plan.rank, plan.size))
          sum += layout.shard(owner).bytes(Way::kGather);
      }
      return sum;
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<RingAllreduce>(std::move(plan));
    },
};

}  // namespace cgx
