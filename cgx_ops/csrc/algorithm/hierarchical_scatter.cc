// Hierarchical reduce_scatter, for several hosts with several ranks each. A value crosses between
// two hosts once per host, however many ranks they have.
//
//   1. Intra: encode my values (uncompressed, or in intra_bits) of each block for the rank of my
//      host that handles it (host_blocks.h).
//   2. Sum: a delegate sums its host's values of a block in rank order, with its own raw values. It
//      encodes the sum and sends it to the owner.
//   3. Reduce: the owner sums its own host's values, adds the other hosts' sums in host order, and
//      divides for avg.
//
// Each rank sends one message per chunk of each other rank's block: values to a rank of its host,
// or a sum.
//
// No deadlock: let m be the lowest chunk of which any rank has unsent messages. All messages of
// earlier chunks are sent, so they will be read. A rank with unsent values of chunk m has sent only
// sums up to chunk m, so fewer than most_values_ of its messages are unread for longer. A rank with
// unsent sums of chunk m has sent no sums of later chunks, so fewer than most_sums_ are.
#include <algorithm>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/host_blocks.h"
#include "algorithm/layout.h"
#include "base/thread_pool.h"

namespace cgx {
namespace {

// Fewer than elsewhere, because uncompressed values of a 4-bit chunk take 256 KiB.
constexpr int kFewUnreleased = 32;

// Another rank of my host.
struct Neighbour {
  int rank = 0;
  ChunkStream arrived;                      // its messages for me
  std::vector<std::deque<Arrival>> values;  // not summed yet; delegated blocks, then my own
};

class HierarchicalScatter : public Algorithm {
 public:
  explicit HierarchicalScatter(Plan plan)
      : plan_(std::move(plan)),
        topology_(*plan_.topology),
        layout_(plan_),
        host_(topology_.host_of(plan_.rank)),
        chunks_(layout_.shard(plan_.rank).chunks.size()),
        blocks_(delegated_to(topology_, plan_.rank)),
        most_values_(
            std::max(std::min(kFewUnreleased, plan_.most_unreleased(layout_.longest_message())),
                     plan_.size)),
        most_sums_(most_values_ + threads_.size() + static_cast<int>(blocks_.size())),
        sums_out_{blocks_.size(), chunks_},
        sums_(topology_.hosts()),
        reducers_(threads_.size(), ChunkReducer(plan_)) {
    blocks_.push_back(plan_.rank);
    for (const int rank : topology_.ranks_of(host_))
      if (rank != plan_.rank)
        neighbours_.push_back(
            {rank, {blocks_.size(), chunks_}, decltype(Neighbour::values)(blocks_.size())});
    add_destinations();
    values_out_ = {destinations_.size(), chunks_};
  }

  Step step(Port& port) override {
    if (reduce_next()) return Step::kWorked;
    const size_t sums = summable();
    if (sums > 0 && port.unreleased() < most_sums_) {
      sum_next(port, sums);
      return Step::kWorked;
    }
    if (!values_out_.done() && port.unreleased() < most_values_) {
      encode_next(port);
      return Step::kWorked;
    }
    return sums > 0 || !values_out_.done() ? Step::kBlocked : Step::kIdle;
  }

  bool finished() const override {
    return values_out_.done() && sums_out_.done() && reduced_ == chunks_;
  }
  bool waits_for(int rank) const override {
    if (const Neighbour* from = neighbour(rank)) return !from->arrived.done();
    return sends_sums(rank) && sums_arrived(rank) < chunks_;
  }
  const char* phase() const override {
    return values_out_.done() && sums_out_.done() ? "hierarchical reduce" : "hierarchical scatter";
  }

 private:
  std::optional<Length> due(int source, int part) const override {
    if (part != 0 || !waits_for(source)) return {};
    if (const Neighbour* from = neighbour(source))
      return own_chunk(from->arrived.chunk()).length[Stage::kIntra];
    return own_chunk(sums_arrived(source)).length[Stage::kScatter];
  }
  void take(int, Arrival arrival) override {
    if (Neighbour* from = neighbour(arrival.source)) {
      from->values[from->arrived.block()].push_back(std::move(arrival));
      ++from->arrived.position;
    } else {
      sums_[topology_.host_of(arrival.source)].push_back(std::move(arrival));
    }
  }

