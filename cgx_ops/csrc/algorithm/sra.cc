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
#include "algorithm/layout.h"
#include "algorithm/reduce.h"
#include "kernel/kernels.h"

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
        gather_arrived_(plan_.size, 0),
        decoded_(plan_.size, 0) {
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

  // Where an element of a rank's shard is, in the input and in the output.
  const std::byte* input(int owner, const Piece& piece) const {
    const int64_t block = scatters_ ? layout_.block_offset(owner) : 0;
    return plan_.input + plan_.bytes(block + piece.offset);
  }
  std::byte* output(int owner, const Piece& piece) const {
    const int64_t block = gathers_ ? layout_.block_offset(owner) : 0;
    return plan_.output + plan_.bytes(block + piece.offset);
  }

  // Phase 1, one message: chunk `encoded_` of the shard of peer `encode_peer_`. Chunks outermost,
  // so that no owner waits for all of another's.
  void encode_next(Port& port) {
    const Shard& shard = layout_.shard(encode_peer_);
    if (encoded_ < shard.chunks.size()) {
      const Chunk& chunk = shard.chunks[encoded_];
      const BufferRef buffer = port.allocate(chunk.scatter_bytes);
      for (size_t i = chunk.first_piece; i < chunk.last_piece; ++i) {
        const Piece& piece = shard.pieces[i];
        piece.scatter->encode(plan_.dtype, input(encode_peer_, piece), piece.numel,
                              piece.first_index, plan_.rounding(kScatterPhase),
                              buffer->data + piece.scatter_at);
      }
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
    for (int peer = 0; peer < plan_.size; ++peer)
      if (peer != plan_.rank && contributions_[peer].empty()) return false;
    const Shard& shard = layout_.shard(plan_.rank);
    const Chunk& chunk = shard.chunks[reduced_];
    const BufferRef buffer = gathers_ ? port.allocate(chunk.gather_bytes) : nullptr;
    std::vector<Contribution> contributions(plan_.size);
    for (size_t i = chunk.first_piece; i < chunk.last_piece; ++i) {
      const Piece& piece = shard.pieces[i];
      for (int peer = 0; peer < plan_.size; ++peer)
        contributions[peer] =
            peer == plan_.rank
                ? Contribution{input(peer, piece), true}
                : Contribution{contributions_[peer].front().bytes.data() + piece.scatter_at, false};
      reducer_.reduce(
          plan_, piece, contributions, true, [&](const float* sum, int64_t first, int64_t numel) {
            std::byte* out = output(plan_.rank, piece) + plan_.bytes(first);
            if (!gathers_) {
              kernels().convert(Dtype::kFloat32, sum, plan_.dtype, out, numel);
              return;
            }
            std::byte* to = buffer->data + piece.gather_at + piece.gather->max_bytes(first);
            const int64_t bytes =
                piece.gather->encode(Dtype::kFloat32, sum, numel, piece.first_index + first,
                                     plan_.rounding(kGatherPhase), to);
            piece.gather->decode(to, bytes, numel, plan_.dtype, out);
          });
    }
    for (auto& queue : contributions_)
      if (!queue.empty()) queue.pop_front();
    ++reduced_;
    if (gathers_) send_to_all(port, buffer, chunk.gather_bytes);
    return true;
  }

  // all_gather: one chunk of my own block.
  bool encode_own_block(Port& port) {
    if (reduced_ == own_chunks().size()) return false;
    const Shard& shard = layout_.shard(plan_.rank);
    const Chunk& chunk = shard.chunks[reduced_++];
    const BufferRef buffer = port.allocate(chunk.gather_bytes);
    for (size_t i = chunk.first_piece; i < chunk.last_piece; ++i) {
      const Piece& piece = shard.pieces[i];
      const int64_t bytes = piece.gather->encode(plan_.dtype, input(plan_.rank, piece), piece.numel,
                                                 piece.first_index, plan_.rounding(kGatherPhase),
                                                 buffer->data + piece.gather_at);
      piece.gather->decode(buffer->data + piece.gather_at, bytes, piece.numel, plan_.dtype,
                           output(plan_.rank, piece));
    }
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
    for (size_t i = chunk.first_piece; i < chunk.last_piece; ++i) {
      const Piece& piece = shard.pieces[i];
      piece.gather->decode(arrival.bytes.data() + piece.gather_at,
                           piece.gather->max_bytes(piece.numel), piece.numel, plan_.dtype,
                           output(arrival.source, piece));
    }
    return true;
  }

  const Plan plan_;
  const Layout layout_;
  const bool scatters_, gathers_;
  size_t longest_ = 0;  // chunks of the longest shard
  size_t encoded_ = 0;  // chunk that phase 1 is at
  int encode_peer_;
  std::vector<std::deque<Arrival>> contributions_;  // of my shard, by source
  size_t reduced_ = 0;                              // chunks of my shard that are done
  std::deque<Arrival> gathered_;
  std::vector<size_t> gather_arrived_,
      decoded_;  // chunks of each owner's shard that are in the output
  Reducer reducer_;
};

}  // namespace

std::unique_ptr<Algorithm> make_sra(Plan plan) { return std::make_unique<Sra>(std::move(plan)); }

}  // namespace cgx
