// Hierarchical allreduce, for several hosts with several ranks each. A value crosses between two
// hosts once per direction, however many ranks they have.
//
// Values are divided into one shard per host and lane (base/topology.h). The lane's rank on that
// host owns the shard. On each other host, the lane's rank is the owner's delegate.
//
//   1. Intra: encode my values (uncompressed, or in intra_bits) for the ranks of my host that own a
//      shard or are a delegate for it.
//   2. Reduce: sum the values from the ranks of my host, in rank order, with my own raw values. A
//      delegate encodes the sum and sends it to the owner. The owner adds the other hosts' sums, in
//      host order, encodes the total once and sends it to the delegates.
//   3. Gather: decode the owners' bytes and forward them unchanged within my host, so that all
//      ranks get the same bits.
//
// Steps: 4. Between hosts, each of h hosts sends 2(h-1)/h of the encoded size, as a rank does in
// sra.
#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/lane_walk.h"
#include "algorithm/layout.h"
#include "base/thread_pool.h"

namespace cgx {
namespace {

// Parts. Between ranks of a host: values and results. Between ranks of a lane: sums and results.
constexpr int kScatter = 0, kGather = 1;

// Fewer than elsewhere, because uncompressed values of a 4-bit chunk take 256 KiB.
constexpr int kFewUnreleased = 32;

// A rank of my host. Of my own entry only `rank` is used.
struct Neighbour {
  int rank = 0;
  std::optional<LaneWalk> values_to;        // my next values for it, if it is in a lane
  std::optional<LaneWalk> values_from;      // its next values for me, if I am in a lane
  std::optional<LaneWalk> results_due;      // the next result that it forwards to me, if it is in a
                                            // lane
  std::optional<LaneWalk> results_from;     // the next of these to be decoded
  std::vector<std::deque<Arrival>> values;  // values that have arrived, by the owner of their shard
};

// The shard of my lane that belongs to one host. I am its owner or its delegate.
struct LaneShard {
  const Shard* shard = nullptr;
  size_t reduced = 0;        // chunks summed over my host
  size_t arrived = 0;        // chunks whose result has arrived, if another host owns it
  size_t decoded = 0;        // of these, chunks that are decoded
  std::deque<Arrival> sums;  // that host's sums of the shard that I own
  std::deque<std::pair<BufferRef, size_t>> results;  // to be forwarded: buffer, bytes

  size_t size() const { return shard->chunks.size(); }
};

class Hierarchical : public Algorithm {
 public:
  explicit Hierarchical(Plan plan)
      : plan_(std::move(plan)),
        topology_(*plan_.topology),
        layout_(plan_),
        hosts_(topology_.hosts()),
        lanes_(topology_.lanes()),
        host_(topology_.host_of(plan_.rank)),
        local_rank_(topology_.local_rank(plan_.rank)),
        most_unreleased_(
            std::max(std::min(kFewUnreleased, plan_.most_unreleased(layout_.longest_message())),
                     (lanes_ + 2) * hosts_)),
        awaited_(plan_.size, 0),
        reducers_(threads_.size(), ChunkReducer(plan_)) {
    for (const int rank : topology_.ranks_of(host_)) add_neighbour(rank);
    choose_next();
    if (local_rank_ >= lanes_) return;
    if (neighbours_.size() > 1) passed_on_.emplace(layout_, topology_, host_, local_rank_);
    shards_ = std::vector<LaneShard>(hosts_);
    for (int host = 0; host < hosts_; ++host)
      shards_[host].shard = &layout_.shard(topology_.shard_of(host, local_rank_));
    for (int host = 0; host < hosts_; ++host)
      if (host != host_) awaited_[partner(host)] = shards_[host].size() + shards_[host_].size();
  }

  Step step(Port& port) override {
    if (decode_next(port)) return Step::kWorked;
    for (int owner = 0; owner < static_cast<int>(shards_.size()); ++owner)
      if (reduce_next(port, owner)) return Step::kWorked;
    if (pass_on_next(port)) return Step::kWorked;
    if (!next_) return Step::kIdle;
    if (port.unreleased() >= most_unreleased_) return Step::kBlocked;
    encode_next(port);
    return Step::kWorked;
  }

