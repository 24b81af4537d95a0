// Ring allreduce: every rank sends to its right neighbor only.
//
//   1. Start: encode my values of the shard that begins here.
//   2. Reduce: add my values to each message from the left, then encode and forward it. When the
//      shard has reached its owner (me), encode the sum for all ranks.
//   3. Gather: decode the owners' bytes and forward them unchanged.
//
// Chunks pass around the ring in waves. A wave has as many chunks of every shard as the limit on
// unread messages allows. Within a wave, messages are forwarded in the order of arrival, mine
// first, so the n-th message from the left has a known meaning. A rank sends everything that it
// starts in a wave before it reads, so it must not block there. It may block before the next wave,
// because peers read all messages of a wave independently of it.
//
// Steps: 2(n-1). Values are quantized once per hop, so this suits uncompressed values or few ranks.
#include <algorithm>
#include <cstring>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"
#include "algorithm/schedule.h"

namespace cgx {
namespace {

constexpr int kReduce = 0, kGather = 1;  // parts

// Iterates over the messages of one part from the left: wave by wave; within a wave, chunk by chunk
// of the shards of hops 1 to size - 1. Hop h brings shard rank - shift - h.
class Walk {
 public:
  Walk(const Layout& layout, size_t wave_chunks, size_t waves, int rank, int size, int shift)
      : layout_(layout),
        wave_chunks_(wave_chunks),
        waves_(waves),
        rank_(rank),
        size_(size),
        shift_(shift) {
    skip_missing();
  }
  bool done() const { return wave_ == waves_; }
  size_t wave() const { return wave_; }  // of the next message
  int shard() const { return ring_shard(rank_, hop_ + shift_, size_); }
  const Chunk& chunk() const { return chunks()[chunk_]; }
  bool last_hop() const { return hop_ == size_ - 1; }
  void advance() {
    ++chunk_;
    skip_missing();
  }

 private:
  const std::vector<Chunk>& chunks() const { return layout_.shard(shard()).chunks; }
  void skip_missing() {
    while (!done() && chunk_ >= std::min(chunks().size(), (wave_ + 1) * wave_chunks_)) {
      if (++hop_ == size_) {
        hop_ = 1;
        ++wave_;
      }
      chunk_ = wave_ * wave_chunks_;
    }
  }
  const Layout& layout_;
  const size_t wave_chunks_, waves_;
  const int rank_, size_, shift_;
  size_t wave_ = 0;
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
        most_unreleased_(plan_.unread_bytes / std::max<int64_t>(1, layout_.longest_message())),
        // A wave is 2(size - 1) times as many messages: half of the limit.
        wave_chunks_(std::max<int64_t>(1, most_unreleased_ / (4 * (plan_.size - 1)))),
        waves_(count_waves()),
        reduce_(layout_, wave_chunks_, waves_, plan_.rank, plan_.size, 1),
        gather_(layout_, wave_chunks_, waves_, plan_.rank, plan_.size, 0),
        due_{reduce_, gather_},
        reducer_(plan_) {}

  Step step(Port& port) override {
    if (wave_ == waves_) return Step::kIdle;
    if (started_ < std::min(starting_shard().chunks.size(), (wave_ + 1) * wave_chunks_)) {
      if (started_ == wave_ * wave_chunks_ && port.unreleased() > most_unreleased_ / 2)
        return Step::kBlocked;
      start_next(port);
    } else if (reduce_.wave() == wave_) {
      if (arrived_[kReduce].empty()) return Step::kIdle;
      reduce_next(port);
    } else if (gather_.wave() == wave_) {
      if (arrived_[kGather].empty()) return Step::kIdle;
      gather_next(port);
    } else {
      ++wave_;
    }
    return Step::kWorked;
  }

  bool finished() const override { return wave_ == waves_; }
  bool waits_for(int rank) const override {
    return rank == left_ && !(due_[kReduce].done() && due_[kGather].done());
  }
  const char* phase() const override { return reduce_.done() ? "ring gather" : "ring reduce"; }

