#include "algorithm/layout.h"

#include <algorithm>

#include "algorithm/algorithm.h"
#include "algorithm/schedule.h"

namespace cgx {
int64_t Shard::bytes(Stage stage) const {
  int64_t sum = 0;
  for (const Chunk& chunk : chunks) sum += chunk.length[stage].most;
  return sum;
}

Layout::Layout(const Plan& plan) {
  shards_.resize(entry_of(plan).shards(plan));
  chunk_bytes_ = plan.chunk_bytes;
  value_bytes_ = plan.bytes(1);
  has_intra_ = plan.algorithm == CGX_HIERARCHICAL && plan.verb->reduces;
  if (plan.verb->exchanges()) {
    received_.resize(plan.size);
    for (int peer = 0; peer < plan.size; ++peer) {
      if (peer == plan.rank) continue;
      append_block(&shards_[peer], plan.sends[peer]);
      append_block(&received_[peer], plan.receives[peer]);
    }
    return;
  }
  for (const auto& segment : plan.segments) {
    int64_t cut = 1;
    for (const CodecSettings& settings : segment.codecs.each)
      cut = std::max(cut, codec(settings)->cut());
    const int64_t cuts = segment.numel / cut + (segment.numel % cut != 0);
    for (int owner = 0; owner < static_cast<int>(shards_.size()); ++owner) {
      const auto range = owned_grains(cuts, owner, static_cast<int>(shards_.size()));
      append(&shards_[owner], segment, std::min(segment.numel, range.first * cut),
             std::min(segment.numel, range.last * cut));
    }
  }
  if (plan.verb->shards()) return;
  // Blocks differ only in their places.
  shards_.resize(plan.size, shards_[0]);
  for (int owner = 1; owner < plan.size; ++owner) {
    for (Piece& piece : shards_[owner].pieces) {
      const int64_t at = owner * piece.segment->block_bytes;
      if (plan.verb->blocks_in) piece.input_at += at;
      if (plan.verb->blocks_in && piece.residual) piece.residual += at;
      if (plan.verb->blocks_out) piece.output_at += at;
    }
  }
}

int64_t Layout::longest_message() const {
  int64_t longest = 0;
  for (const Shard& shard : shards_)
    for (const Chunk& chunk : shard.chunks)
      for (const Stage stage : {Stage::kScatter, Stage::kGather, Stage::kIntra})
        if (stage != Stage::kIntra || has_intra_)
          longest = std::max(longest, chunk.length[stage].most);
  return longest;
}

void Layout::append_block(Shard* shard, const std::vector<Segment>& block) {
  for (const Segment& segment : block) append(shard, segment, 0, segment.numel);
}

void Layout::append(Shard* shard, const Segment& segment, int64_t first, int64_t last) {
  PerStage<const Codec*> codecs;
  int64_t grain = 1;
  bool fixed_length = true;
  for (size_t stage = 0; stage < codecs.each.size(); ++stage) {
    codecs.each[stage] = codec(segment.codecs.each[stage]);
    grain = std::max(grain, codecs.each[stage]->grain());
    fixed_length &= codecs.each[stage]->fixed_length() != nullptr;
  }
  const int64_t grain_bytes =
      std::max(codecs[Stage::kScatter]->max_bytes(grain), codecs[Stage::kGather]->max_bytes(grain));
  while (first < last) {
    const Chunk* open = shard->chunks.empty() ? nullptr : &shard->chunks.back();
    const int64_t used =
        open && fixed_length && open->fixed_length
            ? std::max(open->length[Stage::kScatter].most, open->length[Stage::kGather].most)
            : chunk_bytes_;
    int64_t room = (chunk_bytes_ - used) / grain_bytes;
    if (room <= 0) {
      shard->chunks.push_back({shard->pieces.size(), shard->pieces.size(), {}, fixed_length});
      room = fixed_length ? std::max<int64_t>(1, chunk_bytes_ / grain_bytes) : 1;
    }
    Chunk& chunk = shard->chunks.back();
    const int64_t numel = std::min(last - first, room * grain);
    const int64_t at = first * value_bytes_;
    Piece piece{segment.input_at + at,
                segment.output_at + at,
                segment.residual ? segment.residual + at : nullptr,
                numel,
                first,
                segment.seed,
                {},
                &segment};
    for (size_t stage = 0; stage < codecs.each.size(); ++stage) {
      Length& length = chunk.length.each[stage];
      piece.coded.each[stage] = {codecs.each[stage], length.most};
      length.most += codecs.each[stage]->max_bytes(numel);
      length.least = codecs.each[stage]->fixed_length() ? length.most : 1;
    }
    shard->pieces.push_back(piece);
    chunk.last_piece = shard->pieces.size();
    first += numel;
  }
}

const Codec* Layout::codec(const CodecSettings& settings) {
  for (const auto& [known, made] : codecs_)
    if (known == settings) return made.get();
  codecs_.emplace_back(settings, make_codec(settings));
  return codecs_.back().second.get();
}

int64_t fitting_chunk_bytes(const Plan& plan, int64_t most) {
  constexpr int64_t kChunksOfShard = 8;
  // Sizes differ between ranks, but the sender and the receiver of a block must cut it equally.
  if (plan.verb->exchanges()) return std::max(kChunkBytes, most);
  int64_t bytes = 0;  // values only, without bucket headers
  for (const Segment& segment : plan.segments) {
    const CodecSettings& codec = segment.codecs[Stage::kScatter];
    const auto width = static_cast<int>(size_of(codec.dtype));
    const int bits = std::min(codec.bits, 8 * width);
    bytes += segment.numel / 8 * bits;
  }
  const bool cut = plan.verb->shards() && plan.algorithm != CGX_ONE_SHOT;
  const int64_t shard = bytes / (cut ? plan.size : 1);
  return std::clamp(shard / kChunksOfShard, kChunkBytes, std::max(kChunkBytes, most));
}

}  // namespace cgx
