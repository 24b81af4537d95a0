// One shot: every rank sends all its encoded values to every other rank, and sums all ranks' values
// in rank order. It decodes its own bytes too, so all ranks compute the same bits.
//
//   small    (at most kEagerBytes encoded) values are sent in the header
//   larger   chunk messages; a chunk is summed when all ranks' messages have arrived
//
// Steps: 1. Each rank sends (n-1) times the encoded size. Values are quantized once.
#include "algorithm/one_shot.h"

#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"

namespace cgx {
namespace {

class OneShot : public Algorithm {
 public:
  explicit OneShot(Plan plan)
      : plan_(std::move(plan)),
        layout_(plan_),
        eager_(plan_.size),
        arrived_(plan_.size),
        messages_(plan_.size),
        reducer_(plan_),
        most_unreleased_(plan_.most_unreleased(layout_.longest_message())) {
    int64_t bytes = 0;
    for (const auto& chunk : chunks()) bytes += chunk.length[Stage::kScatter].most;
    is_eager_ = bytes <= kEagerBytes && chunks().size() <= 1;
  }

  Bytes eager() override {
    if (!is_eager_ || chunks().empty()) return {};
    Bytes payload(most(chunks()[0]));
    payload.resize(encode(chunks()[0], payload.data()));
    eager_[plan_.rank] = payload;
    encoded_ = 1;
    return payload;
  }

  Step step(Port& port) override {
    if (reduce_next()) return Step::kWorked;
    if (encoded_ == chunks().size()) return Step::kIdle;
    if (port.unreleased() >= most_unreleased_) return Step::kBlocked;
    const Chunk& chunk = chunks()[encoded_++];
    const BufferRef buffer = port.allocate(most(chunk));
    const auto bytes = static_cast<size_t>(encode(chunk, buffer->data));
    for (int step = 1; step < plan_.size; ++step)
      port.send((plan_.rank + step) % plan_.size, 0, buffer, bytes);
    own_.emplace_back(buffer, bytes);
    return Step::kWorked;
  }

  bool finished() const override { return reduced_ == chunks().size(); }
  bool waits_for(int rank) const override {
    return rank != plan_.rank && reduced_ + arrived_[rank].size() < chunks().size() && !is_eager_;
  }
  const char* phase() const override { return "one-shot exchange"; }

 private:
  std::optional<Length> due(int source, int part) const override {
    const size_t next = reduced_ + arrived_[source].size();
    if (is_eager_ || part != 0 || next >= chunks().size()) return {};
    return chunks()[next].length[Stage::kScatter];
  }
  void take(int, Arrival arrival) override {
    arrived_[arrival.source].push_back(std::move(arrival));
  }
  bool awaits_eager(int, size_t bytes) const override {
    if (!is_eager_ || chunks().empty()) return bytes == 0;
    return chunks()[0].length[Stage::kScatter].fits(static_cast<int64_t>(bytes));
  }
  void take_eager(int source, Bytes payload) override { eager_[source] = std::move(payload); }

  const Shard& shard() const { return layout_.shard(plan_.rank); }  // everything
  const std::vector<Chunk>& chunks() const { return shard().chunks; }

  static int64_t most(const Chunk& chunk) { return chunk.length[Stage::kScatter].most; }
  int64_t encode(const Chunk& chunk, std::byte* to) const {
    return encode_chunk(plan_, shard(), chunk, Stage::kScatter, plan_.input, to);
  }

  // Whether a rank's message of the next chunk to be summed is available.
  bool has(int rank) const {
    return is_eager_ || !(rank == plan_.rank ? own_.empty() : arrived_[rank].empty());
  }
  std::span<const std::byte> message(int rank) const {
    if (is_eager_) return eager_[rank];
    if (rank != plan_.rank) return arrived_[rank].front().bytes;
    const auto& [buffer, bytes] = own_.front();
    return {buffer->data, bytes};
  }

  bool reduce_next() {
    if (finished()) return false;
    for (int rank = 0; rank < plan_.size; ++rank)
      if (!has(rank)) return false;
    for (int rank = 0; rank < plan_.size; ++rank) messages_[rank] = {rank, message(rank)};
    reducer_.to_values(shard(), chunks()[reduced_++], messages_, nullptr, plan_.output);
    if (!is_eager_) own_.pop_front();
    for (auto& queue : arrived_)
      if (!queue.empty()) queue.pop_front();
    return true;
  }

  const Plan plan_;
  const Layout layout_;
  bool is_eager_ = false;
  std::vector<Bytes> eager_;  // per rank
  size_t encoded_ = 0, reduced_ = 0;
  std::deque<std::pair<BufferRef, size_t>> own_;  // encoded, with its size
  std::vector<std::deque<Arrival>> arrived_;
  std::vector<Encoded> messages_;  // of one chunk, per rank
  ChunkReducer reducer_;
  const int most_unreleased_;
};

}  // namespace

const AlgorithmEntry kOneShot = {
    CGX_ONE_SHOT,
    "one_shot",
    "every rank sends everything to every other: 1 step, (n-1) x size sent, quantized once",
    /*passes_sums_on=*/false,
    [](const Plan&) { return 1; },
    [](const Plan& plan, const Layout& layout) {
      return (plan.size - 1) * layout.shard(0).bytes(Stage::kScatter);
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<OneShot>(std::move(plan));
    },
};

}  // namespace cgx