  // Delegated blocks first, so that other hosts get their sums early. Ranks begin with different
  // receivers.
  void add_destinations() {
    std::vector<std::vector<int>> handled;
    size_t most = 0;
    const size_t count = neighbours_.size();
    const auto first = static_cast<size_t>(topology_.local_rank(plan_.rank));
    for (const Neighbour& to : neighbours_) {
      handled.push_back(delegated_to(topology_, to.rank));
      handled.back().push_back(to.rank);
      most = std::max(most, handled.back().size());
    }
    for (size_t place = 0; place < most; ++place)
      for (size_t step = 0; step < count; ++step) {
        const size_t to = (first + step) % count;
        if (place < handled[to].size())
          destinations_.push_back({neighbours_[to].rank, handled[to][place]});
      }
  }

  Neighbour* neighbour(int rank) {
    const auto found = std::find_if(neighbours_.begin(), neighbours_.end(),
                                    [&](const Neighbour& each) { return each.rank == rank; });
    return found == neighbours_.end() ? nullptr : &*found;
  }
  const Neighbour* neighbour(int rank) const {
    return const_cast<HierarchicalScatter*>(this)->neighbour(rank);
  }
  // Whether a rank of another host is my delegate there.
  bool sends_sums(int rank) const {
    const int host = topology_.host_of(rank);
    return host != host_ && handler_of(topology_, host, plan_.rank) == rank;
  }
  size_t sums_arrived(int rank) const { return reduced_ + sums_[topology_.host_of(rank)].size(); }

  // All blocks have equal chunks.
  const Chunk& own_chunk(size_t chunk) const { return layout_.shard(plan_.rank).chunks[chunk]; }

  // Step 1, one message per thread.
  void encode_next(Port& port) {
    const size_t count = std::min<size_t>(threads_.size(), values_out_.left());
    jobs_.clear();
    for (size_t i = 0; i < count; ++i) {
      const auto& [peer, block] = destinations_[values_out_.block(i)];
      const Chunk& chunk = layout_.shard(block).chunks[values_out_.chunk(i)];
      jobs_.push_back({peer, block, &chunk, port.allocate(chunk.length[Stage::kIntra].most)});
    }
    threads_.for_each(static_cast<int>(count), [&](int i) {
      auto& [peer, block, chunk, buffer, bytes] = jobs_[i];
      bytes = encode_chunk(plan_, layout_.shard(block), *chunk, Stage::kIntra, plan_.input,
                           buffer->data, block);
    });
    send(port);
    values_out_.position += count;
  }

  // The number of sums that can be encoded now, at most one per thread. Never beyond the current
  // chunk of step 1.
  size_t summable() const {
    const size_t most = std::min<size_t>(threads_.size(), sums_out_.left());
    const size_t end = values_out_.done() ? chunks_ : values_out_.chunk() + 1;
    for (size_t i = 0; i < most; ++i) {
      const size_t block = sums_out_.block(i);
      if (sums_out_.chunk(i) >= end) return i;
      for (const Neighbour& from : neighbours_)
        if (from.values[block].size() <= sums_out_.before(i)) return i;
    }
    return most;
  }

  // The values of my host of a delegated block or, behind them, my own block. In rank order.
  std::vector<Encoded> values_of_host(size_t place, size_t ahead) const {
    std::vector<Encoded> values;
    auto from = neighbours_.begin();
    for (const int rank : topology_.ranks_of(host_))
      values.push_back(rank == plan_.rank ? kOwnValues
                                          : Encoded{rank, (from++)->values[place][ahead].bytes});
    return values;
  }

