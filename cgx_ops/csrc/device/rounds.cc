#include "device/rounds.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status.h"

namespace cgx::device {

Rounds::Rounds(Plan plan) : plan_(std::move(plan)), layout_(plan_), steps_(plan_, layout_) {
  for (const Segment& segment : plan_.segments)
    for (const CodecSettings& codec : segment.codecs.each)
      require(codec.compressor != CGX_RANDK || !segment.seed_at, CGX_UNSUPPORTED,
              "randk does not support seeds in GPU memory, because ranks cannot compare them: pass "
              "seeds in host memory");
  for (int peer = 0; peer < plan_.size; ++peer) {
    add(layout_.shard(peer));
    if (plan_.verb->exchanges()) add(layout_.received(peer));
  }
}

void Rounds::add(const Shard& shard) {
  count_ = std::max(count_, static_cast<int64_t>(shard.chunks.size()));
  for (const Chunk& chunk : shard.chunks) {
    const int64_t bytes =
        std::max(chunk.length[Stage::kScatter].most, chunk.length[Stage::kGather].most);
    require(bytes <= plan_.chunk_bytes, CGX_UNSUPPORTED, "a bucket takes ", bytes,
            " bytes, but GPUs send at most ", plan_.chunk_bytes,
            " at a time: use a smaller bucket_size");
  }
}

void Rounds::run(int64_t number, Wire& wire, Lane& lane) const {
  const Verb& verb = *plan_.verb;
  const Round round{number, lane.queue(), wire.regions(), lane.fault()};
  const auto received = [&](Traffic traffic) {
    const Slots slots = lane.slots(traffic);
    return Received{slots.from, slots.stride};
  };
  const Traffic first = verb.scatters && !one_shot() ? Traffic::kEach : Traffic::kAll;
  steps_.encode(round, lane.slots(first).to);
  exchange(number, lane, first);
  if (verb.exchanges()) {
    if (number == 0) copy_own_block(plan_, round.queue);
    return steps_.decode(round, received(first));
  }
  const bool again = verb.scatters && verb.gathers && !one_shot();  // the sums are exchanged, too
  if (verb.scatters) {
    std::vector<std::byte*> to;
    if (again) to = lane.slots(Traffic::kAll).to;
    steps_.reduce(round, received(first), to);
  }
  if (again) exchange(number, lane, Traffic::kAll);
  if (verb.gathers && !one_shot()) steps_.decode(round, received(Traffic::kAll));
}

void Rounds::exchange(int64_t round, Lane& lane, Traffic traffic) const {
  const auto bytes = [&](const Shard& shard, Stage stage) {
    const Chunk* chunk = Steps::chunk(shard, round);
    return chunk ? chunk->length[stage].most : 0;
  };
  const bool each = traffic == Traffic::kEach;
  std::vector<int64_t> sent(plan_.size, 0), received(plan_.size, 0);
  const Stage stage = each || one_shot() ? Stage::kScatter : Stage::kGather;
  for (int peer = 0; peer < plan_.size; ++peer) {
    if (peer == plan_.rank) continue;
    const Shard& from_peer = plan_.verb->exchanges() ? layout_.received(peer)
                             : each                  ? layout_.shard(plan_.rank)
                                                     : layout_.shard(peer);
    sent[peer] = bytes(layout_.shard(each ? peer : plan_.rank), stage);
    received[peer] = bytes(from_peer, stage);
  }
  lane.exchange(traffic, sent, received);
}

}  // namespace cgx::device