  bool finished() const override {
    return !next_ && reduced() && gathered_.empty() && (!passed_on_ || passed_on_->done()) &&
           std::all_of(awaited_.begin(), awaited_.end(), [](size_t n) { return n == 0; });
  }
  bool waits_for(int rank) const override { return awaited_[rank] != 0; }
  const char* phase() const override {
    return reduced() ? "hierarchical all-gather" : "hierarchical scatter-reduce";
  }

 private:
  std::optional<Length> due(int source, int part) const override {
    const int host = topology_.host_of(source);
    if (host == host_) {
      const Neighbour& from = neighbours_[topology_.local_rank(source)];
      const auto& walk = part == kScatter ? from.values_from : from.results_due;
      if (!walk || walk->done()) return {};
      return walk->chunk().length[part == kScatter ? Stage::kIntra : Stage::kGather];
    }
    if (local_rank_ >= lanes_ || source != partner(host)) return {};
    const LaneShard& mine = shards_[host_];
    const LaneShard& theirs = shards_[host];
    const size_t next = part == kScatter ? mine.reduced + theirs.sums.size() : theirs.arrived;
    const auto& chunks = (part == kScatter ? mine : theirs).shard->chunks;
    if (next >= chunks.size()) return {};
    return chunks[next].length[part == kScatter ? Stage::kScatter : Stage::kGather];
  }

  void take(int part, Arrival arrival) override {
    const int source = arrival.source, host = topology_.host_of(source);
    const bool near = host == host_;
    --awaited_[source];
    if (part == kGather) {
      if (near)
        neighbours_[topology_.local_rank(source)].results_due->advance();
      else
        ++shards_[host].arrived;
      gathered_.push_back(std::move(arrival));
    } else if (near) {
      Neighbour& from = neighbours_[topology_.local_rank(source)];
      from.values[from.values_from->owner()].push_back(std::move(arrival));
      from.values_from->advance();
    } else {
      shards_[host].sums.push_back(std::move(arrival));
    }
  }

  void add_neighbour(int rank) {
    Neighbour& added = neighbours_.emplace_back();
    added.rank = rank;
    if (rank == plan_.rank) return;
    const int local_rank = topology_.local_rank(rank);
    if (local_rank < lanes_) {
      added.values_to.emplace(layout_, topology_, host_, local_rank);
      added.results_due.emplace(layout_, topology_, host_, local_rank);
      added.results_from.emplace(*added.results_due);
      awaited_[rank] += added.results_from->messages();
    }
    if (local_rank_ < lanes_) {
      added.values_from.emplace(layout_, topology_, host_, local_rank_);
      added.values = std::vector<std::deque<Arrival>>(hosts_);
      awaited_[rank] += added.values_from->messages();
    }
  }

  // The rank of my lane on another host.
  int partner(int host) const { return topology_.ranks_of(host)[local_rank_]; }
  bool reduced() const {
    return std::all_of(shards_.begin(), shards_.end(),
                       [](const LaneShard& each) { return each.reduced == each.size(); });
  }

  // Chooses the rank with the lowest unsent chunk, so that no shard waits for all of another.
  // Starts after me, so that ranks do not all send to the same one first.
  void choose_next() {
    next_ = nullptr;
    for (size_t step = 1; step < neighbours_.size(); ++step) {
      Neighbour& other = neighbours_[(local_rank_ + step) % neighbours_.size()];
      if (!other.values_to || other.values_to->done()) continue;
      if (!next_ || other.values_to->chunk_index() < next_->values_to->chunk_index())
        next_ = &other;
    }
  }

