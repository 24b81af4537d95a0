#include "algorithm/layout.h"

#include <algorithm>

#include "algorithm/schedule.h"

namespace cgx {
namespace {

int count_shards(const Plan& plan) {
  if (plan.verb != CGX_ALLREDUCE || plan.algorithm == CGX_ONE_SHOT) return 1;
  if (plan.algorithm != CGX_HIERARCHICAL) return plan.size;
  return plan.topology->hosts() * plan.topology->lanes();
}

}  // namespace

Layout::Layout(const Plan& plan) {
  shards_.resize(count_shards(plan));
  chunk_bytes_ = plan.chunk_bytes;
  value_bytes_ = plan.bytes(1);
  has_intra_ = plan.algorithm == CGX_HIERARCHICAL;
  if (plan.verb != CGX_ALLREDUCE) block_stride_ = plan.block_numel;
  for (const auto& segment : plan.segments) {
    const int64_t grain = compressor(segment.scatter)->grain();
    const int64_t grains = segment.numel / grain + (segment.numel % grain != 0);
    for (int owner = 0; owner < static_cast<int>(shards_.size()); ++owner) {
      const auto range = owned_grains(grains, owner, static_cast<int>(shards_.size()));
      append(&shards_[owner], segment, std::min(segment.numel, range.first * grain),
             std::min(segment.numel, range.last * grain));
    }
  }
}

int64_t Layout::longest_message() const {
  int64_t longest = 0;
  for (const Shard& shard : shards_)
    for (const Chunk& chunk : shard.chunks)
      longest = std::max(
          {longest, chunk.scatter_bytes, chunk.gather_bytes, has_intra_ ? chunk.intra_bytes : 0});
  return longest;
}

void Layout::append(Shard* shard, const Segment& segment, int64_t first, int64_t last) {
  const Compressor* intra = compressor(segment.intra);
  const Compressor* scatter = compressor(segment.scatter);
  const Compressor* gather = compressor(segment.gather);
  const int64_t grain = std::max({intra->grain(), scatter->grain(), gather->grain()});
  const int64_t grain_bytes = std::max(scatter->max_bytes(grain), gather->max_bytes(grain));
  while (first < last) {
    const bool open = !shard->chunks.empty();
    const int64_t used =
        open ? std::max(shard->chunks.back().scatter_bytes, shard->chunks.back().gather_bytes)
             : chunk_bytes_;
    int64_t room = (chunk_bytes_ - used) / grain_bytes;
    if (room <= 0) {
      shard->chunks.push_back({shard->pieces.size(), shard->pieces.size(), 0, 0, 0});
      room = std::max<int64_t>(1, chunk_bytes_ / grain_bytes);
    }
    Chunk& chunk = shard->chunks.back();
    const int64_t numel = std::min(last - first, room * grain);
    const int64_t at = first * value_bytes_;
    shard->pieces.push_back({segment.input_at + at, segment.output_at + at,
                             segment.error ? segment.error + at : nullptr, numel, first,
                             segment.seed, intra, scatter, gather, chunk.intra_bytes,
                             chunk.scatter_bytes, chunk.gather_bytes, &segment});
    chunk.last_piece = shard->pieces.size();
    chunk.intra_bytes += intra->max_bytes(numel);
    chunk.scatter_bytes += scatter->max_bytes(numel);
    chunk.gather_bytes += gather->max_bytes(numel);
    first += numel;
  }
}

const Compressor* Layout::compressor(const CompressorSettings& settings) {
  for (const auto& [known, made] : compressors_)
    if (known == settings) return made.get();
  compressors_.emplace_back(settings, make_compressor(settings));
  return compressors_.back().second.get();
}

int64_t fitting_chunk_bytes(const Plan& plan, int64_t most) {
  constexpr int64_t kChunksOfShard = 8;
  int64_t bytes = 0;  // of values alone, without buckets' headers
  for (const Segment& segment : plan.segments) {
    const auto width = static_cast<int>(size_of(segment.scatter.dtype));
    const int bits = std::min(segment.scatter.bits, 8 * width);
    bytes += segment.numel / 8 * bits;
  }
  const bool cut = plan.verb == CGX_ALLREDUCE && plan.algorithm != CGX_ONE_SHOT;
  const int64_t shard = bytes / (cut ? plan.size : 1);
  return std::clamp(shard / kChunksOfShard, kChunkBytes, std::max(kChunkBytes, most));
}

int64_t payload_bytes(const Plan& plan) {
  if (plan.size == 1) return 0;
  const Layout layout(plan);
  const int64_t peers = plan.size - 1;
  const auto bytes = [&](int shard, int64_t Chunk::* which) {
    int64_t sum = 0;
    for (const auto& chunk : layout.shard(shard).chunks) sum += chunk.*which;
    return sum;
  };
  if (plan.algorithm == CGX_ONE_SHOT) return peers * bytes(0, &Chunk::scatter_bytes);
  int64_t sum = 0;
  if (plan.algorithm == CGX_RING) {  // every shard but one passes through, each way
    for (int shard = 0; shard < plan.size; ++shard) {
      if (shard != plan.rank) sum += bytes(shard, &Chunk::scatter_bytes);
      if (shard != (plan.rank + 1) % plan.size) sum += bytes(shard, &Chunk::gather_bytes);
    }
    return sum;
  }
  if (plan.algorithm == CGX_HIERARCHICAL) {
    const Topology& topology = *plan.topology;
    const int host = topology.host_of(plan.rank), place = topology.place_of(plan.rank);
    const int64_t neighbours = static_cast<int64_t>(topology.ranks_of(host).size()) - 1;
    for (int owner = 0; owner < topology.hosts(); ++owner) {
      for (int lane = 0; lane < topology.lanes(); ++lane) {
        const int shard = topology.shard_of(owner, lane);
        const int64_t reduced = bytes(shard, &Chunk::gather_bytes);
        if (lane != place)
          sum += bytes(shard, &Chunk::intra_bytes);
        else if (owner != host)
          sum += bytes(shard, &Chunk::scatter_bytes) + neighbours * reduced;
        else
          sum += (topology.hosts() - 1 + neighbours) * reduced;
      }
    }
    return sum;
  }
  if (plan.verb != CGX_ALL_GATHER)
    for (int shard = 0; shard < plan.size; ++shard)
      if (shard != plan.rank) sum += bytes(shard, &Chunk::scatter_bytes);
  if (plan.verb != CGX_REDUCE_SCATTER) sum += peers * bytes(plan.rank, &Chunk::gather_bytes);
  return sum;
}

}  // namespace cgx