 private:
  std::optional<Length> due(int source, int part) const override {
    if (source != left_ || due_[part].done()) return {};
    return due_[part].chunk().length[part == kReduce ? Stage::kScatter : Stage::kGather];
  }
  void take(int part, Arrival arrival) override {
    due_[part].advance();
    arrived_[part].push_back(std::move(arrival));
  }

  const Shard& starting_shard() const { return layout_.shard(left_); }

  size_t count_waves() const {
    size_t longest = 0;
    for (int owner = 0; owner < plan_.size; ++owner)
      longest = std::max(longest, layout_.shard(owner).chunks.size());
    return (longest + wave_chunks_ - 1) / wave_chunks_;
  }

  void start_next(Port& port) {
    const Shard& shard = starting_shard();
    const Chunk& chunk = shard.chunks[started_++];
    const BufferRef buffer = port.allocate(chunk.length[Stage::kScatter].most);
    const Encoded mine[] = {kOwnValues};
    port.send(right_, kReduce, buffer,
              reducer_.to_message(Stage::kScatter, shard, chunk, mine, plan_.input, buffer->data));
  }

  void reduce_next(Port& port) {
    const Arrival arrival = std::move(arrived_[kReduce].front());
    arrived_[kReduce].pop_front();
    const bool mine = reduce_.last_hop();
    const Shard& shard = layout_.shard(reduce_.shard());
    const Chunk& chunk = reduce_.chunk();
    const Stage stage = mine ? Stage::kGather : Stage::kScatter;
    const BufferRef buffer = port.allocate(chunk.length[stage].most);
    const Encoded messages[] = {{left_, arrival.bytes}, kOwnValues};
    const int64_t bytes = reducer_.to_message(stage, shard, chunk, messages, plan_.input,
                                              buffer->data, mine ? plan_.output : nullptr);
    reduce_.advance();
    port.send(right_, mine ? kGather : kReduce, buffer, bytes);
  }

  void gather_next(Port& port) {
    const Arrival arrival = std::move(arrived_[kGather].front());
    arrived_[kGather].pop_front();
    if (!gather_.last_hop()) {  // unless the right neighbor owns it
      const BufferRef buffer = port.allocate(arrival.bytes.size());
      std::memcpy(buffer->data, arrival.bytes.data(), arrival.bytes.size());
      port.send(right_, kGather, buffer, arrival.bytes.size());
    }
    const Shard& shard = layout_.shard(gather_.shard());
    decode_chunk(plan_, shard, gather_.chunk(), Stage::kGather, {left_, arrival.bytes},
                 plan_.output);
    gather_.advance();
  }

  const Plan plan_;
  const Layout layout_;
  const int left_, right_;
  const int64_t most_unreleased_;
  const size_t wave_chunks_, waves_;
  size_t wave_ = 0;       // current wave
  size_t started_ = 0;    // chunks of the shard that begins here
  Walk reduce_, gather_;  // next to be processed
  Walk due_[2];           // next to arrive, per part
  std::deque<Arrival> arrived_[2];
  ChunkReducer reducer_;
};

}  // namespace

const AlgorithmEntry kRing = {
    CGX_RING,
    "ring",
    "2(n-1) steps to the right neighbor, 2(n-1)/n x size sent, quantized n times: for exact values",
    /*passes_sums_on=*/true,
    [](const Plan& plan) { return plan.size; },
    [](const Plan& plan, const Layout& layout) {
      int64_t sum = 0;  // every shard but one passes through, in each direction
      for (int owner = 0; owner < plan.size; ++owner) {
        if (owner != plan.rank) sum += layout.shard(owner).bytes(Stage::kScatter);
        if (owner != ring_right(plan.rank, plan.size))
          sum += layout.shard(owner).bytes(Stage::kGather);
      }
      return sum;
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<RingAllreduce>(std::move(plan));
    },
};

}  // namespace cgx