  // Phase 1, one message per thread.
  void encode_next(Port& port) {
    jobs_.clear();
    while (static_cast<int>(jobs_.size()) < threads_.size() && next_) {
      LaneWalk& walk = *next_->values_to;
      const Chunk& chunk = walk.chunk();
      jobs_.push_back(
          {next_->rank, &walk.shard(), &chunk, port.allocate(chunk.length[Stage::kIntra].most)});
      walk.advance();
      choose_next();
    }
    threads_.for_each(static_cast<int>(jobs_.size()), [&](int i) {
      auto& [peer, shard, chunk, buffer, bytes] = jobs_[i];
      bytes = encode_chunk(plan_, *shard, *chunk, Stage::kIntra, plan_.input, buffer->data);
    });
    for (const auto& [peer, shard, chunk, buffer, bytes] : jobs_)
      port.send(peer, kScatter, buffer, bytes);
    jobs_.clear();
  }

  // The number of chunks of host `owner`'s shard for which all summands have arrived. Never beyond
  // phase 1's current chunk: ranks that most_unreleased_ has stopped are then at one chunk, of
  // which each may send all messages, so that it can be reduced.
  size_t ready_to_reduce(int owner) const {
    const LaneShard& mine = shards_[owner];
    size_t end = mine.size();
    if (next_) end = std::min(end, next_->values_to->chunk_index() + 1);
    if (end <= mine.reduced) return 0;
    size_t ready = end - mine.reduced;
    for (const Neighbour& from : neighbours_)
      if (from.rank != plan_.rank) ready = std::min(ready, from.values[owner].size());
    for (int host = 0; host < hosts_ && owner == host_; ++host)
      if (host != host_) ready = std::min(ready, shards_[host].sums.size());
    return ready;
  }

  // Phase 2 for one shard, one chunk per thread.
  bool reduce_next(Port& port, int owner) {
    const auto ready = static_cast<int>(std::min<size_t>(ready_to_reduce(owner), threads_.size()));
    if (ready == 0) return false;
    const bool mine = owner == host_;
    const Stage stage = mine ? Stage::kGather : Stage::kScatter;
    LaneShard& of = shards_[owner];
    jobs_.clear();
    for (int i = 0; i < ready; ++i) {
      const Chunk& chunk = of.shard->chunks[of.reduced++];
      jobs_.push_back({plan_.rank, of.shard, &chunk, port.allocate(chunk.length[stage].most)});
    }
    threads_.for_each(ready, [&](int i) {
      auto& [peer, shard, chunk, buffer, bytes] = jobs_[i];
      std::vector<Encoded> intra, sums;
      for (const Neighbour& from : neighbours_)
        intra.push_back(from.rank == peer ? kOwnValues
                                          : Encoded{from.rank, from.values[owner][i].bytes});
      for (int host = 0; host < hosts_ && mine; ++host)
        if (host != host_) sums.push_back({partner(host), shards_[host].sums[i].bytes});
      bytes = reducers_[i].to_message(stage, *shard, *chunk, sums, plan_.input, buffer->data,
                                      mine ? plan_.output : nullptr, intra);
    });
    for (const auto& [peer, shard, chunk, buffer, bytes] : jobs_) {
      for (Neighbour& from : neighbours_)
        if (from.rank != plan_.rank) from.values[owner].pop_front();
      if (mine)
        send_result(port, buffer, bytes);
      else
        port.send(partner(owner), kScatter, buffer, bytes);
    }
    jobs_.clear();
    return true;
  }

  void send_result(Port& port, const BufferRef& buffer, size_t bytes) {
    for (int step = 1; step < hosts_; ++step) {
      const int host = (host_ + step) % hosts_;
      shards_[host].sums.pop_front();
      port.send(partner(host), kGather, buffer, bytes);
    }
    if (passed_on_) shards_[host_].results.emplace_back(buffer, bytes);
  }