  // Step 2, one message per thread.
  void sum_next(Port& port, size_t count) {
    jobs_.clear();
    for (size_t i = 0; i < count; ++i) {
      const int block = blocks_[sums_out_.block(i)];
      const Chunk& chunk = layout_.shard(block).chunks[sums_out_.chunk(i)];
      jobs_.push_back({block, block, &chunk, port.allocate(chunk.length[Stage::kScatter].most)});
    }
    threads_.for_each(static_cast<int>(count), [&](int i) {
      auto& [peer, block, chunk, buffer, bytes] = jobs_[i];
      bytes = reducers_[i].to_message(
          Stage::kScatter, layout_.shard(block), *chunk, {}, plan_.input, buffer->data, nullptr,
          values_of_host(sums_out_.block(i), sums_out_.before(i)), block);
    });
    for (size_t i = 0; i < count; ++i) pop_values(sums_out_.block(i));
    send(port);
    sums_out_.position += count;
  }

  // Step 3, one chunk per thread.
  bool reduce_next() {
    const size_t own = blocks_.size() - 1;
    size_t ready = std::min<size_t>(threads_.size(), chunks_ - reduced_);
    for (const Neighbour& from : neighbours_) ready = std::min(ready, from.values[own].size());
    for (int host = 0; host < topology_.hosts(); ++host)
      if (host != host_) ready = std::min(ready, sums_[host].size());
    if (ready == 0) return false;
    threads_.for_each(static_cast<int>(ready), [&](int i) {
      std::vector<Encoded> sums;
      for (int host = 0; host < topology_.hosts(); ++host)
        if (host != host_) sums.push_back({sums_[host][i].source, sums_[host][i].bytes});
      reducers_[i].to_values(layout_.shard(plan_.rank), own_chunk(reduced_ + i), sums, plan_.input,
                             plan_.output, values_of_host(own, i));
    });
    reduced_ += ready;
    for (size_t i = 0; i < ready; ++i) {
      pop_values(own);
      for (auto& queue : sums_)
        if (!queue.empty()) queue.pop_front();
    }
    return true;
  }

  void pop_values(size_t place) {
    for (Neighbour& from : neighbours_) from.values[place].pop_front();
  }

  void send(Port& port) {
    for (const auto& [peer, block, chunk, buffer, bytes] : jobs_) port.send(peer, 0, buffer, bytes);
    jobs_.clear();
  }

  struct Destination {
    int peer;
    int block;
  };
  // A message to be sent.
  struct Job {
    int peer;
    int block;
    const Chunk* chunk;
    BufferRef buffer;
    int64_t bytes = 0;
  };

  ThreadPool& threads_ = ThreadPool::instance();
  const Plan plan_;
  const Topology& topology_;
  const Layout layout_;
  const int host_;
  const size_t chunks_;                    // of each block
  std::vector<int> blocks_;                // that I handle: delegated ones, then my own
  const int most_values_, most_sums_;      // unread messages at which sending them stops
  std::vector<Neighbour> neighbours_;      // in rank order
  std::vector<Destination> destinations_;  // of the values of each chunk, in their order
  ChunkStream values_out_, sums_out_;      // blocks: destinations_, and blocks_ without my own
  std::vector<std::deque<Arrival>> sums_;  // of my block, by host
  size_t reduced_ = 0;                     // chunks of my block
  std::vector<Job> jobs_;                  // of one step
  std::vector<ChunkReducer> reducers_;     // one per thread
};

}  // namespace

const AlgorithmEntry kHierarchicalScatter = {
    CGX_HIERARCHICAL,
    "hierarchical",
    "ranks of a host, then hosts: 2 steps, a value is sent once by each host, quantized once",
    /*passes_sums_on=*/true,
    [](const Plan&) { return 1; },
    [](const Plan& plan, const Layout& layout) {
      const auto sums = static_cast<int64_t>(delegated_to(*plan.topology, plan.rank).size());
      const Shard& block = layout.shard(plan.rank);
      const int host = plan.topology->host_of(plan.rank);
      const bool alone = plan.topology->ranks_of(host).size() == 1;
      const int64_t values = alone ? 0 : plan.size - 1 - sums;
      return values * block.bytes(Stage::kIntra) + sums * block.bytes(Stage::kScatter);
    },
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<HierarchicalScatter>(std::move(plan));
    },
};

}  // namespace cgx
