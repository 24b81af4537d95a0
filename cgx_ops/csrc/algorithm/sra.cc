// Scatter-reduce-allgather. Every rank owns a shard.
//
//   1. scatter: encode each peer's shard of my values, send it to its owner
//   2. reduce: when all peers' messages of a chunk of my shard are here, sum them in rank order
//   with
//      my own (exact) values; then encode the sum once and send it to everyone
//   3. gather: decode the owners' bytes; of my own shard too, so that all ranks hold the same bits
//
// reduce_scatter is 1 and the sum of 2; all_gather is 3 on every rank's own block. Steps: 2. Sent
// by each rank: 2(n-1)/n of the encoded size.
#include <algorithm>
#include <deque>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/layout.h"

namespace cgx {
namespace {

constexpr int kScatter = 0, kGather = 1;  // parts
// Messages of a collective that peers may leave unread before it stops encoding: 2 MB. Every rank
// sends its chunks in the same order, and at least one to every peer, so the oldest chunk can
// always be reduced, and read.
constexpr int kMostUnreleased = 64;

class Sra : public Algorithm {
 public:
  explicit Sra(Plan plan)
      : plan_(std::move(plan)),
        layout_(plan_),
        scatters_(plan_.verb != CGX_ALL_GATHER),
        gathers_(plan_.verb != CGX_REDUCE_SCATTER),
        contributions_(plan_.size),
        messages_(plan_.size),
        gather_arrived_(plan_.size, 0),
        decoded_(plan_.size, 0),
        reducer_(plan_) {
    encode_peer_ = next_peer(plan_.rank);
    for (int owner = 0; owner < plan_.size; ++owner)
      longest_ = std::max(longest_, layout_.shard(owner).chunks.size());
  }

  Step step(Port& port) override {
    if (scatters_ && reduce_next(port)) return Step::kWorked;
    if (!scatters_ && encode_own_block(port)) return Step::kWorked;
    if (decode_next()) return Step::kWorked;
    if (scatters_ && encoded_ < longest_) {
      if (port.unreleased() >= std::max(kMostUnreleased, plan_.size - 1)) return Step::kBlocked;
      encode_next(port);
      return Step::kWorked;
    }
    return Step::kIdle;
  }

  void deliver(int part, Arrival arrival) override {
    if (part == kScatter) {
      contributions_[arrival.source].push_back(std::move(arrival));
    } else {
      ++gather_arrived_[arrival.source];
      gathered_.push_back(std::move(arrival));
    }
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
  const std::vector<Chunk>& own_chunks() const { return layout_.shard(plan_.rank).chunks; }
  int next_peer(int peer) const { return (peer + 1) % plan_.size; }
  // Whether a peer's shard has chunks that `counts` does not count yet.
  bool lacks(const std::vector<size_t>& counts, int peer) const {
    return gathers_ && peer != plan_.rank && counts[peer] < layout_.shard(peer).chunks.size();
  }

  // Where the offsets of a rank's shard count from, in the input and in the output.
  const std::byte* input(int owner) const {
    return plan_.input + plan_.bytes(scatters_ ? layout_.block_offset(owner) : 0);
  }
  std::byte* output(int owner) const {
    return plan_.output + plan_.bytes(gathers_ ? layout_.block_offset(owner) : 0);
  }

  // Phase 1, one message: chunk `encoded_` of the shard of peer `encode_peer_`. Chunks outermost,
  // so that no owner waits for all of another's.
  void encode_next(Port& port) {
    const Shard& shard = layout_.shard(encode_peer_);
    if (encoded_ < shard.chunks.size()) {
      const Chunk& chunk = shard.chunks[encoded_];
      const BufferRef buffer = port.allocate(chunk.scatter_bytes);
      encode_chunk(plan_, shard, chunk, Way::kScatter, input(encode_peer_), buffer->data);
      port.send(encode_peer_, kScatter, buffer, chunk.scatter_bytes);
    }
    encode_peer_ = next_peer(encode_peer_);
    if (encode_peer_ == plan_.rank) {
      encode_peer_ = next_peer(encode_peer_);
      ++encoded_;
    }
  }

  // Phase 2, one chunk of my shard.
  bool reduce_next(Port& port) {
    if (reduced_ == own_chunks().size()) return false;
    for (int peer = 0; peer < plan_.size; ++peer) {
      if (peer == plan_.rank) continue;
      if (contributions_[peer].empty()) return false;
      messages_[peer] = contributions_[peer].front().bytes.data();
    }
    const Shard& shard = layout_.shard(plan_.rank);
    const Chunk& chunk = shard.chunks[reduced_++];
    const std::byte* own = input(plan_.rank);
    if (gathers_) {
      const BufferRef buffer = port.allocate(chunk.gather_bytes);
      reducer_.to_gather_message(shard, chunk, messages_, own, buffer->data, output(plan_.rank));
      send_to_all(port, buffer, chunk.gather_bytes);
    } else {
      reducer_.to_values(shard, chunk, messages_, own, output(plan_.rank));
    }
    for (auto& queue : contributions_)
      if (!queue.empty()) queue.pop_front();
    return true;
  }

  // all_gather: one chunk of my own block.
  bool encode_own_block(Port& port) {
    if (reduced_ == own_chunks().size()) return false;
    const Shard& shard = layout_.shard(plan_.rank);
    const Chunk& chunk = shard.chunks[reduced_++];
    const BufferRef buffer = port.allocate(chunk.gather_bytes);
    encode_chunk(plan_, shard, chunk, Way::kGather, input(plan_.rank), buffer->data);
    decode_chunk(plan_, shard, chunk, buffer->data, output(plan_.rank));
    send_to_all(port, buffer, chunk.gather_bytes);
    return true;
  }

  void send_to_all(Port& port, const BufferRef& buffer, size_t bytes) {
    for (int peer = next_peer(plan_.rank); peer != plan_.rank; peer = next_peer(peer))
      port.send(peer, kGather, buffer, bytes);
  }

  // Phase 3, one message.
  bool decode_next() {
    if (gathered_.empty()) return false;
    const Arrival arrival = std::move(gathered_.front());
    gathered_.pop_front();
    const Shard& shard = layout_.shard(arrival.source);
    const Chunk& chunk = shard.chunks[decoded_[arrival.source]++];
    decode_chunk(plan_, shard, chunk, arrival.bytes.data(), output(arrival.source));
    return true;
  }

  const Plan plan_;
  const Layout layout_;
  const bool scatters_, gathers_;
  size_t longest_ = 0;  // chunks of the longest shard
  size_t encoded_ = 0;  // chunk that phase 1 is at
  int encode_peer_;
  std::vector<std::deque<Arrival>> contributions_;  // of my shard, by source
  // Of the chunk that is being reduced, by source; null: my own, raw values.
  std::vector<const std::byte*> messages_;
  size_t reduced_ = 0;  // chunks of my shard that are done
  std::deque<Arrival> gathered_;
  std::vector<size_t> gather_arrived_,
      decoded_;  // chunks of each owner's shard that are in the output
  ChunkReducer reducer_;
};

}  // namespace

std::unique_ptr<Algorithm> make_sra(Plan plan) { return std::make_unique<Sra>(std::move(plan)); }

}  // namespace cgx