  // Phase 3, one message per thread: from owners, or forwarded by ranks of my host.
  bool decode_next(Port& port) {
    const auto ready = static_cast<int>(std::min<size_t>(gathered_.size(), threads_.size()));
    if (ready == 0) return false;
    jobs_.clear();
    for (int i = 0; i < ready; ++i) {
      const int source = gathered_[i].source, host = topology_.host_of(source);
      if (host == host_) {
        LaneWalk& walk = *neighbours_[topology_.local_rank(source)].results_from;
        jobs_.push_back({source, &walk.shard(), &walk.chunk(), nullptr});
        walk.advance();
      } else {
        LaneShard& from = shards_[host];
        const Chunk& chunk = from.shard->chunks[from.decoded++];
        jobs_.push_back({source, from.shard, &chunk, nullptr});
        if (!passed_on_) continue;
        const size_t bytes = gathered_[i].bytes.size();
        jobs_.back().buffer = port.allocate(bytes);
        from.results.emplace_back(jobs_.back().buffer, bytes);
      }
    }
    threads_.for_each(ready, [&](int i) {
      const auto& job = jobs_[i];
      const auto bytes = gathered_[i].bytes;
      decode_chunk(plan_, *job.shard, *job.chunk, Stage::kGather, {job.peer, bytes}, plan_.output);
      if (job.buffer) std::memcpy(job.buffer->data, bytes.data(), bytes.size());
    });
    jobs_.clear();
    for (int i = 0; i < ready; ++i) gathered_.pop_front();
    return true;
  }

  // Forwards one result of my lane to all ranks of my host.
  bool pass_on_next(Port& port) {
    if (!passed_on_ || passed_on_->done()) return false;
    auto& results = shards_[passed_on_->owner()].results;
    if (results.empty()) return false;
    const auto [buffer, bytes] = std::move(results.front());
    results.pop_front();
    for (const Neighbour& to : neighbours_)
      if (to.rank != plan_.rank) port.send(to.rank, kGather, buffer, bytes);
    passed_on_->advance();
    return true;
  }

  // A message to be sent or decoded.
  struct Job {
    int peer;
    const Shard* shard;
    const Chunk* chunk;
    BufferRef buffer;
    int64_t bytes = 0;  // size of the encoded message
  };

  ThreadPool& threads_ = ThreadPool::instance();
  const Plan plan_;
  const Topology& topology_;
  const Layout layout_;
  const int hosts_, lanes_, host_;
  const int local_rank_;  // on this host; its lane, if it is in one
  const int most_unreleased_;
  std::vector<Neighbour> neighbours_;   // by rank on the host
  Neighbour* next_ = nullptr;           // the next destination of phase 1; null: phase 1 is done
  std::vector<LaneShard> shards_;       // by owner; empty if I am in no lane
  std::vector<size_t> awaited_;         // outstanding messages, per rank
  std::deque<Arrival> gathered_;        // results
  std::optional<LaneWalk> passed_on_;   // results of my lane; nullopt if I am alone on my host
  std::vector<Job> jobs_;               // of one step
  std::vector<ChunkReducer> reducers_;  // one per thread
};

// The largest payload that this rank sends.
int64_t bytes_sent(const Plan& plan, const Layout& layout) {
  const Topology& topology = *plan.topology;
  const int host = topology.host_of(plan.rank), local_rank = topology.local_rank(plan.rank);
  const int64_t neighbours = static_cast<int64_t>(topology.ranks_of(host).size()) - 1;
  int64_t sum = 0;
  for (int owner = 0; owner < topology.hosts(); ++owner) {
    for (int lane = 0; lane < topology.lanes(); ++lane) {
      const Shard& shard = layout.shard(topology.shard_of(owner, lane));
      const int64_t reduced = shard.bytes(Stage::kGather);
      if (lane != local_rank)
        sum += shard.bytes(Stage::kIntra);
      else if (owner != host)
        sum += shard.bytes(Stage::kScatter) + neighbours * reduced;
      else
        sum += (topology.hosts() - 1 + neighbours) * reduced;
    }
  }
  return sum;
}

}  // namespace

const AlgorithmEntry kHierarchical = {
    CGX_HIERARCHICAL,
    "hierarchical",
    "ranks of a host, hosts, ranks of a host: 4 steps, 2(h-1)/h x size sent by each of h hosts to "
    "others, quantized twice",
    /*passes_sums_on=*/true,
    [](const Plan& plan) { return plan.topology->hosts() * plan.topology->lanes(); },
    bytes_sent,
    [](Plan plan) -> std::unique_ptr<Algorithm> {
      return std::make_unique<Hierarchical>(std::move(plan));
    },
};

}  // namespace cgx
